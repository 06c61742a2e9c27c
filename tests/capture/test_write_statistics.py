"""Running statistics that an op writes without saying so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture_step
from autopar.errors import CaptureError
from autopar.proof.verify import verify


class Tracked(nn.Module):
    """A norm with running statistics behind a convolution."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], dims: int = 2) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
        self.run, self.first = run, convolution(2, 4, 1, bias=False)
        self.norm = norm(4, affine=True, track_running_stats=True, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.norm, self.first(x)).sin().mean()


def twice_without_gradient(norm: nn.Module, x: Tensor) -> Tensor:
    """The second reads what the first has written."""
    with torch.no_grad():
        norm.eval()(norm.train()(x))
        scale = norm(x)
    norm.train()
    return x * scale


FORMS = {"1d": (lambda norm, x: norm(x), 1), "3d": (lambda norm, x: norm(x), 3), "no_grad": (twice_without_gradient, 2)}


@pytest.mark.parametrize("form", FORMS)
def test_instance_norm_keeps_statistics_of_the_whole_batch(form: str) -> None:
    torch.manual_seed(0)
    run, dims = FORMS[form]
    model, x = Tracked(run, dims).double(), torch.randn(4, 2, *[4, 3, 2][:dims]).double()
    assert list(capture_step(model, (x,), {}, None).mutated.values()) == ["norm.running_mean", "norm.running_var"]
    for mesh in ({"dp": 2}, {"tp": 2}):
        report = verify(model, (x,), mesh=mesh, recipe="ddp" if "dp" in mesh else "tp")
        assert report.passed and report.buffers == 2, report


def test_statistics_in_half_precision_stay_in_their_own_format() -> None:
    torch.manual_seed(0)
    model = Tracked(lambda norm, x: norm(x.bfloat16()).float())
    report = verify(model, (torch.randn(4, 2, 4, 4),), mesh={"tp": 2}, recipe="tp")
    assert report.passed and report.buffers == 2, report


def test_an_op_that_writes_them_unmarked_is_refused() -> None:
    def update(norm: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():  # of which export keeps nothing, as nobody reads the results
            torch.batch_norm_update_stats(x, norm.running_mean, norm.running_var, 0.1)
        return norm.eval()(x)

    with pytest.raises(CaptureError) as error:
        capture_step(Tracked(update), (torch.randn(4, 2, 4, 4),), {}, None)
    message = str(error.value)
    assert "in forward: return self.run(self.norm, self.first(x))" in message
    assert "aten.batch_norm_update_stats.default writes to running statistics" in message

"""A model that fails on one device too is reported by PyTorch's own error, with module and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from autopar.capture.export import capture_step
from autopar.capture.remedies import remedy_of_operands
from autopar.errors import CaptureError, StepError
from tests.support.scripts import line_of


class Net(nn.Module):
    """A block whose forward is given."""

    def __init__(self, work: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.norm, self.work = nn.Linear(4, 6), nn.LayerNorm(5), work

    def forward(self, x: Tensor) -> Any:
        return self.work(self, x).sum()


def wide(net: Net, x: Tensor) -> Tensor:
    return net.up(x)


def normed(net: Net, x: Tensor) -> Tensor:
    return net.norm(x)


def looked_up(net: Net, x: Tensor) -> Tensor:
    return nn.functional.embedding(x, net.up.weight)


def misspelt(net: Net, x: Tensor) -> Tensor:
    return net.upp(x)  # type: ignore[no-any-return]


def checked(net: Net, x: Tensor) -> Tensor:
    if x.shape[1] != 4:
        raise ValueError(f"{x.shape[1]} features, not 4")
    return x


def outside(net: Net, x: Tensor) -> Tensor:
    return x.transpose(0, 2)


def recovering(net: Net, x: Tensor) -> Tensor:
    try:
        x = x @ x
    except RuntimeError:
        x = x + 1
    return net.norm(x)


def translating(net: Net, x: Tensor) -> Tensor:
    try:
        return x @ x
    except RuntimeError as error:
        raise ValueError("x is not square") from error


# There the first step fails instead, as on one device.
NO_CHECK = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.11 takes indices of floats where it has no values"
)
FAULTS = [
    (wide, "net.up(x)", "up, Linear(in_features=4, out_features=6, bias=True), which is given [2, 3] float32"),
    (normed, "net.norm(x)", "norm, LayerNorm((5,), eps=1e-05"),
    pytest.param(looked_up, "nn.functional.embedding", "", marks=NO_CHECK),
    (misspelt, "net.upp(x)", ""),
    (checked, "raise ValueError", ""),
    (outside, "x.transpose(0, 2)", ""),
    (recovering, "net.norm(x)", "norm, LayerNorm((5,), eps=1e-05"),
    (translating, "raise ValueError", ""),
]


@pytest.mark.parametrize(("work", "text", "module"), FAULTS)
def test_type_and_text_are_those_of_one_device(work: Any, text: str, module: str) -> None:
    x = torch.randn(2, 3)
    with pytest.raises(Exception) as alone:
        Net(work)(x)
    with pytest.raises(type(alone.value)) as captured:
        capture_step(Net(work), (x,), {}, None)
    (note,) = captured.value.__notes__
    assert str(captured.value) == str(alone.value)
    assert f"where:  {line_of(work, text)} in {work.__name__}: " in note and module in note


@pytest.mark.parametrize(
    ("loss_fn", "name"), [(nn.functional.cross_entropy, "cross_entropy"), (nn.CrossEntropyLoss(), "CrossEntropyLoss")]
)
def test_an_error_of_torch_s_own_loss_is_in_the_loss_function(loss_fn: Any, name: str) -> None:
    batch = torch.randn(2, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="to match target batch_size") as caught:
        capture_step(nn.Linear(4, 6), batch, {}, loss_fn)
    assert f"where:  in the loss function {name}\n" in caught.value.__notes__[0]


def test_an_error_of_torch_s_own_model_is_not() -> None:
    batch = torch.randn(2, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        capture_step(nn.Sequential(nn.Linear(4, 6)), batch, {}, nn.functional.cross_entropy)
    assert "loss function" not in caught.value.__notes__[0]
    assert "module: 0, Linear" in caught.value.__notes__[0]


def test_compile_raises_it_too() -> None:
    made = autopar.compile(Net(wide))
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(2x3 and 4x6\)"):
        made.step(torch.randn(2, 3))


def test_a_dtype_bug_is_met_in_the_step_and_names_its_line() -> None:
    """Tensors without values are multiplied whatever their dtypes, so that the trace does not meet it."""
    made = autopar.compile(Net(wide))
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        made.step(torch.randn(2, 4).double())
    assert f"where:  {line_of(Net, 'self.work(self')} in forward: " in caught.value.__notes__[0]
    assert caught.value.__notes__[1] == "module: up"


def torch_adafactor_of_shards() -> None:
    """A step of torch's own optimizer for a parameter of which this rank has a part."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]))
        weight.grad = weight.detach()
        torch.optim.Adafactor([weight]).step()
    finally:
        dist.destroy_process_group()


def sparse_adam_of_a_table() -> None:
    """A step for a table whose gradient is dense, as those of compiled modules are."""
    weight = nn.Parameter(torch.ones(4, 2))
    weight.grad = torch.ones(4, 2)
    torch.optim.SparseAdam([weight]).step()


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (sparse_adam_of_a_table, "take torch.optim.Adagrad"),
        (lambda: torch.ones(2, 3) @ torch.ones(4, 6), "give this layer 4 features, or make it for 3"),
        (lambda: torch.ones(2, 4).double() @ torch.ones(4, 6), "convert one to the other's dtype"),
        (lambda: torch.ones(4, device="meta") + torch.ones(4), "move both to one device"),
        (torch_adafactor_of_shards, "take autopar.runtime.parameters.adafactor.Adafactor"),
    ],
)
def test_operands_that_do_not_fit_have_a_remedy(call: Any, remedy: str) -> None:
    with pytest.raises((RuntimeError, StepError)) as caught:
        call()
    assert remedy in (remedy_of_operands(caught.value) or str(caught.value))


def as_array(net: Net, x: Tensor) -> Tensor:
    return x * float(x.numpy().sum())


def as_number(net: Net, x: Tensor) -> Tensor:
    return x * x.sum().item()


@pytest.mark.parametrize("work", [as_array, as_number])
def test_what_a_trace_alone_refuses_cannot_be_captured(work: Any) -> None:
    assert Net(work)(torch.ones(2, 4)).shape == ()
    with pytest.raises(CaptureError, match="The model cannot be captured as a graph"):
        capture_step(Net(work), (torch.randn(2, 4),), {}, None)

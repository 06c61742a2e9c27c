"""The op that makes the first NaN, by line, module and rank; and that looking for it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import StepError
from autopar.runtime.model.module import CompiledModule
from autopar.runtime.model.nonfinite import NonFinite
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import RootOfProduct, mean_square
from tests.support.staged import captured_once


class Share(nn.Module):
    """NaN where a row is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True)  # this line


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.share, self.down = nn.Linear(4, 4), Share(), nn.Linear(4, 4)
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.down(self.share(torch.relu(self.up(x))))))


def model(bias: float = 1.0, **options: Any) -> CompiledModule:
    torch.manual_seed(0)
    made = Model()
    nn.init.constant_(made.up.bias, bias)
    nn.init.constant_(made.up.weight, 1.0)
    return autopar.compile(made, loss_fn=mean_square, **options)


def batch(bad: int | None = None) -> tuple[Tensor, Tensor]:
    """Eight rows; a bad one becomes zero before it is divided by its sum."""
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(0))
    if bad is not None:
        x[bad] = -10
    return x, torch.ones(8, 4)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_op_of_forward_is_named(recompute: str) -> None:
    found = autopar.find_nan(model(recompute=recompute), *batch(bad=3))
    assert found is not None
    assert (found.what, found.phase, found.op) == ("NaN", "forward", "aten.div.Tensor")
    assert found.module == "share" and "sum(-1, keepdim=True)  # this line" in found.line
    assert found.operands[0].startswith("[8, 4] float32 from 0 to ")
    assert "rank 0, forward: aten.div.Tensor gives the first NaN" in str(found)


def test_looking_changes_nothing() -> None:
    made = model(loss_scale=2.0)
    made.step(*batch())
    before = {name: x.clone() for name, x in made.state_dict().items()}
    gradients = [p.grad.clone() for p in made.parameters() if p.grad is not None]
    seed = torch.get_rng_state()
    assert autopar.find_nan(made, *batch()) is None
    assert autopar.find_nan(made, *batch(bad=0)) is not None
    assert torch.equal(seed, torch.get_rng_state()) and made.skipped_steps == 0
    assert all(torch.equal(before[name], x) for name, x in made.state_dict().items())
    found = [p.grad for p in made.parameters() if p.grad is not None]
    assert len(found) == len(gradients) and all(map(torch.equal, found, gradients))
    assert made._runs.steps == 1


def test_the_op_of_backward_is_named_with_the_infinity_before_it() -> None:
    found = autopar.find_nan(autopar.compile(RootOfProduct()), torch.ones(2))
    assert found is not None and found.before is not None
    assert (found.what, found.phase) == ("NaN", "backward")
    assert (found.before.what, found.before.phase) == ("infinity", "backward")
    assert "(self.weight * x).abs().sqrt().sum()" in found.before.line
    assert "after:" in str(found)


class Masked(nn.Module):
    """Its masks are infinite, and its logarithm of zero is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor, low: Tensor) -> Tensor:
        scores = (self.weight * x).masked_fill(torch.ones(2, 2).triu(1).bool(), float("-inf"))
        return torch.softmax(scores, -1).sum() + low.log().sum()


def test_masks_are_no_fault() -> None:
    made = autopar.compile(Masked())
    assert autopar.find_nan(made, torch.ones(2, 2), torch.ones(2)) is None
    found = autopar.find_nan(made, torch.ones(2, 2), torch.tensor([1.0, 0.0]))
    assert found is not None and (found.what, found.op) == ("infinity", "aten.log.default")


def test_what_was_there_before_is_named() -> None:
    x, y = batch()
    x[2, 1] = float("nan")
    found = autopar.find_nan(model(), x, y)
    assert found is not None and (found.phase, found.op) == ("input or parameter", "input 0")
    assert "holds 1 value that is NaN or infinite, the first at [2, 1]" in found.operands[0]
    made = model()
    with torch.no_grad():
        made.down.bias[1] = float("inf")
    found = autopar.find_nan(made, *batch())
    assert found is not None and found.op == "parameter down.bias"


@captured_once()
def on_ranks(recipe: Any, mesh: dict[str, int], bad: int) -> NonFinite | None:
    made = model(mesh=mesh, recipe=recipe, micro_batches=mesh.get("pp", 1), example_inputs=batch())
    return autopar.find_nan(made, *batch(bad))


@pytest.mark.multiprocess
def test_the_rank_that_made_it_is_named_on_all(two_ranks: Ranks) -> None:
    """Row 5 is on the second rank of a batch in two parts; the statistics of batch norm take it to the first."""
    both = two_ranks.run(on_ranks, "zero3", {"dp": 2}, 5)
    assert both[0] == both[1] and both[0] is not None
    assert (both[0].rank, both[0].module, both[0].phase) == (1, "share", "forward")


class RootOfSum(nn.Module):
    """NaN in backward where the sum of a row is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-1).abs().sqrt()


def test_a_nan_that_made_a_loss_scale_skip_the_step_is_named() -> None:
    made = autopar.compile(
        nn.Sequential(nn.Linear(4, 4, bias=False), RootOfSum()),
        loss_fn=_mean,
        precision="fp16",
        loss_scale=autopar.LossScaling(initial=2.0**8),
    )
    x = torch.rand(8, 4)
    assert autopar.find_nan(made, x + 1) is None
    x[6] = 0
    found = autopar.find_nan(made, x)
    assert found is not None and (found.what, found.phase) == ("NaN", "backward")
    assert made.skipped_steps == 0 and made.loss_scale == 256


def test_a_loss_scale_that_is_too_large_makes_an_infinity() -> None:
    made = autopar.compile(nn.Linear(4, 4), loss_fn=_mean, precision="fp16", loss_scale=2.0**40)
    found = autopar.find_nan(made, torch.rand(8, 4))
    assert found is not None and (found.what, found.phase) == ("infinity", "backward")


def _mean(y: Tensor) -> Tensor:
    return y.float().mean()


@pytest.mark.multiprocess
def test_a_replica_looks_at_its_own_rows(two_ranks: Ranks) -> None:
    """The last four of the eight rows are those of rank 1."""
    (bad, good), other = two_ranks.run(_of_replicas)
    assert [bad, good] == other and good is None
    assert bad is not None and bad.rank == 1 and bad.operands[0].startswith("[4, 4] ")


@captured_once()
def _of_replicas() -> list[NonFinite | None]:
    made = model(mesh={"far": 2}, recipe={"far": "local:3"})
    return [autopar.find_nan(made, *batch(bad=6)), autopar.find_nan(made, *batch())]


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_stages_name_it_too(two_ranks: Ranks, schedule: str) -> None:
    both = two_ranks.run(on_ranks, schedule, {"pp": 2}, 5)
    assert both[0] == both[1] and both[0] is not None and both[0].module == "share"


def test_other_modules_and_executors_are_refused() -> None:
    with pytest.raises(StepError, match="given a Linear"):
        autopar.find_nan(nn.Linear(2, 2), torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(StepError, match='executor="eager"'):
        autopar.find_nan(model(executor="aot_eager"), *batch())

"""Compiled plans train as eager ones do, and as one device does; masks are the same bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime.compiled import Executor, ExecutorName
from autopar.runtime.gather import Gathers
from tests.runtime import scripts
from tests.runtime.ranks import Ranks
from tests.runtime.test_recompute import Made, model_of
from tests.runtime.training import difference, single, train

Case = tuple[str, dict[str, int], str, dict[str, Any]]

AS_ONE_DEVICE: list[Case] = [
    ("gpt", {"tp": 2}, "tp", {}),
    ("gpt", {"dp": 2}, "zero3", {"recompute": "full", "micro_batches": 2}),
]
AS_EAGER: list[Case] = [  # by numbers that one device draws otherwise, or sums otherwise
    ("images", {"dp": 2}, "ddp", {}),
    ("dropout", {"dp": 2}, "zero2", {"micro_batches": 2}),
    ("dropout", {"pp": 2}, "auto", {"recompute": "full", "micro_batches": 2}),
    ("norm", {"pp": 2}, "auto", {"schedule": "zb", "micro_batches": 2}),
]


class Images(nn.Module):
    """A convolution net whose batch norms take statistics over the batch of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )  # fmt: skip
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.layers(x)).mean((2, 3)))


def made_of(name: str) -> Made:
    """By name; the same in every process."""
    if name != "images":
        return model_of(name)
    torch.manual_seed(0)
    batch = (torch.randn(8, 3, 6, 6).double(), torch.randint(0, 4, (8,)))
    return Images().double(), batch, nn.functional.cross_entropy


def trained(case: Case, executor: ExecutorName) -> dict[str, Any]:
    """What training gives on this rank, and of `Images` what evaluation does, without autograd."""
    name, mesh, recipe, options = case
    model, batch, loss_fn = made_of(name)
    made = autopar.compile(
        model, loss_fn=loss_fn, mesh=mesh, recipe=recipe, executor=executor, **options
    )
    found = train(made, made.step, batch)
    if name == "images":
        made.eval()
        with torch.no_grad():
            found["no_grad"] = made(batch[0])
        with torch.inference_mode():
            found["inference"] = made(batch[0])
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", AS_ONE_DEVICE, ids=lambda case: case[2])
def test_compiled_plans_train_as_one_device_does(two_ranks: Ranks, case: Case) -> None:
    expected = single("gpt", micro_batches=case[3].get("micro_batches", 1))
    for found in two_ranks.run(trained, case, "aot_eager"):
        assert difference(found, expected) < 1e-9


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", AS_EAGER, ids=lambda case: f"{case[0]} {case[2]}")
def test_masks_and_statistics_are_those_of_the_eager_executor(two_ranks: Ranks, case: Case) -> None:
    eager, compiled = (two_ranks.run(trained, case, name) for name in ("eager", "aot_eager"))
    for found, expected in zip(compiled, eager, strict=True):
        assert difference(found, expected) < 1e-12


@pytest.mark.multiprocess
def test_inductor_trains_as_one_device_does(two_ranks: Ranks) -> None:
    case: Case = ("mlp", {"tp": 2}, "tp", {})
    for found in two_ranks.run(trained, case, "inductor"):
        assert difference(found, single("mlp")) < 1e-9


def keeping(executor: ExecutorName) -> tuple[int, int, int]:
    """Under ZeRO-3: gathered parameters given up until backward, regions, and what was compiled."""
    given_up, pack = 0, Gathers._pack

    def counted(self: Gathers, x: Tensor) -> Any:
        nonlocal given_up
        kept = pack(self, x)
        given_up += not isinstance(kept, Tensor)
        return kept

    model, batch, loss_fn = made_of("gpt")
    made = autopar.compile(
        model, loss_fn=loss_fn, mesh={"dp": 2}, recipe="zero3", executor=executor
    )
    Gathers._pack = counted  # type: ignore[method-assign]
    try:
        made.step(*batch)
    finally:
        Gathers._pack = pack  # type: ignore[method-assign]
    regions = made._settings.executor._regions.values()
    return given_up, len(regions), sum(len(region._runs) for region in regions)


@pytest.mark.multiprocess
def test_gathered_parameters_are_not_kept_between_forward_and_backward(two_ranks: Ranks) -> None:
    eager, compiled = (two_ranks.run(keeping, name)[0] for name in ("eager", "aot_eager"))
    assert compiled[0] == eager[0] > 0


def split(executor: ExecutorName) -> dict[str, dict[str, Any]]:
    names = ["graph_break", "batch_norm", "dropout", "inference"]
    options = {"recipe": "ddp", "executor": executor}
    return {name: scripts.run_compiled(name, options) for name in names}


@pytest.mark.multiprocess
def test_the_backend_compiles_what_it_splits(two_ranks: Ranks) -> None:
    eager = two_ranks.run(scripts.run_compiled, "dropout", {"recipe": "ddp"})[0]
    for found in two_ranks.run(split, "aot_eager"):
        assert found.pop("dropout")["kept"] == eager["kept"]
        for name, result in found.items():
            assert difference(result, scripts.run(name)) < 1e-9, name


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)))


def test_equal_layers_are_compiled_once() -> None:
    runs = []
    for count in (3, 9):
        made = autopar.compile(layers(count), mesh={"dp": 1}, executor="aot_eager")
        made(torch.ones(2, 4)).sum().backward()
        regions = made._settings.executor._regions.values()
        runs.append(sum(len(region._runs) for region in regions))
    assert runs[0] == runs[1]


def test_an_unknown_executor_is_named() -> None:
    sentence = "no executor 'jit'; executor is one of 'eager', 'aot_eager', 'inductor'"
    with pytest.raises(AutoparError, match=sentence):
        Executor("jit")  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match=sentence):
        autopar.compile(layers(1), executor="jit")  # type: ignore[arg-type]

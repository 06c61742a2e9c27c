"""The same request gives the same plan, whichever door it comes through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

import autopar
from autopar.api.announcing import start_line
from autopar.api.planner import Planner
from autopar.cli import main
from autopar.ir import Plan
from autopar.ir.note import kind_of
from autopar.models.targets import resolve_target
from tests.support.wide_blocks import Block

TARGET = "examples.gpt:tiny_example"


class Wide(nn.Module):
    """Blocks that take longer to run again than a batch takes in two parts."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(x), y)

    def loss(self, found: Tensor, expected: Tensor) -> Tensor:
        return F.mse_loss(found, expected)


class Contrastive(Wide):
    """A loss in which every row meets every other one."""

    def loss(self, found: Tensor, expected: Tensor) -> Tensor:
        rows = found.flatten(1)
        return (rows @ rows.T).logsumexp(1).mean() + (found - expected).mean()


class Normalized(Wide):
    """A batch norm, which has statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1024)

    def loss(self, found: Tensor, expected: Tensor) -> Tensor:
        return F.mse_loss(self.norm(found), expected)


class Counting(Wide):
    """A count of steps, which every micro-batch would raise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def loss(self, found: Tensor, expected: Tensor) -> Tensor:
        self.steps.add_(1)
        return super().loss(found, expected)


class Sized(Wide):
    """The size of the batch in its code."""

    def loss(self, found: Tensor, expected: Tensor) -> Tensor:
        return super().loss(found.reshape(64, -1), expected.reshape(64, -1))


Built = tuple[nn.Module, tuple[Tensor, Tensor]]


def built(kind: type[Wide], batch: int) -> Built:
    with torch.device("meta"):
        return kind(), (torch.empty(batch, 1024, 1024), torch.empty(batch, 1024, 1))


def wide(batch: int = 64) -> Built:
    return built(Wide, batch)


def wide_own() -> Built:
    """Without a parameter for the batch, so that the batch is the function's own."""
    return wide()


def by_command_line(target: str, folder: Path, *options: str) -> Plan:
    """What `autopar explain` saves."""
    path = folder / "plan.json"
    given = ["explain", target, "--save", str(path), *options]
    result = CliRunner().invoke(main, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return Plan.load(path)


def by_explain(target: str, cluster: str, **options: Any) -> Plan:
    model, args, _, loss_fn = resolve_target(target).build(None)
    return autopar.explain(model, args, cluster=cluster, loss_fn=loss_fn, **options).plan


def by_compile(
    target: str, monkeypatch: pytest.MonkeyPatch, *, ranks: int, hardware: str = "h100", **options: Any
) -> Plan:
    """What `autopar.compile` runs, planned for ranks that do not exist."""

    class Planned(Exception):
        """Ends a call of compile once there is a plan."""

    def programs(self: Planner, prepared: object, plan: Plan, batch: object) -> None:
        raise Planned(plan)

    for room in ("api.asked", "api.planner", "runtime.ranks.processes"):
        monkeypatch.setattr(f"autopar.{room}.world_size", lambda: ranks)
    monkeypatch.setattr("autopar.api.planner.agreed", lambda make: make())
    monkeypatch.setattr(Planner, "device_mesh", lambda self: None)
    monkeypatch.setattr(Planner, "_programs", programs)
    model, args, _, loss_fn = resolve_target(target).build(None)
    with pytest.raises(Planned) as found:
        autopar.compile(model, example_inputs=args, loss_fn=loss_fn, hardware=hardware, device="cpu", **options)
    plan: Plan = found.value.args[0]
    return plan


def text_of(plan: Plan) -> str:
    """A plan as it is saved, without notes: those of a captured middle layer count other ops."""
    return json.dumps({**plan.to_json(), "notes": []})


@pytest.mark.parametrize(
    ("ranks", "given", "options"),
    [
        (2, ["--cluster", "h100x2"], {}),
        (4, ["--ranks", "4", "--recipe", "zero3"], {"recipe": "zero3"}),
        (4, ["--mesh", "dp=2,tp=2"], {"mesh": "dp=2,tp=2"}),
        (4, ["--ranks", "4", "--no", "dp", "--stages", "2"], {"without": "dp", "stages": (1, 2)}),
        (4, ["--mesh", "pp=2,dp=2", "--schedule", "1f1b"], {"mesh": "pp=2,dp=2", "schedule": "1f1b"}),
    ],
)
def test_all_doors_give_the_same_plan(
    ranks: int, given: list[str], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has a batch of its own."""
    plans = [by_command_line(TARGET, tmp_path, *given), by_compile(TARGET, monkeypatch, ranks=ranks, **options)]
    plans.append(by_explain(TARGET, f"h100x{ranks}", **options))
    assert len({text_of(plan) for plan in plans}) == 1


DDP = {"mesh": "dp=4", "recipe": "ddp"}


@pytest.mark.parametrize(
    ("options", "memory", "count", "batch"),
    [
        (DDP, 3_400_000_000, 1, ["--batch", "64"]),
        (DDP, 2_400_000_000, 2, ["--batch", "64"]),
        (DDP, 2_400_000_000, 2, []),
        ({}, 3_400_000_000, 1, ["--batch", "64"]),
        ({}, 2_400_000_000, 2, ["--batch", "64"]),
    ],
)
def test_all_doors_cut_a_batch_that_is_faster_in_parts(
    options: dict[str, str], memory: int, count: int, batch: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where little memory is left, two micro-batches are faster than blocks that run again."""
    target = f"{__name__}:{'wide' if batch else 'wide_own'}"
    named = [part for name, value in options.items() for part in (f"--{name}", value)]
    asked = ["--cluster", "h100x4", "--max-memory", str(memory), *batch, *named]
    plans = [
        by_command_line(target, tmp_path, *asked),
        by_compile(f"{__name__}:wide", monkeypatch, ranks=4, memory_bytes=memory, **options),
    ]
    plans.append(by_explain(target, "h100x4", memory_bytes=memory, **options))
    assert len({text_of(plan) for plan in plans}) == 1
    if options:
        assert [plan.micro_batches for plan in plans] == [count] * 3
        assert plans[0].recompute == "none"


def test_one_rank_without_a_mesh_cuts_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    target, memory = f"{__name__}:wide", 5_200_000_000
    given = by_explain(target, "h100x1", mesh="dp=1", memory_bytes=memory)
    found = by_compile(target, monkeypatch, ranks=1, memory_bytes=memory)
    assert found.micro_batches == given.micro_batches == 2
    assert text_of(found) == text_of(given)
    said = [note for note in found.notes if kind_of(note) == "micro-batches"]
    assert len(said) == 1 and said[0].startswith("2 micro-batches: ")


def test_numbers_that_are_no_power_of_two_are_tried() -> None:
    """Three micro-batches fit without recomputation, and two do not; powers of two alone were tried."""
    given: dict[str, Any] = {"mesh": "dp=1", "cluster": "h100x1"}
    three = autopar.explain(*wide(16), micro_batches=3, recompute="none", **given).memory_bytes
    found = autopar.explain(*wide(48), memory_bytes=int(three) + 1000, **given)
    assert found.plan.micro_batches == 3 and found.plan.recompute == "none"


def test_a_batch_that_no_rank_divides_is_split_in_parts_of_different_sizes() -> None:
    plan = autopar.explain(*wide(6), mesh="dp=4", recipe="ddp", cluster="h100x4").plan
    (said,) = (note for note in plan.notes if kind_of(note) == "uneven")
    assert said.startswith("of the 6 rows ranks have 2 or none, and wait for those with the most in 25.0 %")


@pytest.mark.parametrize("kind", [Contrastive, Normalized, Counting, Sized])
def test_a_batch_whose_parts_have_other_results_is_not_cut(kind: type[Wide]) -> None:
    model, args = built(kind, 64)
    options: dict[str, Any] = {"mesh": "dp=4", "recipe": "ddp", "memory_bytes": 2_400_000_000}
    plan = autopar.explain(model, args, cluster="h100x4", **options).plan
    assert plan.micro_batches == 1 and plan.recompute != "none"


class Stretched(Wide):
    """A table of positions as an input, which is not part of the batch."""

    def forward(self, x: Tensor, y: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + table, y)


def test_a_batch_beside_an_input_without_rows_is_not_cut() -> None:
    with torch.device("meta"):
        model, table = Stretched(), torch.empty(1024, 1024)
        args = (torch.empty(64, 1024, 1024), torch.empty(64, 1024, 1), table)
    options: dict[str, Any] = {"mesh": "dp=4", "recipe": "ddp", "memory_bytes": 2_400_000_000}
    assert autopar.explain(model, args, cluster="h100x4", **options).plan.micro_batches == 1


def test_the_start_line_says_why_a_batch_is_cut() -> None:
    options: dict[str, Any] = {"mesh": "dp=4", "recipe": "ddp", "memory_bytes": 2_400_000_000}
    explained = autopar.explain(*wide(), cluster="h100x4", **options)
    assert explained.request is not None
    line = start_line(explained.plan, explained.request, False, (1.0, 1.0))
    assert "; 2 micro-batches: a step takes 60.9 ms, and 6" in line
    asked = autopar.explain(*wide(32), cluster="h100x4", micro_batches=2, **options)
    assert asked.request is not None
    assert "; 2 micro-batches:" in start_line(asked.plan, asked.request, False, (1.0, 1.0))

"""Schedules without a flush on real ranks: they train as plain PyTorch does with the same delays."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.export import run_with_loss
from autopar.ir import VERSIONED
from autopar.runtime.parameters.weight_stashing import StageVersions
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import Batch, mean_square
from tests.runtime.training import difference, full_state
from tests.support.delayed import train_stages
from tests.support.staged import captured_once, plan_for
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess

STEPS, WIDTH = 8, 12  # a step has 8 or 16 micro-batches, each of which may update


class Chain(nn.Sequential):
    """Equal layers, each a stage of its own; the names of parameters begin with the stage's number."""

    def __init__(self, stages: int) -> None:
        super().__init__(*(Layer() for _ in range(stages)))


class Layer(nn.Module):
    """Two linear maps around a tanh, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make(stages: int, rows: int) -> tuple[nn.Module, list[Batch]]:
    """A chain with another batch for every step."""
    torch.manual_seed(0)
    model = Chain(stages).double()
    x, y = torch.randn(2, rows, WIDTH, dtype=torch.float64)
    return model, [(x.roll(i, -1), y.roll(2 * i, -1)) for i in range(STEPS)]


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6)


@captured_once()
def trained(
    schedule: str,
    stages: int,
    optimizer: str,
    mesh: dict[str, int] | None = None,
    recipe: Any = "auto",
    recompute: Any = "none",
    executor: str = "eager",
) -> dict[str, Any]:
    micro_batches = 4 * stages
    model, batches = make(stages, 4 * micro_batches)
    plan = plan_for(model, batches[0], mean_square, schedule, stages, micro_batches, mesh, recipe)
    plan = replace(plan, recompute=recompute)
    made = autopar.compile(model, loss_fn=mean_square, plan=plan, executor=executor)
    steps = optimizer_of(optimizer, made)
    made.attach_optimizer(steps)
    losses = [made.step(*each).item() for each in batches]
    assert all(p.grad is None for p in made.parameters())
    return {"losses": losses, **full_state(made.original)}


def expected(schedule: str, stages: int, optimizer: str) -> dict[str, Any]:
    """The same in plain PyTorch."""
    micro_batches = 4 * stages
    model, batches = make(stages, 4 * micro_batches)
    losses = train_stages(
        model,
        batches,
        lambda m, part: run_with_loss(m, part, {}, mean_square),  # type: ignore[arg-type]
        optimizer_of(optimizer, model),
        stage_of=lambda name: int(name.split(".")[0]),
        stages=stages,
        schedule=schedule,
        micro_batches=micro_batches,
    )
    return {"losses": losses, **full_state(model)}


def distance(parts: list[dict[str, Any]], reference: dict[str, Any]) -> float:
    whole: dict[str, Any] = {}
    for part in parts:
        whole |= part
    return max(difference({k: (whole | p)[k] for k in reference}, reference) for p in parts)


@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    often(
        itertools.product(VERSIONED, ("sgd", "adamw")),
        [("pipedream", "sgd"), ("pipedream-sync", "adamw"), ("2bw", "sgd")],
    ),
)
def test_two_stages_train_as_the_delayed_reference(two_ranks: Ranks, schedule: str, optimizer: str) -> None:
    found = two_ranks.run(trained, schedule, 2, optimizer)
    assert distance(found, expected(schedule, 2, optimizer)) < 1e-9


@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [
        ("pipedream", "adamw"),
        ("pipedream-sync", "sgd"),
        ("2bw", "adamw"),
        pytest.param("pipedream", "sgd", marks=pytest.mark.slow),
        pytest.param("pipedream-sync", "adamw", marks=pytest.mark.slow),
        pytest.param("2bw", "sgd", marks=pytest.mark.slow),
    ],
)
def test_four_stages_train_as_the_delayed_reference(four_ranks: Ranks, schedule: str, optimizer: str) -> None:
    found = four_ranks.run(trained, schedule, 4, optimizer)
    assert distance(found, expected(schedule, 4, optimizer)) < 1e-9


def test_the_delays_matter() -> None:
    """Were they left out, the comparison above would fail."""
    references = [expected(schedule, 4, "sgd") for schedule in VERSIONED]
    assert difference(references[0], references[1]) > 1e-3
    assert difference(references[1], references[2]) > 1e-3


@captured_once()
def counted(schedule: str, stages: int) -> int:
    """The most tensors with values of this rank's `up` that there were at once, looked for after every update."""
    # What other tests in this process have left: to look through all of it at every update takes most of the time.
    earlier = {id(x) for x in gc.get_objects() if type(x) is Tensor}
    gc.freeze()
    model, batches = make(stages, 4 * 4 * stages)
    plan = plan_for(model, batches[0], mean_square, schedule, stages, 4 * stages)
    made = autopar.compile(model, loss_fn=mean_square, plan=plan)
    optimizer, found = torch.optim.SGD(made.parameters(), lr=0.05), []
    optimizer.register_step_post_hook(lambda *_: found.append(_weights(optimizer, earlier)))
    made.attach_optimizer(optimizer)
    made.step(*batches[0])
    return max(found)


def _weights(optimizer: torch.optim.Optimizer, earlier: set[int]) -> int:
    """Number of memories in which a matrix of the shape of `up` lies, gradients left out."""
    every = [x for x in gc.get_objects() if type(x) is Tensor and id(x) not in earlier]
    tensors = [x for x in every if x.shape == (2 * WIDTH, WIDTH) and not x.is_meta]
    gradients = [p.grad.to_local() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    at = {x.untyped_storage().data_ptr() for x in tensors}
    return len(at - {x.untyped_storage().data_ptr() for x in gradients})


@pytest.mark.parametrize(
    ("schedule", "alive"),
    [
        ("pipedream", [4, 3, 2, 1]),
        pytest.param("pipedream-sync", [4, 4, 4, 4], marks=pytest.mark.slow),
        ("2bw", [2, 2, 2, 2]),
    ],
)
def test_versions_that_are_alive_are_counted_as_tensors(four_ranks: Ranks, schedule: str, alive: list[int]) -> None:
    assert four_ranks.run(counted, schedule, 4) == alive


@pytest.mark.parametrize(
    ("schedule", "mesh", "recipe"),
    [
        pytest.param("pipedream", {"dp": 2}, "ddp", marks=pytest.mark.slow),
        ("pipedream-sync", {"tp": 2}, "tp"),
        ("2bw", {"dp": 2}, "ddp"),
    ],
)
def test_stages_of_several_ranks(four_ranks: Ranks, schedule: str, mesh: dict[str, int], recipe: str) -> None:
    found = four_ranks.run(trained, schedule, 2, "adamw", mesh, recipe)
    assert distance(found, expected(schedule, 2, "adamw")) < 1e-9


@pytest.mark.parametrize("recompute", often(["full", 1], [1]))
def test_recomputed_blocks_take_the_version_of_their_forward(two_ranks: Ranks, recompute: Any) -> None:
    found = two_ranks.run(trained, "pipedream-sync", 2, "sgd", None, "auto", recompute)
    assert distance(found, expected("pipedream-sync", 2, "sgd")) < 1e-9


@pytest.mark.slow
def test_a_compiled_executor(two_ranks: Ranks) -> None:
    found = two_ranks.run(trained, "pipedream", 2, "sgd", None, "auto", "none", "inductor")
    assert distance(found, expected("pipedream", 2, "sgd")) < 1e-9


# --- what a user meets


@captured_once()
def as_written() -> dict[str, Any]:
    """A loop of 1f1b with two lines changed; evaluation between the steps, and the optimizer's step left in place."""
    model, batches = make(2, 32)
    made = autopar.compile(model, loss_fn=mean_square, mesh={"pp": 2}, recipe="pipedream", micro_batches=8)
    optimizer = optimizer_of("sgd", made)
    made.attach_optimizer(optimizer)
    losses, seen = [], []
    for each in batches:
        with torch.no_grad():
            seen.append(made.step(*each).item())
        losses.append(made.step(*each).item())
        optimizer.step()
        optimizer.zero_grad()
    assert seen[1] != losses[1]  # the one is of the newest parameters, the other of those that micro-batches saw
    return {"losses": losses, **full_state(made.original)}


def test_a_loop_is_changed_in_two_lines(two_ranks: Ranks) -> None:
    # The search cuts after the first layer, where the model's own stages begin.
    assert distance(two_ranks.run(as_written), expected("pipedream", 2, "sgd")) < 1e-9


@captured_once()
def refusals() -> list[str]:
    found = []

    def says(call: Any, *given: Any) -> None:
        with pytest.raises(autopar.StepError) as caught:
            call(*given)
        found.append(str(caught.value))

    model, batches = make(2, 32)
    options: dict[str, Any] = {"loss_fn": mean_square, "mesh": {"pp": 2}, "micro_batches": 8}
    made = autopar.compile(model, recipe="pipedream", **options)
    says(made.step, *batches[0])
    says(made.attach_optimizer, 3)
    made.attach_optimizer(optimizer_of("sgd", made))
    says(made.clip_grad_norm_, 1.0)
    says(autopar.find_nan, made, *batches[0])
    skipping = autopar.compile(make(2, 32)[0], recipe="2bw", skip_nonfinite=True, **options)
    skipping.attach_optimizer(optimizer_of("sgd", skipping))
    says(skipping.step, *batches[0])
    flushing = autopar.compile(make(2, 32)[0], recipe="1f1b", **options)
    flushing.attach_optimizer(optimizer_of("sgd", flushing))
    says(flushing.step, *batches[0])
    return found


def test_what_cannot_be_says_so(two_ranks: Ranks) -> None:
    for found in two_ranks.run(refusals):
        no_optimizer, no_torch, clipping, finding, skipping, flushing = found
        assert "no optimizer was given. Call model.attach_optimizer(optimizer) once" in no_optimizer
        assert "attach_optimizer was given int" in no_torch
        assert clipping.startswith("clip_grad_norm_ needs the gradients of a whole step, but the sch")
        assert finding.startswith("find_nan needs the gradients of a whole step")
        assert skipping.startswith("skip_nonfinite=True needs the gradients of a whole step")
        assert "call optimizer.step() after each step, or ask for such a schedule" in flushing


@captured_once()
def calls_a_model_that_returns_its_loss() -> str:
    model, batches = make(2, 32)
    made = autopar.compile(
        WithLoss(model), mesh={"pp": 2}, recipe="pipedream", micro_batches=8, example_inputs=batches[0]
    )
    made.attach_optimizer(optimizer_of("sgd", made))
    with pytest.raises(autopar.StepError) as caught:
        made(*batches[0])
    return str(caught.value)


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mean_square(self.inner(x), y)


def test_a_call_with_autograd_is_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(calls_a_model_that_returns_its_loss):
        assert message.startswith("model(...) with autograd on needs the gradients of a whole step")


# --- without ranks


class OneParameter:
    """Residents of a parameter that is used as it is stored, and the reducer and optimizer of them."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.zeros(()))
        self.kept = [self]
        self.leaves = [self.parameter.detach()]
        self.attached = 0

    def copy_at_rest(self) -> None:
        self.parameter.data = self.parameter.detach().clone()

    def refresh(self) -> bool:
        is_new = self.leaves[0].data_ptr() != self.parameter.data_ptr()
        self.leaves[0] = self.parameter.detach()
        return is_new

    def attach(self) -> None:
        self.attached += 1

    @torch.no_grad()
    def step(self) -> None:
        self.parameter.add_(1)


def test_a_version_is_copied_only_while_a_micro_batch_needs_it() -> None:
    one: Any = OneParameter()
    versions = StageVersions(one, one, seen=(0, 0, 1, 2))
    found = []
    for number in range(4):
        versions.use(number)
        found.append(one.leaves[0].item())
        versions.update(number, one)
    assert found == [0, 0, 1, 2] and one.parameter.item() == 4
    # Micro-batch 1 needs 0, 2 needs 1 and 3 needs 2 beside the newest; the last update needs nothing.
    assert one.attached == 3


def test_a_step_that_fails_leaves_the_newest_version_in_use() -> None:
    one: Any = OneParameter()
    versions = StageVersions(one, one, seen=(0, 0, 1, 2))
    versions.update(0, one)
    versions.use(1)
    assert one.leaves[0].item() == 0
    versions.end()
    assert one.leaves[0].item() == 1 == one.parameter.item()

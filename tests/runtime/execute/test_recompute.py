"""Recomputation in backward: the same training, the same masks, few bytes kept, collectives counted."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from gpt import GPT, GPTConfig, loss_fn
from torch import Tensor, nn

import autopar
from autopar.cost_model import find_hardware
from autopar.errors import PlanError
from autopar.ir import Graph, Pipeline, Plan
from autopar.ir.recompute import Recompute, Selection
from autopar.pipeline.parts import block_starts
from autopar.pipeline.producers import recomputable_names
from autopar.pipeline.stage_costs import StageTables
from autopar.pipeline.stage_table import StageTable
from autopar.planning.planning import make_plan
from autopar.runtime.execute.executor import Runner
from autopar.search.exact.selection import select
from autopar.search.request.request import Request
from benchmarks.accuracy.saved_activations import kept_bytes
from tests.proof.test_communication import Counted
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import Batch, make, mean_square
from tests.runtime.training import difference, single, train
from tests.support.staged import captured_once, prepared_once

HARDWARE = find_hardware("cpu-gloo")
WIDTH = 8

Made = tuple[nn.Module, Batch, Callable[..., Tensor] | None]


class Layers(nn.Module):
    """Residual layers of a linear map, what `middle` makes, and a nonlinearity, between two maps."""

    def __init__(self, middle: Callable[[], nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), middle(), nn.GELU()) for _ in range(layers))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def model_of(name: str) -> Made:
    """A model by its name, the same in every process."""
    torch.manual_seed(0)
    middles = {"dropout": lambda: nn.Dropout(0.3), "norm": lambda: nn.BatchNorm1d(WIDTH)}
    if name not in middles:
        return make(name)  # type: ignore[return-value]
    batch = (torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double())
    return Layers(middles[name]).double(), batch, mean_square


def planned(
    made: Made, mesh: dict[str, int], recipe: str, micro_batches: int, pipeline: tuple[str, int]
) -> tuple[Plan, Graph]:
    """A plan without recomputation; `pipeline` is a schedule ("" for none) and its number of stages."""
    model, batch, loss = made
    part = tuple(x[: len(x) // micro_batches] for x in batch)
    prepared = prepared_once(model, part, loss)
    plan = make_plan(prepared, Request(HARDWARE, mesh=mesh, recipe=recipe, micro_batches=micro_batches))
    schedule, stages = pipeline
    if schedule:
        cuts = block_starts(prepared.analysis.graph)[1:stages]
        plan = replace(plan, pipeline=Pipeline(2, schedule, cuts))
    return plan, prepared.analysis.graph


def random_selection(graph: Graph, plan: Plan, seed: int) -> Selection:
    """About half of the ops and conversions of every block."""
    draw = random.Random(seed)
    return Selection(
        tuple(
            (path, tuple(name for name in names if draw.random() < 0.5))
            for path, names in recomputable_names(graph, plan).items()
        )
    )


@captured_once()
def trained(
    name: str,
    mesh: dict[str, int],
    recipe: str,
    micro_batches: int,
    pipeline: tuple[str, int],
    recompute: Recompute | Callable[[Graph, Plan], Selection] = "full",
) -> dict[str, Any]:
    made = model_of(name)
    plan, graph = planned(made, mesh, recipe, micro_batches, pipeline)
    model, batch, loss = made
    if callable(recompute):
        recompute = recompute(graph, plan)
    plan = replace(plan, recompute=recompute)
    compiled = autopar.compile(model, loss_fn=loss, plan=plan)
    torch.manual_seed(1)
    return train(compiled, compiled.step, batch)


def trained_each(arguments: tuple[Any, ...], recomputes: tuple[Recompute, ...]) -> list[Any]:
    """Trains by the same plan once for each number of recomputed blocks."""
    return [trained(*arguments, recompute) for recompute in recomputes]


def trained_with_random_ops(arguments: tuple[Any, ...], seeds: tuple[int, ...]) -> list[Any]:
    """Without recomputation, and with random ops recomputed."""
    choices = [partial(random_selection, seed=seed) for seed in seeds]
    return [trained(*arguments, each) for each in ("none", *choices)]


def joined(parts: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """What ranks that hold different stages have together, in the order of `names`."""
    together = {key: value for part in reversed(parts) for key, value in part.items()}
    return {name: together[name] for name in names}


NO_PIPELINE = ("", 1)


# --- training


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mesh", "recipe", "micro_batches", "pipeline"),
    [
        pytest.param({"dp": 2}, "ddp", 1, NO_PIPELINE, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, "zero1", 2, NO_PIPELINE, marks=pytest.mark.slow),
        ({"dp": 2}, "zero3", 2, NO_PIPELINE),
        pytest.param({"tp": 2}, "tp", 1, NO_PIPELINE, marks=pytest.mark.slow),
        ({"tp": 2}, "tp+sp", 1, NO_PIPELINE),
        pytest.param({"dp": 1}, "ddp", 4, ("gpipe", 2), marks=pytest.mark.slow),
        ({"dp": 1}, "ddp", 4, ("1f1b", 2)),
        ({"dp": 1}, "ddp", 4, ("zb", 4)),
    ],
)
def test_training_is_that_of_one_process(
    two_ranks: Ranks, mesh: dict[str, int], recipe: str, micro_batches: int, pipeline: tuple[str, int]
) -> None:
    expected = single("gpt", micro_batches=micro_batches)
    parts = two_ranks.run(trained, "gpt", mesh, recipe, micro_batches, pipeline)
    assert difference(joined(parts, list(expected)), expected) < 1e-9


@pytest.mark.multiprocess
def test_a_gathered_parameter_of_several_blocks(two_ranks: Ranks) -> None:
    """It enters the second block whole, and is kept there by its shard; without layers all blocks run again."""
    expected = single("tied", micro_batches=2)
    for found in two_ranks.run(trained, "tied", {"dp": 2}, "zero3", 2, NO_PIPELINE):
        assert difference(found, expected) < 1e-9


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zb"])
def test_stages_of_split_parameters_recompute(four_ranks: Ranks, schedule: str) -> None:
    expected = single("gpt", micro_batches=2)
    parts = four_ranks.run(trained, "gpt", {"dp": 2}, "zero3", 2, (schedule, 2))
    assert difference(joined(parts, list(expected)), expected) < 1e-9


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mesh", "recipe", "micro_batches", "pipeline"),
    [({"dp": 2}, "zero3", 2, NO_PIPELINE), ({"tp": 2}, "auto", 1, NO_PIPELINE), ({"dp": 1}, "ddp", 4, ("1f1b", 2))],
)
def test_masks_are_the_same_again(
    two_ranks: Ranks, mesh: dict[str, int], recipe: str, micro_batches: int, pipeline: tuple[str, int]
) -> None:
    arguments = ("dropout", mesh, recipe, micro_batches, pipeline)
    for kept, *again in two_ranks.run(trained_each, arguments, ("none", 1, "full")):
        assert max(difference(found, kept) for found in again) < 1e-12


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "mesh", "recipe", "micro_batches", "pipeline"),
    [
        ("gpt", {"dp": 2}, "zero3", 2, NO_PIPELINE),
        pytest.param("gpt", {"tp": 2}, "tp+sp", 1, NO_PIPELINE, marks=pytest.mark.slow),
        ("gpt", {"dp": 1}, "ddp", 4, ("1f1b", 2)),
        pytest.param("dropout", {"dp": 2}, "zero3", 2, NO_PIPELINE, marks=pytest.mark.slow),
        ("dropout", {"tp": 2}, "auto", 1, NO_PIPELINE),
    ],
)
def test_any_ops_may_be_recomputed(
    two_ranks: Ranks, name: str, mesh: dict[str, int], recipe: str, micro_batches: int, pipeline: tuple[str, int]
) -> None:
    """Ops drawn at random: the same parameters after three steps as with all of them kept."""
    arguments = (name, mesh, recipe, micro_batches, pipeline)
    for kept, *again in two_ranks.run(trained_with_random_ops, arguments, (0, 1)):
        assert max(difference(found, kept) for found in again) < 1e-12


class Noise(nn.Module):
    """Draws from the generator itself, for no operand gives it a key."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, dtype=x.dtype)


@captured_once()
def test_an_op_without_a_key_draws_the_same_again() -> None:
    """The state of the generator is restored."""
    torch.manual_seed(0)
    model = Layers(Noise).double()
    batch = (torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double())
    plan, graph = planned((model, batch, mean_square), {"dp": 1}, "ddp", 1, NO_PIPELINE)
    assert "1/rand" in recomputable_names(graph, plan)["layers.0"]
    found = []
    for recompute in ("none", "full", *(random_selection(graph, plan, seed) for seed in range(2))):
        compiled = autopar.compile(copy.deepcopy(model), loss_fn=mean_square, plan=replace(plan, recompute=recompute))
        torch.manual_seed(1)
        found.append(train(compiled, compiled.step, batch))
    assert max(difference(each, found[0]) for each in found[1:]) < 1e-12


class Conjugated(nn.Module):
    """Saves a conjugated view of what it computes, and a real view of one, which is negated."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x.tanh())
        z = z * z
        return (z.conj() * torch.complex(x.sin(), x)).imag + z.conj().imag ** 2


@captured_once()
def test_conjugated_views_are_recomputed() -> None:
    """Shape, strides and offset do not tell that a view is conjugated or negated."""
    torch.manual_seed(0)
    batch = (torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double())
    model = Layers(Conjugated).double()
    plan, graph = planned((model, batch, mean_square), {"dp": 1}, "ddp", 1, NO_PIPELINE)
    found = []
    for recompute in ("none", "full", *(random_selection(graph, plan, seed) for seed in range(2))):
        compiled = autopar.compile(copy.deepcopy(model), loss_fn=mean_square, plan=replace(plan, recompute=recompute))
        found.append(train(compiled, compiled.step, batch))
    assert max(difference(each, found[0]) for each in found[1:]) < 1e-12


def test_a_forward_after_steps_that_recompute_ops() -> None:
    """The forward runs no loss, and in evaluation no dropout: these names are not looked for."""
    model, batch, loss = model_of("dropout")
    plan, graph = planned((model, batch, loss), {"dp": 1}, "ddp", 1, NO_PIPELINE)
    names = recomputable_names(graph, plan)
    compiled = autopar.compile(model, loss_fn=loss, plan=replace(plan, recompute=Selection.of(names)))
    compiled.step(*batch)
    in_training = compiled(batch[0]).sum()
    in_training.backward()
    compiled.eval()
    assert torch.equal(compiled(batch[0]), compiled(batch[0]))
    compiled.step(*batch)


@pytest.mark.parametrize("recompute", ["none", "full", "some"])
def test_a_weight_that_changes_before_backward_is_an_error(recompute: Recompute) -> None:
    """Backward would take the new weight for the old one; autograd refuses it, with hooks or without."""
    model, batch, loss = model_of("dropout")
    plan, graph = planned((model, batch, loss), {"dp": 1}, "ddp", 1, NO_PIPELINE)
    chosen = random_selection(graph, plan, 1) if recompute == "some" else recompute
    compiled = autopar.compile(model, loss_fn=loss, plan=replace(plan, recompute=chosen))
    compiled.step(*batch)
    result = compiled(batch[0]).sum()
    with torch.no_grad():
        for parameter in compiled.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@captured_once()
def test_compiled_regions_are_recomputed() -> None:
    """A region is compiled of calls that are all recomputed, or all not."""
    made = model_of("dropout")
    plan, graph = planned(made, {"dp": 1}, "ddp", 1, NO_PIPELINE)
    found = []
    for recompute in ("none", "full", *(random_selection(graph, plan, seed) for seed in range(2))):
        model = copy.deepcopy(made[0])
        compiled = autopar.compile(
            model, loss_fn=made[2], plan=replace(plan, recompute=recompute), executor="aot_eager"
        )
        torch.manual_seed(1)
        found.append(train(compiled, compiled.step, made[1]))
    assert max(difference(each, found[0]) for each in found[1:]) < 1e-12


def test_unknown_ops_and_blocks_are_refused() -> None:
    made = model_of("dropout")
    plan, _ = planned(made, {"dp": 1}, "ddp", 1, NO_PIPELINE)
    for blocks, says in (
        ({"layers.*": ["2/relu"]}, "the op '2/relu' of the block 'layers.*', which the model does"),
        ({"layers.0": ["2/relu"]}, "the op '2/relu' of the block 'layers.0', which the model does"),
        ({"blocks.*": ["2/gelu"]}, "the block 'blocks.*', which the model does not have. It has la"),
    ):
        wrong = replace(plan, recompute=Selection.of(blocks))
        compiled = autopar.compile(made[0], loss_fn=made[2], plan=wrong)
        with pytest.raises(PlanError, match=says.replace("*", r"\*")):
            compiled.step(*made[1])


def test_masks_differ_between_layers_and_steps() -> None:
    """So that equal masks above say something."""
    model, batch, loss = model_of("dropout")
    plan, _ = planned((model, batch, loss), {"dp": 1}, "ddp", 1, NO_PIPELINE)
    compiled = autopar.compile(model, loss_fn=loss, plan=replace(plan, recompute="full"))
    assert compiled.step(*batch).item() != compiled.step(*batch).item()


@pytest.mark.multiprocess
def test_statistics_are_updated_once(two_ranks: Ranks) -> None:
    model, batch, loss = model_of("norm")

    def step(x: Tensor, y: Tensor) -> Tensor:
        found = loss(model(x), y)
        found.backward()
        return found.detach()

    expected = train(model, step, batch)
    for found in two_ranks.run(trained, "norm", {"dp": 2}, "ddp", 1, NO_PIPELINE):
        assert difference(found, expected) < 1e-9
        assert found["layers.0.1.num_batches_tracked"] == 3


def test_a_forward_outside_a_step_recomputes_as_often_as_its_backward_runs() -> None:
    model, batch, loss = model_of("norm")
    alone = copy.deepcopy(model)
    plan, _ = planned((model, batch, loss), {"dp": 1}, "ddp", 1, NO_PIPELINE)
    compiled = autopar.compile(model, loss_fn=loss, plan=replace(plan, recompute="full"))
    compiled.step(*batch)
    compiled.zero_grad()
    loss(alone(batch[0]), batch[1])  # its statistics move as often
    for each in (compiled, alone):
        value = loss(each(batch[0]), batch[1])
        value.backward(retain_graph=True)
        value.backward()
    for found, wanted in zip(compiled.parameters(), alone.parameters(), strict=True):
        gradient = found.grad.full_tensor() if hasattr(found.grad, "full_tensor") else found.grad
        assert torch.allclose(gradient, wanted.grad)


# --- memory


RECOMPUTES: tuple[Recompute, ...] = ("none", 1, 2, "full")


@captured_once()
def step_kept_bytes(layers: int, recompute: Recompute) -> tuple[float, StageTable]:
    """What a forward keeps for backward, and its price."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq_len=16, layers=layers, heads=4, width=32))
    batch = (torch.randint(256, (4, 16)), torch.randint(256, (4, 16)))
    plan, graph = planned((model, batch, loss_fn), {"dp": 1}, "ddp", 1, NO_PIPELINE)
    plan = replace(plan, recompute=recompute)
    compiled = autopar.compile(model, loss_fn=loss_fn, plan=plan)
    compiled.step(*batch)
    runner: Runner = compiled._kept.ready[True][0].bound._runner  # type: ignore[union-attr]
    runner.begin()
    kept = kept_bytes(lambda: runner.run(batch), runner.leaves)
    return kept, StageTables(graph, plan, HARDWARE).at(plan.recompute)


def test_what_is_kept_is_what_is_priced() -> None:
    """Every block that is recomputed saves the same, and keeps what enters it."""
    kept = []
    for recompute in RECOMPUTES:
        found, table = step_kept_bytes(3, recompute)
        assert found == pytest.approx(table.saved_bytes[0, -1], rel=0.01)
        kept.append(found)
    boundary = 4 * 16 * 32 * 4  # batch, positions, width, float32
    saved = [a - b for a, b in itertools.pairwise(kept)]
    assert saved == pytest.approx([saved[0]] * 3, rel=0.01) and saved[0] > 10 * boundary
    fewer, _ = step_kept_bytes(2, "full")
    assert kept[-1] - fewer == pytest.approx(boundary, rel=0.01)


@captured_once()
def test_what_selected_ops_leave_is_what_is_priced() -> None:
    """Ops are drawn at random, or selected for a part of the memory; saved-tensor hooks count the bytes."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq_len=16, layers=3, heads=4, width=32))
    batch = (torch.randint(256, (4, 16)), torch.randint(256, (4, 16)))
    plan, graph = planned((model, batch, loss_fn), {"dp": 1}, "ddp", 1, NO_PIPELINE)
    tables = StageTables(graph, plan, HARDWARE, world=plan.mesh)
    none, full = (tables.at(how).saved_bytes[0, -1] for how in ("none", "full"))
    chosen = {part: select(tables.selectable, part) for part in (0.8, 0.5, 0.2)}
    drawn = [random_selection(graph, plan, seed) for seed in range(2)]
    for recompute in (*chosen.values(), *drawn):
        compiled = autopar.compile(model, loss_fn=loss_fn, plan=replace(plan, recompute=recompute))
        compiled.step(*batch)
        runner: Runner = compiled._kept.ready[True][0].bound._runner  # type: ignore[union-attr]
        runner.begin()
        kept = kept_bytes(lambda: runner.run(batch), runner.leaves)  # noqa: B023
        assert kept == pytest.approx(tables.at(recompute).saved_bytes[0, -1], rel=0.001)
    for part, selection in chosen.items():
        assert tables.at(selection).saved_bytes[0, -1] <= full + part * (none - full)


# --- collectives


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


LAYERS, ROWS, FLOAT = 3, 8, 4
PARAMETERS = LAYERS * (WIDTH + 4 * WIDTH**2) * FLOAT
STREAM = ROWS * 4 * WIDTH * FLOAT


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


@captured_once()
def sent_bytes(mesh: dict[str, int], recipe: str, micro_batches: int) -> dict[str, int]:
    """Bytes by collective of one step in which layers run again."""
    torch.manual_seed(0)
    model, batch = Stack(), (torch.randn(ROWS, 4, WIDTH),)
    plan, _ = planned((model, batch, None), mesh, recipe, micro_batches, NO_PIPELINE)
    compiled = autopar.compile(model, plan=replace(plan, recompute="full"))
    compiled.step(*batch)
    compiled.zero_grad()
    with Counted() as counted:
        compiled.step(*batch)
    return dict(counted.bytes)


@pytest.mark.multiprocess
def test_parameters_are_gathered_once_for_each_run_of_a_layer(two_ranks: Ranks) -> None:
    for micro_batches in (1, 2):
        for found in two_ranks.run(sent_bytes, {"dp": 2}, "zero3", micro_batches):
            assert found["all_gather"] == 2 * micro_batches * PARAMETERS
            assert found["reduce_scatter"] == micro_batches * PARAMETERS


@pytest.mark.multiprocess
def test_sums_of_activations_are_not_recomputed_for_nobody(two_ranks: Ranks) -> None:
    """A layer ends with its sum, which its second run does not reach: forward's and backward's remain.

    The last layer's block goes on to the square, which keeps the sum, and so makes it again.
    """
    for found in two_ranks.run(sent_bytes, {"tp": 2}, "tp", 1):
        assert found == {"all_reduce": (2 * LAYERS + 1) * STREAM}


@pytest.mark.multiprocess
def test_gathers_of_activations_are_recomputed(two_ranks: Ranks) -> None:
    """Before each `up`, forward's, the second run's, and the transpose of each `down`'s scatter."""
    for found in two_ranks.run(sent_bytes, {"tp": 2}, "tp+sp", 1):
        assert found["all_gather"] == 3 * LAYERS * STREAM
        assert found["reduce_scatter"] == (2 * LAYERS + 1) * STREAM

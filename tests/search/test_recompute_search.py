"""Blocks that run again as memory has it: the fewest that fit, priced as their tables say."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpt import GPT, GPTConfig, loss_fn

from autopar.cost_model import find_hardware
from autopar.errors import PlanError, SearchError
from autopar.ir import Graph, Pipeline, Plan
from autopar.ir.recompute import Recompute, Selection, recomputed_blocks
from autopar.pipeline.composed import composed
from autopar.pipeline.parts import repeating_parts
from autopar.pipeline.stage_costs import StageTables
from autopar.planning.planning import make_plan, prepare_forward, prepare_step, search_step
from autopar.search.request.request import Request
from autopar.search.stages.balance import balance_of
from autopar.search.stages.case import Case
from autopar.search.stages.pipeline import search_pipeline
from autopar.search.stages.pipeline_settings import PipelineFound
from autopar.units import format_bytes
from tests.pipeline.test_stage_costs import ROW, SIZES, WORLD, table, unsplit
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY
from tests.support.tables import often

LAYERS = 6
WIDE = residual(LAYERS, Sizes(batch=64, width=16, hidden=256, vocab=16))


def found(ranks: int, graph: Graph = WIDE, **options: Any) -> PipelineFound:
    settings = {"schedule": "1f1b", "micro_batches": 4, **options}
    request = Request(TOY, mesh={"pp": ranks}, **settings)
    return search_pipeline(Case(graph, request, 4))


def fullest(each: PipelineFound) -> float:
    return max(each.best.balance.rank_bytes)


def count(recompute: Recompute) -> int:
    return recomputed_blocks(recompute, LAYERS)


# --- memory


@pytest.mark.parametrize("machine", ["h100", pytest.param("cpu-gloo", marks=pytest.mark.slow)])
def test_more_memory_never_makes_a_plan_slower_where_the_host_stores_nothing(machine: str) -> None:
    """Slower plans of layouts that leave more memory were not tried beside recomputed blocks: on `h100` these bounds
    gave no plan (4.6 MB), 0.551 ms (5.0), 0.413 (5.4) and 0.401 (8.0), and the host had to be allowed for 0.414 at 4.6.
    """
    model = GPT(GPTConfig(seq_len=128, layers=6, heads=4, width=32))
    batch = (torch.randint(256, (8, 128)), torch.randint(256, (8, 128)))
    prepared, hardware = prepare_step(model, batch, loss_fn=loss_fn), find_hardware(machine)
    asked = Request(hardware, mesh={"tp": 2}, recipe="tp", offload=False)
    bounds = [hardware.reserved_bytes + int(1e6 * mb) for mb in (3.8, 4.2, 4.6, 5.0, 5.4, 6.0, 8.0)]
    prices = [search_step(prepared, asked.but(memory_bytes=b)).best.price for b in bounds]
    assert [each.peak_bytes <= b for each, b in zip(prices, bounds, strict=True)] == [True] * 7
    seconds = [each.step_seconds for each in prices]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_memory_is_never_slower_and_never_more_blocks(ranks: int) -> None:
    none, full = (found(ranks, recompute=how) for how in ("none", "full"))
    low, high = int(fullest(full)), int(fullest(none)) + 1
    bounds = [low + 1 + (high - low) * part // 12 for part in range(13)]
    all_of_them = [found(ranks, memory_bytes=bound) for bound in bounds]
    for each, bound in zip(all_of_them, bounds, strict=True):
        assert fullest(each) <= bound
    for less, more in itertools.pairwise(all_of_them):
        assert more.best.seconds <= less.best.seconds * (1 + 1e-9)
        assert count(more.plan.recompute) <= count(less.plan.recompute)
    blocks = {each.plan.recompute for each in all_of_them}
    assert "none" in blocks and len(blocks) >= 3


@pytest.mark.parametrize("ranks", often([1, 2], [2]))
def test_no_fewer_blocks_fit(ranks: int) -> None:
    """With any cuts, of the same layouts; ops of all blocks are recomputed instead where that is faster."""
    fixed = {how: found(ranks, recompute=how) for how in ("none", 1, 2, 3, 4, 5, "full")}
    for how in (1, 2):
        bound = int(fullest(fixed[how])) + 1
        best = found(ranks, memory_bytes=bound)
        assert best.plan.recompute == how or isinstance(best.plan.recompute, Selection)
        fewer = [each for name, each in fixed.items() if count(name) < how]
        assert all(fullest(each) > bound for each in fewer)
        assert best.best.seconds <= fixed[how].best.seconds * (1 + 1e-9)
        assert fullest(best) <= bound


def test_notes_say_what_running_again_saves_and_takes() -> None:
    none, some = found(1, recompute="none"), found(1, recompute=2)
    saved = fullest(none) - fullest(some)
    slower = 1e3 * (some.best.seconds - none.best.seconds)
    assert saved > 0 and slower > 0
    (note,) = [n for n in some.plan.notes if n.startswith("recompute ")]
    assert note.startswith(f"recompute 2 blocks: {format_bytes(int(saved))} less on the fullest rank")
    assert f"for {slower:.3f} ms more a step" in note
    assert not [n for n in none.plan.notes if n.startswith("recompute ")]


def test_a_part_of_the_memory_for_activations() -> None:
    """Every stage keeps at most that part of what can be saved, no slower than with the fewest whole blocks."""
    tables = StageTables(WIDE, unsplit(WIDE), TOY, world=WORLD)
    least, most = (tables.at(how).saved_bytes[0, -1] for how in ("full", "none"))
    for part in (0.9, 0.5, 0.2):
        chosen, bound = found(1, recompute=part), least + part * (most - least)
        assert tables.at(chosen.plan.recompute).saved_bytes[0, -1] <= bound
        enough = (k for k in (*range(1, LAYERS), "full") if tables.at(k).saved_bytes[0, -1] <= bound)
        blocks = found(1, recompute=next(enough))
        assert chosen.best.seconds <= blocks.best.seconds * (1 + 1e-9)
    for wrong in (0.0, 1.0, 1.5):
        with pytest.raises(PlanError, match=r"between 0 and 1, such as 0.5"):
            found(1, recompute=wrong)
    with pytest.raises(PlanError, match=r"no recompute=-1: .* a whole number of blocks such as 3"):
        found(1, recompute=-1)


def test_recomputation_of_nothing_is_refused() -> None:
    prepared = prepare_forward(torch.nn.Flatten(), (torch.ones(4, 2, 2),))
    with pytest.raises(PlanError, match="recompute='full' was asked for, but nothing can be recomputed"):
        make_plan(prepared, Request(TOY, mesh={"dp": 2}, recompute="full"))


def test_more_blocks_than_there_are_are_refused() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    prepared = prepare_forward(model, (torch.ones(4, 4),))

    def recompute(count: int, mesh: dict[str, int]) -> Recompute:
        return make_plan(prepared, Request(TOY, mesh=mesh, recompute=count)).recompute

    assert recompute(2, {"dp": 2}) == 2 and recompute(3, {"dp": 2}) == "full"
    for mesh in ({"dp": 2}, {"pp": 2}):
        with pytest.raises(PlanError, match=r"recompute=4 .* has 3 blocks that can be recomputed: ask for at most 3"):
            recompute(4, mesh)


def test_all_blocks_of_every_stage_are_full() -> None:
    assert found(2, recompute=LAYERS).plan.recompute == "full"
    assert found(1, recompute=LAYERS - 1).plan.recompute == LAYERS - 1


def test_nothing_fits_at_all() -> None:
    with pytest.raises(SearchError, match="too much"):
        found(1, memory_bytes=1000)


# --- tables


def test_the_first_blocks_of_every_stage_run_again() -> None:
    """Counted by hand: a recomputed layer keeps its input, and the others keep their input and their middle."""
    graph = residual(4)
    plain, again = (table(graph, replace(unsplit(graph), recompute=how)) for how in ("none", 2))
    layer, stream = ROW * (SIZES.width + SIZES.hidden), ROW * SIZES.width
    assert again.saved_bytes[1, 5] == 2 * stream + 2 * layer + stream  # and what leaves
    assert again.saved_bytes[3, 5] == 3 * stream  # a stage that begins later has its own first two
    assert again.transient_bytes[1, 5] == 0  # the last two have given back more than runs again
    assert again.transient_bytes[1, 3] == layer
    for i, j in ((1, 5), (0, 6), (2, 4), (3, 4)):
        ends = min(j, max(i, 1) + 2)
        # the sum that ends a layer reads two tensors and writes one; it is not repeated
        sums = max(0, ends - max(i, 1)) * 3 * stream / TOY.memory_bytes_per_second
        extra = plain.forward_seconds[max(i, 1), ends] - sums
        assert again.backward_seconds[i, j] == pytest.approx(plain.backward_seconds[i, j] + extra)


def test_none_and_full_are_ends_of_one_scale() -> None:
    tables = StageTables(WIDE, unsplit(WIDE), TOY, world=WORLD)
    for name in ("saved_bytes", "backward_seconds", "transient_bytes"):
        full = getattr(tables.at("full"), name)
        assert (getattr(tables.at(LAYERS), name) == full).all(), name
    held = [balance_of(tables.at(k or "none"), found(1).best.setting.shape, ()).rank_bytes[0] for k in range(LAYERS)]
    assert held == sorted(held, reverse=True) and len(set(held)) == LAYERS


def test_a_block_that_is_cut_counts_in_both_stages() -> None:
    graph = residual(3)
    cut = replace(unsplit(graph), pipeline=Pipeline(2, "gpipe", ("relu_2",)), recompute=1)
    parts, again = repeating_parts(graph, cut)
    assert [part.block for part in parts] == [0, 1, 1, 2, 3, 4]
    assert again == {1, 2}  # of the first layer what each of the stages has


# --- plans without stages


def test_a_plan_without_stages_has_the_fewest_blocks_that_fit() -> None:
    """Or ops of every block, if that is faster; where parameters may be sharded too, the fastest of all."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq_len=32, layers=4, heads=4, width=32))
    batch = (torch.randint(256, (8, 32)), torch.randint(256, (8, 32)))
    prepared = prepare_step(model, batch, loss_fn=loss_fn)
    graph, hardware = prepared.analysis.graph, find_hardware("cpu-gloo")

    def plan_of(mesh: dict[str, int], **options: Any) -> Plan:
        return make_plan(prepared, Request(hardware, mesh=mesh, **options))

    def seconds(plan: Plan) -> float:
        return composed(graph, plan, hardware).step_seconds

    for mesh in ({"dp": 1}, {"dp": 2}):
        free = plan_of(mesh, recipe="ddp")
        assert free.recompute == "none"
        tables = StageTables(graph, free, hardware, world=free.mesh)
        held = {}
        for how in ("none", 1, 2, 3):
            at = tables.at(how)
            held[how] = (at.saved_bytes + at.kept_bytes + at.transient_bytes)[0, -1]
        tight = plan_of(mesh, recipe="ddp", memory_bytes=int(held[2]) + 1)
        at = tables.at(tight.recompute)
        assert (at.saved_bytes + at.kept_bytes + at.transient_bytes)[0, -1] <= held[2] + 1
        assert seconds(tight) <= seconds(replace(free, recompute=2)) and tight.pipeline is None
        assert tight.ops == free.ops and Plan.parse(str(tight)) == tight
        assert isinstance(tight.recompute, Selection)
        assert any("ops recomputed in backward: " in note for note in tight.notes)
    sharding = plan_of({"dp": 2}, memory_bytes=int(held[2]) + 1)
    assert seconds(sharding) <= seconds(tight)
    with pytest.raises(SearchError) as refused:
        plan_of({"dp": 1}, memory_bytes=10_000)
    said, (*_, last) = str(refused.value), str(refused.value).splitlines()
    assert "Nor does it with blocks recomputed" in said and said.count("What would help") == 1
    needed = re.fullmatch(r"What would help: .*memory_bytes=(\d+) \(--max-memory\) if a rank has .*", last)
    assert needed and plan_of({"dp": 1}, memory_bytes=int(needed[1]))
    with pytest.raises(SearchError, match="No plan for the mesh dp=1 fits"):
        plan_of({"dp": 1}, recompute="none", memory_bytes=int(held[2]))

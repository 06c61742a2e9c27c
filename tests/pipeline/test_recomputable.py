"""What a selection of ops keeps and costs: by hand, and alike in every price."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_model.machines.software import Software
from autopar.ir import Graph, Plan
from autopar.ir.recompute import Selection
from autopar.pipeline.composed import composed
from autopar.pipeline.producers import op_names, recomputable_names
from autopar.pipeline.stage_costs import StageTables
from autopar.search import search
from autopar.search.exact.selection import select
from tests.pipeline.test_stage_costs import ROW, SIZES, WORLD, unsplit
from tests.search.stacked import residual
from tests.search.toy import TOY

GRAPH = residual(3)


def tables(graph: Graph, plan: Plan) -> StageTables:
    return StageTables(graph, plan, TOY, world=WORLD)


def test_ops_are_named_within_their_block() -> None:
    found = op_names(GRAPH, unsplit(GRAPH))
    assert {path for path, _ in found.values()} == {"layers.0", "layers.1", "layers.2"}
    first, second = ([name for path, name in found.values() if path == f"layers.{i}"] for i in (0, 1))
    assert first == second and len(set(first)) == len(first)


def test_all_ops_of_all_blocks_are_whole_blocks() -> None:
    """They keep the same; they take no longer, since an op for which nobody waits does not run."""
    found = tables(GRAPH, unsplit(GRAPH))
    names = recomputable_names(GRAPH, unsplit(GRAPH))
    everything = Selection(tuple((path, tuple(own)) for path, own in names.items()))
    one, other = found.at(everything), found.at("full")
    assert (one.saved_bytes == other.saved_bytes).all()
    stages = np.triu_indices(one.blocks + 1, 1)
    assert (one.backward_seconds <= other.backward_seconds * (1 + 1e-9))[stages].all()
    nothing = found.at(Selection(()))
    for name in ("saved_bytes", "backward_seconds", "transient_bytes"):
        plain = getattr(found.at("none"), name)
        assert getattr(nothing, name)[stages] == pytest.approx(plain[stages]), name


def test_a_part_of_the_memory_is_kept() -> None:
    """A layer saves its input and its hidden numbers; the hidden ones are 2/3 of both."""
    found = tables(GRAPH, unsplit(GRAPH))
    layer, stream = ROW * (SIZES.width + SIZES.hidden), ROW * SIZES.width
    assert found.selectable[0][1].kept_bytes(()) == layer
    for part in (0.0, 0.3, 0.99):
        chosen = select(found.selectable, part)
        assert [path for path, _ in chosen.blocks] == ["layers.*"]
        assert found.at(chosen).saved_bytes[1, 4] == 4 * stream
    assert select(found.selectable, 1.0) == Selection((("layers.*", ()),))


@pytest.mark.parametrize("recipe", ["ddp", "zero3", "tp", "tp+sp"])
@pytest.mark.parametrize("seed", range(3))
def test_formulas_and_tables_agree(recipe: str, seed: int) -> None:
    """The composed price of a selection is the table's, for a stage of all blocks."""
    axis = "tp" if recipe.startswith("tp") else "dp"
    plan = search(GRAPH, {axis: 2}, hardware=TOY, recipe=recipe)
    draw = random.Random(seed)
    chosen = Selection(
        tuple(
            (path, tuple(name for name in names if draw.random() < 0.5))
            for path, names in recomputable_names(GRAPH, plan).items()
        )
    )
    plan = replace(plan, recompute=chosen)
    table = StageTables(GRAPH, plan, TOY, world=plan.mesh, software=Software()).at(chosen)
    price = composed(GRAPH, plan, TOY, software=Software())
    once = table.once_seconds[0, -1]
    assert price.step_seconds == pytest.approx((table.forward_seconds + table.backward_seconds)[0, -1] + once)
    held = (table.saved_bytes + table.kept_bytes + table.transient_bytes)[0, -1]
    assert price.peak_bytes == pytest.approx(held + TOY.reserved_bytes)

"""What an order of the axes for each op by itself saves, and how near that is to the least.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/axis_orders.py [--only TEXT]

Where several axes split one factor, their order decides which of them leaves it without a detour, and which links carry
whole tensors. This benchmark prices the conversions of a plan that autopar found: with all ops in the order in which
users name the axes, in the order of the mesh that autopar chose, and in the order that each op has. `at least` gives
both ends of every conversion the orders in which it is cheapest, whatever its neighbours have. No orders can have
conversions that take less, so that it is a lower bound, which needs no search.

Times are those of conversions in forward and backward, without buckets and without what they hide, and every captured
layer counts once.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where it runs as a script

from autopar.cost_model import Hardware, find_cluster
from autopar.cost_model.collectives import conversion_seconds
from autopar.cost_model.flow import Flow
from autopar.cost_model.sizes import Sizes
from autopar.explanation.advice import Question
from autopar.ir import Graph, Layout, Mesh, Plan, Tensor, nested
from autopar.models.presets import find_preset
from autopar.search.refine.orders import in_mesh_order, in_order
from autopar.search.request.request import Request
from autopar.units import format_seconds
from benchmarks.tables import markdown_table

COLUMNS = (
    "model",
    "mesh",
    "recipe",
    "conversions",
    "as the axes are named",
    "in the mesh's order",
    "in their own orders",
    "at least",
)


class Case(NamedTuple):
    """A question whose answer has axes that split one dim together."""

    model: str
    cluster: str
    mesh: str
    recipe: str
    batch: int
    seq: int | None = 4096


CASES = (
    Case("llama3-8b", "h100x8x2", "z=2,y=2,x=4", "x,y,z:3d", 16),
    Case("llama3-8b", "h100x8x2", "z=4,y=2,x=2", "x,y,z:2.5d", 16),
    Case("llama3-8b", "h100x8x2", "y=4,x=4", "x,y:2d", 16),
    Case("llama3-8b", "h100x8x2", "tp=4,dp=4", "dp:zero3,tp:tp+sp", 16),
    Case("llama3-8b", "h100x8x2", "cp=8,dp=2", "dp:zero3,cp:cp", 2, 32768),
    Case("llama3-70b", "h100x8x2", "tp=16", "tp:tp+sp", 16),
    Case("llama3-70b", "h100x8x4", "dp=4,tp=8", "auto", 32),
    Case("mixtral-8x7b", "h100x8x8", "ep=8,dp=8", "dp:zero3,ep:ep", 64),
    Case("mixtral-8x7b", "h100x8x4", "tp=2,ep=8,dp=2", "dp:zero3,ep:ep,tp:tp+sp", 64),
    Case("gpt2-xl", "a100x8", "z=2,y=2,x=2", "x,y,z:3d", 64, 1024),
)


class Conversion(NamedTuple):
    """A tensor of a plan with the layouts from which and to which it is converted."""

    tensor: Tensor
    source: Layout
    target: Layout


def conversions_of(graph: Graph, plan: Plan) -> Iterator[Conversion]:
    """The conversions of a step: from storage to residence, and from where tensors are made to where ops use them."""
    for name, tensor in graph.parameters.items():
        how = plan.parameters[name]
        yield Conversion(graph.tensors[tensor], how.storage, how.resident)
    flow = Flow(graph, plan)
    for name, targets in flow.targets.items():
        for target in targets:
            yield Conversion(graph.tensors[name], flow.produced[name], target)


def own_seconds(graph: Graph, plan: Plan, hardware: Hardware) -> float:
    """Seconds of the conversions of a plan."""
    sizes = Sizes(plan.mesh)
    return sum(_seconds(each, sizes, hardware) for each in conversions_of(graph, plan))


def least_seconds(graph: Graph, plan: Plan, hardware: Hardware) -> float:
    """A lower bound: seconds of the conversions if both ends of each have the orders in which it is cheapest."""
    sizes, orders = Sizes(plan.mesh), list(itertools.permutations(range(len(plan.mesh.axes))))

    def least(each: Conversion) -> float:
        sources, targets = ({nested(states, x): None for x in orders} for states in each[1:])
        ways = itertools.product(sources, targets)
        return min(_seconds(Conversion(each.tensor, *way), sizes, hardware) for way in ways)

    return sum(map(least, conversions_of(graph, plan)))


def _seconds(each: Conversion, sizes: Sizes, hardware: Hardware) -> float:
    return float(conversion_seconds(*each, sizes=sizes, hardware=hardware).total)


def row_of(case: Case) -> tuple[str, ...]:
    """The row of a case."""
    cluster = find_cluster(case.cluster)
    request = Request.on(
        cluster, batch=case.batch, mesh=Mesh.parse(case.mesh), recipe=case.recipe, micro_batches=1, refines=True
    )
    answer = Question(find_preset(case.model), request, case.seq).answer()
    graph, plan, hardware = answer.graph, answer.plan, cluster.hardware
    plain = in_mesh_order(plan)
    named = in_order(plain, plan.mesh.placed)
    seconds = [own_seconds(graph, each, hardware) for each in (named, plain, plan)]
    seconds.append(least_seconds(graph, plan, hardware))
    conversions = sum(each.source != each.target for each in conversions_of(graph, plan))
    return (case.model, str(plan.mesh), str(plan.recipe_in_use), str(conversions), *map(format_seconds, seconds))


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--only", default="", help="Models, separated by commas; all by default.")
def main(only: str) -> None:
    console = Console(stderr=True)
    asked: Sequence[Case] = [each for each in CASES if not only or each.model in only.split(",")]
    rows = [row_of(each) for each in track(asked, console=console)]
    print("\n".join(markdown_table(COLUMNS, rows, text_columns=3)))


if __name__ == "__main__":
    main()

"""What an order of the axes for each tensor by itself could save, beside the one order that a plan has.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/axis_orders.py [--only TEXT]

Where several axes split one factor, their order decides which of them leaves it without a detour. A plan has one order
for all its tensors. This benchmark prices every conversion of a plan that autopar found in all orders of the axes, and
gives each conversion the order in which it is cheapest, whatever the order of its neighbours. No order per tensor can
have conversions that take less. `in its own order` is therefore a lower bound, which needs no search.

A plan is priced twice: in the order of the placement, which is how users name axes, and in the order that
autopar chose.
Times are those of conversions in forward and backward, without buckets and without what they hide, and every captured
layer counts once.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from autopar.ir import Graph, Layout, Mesh, Plan, Tensor
from autopar.models.presets import find_preset
from autopar.search.orders import in_order
from autopar.search.request import Request
from autopar.units import format_seconds
from benchmarks.tables import markdown_table

COLUMNS = (
    "model", "mesh", "recipe", "conversions", "order", "in the plan's order", "each in its own order", "gain",
)  # fmt: skip


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
    Case("mixtral-8x7b", "h100x8x4", "dp=2,tp=2,ep=8", "auto", 64),
    Case("gpt2-xl", "a100x8", "z=2,y=2,x=2", "x,y,z:3d", 64, 1024),
)


class Conversion(NamedTuple):
    """A tensor of a plan with the layouts from which and to which it is converted."""

    tensor: Tensor
    source: Layout
    target: Layout


@dataclass(frozen=True)
class Bound:
    """The time of a plan's conversions.

    Attributes:
        conversions: number of conversions.
        gaining: number of conversions that another order makes cheaper.
        seconds: time of the conversions in the order of the plan.
        least_seconds: their time if each has the order in which it is cheapest.
    """

    conversions: int
    gaining: int
    seconds: float
    least_seconds: float

    @property
    def gain(self) -> float:
        """Fraction of the conversions' time that an order of each tensor saves at most."""
        return 1 - self.least_seconds / self.seconds if self.seconds else 0.0


def conversions_of(graph: Graph, plan: Plan) -> Iterator[Conversion]:
    """The conversions of a step: from storage to residence, and from where tensors are made to where ops use them."""
    for name, tensor in graph.parameters.items():
        how = plan.parameters[name]
        yield Conversion(graph.tensors[tensor], how.storage, how.resident)
    flow = Flow(graph, plan)
    for name, targets in flow.targets.items():
        for target in targets:
            yield Conversion(graph.tensors[name], flow.produced[name], target)


def bound_of(graph: Graph, plan: Plan, hardware: Hardware) -> Bound:
    """The time of a plan's conversions in its own order, and in the best order of each."""
    found = [each for each in conversions_of(graph, plan) if each.source != each.target]
    prices = [_prices(each, plan.mesh, hardware) for each in found]
    own, least = [each[0] for each in prices], [min(each) for each in prices]
    gaining = sum(low < 0.999 * price for price, low in zip(own, least, strict=True))
    return Bound(len(found), gaining, sum(own), sum(least))


def _prices(each: Conversion, mesh: Mesh, hardware: Hardware) -> list[float]:
    """Seconds of a conversion in every order of the axes, that of the mesh first."""
    found = []
    for order in itertools.permutations(range(len(mesh.axes))):
        source, target = (tuple(states[i] for i in order) for states in each[1:])
        sizes = Sizes(mesh.ordered([mesh.names[i] for i in order]))
        price = conversion_seconds(each.tensor, source, target, sizes=sizes, hardware=hardware)
        found.append(float(price.forward + price.backward))
    return found


def rows_of(case: Case) -> Iterator[tuple[str, ...]]:
    """The rows of a case: in the order of the placement, and in the chosen one if that is another."""
    cluster = find_cluster(case.cluster)
    request = Request.on(
        cluster, batch=case.batch, mesh=Mesh.parse(case.mesh), recipe=case.recipe, refines=True
    )  # fmt: skip
    answer = Question(find_preset(case.model), request, case.seq).answer()
    chosen = answer.plan.mesh
    for mesh in dict.fromkeys((chosen.placed, chosen)):
        bound = bound_of(answer.graph, in_order(answer.plan, mesh), cluster.hardware)
        yield (
            case.model, str(chosen.placed), str(answer.plan.recipe_in_use), str(bound.conversions),
            ",".join(mesh.names), format_seconds(bound.seconds), format_seconds(bound.least_seconds),
            f"{bound.gain:.1%} ({bound.gaining})",
        )  # fmt: skip


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--only", default="", help="Models, separated by commas; all by default.")
def main(only: str) -> None:
    console = Console(stderr=True)
    asked: Sequence[Case] = [each for each in CASES if not only or each.model in only.split(",")]
    rows = [row for each in track(asked, console=console) for row in rows_of(each)]
    print("\n".join(markdown_table(COLUMNS, rows, text_columns=3)))


if __name__ == "__main__":
    main()

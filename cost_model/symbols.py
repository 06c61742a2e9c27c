"""The cost of a plan as formulas over symbols, which can be evaluated for many configurations at once.

There is a symbol for every figure of the hardware, for the bandwidth, latency and so on of the link along every mesh
axis, for the number of ranks of every axis, the size of every factor (named model dimension), and the number of
layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy

from autopar.cost_model.arith import Quantity
from autopar.cost_model.buckets import usual_bucket_bytes, whole_bytes
from autopar.cost_model.evaluation import Formulas
from autopar.cost_model.items import FULL, MemoryItem, TrainingState, WorkItem
from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.memory import KeptSlice, Selected
from autopar.cost_model.pricer import Pricer
from autopar.cost_model.sizes import SymbolicSizes
from autopar.ir import Graph, Plan

_SCALARS = (
    "memory_bytes_per_second",
    "launch_seconds",
    "host_seconds",
    "matmul_efficiency",
    "matmul_half_size",
    "memory_efficiency",
    "attention_efficiency",
)


def symbol(name: str) -> sympy.Symbol:
    """The sympy symbol of this name, for a positive number."""
    return sympy.Symbol(name, positive=True)


def machine_symbols(hardware: Hardware) -> tuple[Hardware, dict[str, float]]:
    """A copy of the hardware with symbols in place of figures, and the figure of every symbol by name."""
    replaced: dict[str, Any] = {name: symbol(name) for name in _SCALARS}
    peaks = tuple((size, symbol(_peak_name(size))) for size, _ in hardware.peak_flops)
    machine = dataclasses.replace(hardware, peak_flops=peaks, **replaced)
    return machine, machine_values(machine, hardware)


def machine_values(machine: Hardware, hardware: Hardware) -> dict[str, float]:
    """The figures that `hardware` gives for the symbols of `machine`, by name."""
    values = {name: float(getattr(hardware, name)) for name in _SCALARS}
    return values | {_peak_name(size): hardware.flops_per_second(size) for size, _ in machine.peak_flops}


def _peak_name(itemsize_bytes: int) -> str:
    return f"peak_flops_{8 * itemsize_bytes}bit"


BUCKET = "bucket_bytes"  # one symbol: its formula would stand in that of every message
RUN_SYMBOLS = ("micro_batches", "stages", "chunks", "memory_bound_bytes")


def axis_symbols(axes: Sequence[str], taken: Collection[str]) -> tuple[sympy.Symbol, ...]:
    """A symbol for the number of ranks of every axis: the axis' name, or `batch_ranks` where `batch` is taken."""
    others = {*taken, *RUN_SYMBOLS}
    return tuple(symbol(f"{name}_ranks" if name in others else name) for name in axes)


def link_symbols(axes: Sequence[str]) -> tuple[Link, ...]:
    """The link along every mesh axis, with symbols in place of figures: `bandwidth_tp`, `latency_tp` and so on."""
    return tuple(Link(**{field: symbol(f"{short}_{axis}") for field, short in _LINK.items()}) for axis in axes)


def link_values(link: Link, axis: str) -> dict[str, Quantity]:
    """The figures of the link along a mesh axis by the names of their symbols, such as `bandwidth_tp`."""
    return {f"{short}_{axis}": getattr(link, field) for field, short in _LINK.items()}


def _values_of_links(plan: Plan, hardware: Hardware) -> dict[str, Quantity]:
    """`link_values` of every axis of a plan, and of the axis of its replicas."""
    values: dict[str, Quantity] = {}
    if plan.meeting is not None:
        values |= link_values(hardware.link(plan.world_mesh, 0), plan.meeting.axis)
    for position, axis in enumerate(plan.mesh.names):
        values |= link_values(hardware.link(plan.mesh, position), axis)
    return values


def link_of(values: Mapping[str, Quantity], axis: str) -> Link:
    """The link along a mesh axis, from the values of its symbols; the inverse of `link_values`."""
    return Link(**{field: values[f"{short}_{axis}"] for field, short in _LINK.items()})


# Field of a link -> first part of the names of its symbols.
_LINK = {
    "bandwidth_bytes_per_second": "bandwidth",
    "latency_seconds": "latency",
    "start_seconds": "start",
    "fill_seconds": "fill",
    "reduce_gain": "reduce_gain",
    "reduce_rounds": "reduce_rounds",
    "exchange_gain": "exchange_gain",
    "send_gain": "send_gain",
}


def factor_symbols(graph: Graph) -> dict[str, sympy.Symbol]:
    """A symbol for the size of every factor; the same factor in repeated layers has the same symbol.

    `layers.0.mlp.up.weight[0]` and `layers.1.mlp.up.weight[0]` are both `up_0` if they have the same size. If not, the
    second becomes `up_0_2`.
    """
    taken: dict[str, int] = {}
    found: dict[str, sympy.Symbol] = {}
    for name, factor in graph.factors.items():
        short, number = _short(name), 2
        base = short
        while taken.get(short, factor.size) != factor.size:
            short, number = f"{base}_{number}", number + 1
        taken[short] = factor.size
        found[name] = symbol(short)
    return found


def _short(name: str) -> str:
    """A short name of a factor for formulas: `layers.0.mlp.up.weight[0].1` -> `up_0_1`."""
    path, bracket, index = name.partition("[")
    parts = [p for p in path.split(".") if not p.isdigit() and p not in ("weight", "bias")]
    tail = index.replace("]", "").replace(".", "_")
    return "_".join(filter(None, [(parts or [path])[-1], tail])) if bracket else path.split("~")[0]


@dataclass(frozen=True)
class Expressions:
    """Everything that a step does and keeps under a plan, with formulas over symbols in place of numbers.

    Attributes:
        items: work of a step, such as matrix products and collectives, see `autopar.cost_model.items.WorkItem`.
        holdings: memory of a rank, such as parameters and saved activations, see `autopar.cost_model.items.MemoryItem`.
        boundary_bytes: size of the activations that one repeated layer passes to the next.
        layers: number of repeated layers in the whole model.
        machine: the hardware with a symbol for every figure.
        values: value of every symbol for the model and the hardware that the formulas were made with, by name.
        recomputes: whether `items` already contains the recomputed work, so that `Step` must not add it.
    """

    items: tuple[WorkItem, ...]
    holdings: tuple[MemoryItem, ...]
    boundary_bytes: Quantity
    layers: Quantity
    machine: Hardware
    values: Mapping[str, float]
    recomputes: bool = False

    @classmethod
    def of(
        cls,
        graph: Graph,
        plan: Plan,
        hardware: Hardware,
        *,
        factors: Mapping[str, sympy.Symbol] | None = None,
        training_state: TrainingState = FULL,
        fused: bool = False,
        regathers: bool = False,
        bucket_bytes: float | None = None,
        blocks: Mapping[str, Hashable] | None = None,
        again: Collection[str] = (),
        selected: Selected | None = None,
        slices: Collection[KeptSlice] = (),
    ) -> Expressions:
        """Prices every op and conversion of the graph, as formulas over symbols.

        `factors` maps the name of a factor to the symbol of its size, by default as `factor_symbols` does.
        Other arguments are those of `autopar.cost_model.pricer.Pricer`.
        """
        names = factor_symbols(graph) if factors is None else factors
        machine, values = machine_symbols(hardware)
        layers = layer_symbols(graph)
        taken = {*values, *map(str, names.values()), *map(str, layers.values())}
        axes = axis_symbols(plan.mesh.names, taken)
        pricer = Pricer(
            graph,
            plan,
            sizes=SymbolicSizes(plan.mesh, names, axes),
            hardware=machine,
            links=link_symbols(plan.mesh.names),
            layers=layers,
            training_state=training_state,
            fused=fused,
            regathers=regathers,
            bucket_bytes=bucket_bytes,
            chosen_bucket_bytes=symbol(BUCKET),
            blocks=blocks,
            again=again,
            selected=selected,
            slices=slices,
            meeting_link=link_symbols([plan.meeting.axis])[0] if plan.meeting else None,
        )
        values[BUCKET] = float(plan.bucket_bytes or usual_bucket_bytes(whole_bytes(graph), plan.mesh.sizes))
        values |= _values_of_links(plan, hardware)
        values |= dict(zip(map(str, axes), map(float, plan.mesh.sizes), strict=True))
        values |= {str(names[n]): float(f.size) for n, f in graph.factors.items() if n in names}
        values |= {str(layers[stack.path]): float(stack.layers) for stack in graph.stacks}
        return cls(
            merged_items(pricer.items()),
            merged_holdings(pricer.holdings()),
            pricer.boundary_bytes(),
            sum(layers.values()) or sympy.Integer(1),
            machine,
            values,
            recomputes=bool(again) or selected is not None,
        )

    def at(self, **values: Quantity) -> Expressions:
        """These expressions with numbers, or arrays of one shape, in place of symbols.

        Args:
            values: values of the symbols for which `self.values` does not hold.
        """
        given = {**self.values, **values}
        numbers = iter(self._formulas.at([given[str(s)] for s in self._symbols]))
        scalars = {name: given[name] for name in _SCALARS}
        peaks = tuple((size, given[str(flops)]) for size, flops in self.machine.peak_flops)
        return Expressions(
            *self._with(numbers),
            next(numbers),
            next(numbers),
            dataclasses.replace(self.machine, peak_flops=peaks, **scalars),
            given,
            self.recomputes,
        )

    def _with(self, rest: Iterator[Quantity]) -> tuple[tuple[WorkItem, ...], tuple[MemoryItem, ...]]:
        items = tuple(
            dataclasses.replace(
                item,
                count=next(rest),
                seconds=next(rest),
                traffic_bytes=next(rest),
                flops=next(rest),
                ranks=next(rest),
                hidden_seconds=next(rest),
            )
            for item in self.items
        )
        return items, tuple(dataclasses.replace(h, bytes=next(rest)) for h in self.holdings)

    @cached_property
    def _flat(self) -> list[sympy.Expr]:
        fields = [[i.count, i.seconds, i.traffic_bytes, i.flops, i.ranks, i.hidden_seconds] for i in self.items]
        return [sympy.sympify(x) for group in fields for x in group] + [
            *(sympy.sympify(h.bytes) for h in self.holdings),
            sympy.sympify(self.boundary_bytes),
            sympy.sympify(self.layers),
        ]

    @cached_property
    def _symbols(self) -> list[sympy.Symbol]:
        found = set().union(*(expression.free_symbols for expression in self._flat))
        return sorted(found, key=str)

    @cached_property
    def _formulas(self) -> Formulas:
        return Formulas.of(self._flat, self._symbols)


def layer_symbols(graph: Graph) -> dict[str, sympy.Symbol]:
    """The symbol for the number of layers in every list of repeated layers, by the path of the list."""
    single = len(graph.stacks) == 1
    return {
        stack.path: symbol("layers" if single else f"layers_{stack.path.replace('.', '_')}") for stack in graph.stacks
    }


def merged_items(items: Any) -> tuple[WorkItem, ...]:
    """Joins items that differ only in `count` and `of`, and adds up their counts."""
    counts: dict[WorkItem, Quantity] = {}
    for item in items:
        key = dataclasses.replace(item, count=0, of="")
        counts[key] = counts.get(key, 0) + item.count
    return tuple(dataclasses.replace(item, count=count) for item, count in counts.items())


def merged_holdings(holdings: Any) -> tuple[MemoryItem, ...]:
    """Joins holdings that differ only in `bytes` and `of`, and adds up their bytes."""
    sums: dict[MemoryItem, Quantity] = {}
    for holding in holdings:
        key = dataclasses.replace(holding, bytes=0, of="")
        sums[key] = sums.get(key, 0) + holding.bytes
    return tuple(dataclasses.replace(h, bytes=held) for h, held in sums.items())

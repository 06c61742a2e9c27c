"""What a plan costs and why: expressions, their values, and what would change them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import sympy
from rich.console import RenderableType

from autopar.cost_model.breakdown import Breakdown, Candidate, Event, Unit
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.compute import backward_passes, is_product
from autopar.cost_model.hardware import Hardware, Link
from autopar.cost_model.items import FULL, TrainingState
from autopar.cost_model.software import AUTOPAR, Software
from autopar.cost_model.step import ONE_BATCH, Run, Step, Term, total
from autopar.cost_model.symbols import (
    Expressions,
    factor_symbols,
    link_of,
    link_symbols,
    link_values,
    symbol,
)
from autopar.errors import AutoparError
from autopar.explanation.report import as_text, explain
from autopar.explanation.simulated import SimulatedStep
from autopar.explanation.timeline import timeline
from autopar.ir import Graph, Mesh, Plan
from autopar.ir.note import kind_of
from autopar.ir.recompute import recompute_json
from autopar.pipeline.composed import RecomputationPrice
from autopar.pipeline.simulation import Simulation
from autopar.search import search as search_plan
from autopar.search.pipeline import search_pipeline
from autopar.search.recipes import split_recipe
from autopar.search.request import Request
from autopar.units import format_bytes, format_seconds

# Words for what a person may change, and the symbols that each of them scales.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "link_bandwidth": ("bandwidth_",),
    "link_latency": ("latency_",),
    "flops": ("peak_flops_",),
    "memory_bandwidth": ("memory_bytes_per_second",),
    "host_speed": ("host_seconds",),
}


_TINY = 1e-30  # of the step in the complex plane; its square vanishes

STAGES: tuple[Literal["first", "last"], ...] = ("first", "last")


@dataclass(frozen=True)
class LargestFit:
    """The largest value of a size that fits into memory.

    Attributes:
        name: name of the symbol.
        value: the largest whole number that the axes which split it divide.
        limit: where the memory would be exactly full.
        expression: the limit, as a function of the other symbols, while what is largest at the limit
            (of peaks, of stages) stays so; None where that is not linear in the size.
    """

    name: str
    value: int
    limit: float
    expression: sympy.Expr | None


def run_of(plan: Plan, training_state: TrainingState = FULL) -> Run:
    """How a plan runs a step."""
    stages = plan.pipeline.ranks if plan.pipeline else 1
    chunks = plan.pipeline.chunks if plan.pipeline else 1
    return Run(
        plan.micro_batches, stages, chunks, recompute=plan.recompute, training_state=training_state
    )


@dataclass(frozen=True)
class Explanation:
    """The cost of one plan on one cluster.

    Step and memory of a plan with a pipeline are those of its simulation. Formulas, sensitivities and
    solutions are those of the closed form, in which all stages are alike (`closed_form`).

    Attributes:
        graph: the captured model, at the size of one micro-batch of all ranks.
        plan: its choices on the axes of the mesh.
        cluster: what it runs on; its ranks are those of the mesh times the stages.
        run: micro-batches, stages, recomputation.
        software: what the runtime adds or hides.
        memory_bound_bytes: memory that a rank may use; by default what the hardware has.
        tokens: number of tokens in a micro-batch; None where the model has no tokens.
        candidates: other ways that were considered.
        overrides: values of symbols that differ from the cluster's or the graph's.
        built: the expressions, where another explanation of the same plan has made them.
        request: the request that the plan answers; None where nobody passed it on.
    """

    graph: Graph
    plan: Plan
    cluster: Cluster
    run: Run = ONE_BATCH
    software: Software = AUTOPAR
    memory_bound_bytes: int | None = None
    tokens: int | None = None
    candidates: tuple[Candidate, ...] = ()
    overrides: Mapping[str, float] = field(default_factory=dict)
    built: Expressions | None = field(default=None, repr=False)
    request: Request | None = field(default=None, repr=False)

    @cached_property
    def expressions(self) -> Expressions:
        """Items and holdings over symbols."""
        blocks = RecomputationPrice.of(self.graph, self.plan)
        return self.built or Expressions.of(
            self.graph, self.plan, self.software.on(self.cluster.hardware),
            training_state=self.run.training_state, blocks=blocks.blocks, again=blocks.again,
            selected=blocks.selected,
        )  # fmt: skip

    @cached_property
    def values(self) -> Mapping[str, float]:
        """The value of every symbol."""
        link = boundary_link(self.cluster, self.plan.mesh, int(self.run.stages))
        return {
            **self.expressions.values,
            "micro_batches": float(self.run.micro_batches),
            "stages": float(self.run.stages),
            "chunks": float(self.run.chunks),
            **link_values(link, "pp"),
            **self.overrides,
        }

    @cached_property
    def simulated(self) -> SimulatedStep | None:
        """The step of a plan with a pipeline, run action by action; None for any other."""
        if self.plan.pipeline is None:
            return None
        return SimulatedStep(
            self.graph, self.plan, self.cluster.hardware, self.run.training_state, self.software
        )

    @property
    def simulation(self) -> Simulation | None:
        """What every pipeline rank does when; None without a pipeline."""
        return self.simulated.simulation if self.simulated else None

    @cached_property
    def closed_form(self) -> Explanation:
        """The same with the formulas of `autopar.cost_model.step` for time and memory."""
        if self.plan.pipeline is None:
            return self
        return replace(self, plan=replace(self.plan, pipeline=None), built=self.expressions)

    @cached_property
    def symbolic(self) -> Step:
        """The step as formulas."""
        run = replace(
            self.run, micro_batches=symbol("micro_batches"), stages=symbol("stages"),
            chunks=symbol("chunks"),
        )  # fmt: skip
        return _step(self.expressions, run, self.software, link_symbols(["pp"])[0])

    @cached_property
    def step(self) -> Step:
        """The step as numbers."""
        return self.at()

    def at(self, **values: Any) -> Step:
        """The step at other values of symbols; arrays price many configurations at once."""
        given = {**self.values, **values}
        run = replace(
            self.run, micro_batches=given["micro_batches"], stages=given["stages"],
            chunks=given["chunks"],
        )  # fmt: skip
        return _step(self.expressions.at(**given), run, self.software, link_of(given, "pp"))

    def __rich__(self) -> RenderableType:
        sentences = self.simulated.sentences if self.simulated else ()
        notes = (*self._choices, *sentences, self._prediction)
        return explain(replace(self.plan, notes=notes), self.graph)

    @property
    def _choices(self) -> tuple[str, ...]:
        """What the search says it chose, without prices of its own."""
        return tuple(n for n in self.plan.notes if kind_of(n) not in ("price", "stages"))

    @property
    def _prediction(self) -> str:
        return (
            f"predicted on {self.cluster}{' by simulation' if self.simulated else ''}: "
            f"{format_seconds(self.step_seconds)} a step, "
            f"{format_bytes(self.memory_bytes)} of {format_bytes(self.bound_bytes)} of a rank"
        )

    def __str__(self) -> str:
        return as_text(self)

    # --- costs as trees

    @cached_property
    def time(self) -> Breakdown:
        """Seconds of a step."""
        if self.simulated is not None:
            return self.simulated.time
        return self._tree("step", "seconds", lambda step: step.time())

    @cached_property
    def memory(self) -> Breakdown:
        """Peak bytes of a rank, of the stage of the pipeline that needs most."""
        if self.simulated is not None:
            return self.simulated.memory
        trees = [
            self._tree(f"memory of the {stage} stage", "bytes", lambda s, at=stage: s.memory(at))  # type: ignore[misc]
            for stage in STAGES
        ]
        best = max(trees, key=lambda tree: tree.value)
        return (
            best if int(self.run.stages) > 1 else dataclasses.replace(best, name="memory of a rank")
        )

    @cached_property
    def traffic(self) -> Breakdown:
        """Bytes that a rank sends in a step, by axis and collective."""
        tree = self._tree("traffic", "bytes", lambda step: step.traffic())
        if self.simulated is None or not self.simulated.traffic.value:
            return tree
        sent = self.simulated.traffic
        parts = sorted((*tree.parts, sent), key=lambda part: (-part.value, part.name))
        return replace(
            tree, value=tree.value + sent.value, parts=tuple(parts),
            expression=tree.expression + sent.expression,
        )  # fmt: skip

    def _tree(self, name: str, unit: Unit, terms: Callable[[Step], tuple[Term, ...]]) -> Breakdown:
        symbolic, numeric = terms(self.symbolic), terms(self.step)
        return _breakdown(
            Term(name, total(symbolic), symbolic), Term(name, total(numeric), numeric), unit
        )

    # --- figures

    @property
    def step_seconds(self) -> float:
        return self.simulated.seconds if self.simulated else float(total(self.step.time()))

    @property
    def memory_bytes(self) -> float:
        if self.simulated is not None:
            return self.simulated.memory_bytes
        return max(float(total(self.step.memory(stage))) for stage in STAGES)

    @property
    def bound_bytes(self) -> int:
        """The memory of a rank."""
        bound = self.memory_bound_bytes
        return int(self.cluster.hardware.memory_bytes) if bound is None else bound

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.bound_bytes

    @property
    def ranks(self) -> int:
        return self.plan.mesh.size * int(self.run.stages)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together."""
        if self.tokens is None:
            return None
        own = self.expressions.values
        grown = math.prod(self.values[name] / own[name] for name in ("batch", "seq") if name in own)
        return self.tokens * grown * self.values["micro_batches"] / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: of the peak in the model's own number format."""
        sizes = [t.itemsize_bytes for t in self.graph.tensors.values() if t.needs_grad]
        peak = self.step.hardware.flops_per_second(min(sizes, default=4))
        useful = sum(_whole_flops(self.graph)) * self.values["micro_batches"] * self._growth
        return useful / (self.step_seconds * float(peak) * self.ranks)

    @property
    def _growth(self) -> float:
        """FLOPs of a rank over those at the sizes of the graph."""
        if not self.overrides:
            return 1.0

        def flops(step: Step) -> float:
            return sum(float(item.count * item.flops) for item in step.items)

        own = self.expressions.values
        return flops(self.step) / flops(self.at(**{name: own[name] for name in own}))

    # --- questions

    def sensitivity(self) -> dict[str, float]:
        """Change of the step's time, as a fraction, per 1 % more of every symbol it depends on.

        From the derivative, 0.01 x / T dT/dx, by a step in the complex plane, which is exact to
        rounding (Squire and Trapp 1998). Axes and stages of one are left out. Largest first. Of the
        closed form where there is a pipeline.
        """
        if self.closed_form is not self:
            return self.closed_form.sensitivity()
        fixed = {axis for axis, size in self.plan.mesh.axes if size == 1}
        fixed |= {"stages", "chunks"} if self.run.stages == 1 else set()
        names = [name for name in self.values if name not in fixed]
        moved = {
            name: np.where(
                np.arange(len(names)) == i, self.values[name] * (1 + _TINY * 1j), self.values[name]
            )
            for i, name in enumerate(names)
        }
        slopes = np.imag(self.at(**moved).seconds()) / _TINY
        changes = {
            name: 0.01 * float(slope) / self.step_seconds
            for name, slope in zip(names, slopes, strict=True)
            if slope
        }
        return dict(sorted(changes.items(), key=lambda pair: (-abs(pair[1]), pair[0])))

    def solve_for(self, name: str) -> LargestFit:
        """The largest value of a size such as `batch` at which a rank's memory is just enough.

        Of the closed form where there is a pipeline. Raises AutoparError for a name that is no symbol of
        the memory, or if nothing fits.
        """
        if self.closed_form is not self:
            return self.closed_form.solve_for(name)
        x = symbol(name)
        expression = total(self.symbolic.memory("first" if "first" in self.memory.name else "last"))
        if x not in expression.free_symbols:
            known = ", ".join(sorted(map(str, expression.free_symbols)))
            raise AutoparError(f"The memory does not depend on {name!r}; it depends on {known}.")
        limit = self._largest(name)
        step = self._granule(name)
        value = int(limit // step) * step
        if value < 1:
            raise AutoparError(
                f"No {name} fits: the memory of a rank is full at {limit:.3g}, and the axes of the "
                f"mesh {self.plan.mesh} need a multiple of {step}."
            )
        at_limit = {symbol(n): v for n, v in self.values.items()} | {x: limit}
        branch = _active(expression, at_limit)
        return LargestFit(name, value, limit, _solved(branch, x, symbol("memory_bound_bytes")))

    def _largest(self, name: str) -> float:
        """Where memory meets the bound, by bisection: memory rises with every size."""

        def peak(value: float) -> float:
            step = self.at(**{name: value})
            return max(float(total(step.memory("first"))), float(total(step.memory("last"))))

        if peak(2 * self.values[name]) <= peak(self.values[name]):
            raise AutoparError(f"More {name} takes no more memory: any number fits, or none.")
        low, high = 0.0, 1.0
        while peak(high) <= self.bound_bytes and high < 1e15:
            low, high = high, high * 2
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if peak(middle) <= self.bound_bytes else (low, middle)
        return low

    def _granule(self, name: str) -> int:
        """What a size must be a multiple of, so that every axis which splits it divides it."""
        symbols = {factor: str(s) for factor, s in factor_symbols(self.graph).items()}
        axes = {
            axis
            for op in self.graph.ops
            for axis, label in enumerate(self.plan.ops[op.name])
            if symbols.get(op.choice(label).factor) == name
        }
        return math.prod(self.plan.mesh.sizes[axis] for axis in axes)

    def what_if(self, *, search: bool = False, **changes: float) -> Explanation:
        """The same plan, priced again; with `search` the plan that would then be chosen.

        Names of symbols take values in their own units (`batch=64`, `memory_bytes_per_second=4.8e12`);
        `hbm_bytes` is the memory of a rank; `link_bandwidth`, `link_latency`, `flops`,
        `memory_bandwidth` and `host_speed` take factors: 2 is twice as much. Raises AutoparError for
        any other name, and for values that are not positive. A search starts from another machine,
        not from other sizes: those need another capture. So does a pipeline, because its schedule is run
        with the figures of the graph; `closed_form.what_if` takes all names.
        """
        if search:
            return self._searched_again(changes)
        if self.simulated is not None:
            return self._on_changed(changes)
        overrides, bound = dict(self.overrides), self.memory_bound_bytes
        for name, value in changes.items():
            if not 0 < value < math.inf:
                raise AutoparError(f"what_if({name}={value}): give a positive number.")
            if name == "hbm_bytes":
                bound = int(value)
            elif name in GROUPS:
                overrides |= self._scaled(name, value)
            elif name in self.values:
                overrides[name] = float(value)
            else:
                known = ", ".join([*sorted(GROUPS), "hbm_bytes", *sorted(self.values)])
                raise AutoparError(f"Nothing here is called {name!r}; there are {known}.")
        return replace(self, overrides=overrides, memory_bound_bytes=bound, built=self.expressions)

    def _on_changed(self, changes: Mapping[str, float]) -> Explanation:
        """The same pipeline, run on the changed machine."""
        changed = self.closed_form.what_if(search=False, **changes)  # refuses what is no name
        others = sorted(changes.keys() - {*GROUPS, "hbm_bytes"})
        if others:
            raise AutoparError(
                f"A pipeline's schedule is simulated for the graph and the machine as they are, so that "
                f"what_if({others[0]}={changes[others[0]]}) has no answer: explain the model again with it, "
                f"or ask the closed form, closed_form.what_if({others[0]}={changes[others[0]]}). What can "
                f"be changed is {', '.join([*sorted(GROUPS), 'hbm_bytes'])}."
            )
        cluster = replace(self.cluster, hardware=changed_hardware(self.cluster.hardware, changes))
        return replace(
            self, cluster=cluster, memory_bound_bytes=changed.memory_bound_bytes, built=None
        )

    def _searched_again(self, changes: Mapping[str, float]) -> Explanation:
        """The best plan under the same recipe on the changed machine."""
        changed = self.closed_form.what_if(search=False, **changes)  # refuses what is no name
        sizes = sorted(changes.keys() - {*GROUPS, "hbm_bytes"})
        if sizes:
            raise AutoparError(
                f"A new search for another {sizes[0]} needs a new capture: explain the model again."
            )
        hardware = changed_hardware(self.cluster.hardware, changes)
        count = self.plan.micro_batches
        recipe = self.plan.recipe if self.plan.pipeline else split_recipe(self.plan.recipe)[1]
        request = Request(
            hardware, mesh=self.plan.world_mesh, recipe=recipe, micro_batches=count,
            memory_bytes=changed.bound_bytes, training_state=self.run.training_state,
            software=self.software,
        )  # fmt: skip
        if self.plan.pipeline is None:
            plan = search_plan(
                self.graph, self.plan.mesh, hardware=hardware, recipe=request.recipe,
                memory_bytes=request.bound_bytes, micro_batches=count,
                fingerprint=self.plan.fingerprint,
            )  # fmt: skip
        else:
            plan = search_pipeline(
                self.graph, request.but(recompute=self.plan.recompute),
                captured_micro_batches=count, fingerprint=self.plan.fingerprint,
            ).plan  # fmt: skip
        cluster = replace(self.cluster, hardware=hardware)
        run = replace(self.run, chunks=plan.pipeline.chunks) if plan.pipeline else self.run
        return replace(
            changed, plan=plan, cluster=cluster, run=run, overrides=self.overrides, built=None
        )

    def _scaled(self, group: str, factor: float) -> dict[str, float]:
        if group == "host_speed":
            factor = 1 / factor
        return {
            name: value * factor
            for name, value in self.values.items()
            if name.startswith(GROUPS[group])
        }

    def events(self) -> tuple[Event, ...]:
        """The predicted step as a timeline of compute and communication lanes."""
        return timeline(self.step)

    def to_json(self) -> dict[str, Any]:
        """Everything a page shows, with units in the keys."""
        return {
            "plan": self.plan.to_json(),
            "cluster": {"name": str(self.cluster), "ranks": self.cluster.ranks},
            "run": {
                "micro_batches": int(self.values["micro_batches"]),
                "stages": int(self.values["stages"]), "chunks": int(self.values["chunks"]),
                "recompute": recompute_json(self.run.recompute),
            },
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "memory_bound_bytes": self.bound_bytes,
            "fits": self.fits,
            "time": self.time.to_json(),
            "memory": self.memory.to_json(),
            "traffic": self.traffic.to_json(),
            "sensitivity_per_percent": self.sensitivity(),
            "symbols": dict(sorted(self.values.items())),
            "candidates": [dataclasses.asdict(each) for each in self.candidates],
            **self._pipeline_json(),
        }  # fmt: skip

    def _pipeline_json(self) -> dict[str, Any]:
        """The stages and the simulated schedule; nothing without a pipeline."""
        run = self.simulated
        if run is None:
            return {}
        closed = self.closed_form
        return {
            "pipeline": {
                "schedule": run.pipeline.schedule,
                "stages": [each._asdict() for each in run.stages],
                "slowest_stage": run.slowest_stage,
                "fullest_rank": run.fullest_rank,
                "busy_seconds": list(run.simulation.busy_seconds),
                "rank_bytes": list(run.simulation.peak_bytes),
                "schedule_seconds": run.simulation.step_seconds,
                "once_seconds": list(run.once_seconds),
                "bubble_fraction": run.simulation.bubble_fraction,
                "closed_form": {
                    "bubble_fraction": run.closed_bubble,
                    "step_seconds": closed.step_seconds,
                    "memory_bytes": closed.memory_bytes,
                },
            }
        }


def changed_hardware(hardware: Hardware, changes: Mapping[str, float]) -> Hardware:
    """The hardware with the factors of `GROUPS` and `hbm_bytes` applied."""
    factor = {group: changes.get(group, 1.0) for group in GROUPS}

    def link(old: Link) -> Link:
        return replace(
            old,
            bandwidth_bytes_per_second=old.bandwidth_bytes_per_second * factor["link_bandwidth"],
            latency_seconds=old.latency_seconds * factor["link_latency"],
        )

    return replace(
        hardware,
        peak_flops=tuple((size, flops * factor["flops"]) for size, flops in hardware.peak_flops),
        memory_bytes_per_second=hardware.memory_bytes_per_second * factor["memory_bandwidth"],
        host_seconds=hardware.host_seconds / factor["host_speed"],
        memory_bytes=int(changes.get("hbm_bytes", hardware.memory_bytes)),
        inside_node=link(hardware.inside_node),
        across_nodes=link(hardware.across_nodes),
    )


def boundary_link(cluster: Cluster, mesh: Mesh, stages: int) -> Link:
    """The link between neighbouring stages: stages are the slowest axis of the ranks."""
    return cluster.hardware.link(Mesh((("pp", max(2, stages)), ("inside", mesh.size))), 0)


def _step(expressions: Expressions, run: Run, software: Software, link: Link) -> Step:
    run = replace(run, recompute="none") if expressions.recomputes else run
    return Step(
        expressions.items, expressions.holdings, run, expressions.machine, software,
        layers=expressions.layers, boundary_bytes=expressions.boundary_bytes, boundary_link=link,
    )  # fmt: skip


def _breakdown(symbolic: Term, numeric: Term, unit: Unit) -> Breakdown:
    """A tree of terms with their values, parts of nothing left out, largest first."""
    parts = [_breakdown(s, n, unit) for s, n in zip(symbolic.parts, numeric.parts, strict=True)]
    kept = sorted((p for p in parts if p.value), key=lambda p: (-p.value, p.name))
    expression = sympy.sympify(symbolic.value)
    return Breakdown(
        symbolic.name, unit, expression, float(numeric.value), tuple(kept), symbolic.note
    )


def _whole_flops(graph: Graph) -> list[float]:
    """Forward and backward FLOPs of every product of matrices of the whole model."""
    return [
        graph.stands_for.get(op.name, 1)
        * op.flops
        * (1 + min(2, backward_passes(op, graph.tensors)))  # what attention makes anew is no use
        for op in graph.ops
        if is_product(op)
    ]


def _active(expression: sympy.Expr, numbers: Mapping[sympy.Symbol, float]) -> sympy.Expr:
    """The expression with every maximum and minimum replaced by what it is at these numbers."""

    def chosen(best: Callable[..., Any]) -> Callable[..., sympy.Expr]:
        return lambda *args: best(args, key=lambda arg: float(arg.xreplace(numbers)))

    return expression.replace(sympy.Max, chosen(max)).replace(sympy.Min, chosen(min))


def _solved(expression: sympy.Expr, x: sympy.Symbol, bound: sympy.Symbol) -> sympy.Expr | None:
    """The one solution of `expression = bound` in `x` where it is linear in it."""
    slope = sympy.expand(expression).coeff(x, 1)
    rest = sympy.expand(expression) - sympy.expand(slope * x)
    return None if rest.has(x) or slope.has(x) or slope == 0 else (bound - rest) / slope

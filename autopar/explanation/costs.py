"""Costs of a plan on a cluster: expressions over symbols, their values, trees of both, and figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

import sympy

from autopar.cost_model.arith import Quantity
from autopar.cost_model.breakdown import Breakdown, Candidate, Unit
from autopar.cost_model.buckets import hidden_by, messages
from autopar.cost_model.compute import backward_passes, is_product
from autopar.cost_model.flow import Flow
from autopar.cost_model.history import Spread, spread_of
from autopar.cost_model.items import FULL, TrainingState
from autopar.cost_model.machines.cluster import Cluster
from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.machines.origins import origins_of
from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.cost_model.owners import has_lone_ops
from autopar.cost_model.steps.owned_step import OwnedStep
from autopar.cost_model.steps.run import ONE_BATCH, Run, Term, total
from autopar.cost_model.steps.step import Step
from autopar.cost_model.symbols import BUCKET, Expressions, link_of, link_symbols, link_values, symbol
from autopar.explanation.simulated import SimulatedStep
from autopar.ir import TIERS, Graph, Mesh, Plan, Tier
from autopar.ir.batches import captured_batch, sizes_of_micro_batches
from autopar.ir.recompute import Selection
from autopar.pipeline.composed import Figures, RecomputationPrice, step_of
from autopar.pipeline.simulation import Simulation
from autopar.planning.remarks import op_seconds
from autopar.search.request.request import Request

STAGES: tuple[Literal["first", "last"], ...] = ("first", "last")
_DUST = 1e-12  # of a cost: parts that are only rounding errors


def run_of(plan: Plan, training_state: TrainingState = FULL) -> Run:
    """The micro-batches, stages, chunks and recomputation of a plan, as a `Run`."""
    stages = plan.pipeline.ranks if plan.pipeline else 1
    chunks = plan.pipeline.chunks if plan.pipeline else 1
    copies = plan.meeting.copies if plan.meeting else 0
    training_state = replace(training_state, meeting_copies=copies)
    return Run(
        plan.micro_batches,
        stages,
        chunks,
        recompute=plan.recompute,
        training_state=training_state,
        overlap_batches=plan.overlap_batches,
    )


@dataclass(frozen=True)
class PlanCost:
    """The cost of one plan on one cluster.

    Step and memory of a plan with a pipeline are those of its simulation (`simulated`), and those of a plan in which
    single ranks run ops are those of all ranks side by side (`owned`). Formulas are those of the closed form, in which
    all stages are alike and ranks work in turn (`closed_form`).

    Attributes:
        graph: the captured model, at the size of one micro-batch of all ranks, or of those of a replica.
        plan: its choices on the axes of the mesh.
        cluster: the machines; their ranks are the ranks of the mesh times the stages.
        run: micro-batches, stages and recomputation of a step.
        software: figures of the runtime: time that it adds, communication that it hides.
        memory_bound_bytes: memory that a rank may use; by default the memory of the hardware.
        tokens: number of tokens in a micro-batch of the graph; None where the model has no tokens.
        candidates: other ways that were considered.
        overrides: values of symbols that differ from the cluster's or the graph's.
        built: the expressions, where another explanation of the same plan has made them.
        request: the request that the plan answers; None where nobody passed it on.
        in_turn: whether ops of single ranks are priced as if one rank ran after the other, as the formulas do.
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
    in_turn: bool = False

    @cached_property
    def expressions(self) -> Expressions:
        """The work items and memory items of the plan, as expressions over symbols."""
        blocks = RecomputationPrice.of(self.graph, self.plan)
        return self.built or Expressions.of(
            self.graph,
            self.plan,
            self.software.on(self.cluster.hardware),
            training_state=self.run.training_state,
            blocks=blocks.blocks,
            again=blocks.again,
            selected=blocks.selected,
            slices=blocks.slices,
        )

    def but(self, **changes: Any) -> Self:
        """The same costs with other fields, which change no formula; formulas that are made already are kept."""
        return replace(self, built=self.__dict__.get("expressions", self.built), **changes)

    @cached_property
    def _messages(self) -> list[tuple[float, float]]:
        return messages(self.graph, self.plan, Flow(self.graph, self.plan), self.plan.world_mesh)

    def _step(self, expressions: Expressions, run: Run, link: Link, bucket_bytes: Quantity) -> Step:
        # The closed form of stages has no term for single ops, which their simulation prices.
        is_priced = expressions.recomputes or isinstance(run.recompute, Selection)
        run = replace(run, recompute="none") if is_priced else run
        return Step(
            expressions.items,
            expressions.holdings,
            run,
            expressions.machine,
            self.software,
            layers=expressions.layers,
            boundary_bytes=expressions.boundary_bytes,
            boundary_link=link,
            buckets_hide=hidden_by(self._messages, bucket_bytes),
        )

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
        return SimulatedStep(self.graph, self.plan, self.cluster.hardware, self.run.training_state, self.software)

    @cached_property
    def owned(self) -> OwnedStep | None:
        """The step of a plan in which single ranks run ops side by side; None for any other."""
        if self.in_turn or self.plan.pipeline is not None or not has_lone_ops(self.plan):
            return None
        step = step_of(self.graph, self.plan, **self._figures)
        assert isinstance(step, OwnedStep)
        return step

    @property
    def simulation(self) -> Simulation | None:
        """The actions of every pipeline rank with their times; None without a pipeline."""
        return self.simulated.simulation if self.simulated else None

    @cached_property
    def closed_form(self) -> Self:
        """This plan priced by the formulas of `autopar.cost_model.steps.step` for time and memory."""
        if self.owned is not None:
            return replace(self, in_turn=True, built=self.expressions)
        if self.plan.pipeline is None:
            return self
        return replace(self, plan=replace(self.plan, pipeline=None), built=self.expressions)

    @cached_property
    def symbolic(self) -> Step:
        """The step as formulas."""
        run = replace(self.run, micro_batches=symbol("micro_batches"), stages=symbol("stages"), chunks=symbol("chunks"))
        return self._step(self.expressions, run, link_symbols(["pp"])[0], symbol(BUCKET))

    @cached_property
    def step(self) -> Step:
        """The step as numbers."""
        return self.owned or self.at()

    @property
    def op_seconds(self) -> Mapping[str, float]:
        """Op name -> seconds of a step that it takes on the cluster, see `autopar.planning.remarks.op_seconds`."""
        return op_seconds(self.graph, self.plan, **self._figures)

    @property
    def _figures(self) -> Figures:
        state = self.run.training_state
        return {"hardware": self.cluster.hardware, "software": self.software, "training_state": state}

    def at(self, **values: Any) -> Step:
        """The step at other values of symbols; arrays price many configurations at once."""
        given = {**self.values, **values}
        run = replace(self.run, micro_batches=given["micro_batches"], stages=given["stages"], chunks=given["chunks"])
        return self._step(self.expressions.at(**given), run, link_of(given, "pp"), given[BUCKET])

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
        return best if int(self.run.stages) > 1 else dataclasses.replace(best, name="memory of a rank")

    @cached_property
    def traffic(self) -> Breakdown:
        """Bytes that a rank sends in a step, by axis and collective."""
        tree = self._tree("traffic", "bytes", lambda step: step.traffic())
        if self.simulated is None or not self.simulated.traffic.value:
            return tree
        sent = self.simulated.traffic
        parts = sorted((*tree.parts, sent), key=lambda part: (-part.value, part.name))
        return replace(
            tree, value=tree.value + sent.value, parts=tuple(parts), expression=tree.expression + sent.expression
        )

    def _tree(self, name: str, unit: Unit, terms: Callable[[Step], tuple[Term, ...]]) -> Breakdown:
        # what ranks do side by side has no formula
        symbolic, numeric = terms(self.owned or self.symbolic), terms(self.step)
        tree = _breakdown(Term(name, total(symbolic), symbolic), Term(name, total(numeric), numeric), unit)
        return replace(tree, parts=tuple(part for part in tree.parts if abs(part.value) > _DUST * abs(tree.value)))

    # --- figures

    @property
    def step_seconds(self) -> float:
        return self.simulated.seconds if self.simulated else float(total(self.step.time()))

    @property
    def memory_bytes(self) -> float:
        if self.simulated is not None:
            return self.simulated.memory_bytes
        return max(float(total(self.step.memory(stage))) for stage in STAGES)

    @cached_property
    def stored_bytes(self) -> Mapping[Tier, float]:
        """Bytes that the fullest rank keeps in each tier other than the device; tiers without any are left out."""
        if self.simulated is not None:
            found = {tier: self.simulated.stored_bytes(tier) for tier in TIERS[1:]}
        else:
            found = {tier: max(float(total(self.step.stored(tier, stage))) for stage in STAGES) for tier in TIERS[1:]}
        return {tier: size for tier, size in found.items() if size}

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
        return self.plan.mesh.ranks * int(self.run.stages) * self._replicas

    @property
    def spread(self) -> Spread | None:
        """How far steps of this kind were from their prices, in published runs; None where none was measured."""
        is_routed = any("expert" in factor.roles for factor in self.graph.factors.values())
        return spread_of(self.cluster.hardware.name, self.ranks, is_routed=is_routed)

    @property
    def origins(self) -> Mapping[str, str]:
        """Figure of the machine -> "measured", "published" or "scaled"; see `autopar.cost_model.machines.origins`."""
        return origins_of(self.software.on(self.cluster.hardware))

    @property
    def place(self) -> str:
        """The cluster by name, or the part of its only node that the ranks fill, such as `cpu-gloox2x1`."""
        nodes = self.cluster.nodes
        return f"{self.cluster.hardware.name}x{self.ranks}x1" if nodes == 1 else str(self.cluster)

    @property
    def _replicas(self) -> int:
        """Number of replicas, each of which runs the graph; 1 where all ranks run one model in step."""
        return self.plan.meeting.replicas if self.plan.meeting else 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The samples of every micro-batch; the graph is that of the first, and the last may have one less."""
        count, largest = self.plan.micro_batches, captured_batch(self.graph)
        asked = None if self.request is None else self.request.batch
        found = sizes_of_micro_batches(asked or largest * count, count)
        return found if found[0] == largest else (largest,) * count

    @property
    def _filled(self) -> float:
        """Samples of a step as a fraction of what it is priced for, micro-batches as large as the largest."""
        return sum(self.sizes) / (len(self.sizes) * self.sizes[0])

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all ranks together; None where the model has no tokens."""
        if self.tokens is None:
            return None
        own = self.expressions.values
        grown = math.prod(self.values[name] / own[name] for name in ("batch", "seq") if name in own)
        tokens = self.tokens * self._replicas * self._filled
        return tokens * grown * self.values["micro_batches"] / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: of the peak in the model's own number format."""
        sizes = [t.itemsize_bytes for t in self.graph.tensors.values() if t.needs_grad]
        peak = _mean_peak(self.step.hardware, min(sizes, default=4))
        useful = sum(_whole_flops(self.graph)) * self.values["micro_batches"] * self._growth
        useful *= self._replicas * self._filled
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


def _mean_peak(hardware: Hardware, itemsize_bytes: int) -> float:
    """Peak FLOP/s of a rank; the mean over all ranks where these are of several kinds."""
    counts = [(each, each.devices_per_node * nodes) for each, nodes in hardware.kinds] or [(hardware, 1)]
    whole = sum(ranks * float(each.flops_per_second(itemsize_bytes)) for each, ranks in counts)
    return whole / sum(ranks for _, ranks in counts)


def boundary_link(cluster: Cluster, mesh: Mesh, stages: int) -> Link:
    """The link between neighbouring stages: stages are the slowest axis of the ranks."""
    return cluster.hardware.link(Mesh((("pp", max(2, stages)), ("inside", mesh.size))), 0)


def _breakdown(symbolic: Term, numeric: Term, unit: Unit) -> Breakdown:
    """A tree of terms with their values, parts of nothing left out, largest first."""
    parts = [_breakdown(s, n, unit) for s, n in zip(symbolic.parts, numeric.parts, strict=True)]
    kept = sorted((p for p in parts if p.value), key=lambda p: (-p.value, p.name))
    expression = sympy.sympify(symbolic.value)
    return Breakdown(symbolic.name, unit, expression, float(numeric.value), tuple(kept), numeric.note)


def _whole_flops(graph: Graph) -> list[float]:
    """Forward and backward FLOPs of every product of matrices of the whole model."""
    return [
        graph.layer_count.get(op.name, 1)
        * op.flops
        * (1 + min(2, backward_passes(op, graph.tensors)))  # what attention makes anew is no use
        for op in graph.ops
        if is_product(op)
    ]

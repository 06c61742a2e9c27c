"""Estimates of all settings (mesh, pipeline stages, micro-batches, recipes, recomputation) of a model at once.

The layouts of a plan hardly depend on the sizes of the axes. One plan per recipe is therefore searched on a mesh of
(2, 2). Its cost is a formula in the sizes of the axes, which is evaluated for all meshes, numbers of stages and
micro-batches together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from autopar.cost_model.arith import Quantity, smaller
from autopar.cost_model.buckets import hidden_part, likely_bucket_bytes, whole_bytes
from autopar.cost_model.items import TOUCHED, TrainingState
from autopar.cost_model.machines.cluster import Cluster
from autopar.cost_model.machines.kinds import stage_machines, together
from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.cost_model.pricer import Pricer
from autopar.cost_model.sizes import SymbolicSizes
from autopar.cost_model.steps.causes import where_time_goes
from autopar.cost_model.steps.run import Run, Stage, total
from autopar.cost_model.steps.step import Step
from autopar.errors import AutoparError, SearchError
from autopar.ir import Graph, Layout, Mesh, Plan, Tensor, reaches_all, stretch_of, with_pipeline
from autopar.ir.batches import captured_batch
from autopar.ir.recompute import Recompute
from autopar.pipeline.parts import is_whole
from autopar.search.candidates.refined import Grouping, grouping_of
from autopar.search.candidates.settings import DATA, INNER_DATA, INSIDE, TENSOR, ClusterSetting, PricedCandidate
from autopar.search.exact.search import MeshSearch
from autopar.search.request.recipe_rows import is_seq
from autopar.search.stages.pipeline_settings import divisors

# Recipes along the outer one of two axes of data parallelism.
OUTSIDE = (DATA[0], DATA[-1])
# The recipes of dp and of tp, and of an inner axis of dp ("" for none): what a plan depends on.
_Kind = tuple[str, str, str]
_Word = Literal["none", "full", ""]  # of a recomputation; "" for a number of layers


@dataclass(frozen=True)
class SettingEstimator:
    """Estimates the step time and the memory of settings, without a search of their plans.

    Attributes:
        graph: the captured model, with any batch size.
        cluster: the cluster for which settings are priced.
        batch: number of samples of a step on all ranks.
        training_state, software: see `autopar.cost_model`.
        stages: numbers of pipeline stages to try.
        tensor_sizes: sizes of the axis tp to try; None for all that divide the number of ranks.
        recomputes: kinds of recomputation to try.
        pins: single choices that every plan must make.
        own_batch: whether a step without stages must have micro-batches of the graph's batch size.
        asked_count: number of micro-batches that was asked for; others are tried, too, where it divides the batch.
        shares_sequences: whether ranks may share sequences along an axis cp where nothing else is legal.
        depth: the only number of stages of its settings; None for all of `stages`.
    """

    graph: Graph
    cluster: Cluster
    batch: int
    training_state: TrainingState
    software: Software = AUTOPAR
    stages: tuple[int, ...] = (1,)
    tensor_sizes: tuple[int, ...] | None = None
    recomputes: tuple[Recompute, ...] = ("none", "full")
    pins: Mapping[str, str] = field(default_factory=dict)
    own_batch: bool = False
    asked_count: int | None = None
    shares_sequences: bool = False
    depth: int | None = None
    _plans: dict[str, Plan | None] = field(default_factory=dict, compare=False)

    @property
    def is_empty(self) -> bool:
        """Whether no setting is legal."""
        return not any(settings for _, _, settings in self._groups())

    def price(self) -> list[PricedCandidate]:
        """Every legal setting with its price, fastest first. Raises AutoparError if there is none.

        Those with an axis cp are left out, unless there are no others and the request leaves room for that axis.
        """
        found = [each for space in self._spaces for group in space._groups() for each in space._priced(*group)]
        if not found and self.shares_sequences:
            shared = itertools.product(self.over_sequences(), self.recomputes)
            found = self.price_of(replace(each, recompute=again) for each, again in shared)
        if not found:
            raise AutoparError(self._nothing())
        return sorted(found, key=lambda each: (each.seconds, each.setting.name))

    def price_of(self, settings: Iterable[ClusterSetting]) -> list[PricedCandidate]:
        """The prices of the legal ones among these settings, in the same order."""
        wanted = list(settings)
        priced = (each for space in self._spaces for each in space._price_of(filter(space._has, wanted)))
        found = {each.setting: each for each in priced}
        return [found[each] for each in wanted if each in found]

    def _price_of(self, settings: Iterable[ClusterSetting]) -> Iterator[PricedCandidate]:
        groups: dict[tuple[_Kind, _Word], list[ClusterSetting]] = {}
        for each in settings:
            word = each.recompute if isinstance(each.recompute, str) else ""
            groups.setdefault((_kind(each), word), []).append(each)
        for (kind, word), group in groups.items():
            plan, legal = self._legal(kind, group)
            if plan is not None:
                yield from self._priced(plan, word or _numbers_of_blocks(legal), legal)

    @cached_property
    def _spaces(self) -> tuple[SettingEstimator, ...]:
        """The space itself; of a cluster of several kinds, a space for every number of stages.

        Equal stages on what the machines of the stages reach together are as fast as the best stages may be.
        """
        ranks = self.cluster.ranks
        if not self.cluster.hardware.kinds:
            return (self,)
        return tuple(self._of_depth(each) for each in self.stages if ranks % each == 0)

    def _of_depth(self, stages: int) -> SettingEstimator:
        """The settings with so many stages, on one kind of machine that is as fast as theirs together."""
        ranks = self.cluster.ranks
        world = with_pipeline(Mesh((("dp", ranks // stages),)), stages, 0)
        machine = replace(together(stage_machines(self.cluster.hardware, world)), kinds=(), between=None)
        cluster = Cluster(machine, ranks // machine.devices_per_node)
        return replace(self, cluster=cluster, stages=(stages,), depth=stages)

    def _has(self, setting: ClusterSetting) -> bool:
        return self.depth in (None, setting.stages)

    def with_fewest_blocks(
        self, priced: Iterable[PricedCandidate], bound_bytes: float, host_bytes: float = 0.0
    ) -> list[PricedCandidate]:
        """The settings that do not fit without recomputation, with the fewest recomputed layers per stage that fit.

        A setting is left out if it does not fit even with all layers but one recomputed. What does not fit may lie in
        `host_bytes` of the host, as far as it is movable.
        """
        known = list(priced)
        return [
            each
            for space in self._spaces
            for each in space._with_fewest_blocks((p for p in known if space._has(p.setting)), bound_bytes, host_bytes)
        ]

    def _with_fewest_blocks(
        self, priced: Iterable[PricedCandidate], bound_bytes: float, host_bytes: float
    ) -> list[PricedCandidate]:
        groups: dict[_Kind, dict[ClusterSetting, float]] = {}
        for each in priced:
            s, room_bytes = each.setting, bound_bytes + min(host_bytes, each.movable_bytes)
            if s.recompute == "none" and each.memory_bytes > room_bytes:
                groups.setdefault(_kind(s), {})[s] = room_bytes
        found = []
        for kind, rooms in groups.items():
            plan, settings = self._legal(kind, [*rooms])
            assert plan is not None and len(settings) == len(rooms), "they were priced"
            fewest = self._fewest_blocks(plan, settings, np.array([*rooms.values()]))
            again = [
                replace(s, recompute=int(k))
                for s, k in zip(settings, fewest, strict=True)
                if k < self._step_layers / s.stages
            ]
            found += self._priced(plan, _numbers_of_blocks(again), again)
        return found

    @property
    def _step_layers(self) -> int:
        return sum(stack.layers for stack in self.graph.stacks) or 1

    def _fewest_blocks(self, plan: Plan, settings: list[ClusterSetting], bound_bytes: np.ndarray) -> np.ndarray:
        """For every setting the fewest recomputed layers with which both ends of the pipeline fit.

        Each recomputed layer but the last frees the same memory.
        """
        step = self._step(plan, _Columns.of(settings))
        none, one = (_recomputing(step, np.full(len(settings), k)) for k in (0.0, 1.0))
        fewest = np.ones(len(settings))
        ends: tuple[Stage, ...] = ("first", "last")
        for stage in ends:
            whole, less = (total(each.memory(stage)) for each in (none, one))
            wanted = np.ceil((whole - bound_bytes) / np.maximum(whole - less, 1.0))
            fewest = np.maximum(fewest, wanted)
        return fewest

    def over_sequences(self) -> Iterator[ClusterSetting]:
        """All ways to write the ranks as dp x cp x tp x stages where a micro-batch of a rank of dp is one sample."""
        for stages, tp, dp in itertools.product(self.stages, self._tensor_sizes(), divisors(self.batch)):
            cp, rest = divmod(self.cluster.ranks, stages * tp * dp)
            if rest or cp == 1 or not any(length % cp == 0 for length in self._lengths):
                continue
            if self._keeps_batch(stages) and dp != captured_batch(self.graph):
                continue
            for data, tensor in itertools.product(DATA, TENSOR):
                if not self._is_repeated(data, tensor, dp, tp):
                    yield ClusterSetting(dp, tp, stages, 1, self.batch // dp, data, tensor, cp=cp)

    def over_two_data_axes(self, depths: Iterable[int] = (1,), inside: str = INSIDE) -> Iterator[ClusterSetting]:
        """All ways to cut data parallelism in two, in so many stages, with each of `OUTSIDE` along the outer axis.

        The inner axis has the recipe `inside`; if that splits experts, it may have all ranks.
        """
        for stages, tp in itertools.product(depths, self._tensor_sizes()):
            dp, rest = divmod(self.cluster.ranks, stages * tp)
            if rest:
                continue
            parts, cuts = list(self._micro_batches(dp, stages)), divisors(dp)[1:]
            for cut, (each, count), data in itertools.product(cuts, parts, OUTSIDE):
                if cut < dp or (inside != INSIDE and data == OUTSIDE[0]):
                    yield ClusterSetting(dp, tp, stages, each, count, data, TENSOR[-1], cut=cut, inside=inside)

    def on(self, cluster: Cluster) -> SettingEstimator:
        """The same space on another cluster, with the plans that were searched for this one."""
        return replace(self, cluster=cluster)

    def plan(self, data: str, tensor: str, inside: str = "") -> Plan | None:
        """The plan under the recipes for dp and for tp, and for an axis between them if data parallelism is cut.

        It is for a mesh with two ranks along each axis. None if the pins contradict the recipes.
        """
        key = f"dp:{data}," + f"{INNER_DATA}:{inside}," * bool(inside) + f"tp:{tensor}"
        if key not in self._plans:
            searched = self._searched_cut if inside else self._searched
            try:
                self._plans[key] = searched.under(key).fastest_plan()
            except SearchError:
                self._plans[key] = None
        return self._plans[key]

    @cached_property
    def _searched(self) -> MeshSearch:
        """The search on a mesh of 2 x 2, whose folded graph and prices all recipes share."""
        return self._searched_on("dp", "tp")

    @cached_property
    def _searched_cut(self) -> MeshSearch:
        """The same on a mesh of 2 x 2 x 2, with two axes of data parallelism."""
        return self._searched_on("dp", INNER_DATA, "tp")

    def _searched_on(self, *axes: str) -> MeshSearch:
        return MeshSearch.of(self.graph, dict.fromkeys(axes, 2), hardware=self.cluster.hardware, pins=self.pins)

    def _groups(self) -> Iterator[tuple[Plan, Recompute, list[ClusterSetting]]]:
        for data, tensor in itertools.product(DATA, TENSOR):
            for recompute in self.recomputes:
                settings = list(self._settings(data, tensor, recompute))
                plan, legal = self._legal((data, tensor, ""), settings)
                if plan is not None:
                    yield plan, recompute, legal

    def _legal(self, kind: _Kind, settings: list[ClusterSetting]) -> tuple[Plan | None, list[ClusterSetting]]:
        """The plan by which settings of one kind are priced, and those of them that it allows.

        Where the recipe for tp splits nothing of the model, these are the settings without that axis.
        """
        data, _, inside = kind
        plan = self.plan(*kind) if settings else None
        if plan is None:
            settings = [each for each in settings if each.tp == 1]
            plan = self.plan(data, "auto", inside) if settings else None
        splits = frozenset() if plan is None else self._splits(plan)
        return plan, [each for each in settings if self._divides(splits, each)]

    def _settings(self, data: str, tensor: str, recompute: Recompute) -> Iterator[ClusterSetting]:
        """All ways to write the ranks as dp x tp x stages and the batch as micro-batches."""
        for stages, tp in itertools.product(self.stages, self._tensor_sizes()):
            if self.cluster.ranks % (stages * tp):
                continue
            dp = self.cluster.ranks // (stages * tp)
            inner = self._grouping.inner_ranks(tp) if self._grouping else 1
            if self._is_repeated(data, tensor, dp, tp):
                continue
            for micro_batch, count in self._micro_batches(dp, stages):
                yield ClusterSetting(dp, tp, stages, micro_batch, count, data, tensor, recompute, inner)

    def _micro_batches(self, dp: int, stages: int) -> Iterator[tuple[int, int]]:
        """The rows that the busiest rank has of the largest micro-batch, and their number; each rank has some.

        Without those in which it has as many rows at a time as in others, or more, and in all more than in these.
        """
        counts = [self.batch // rows for rows in divisors(self.batch)]
        if self.asked_count is not None and self.batch % self.asked_count:
            counts = [self.asked_count]
        found = [
            (-(-rows // dp), count)
            for count in counts
            if (rows := -(-self.batch // count)) >= dp
            and (not self._keeps_batch(stages) or rows == captured_batch(self.graph))
        ]
        least = math.inf
        for rows, count in found:
            if rows * count <= least:
                yield rows, count
            least = min(least, rows * count)

    def _keeps_batch(self, stages: int) -> bool:
        """Whether micro-batches must have the captured size: no dim is the batch, or the batch must not be cut."""
        return not self._batch_factors or (self.own_batch and stages == 1)

    @cached_property
    def _grouping(self) -> Grouping | None:
        return grouping_of(self.graph)

    @cached_property
    def _batch_factors(self) -> frozenset[str]:
        return self.graph.batch

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        """Lengths of the model's sequences."""
        return tuple(f.size for f in self.graph.factors.values() if is_seq(f.roles))

    @staticmethod
    def _is_repeated(data: str, tensor: str, dp: int, tp: int) -> bool:
        """Whether the setting repeats another one: on an axis of one rank all recipes are the same."""
        return (dp == 1 and data != DATA[0]) or (tp == 1 and tensor != TENSOR[0])

    def _tensor_sizes(self) -> Sequence[int]:
        return self.tensor_sizes or divisors(self.cluster.ranks)

    def _layers(self) -> int:
        return min((stack.layers for stack in self.graph.stacks), default=1)

    def _splits(self, plan: Plan) -> frozenset[tuple[str, str, int]]:
        """The factors that a plan splits: (axis, "batch", 0) for the batch, and for any other (axis, "", size), or
        (axis, "equal", size) where its parts must have one size.
        """
        found = set()
        for op in self.graph.ops:
            for axis, label in zip(plan.mesh.names, plan.ops[op.name], strict=True):
                choice = op.choice(label)
                if choice.splits and choice.factor in self._batch_factors:
                    found.add((axis, "batch", 0))
                elif choice.splits:
                    found.add((axis, "equal" if choice.needs_equal else "", choice.size))
        return frozenset(found)

    def _divides(self, splits: frozenset[tuple[str, str, int]], setting: ClusterSetting) -> bool:
        """Whether a setting's axes can split every factor that a plan splits along them.

        If tensor parallelism has two axes, the outer one alone splits the heads of keys and values. The estimate
        divides them by both, so that it is optimistic.
        """
        sizes, rows = {"dp": setting.dp, "tp": setting.tp}, setting.micro_batch * setting.dp
        sizes[INNER_DATA] = setting.cut
        heads = self._grouping.heads if setting.inner > 1 and self._grouping else 0
        return all(
            ((rows if kind == "batch" else size) % sizes[axis] == 0 if kind else reaches_all(size, sizes[axis]))
            or (axis == "tp" and size == heads)
            for axis, kind, size in splits
        )

    def _priced(
        self, plan: Plan, recompute: Recompute | np.ndarray, settings: list[ClusterSetting]
    ) -> list[PricedCandidate]:
        if not settings:
            return []
        at = _Columns.of(settings)
        figures = self._figures(_recomputing(self._step(plan, at), recompute), at)
        found = (
            PricedCandidate(setting, float(s), float(m), float(t), parts, float(moves))
            for setting, s, m, t, moves, parts in zip(settings, *figures, strict=True)
        )
        return [each if self.graph.stacks else _of_equal_stages(each) for each in found]

    def _figures(self, step: Step, at: _Columns) -> Iterator[Sequence[Any]]:
        """The seconds, the peak, the bytes sent and movable to the host, and seconds by cause, of the settings.

        The host may store the state of training, and without stages activations, if all layers were captured. Each rank
        along cp may store a part of that state, as the recipe there is open; the peak is the least that this leaves.
        """
        count = len(at.dp)
        ends = (sum(step.held(kind, stage) for kind in TOUCHED) for stage in ("first", "last"))
        state = np.maximum(*ends)
        peak = np.maximum(total(step.memory("first")), total(step.memory("last")))
        peak = peak - (1 - 1 / at.cp) * state
        keeps = (at.stages == 1) & is_whole(self.graph)
        movable = np.where(keeps, math.inf, state)
        parts = {name: np.broadcast_to(v, count) for name, v in where_time_goes(step).items()}
        sent = total(step.traffic()) + step.boundary_traffic()
        for figure in (step.seconds(), peak, sent, movable):
            yield list(np.broadcast_to(figure, count))
        yield [{n: float(v[i]) for n, v in parts.items() if v[i]} for i in range(count)]

    def _step(self, plan: Plan, at: _Columns) -> Step:
        """The step of all settings at once, without recomputation: figures are arrays with an element for each."""
        hardware, ranks = self.cluster.hardware, at.dp * at.tp * at.stages
        axes = [(at.cut * at.tp, at.dp // at.cut), (at.tp, at.cut), (1 + 0 * at.tp, at.tp)]
        if INNER_DATA not in plan.mesh.names:
            del axes[1]
        links = tuple(hardware.axis_link(stride, size, ranks) for stride, size in axes)
        sizes = _ManySizes(
            plan.mesh, dict.fromkeys(self._batch_factors, 1.0 * at.batch), tuple(1.0 * size for _, size in axes)
        )
        pricer = partial(
            Pricer, self.graph, plan, sizes=sizes, hardware=hardware, links=links, training_state=self.training_state
        )
        usual = pricer()
        named = [(size, link) for (_, size), link in zip(axes, links, strict=True)]
        total_bytes = whole_bytes(self.graph)
        bucket_bytes = likely_bucket_bytes(total_bytes, named)
        hides = smaller(hardware.hides, hidden_part(total_bytes / at.stages / bucket_bytes))
        # Without lists of layers the formulas cannot tell layers from the ends: see `_of_equal_stages`.
        stages = 1.0 * at.stages if self.graph.stacks else 1.0
        several = np.maximum(2, at.stages)
        return Step(
            tuple(pricer(bucket_bytes=bucket_bytes).items()),
            tuple(usual.holdings()),
            Run(1.0 * at.micro_batches, stages, training_state=self.training_state),
            replace(hardware, hides=hides),
            self.software,
            layers=self._step_layers,
            boundary_bytes=usual.boundary_bytes(),
            boundary_link=hardware.axis_link(at.dp * at.tp, several, several * at.dp * at.tp),
        )

    def _nothing(self) -> str:
        layers, depths = self._layers(), " or ".join(map(str, self.stages))
        stages = f", and {depths} pipeline stages its {layers} layers" if self.stages != (1,) else ""
        return (
            f"There is no way to divide {self.batch} sequences among {self.cluster.ranks} ranks: along some axis each "
            f"rank must have one, and another must divide the model's heads or widths{stages}. Choose a batch of at "
            f"least {self.cluster.ranks}, or fewer ranks."
        )


def _of_equal_stages(each: PricedCandidate) -> PricedCandidate:
    """The price of a pipeline without a bubble, given the price of the whole model on the mesh of one stage."""
    share = 1 / each.setting.stages
    return replace(
        each,
        seconds=share * each.seconds,
        memory_bytes=share * each.memory_bytes,
        parts={name: share * seconds for name, seconds in each.parts.items()},
    )


@dataclass(frozen=True)
class _Columns:
    """Settings as arrays of whole numbers.

    Attributes:
        dp: numbers of ranks of dp and cp together. A part of a sequence is priced as a part of a sample.
        tp, stages, micro_batches, cp: numbers of ranks and micro-batches, as in `ClusterSetting`.
        batch: numbers of samples of a micro-batch on all ranks of dp.
        cut: numbers of these ranks along the inner one of two axes.
    """

    dp: np.ndarray
    tp: np.ndarray
    stages: np.ndarray
    micro_batches: np.ndarray
    batch: np.ndarray
    cp: np.ndarray
    cut: np.ndarray

    @classmethod
    def of(cls, settings: Sequence[ClusterSetting]) -> _Columns:
        rows = [(s.dp * s.cp, s.tp, s.stages, s.micro_batches, s.micro_batch * s.dp, s.cp, s.cut) for s in settings]
        return cls(*np.array(rows, dtype=np.int64).T)


def _recomputing(step: Step, recompute: Recompute | np.ndarray) -> Step:
    """The step with recomputation, on which its work does not depend."""
    return replace(step, run=replace(step.run, recompute=recompute), _sums={})


def _kind(setting: ClusterSetting) -> _Kind:
    return setting.data, setting.tensor, setting.inside if setting.cut > 1 else ""


def _numbers_of_blocks(settings: Sequence[ClusterSetting]) -> np.ndarray:
    """For every setting the number of recomputed layers, where all have one."""
    return np.array([each.recompute for each in settings], dtype=float)


class _ManySizes(SymbolicSizes):
    """Local sizes for many settings at once: arrays in place of the symbols of `SymbolicSizes`.

    Batches have as many rows as if all ranks had those of the busiest.
    """

    def busiest(self, size: int, count: int) -> Quantity:
        return 1

    def count(self, tensor: Tensor, layout: Layout) -> Quantity:
        return self.bytes(tensor, layout) / tensor.itemsize_bytes

    def _local_bytes(self, tensor: Tensor, layout: Layout) -> Quantity:
        leaves = (
            self._factors.get(name, size)
            for names, sizes in zip(tensor.factors, tensor.dims, strict=True)
            for name, size in zip(names, sizes, strict=True)
        )
        parts = (self._axes[axis] for axis, state in enumerate(layout) if state.kind == "S")
        return stretch_of(layout) * math.prod(leaves, start=1.0 * tensor.itemsize_bytes) / math.prod(parts, start=1)

"""Every way to lay a model on a cluster, priced at once: the outer search, over what a plan takes for given.

A plan's layouts hardly depend on how long the axes are, so one plan per recipe is searched on a
mesh of (2, 2) and its cost, an expression of the axes' sizes, is evaluated for all meshes, pipeline
depths and micro-batches together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_model.breakdown import Candidate
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.items import Precision
from autopar.cost_model.software import AUTOPAR, Software
from autopar.cost_model.step import Recompute, Run, Step, total
from autopar.cost_model.symbols import factor_symbols, link_values
from autopar.errors import AutoparError
from autopar.explanation import Explanation, boundary_link
from autopar.ir import Graph, Mesh, Plan
from autopar.search import search

DATA = ("ddp", "zero1", "zero2", "zero3")
TENSOR = ("tp", "tp+sp")


@dataclass(frozen=True)
class Setting:
    """One configuration.

    Attributes:
        dp, tp: sizes of the axes of the mesh.
        stages: of the pipeline.
        micro_batch: sequences of a micro-batch on one rank of dp.
        micro_batches: of a step.
        data, tensor: recipes along dp and tp.
        recompute: see `Run`.
    """

    dp: int
    tp: int
    stages: int
    micro_batch: int
    micro_batches: int
    data: str
    tensor: str
    recompute: Recompute = "none"

    @property
    def name(self) -> str:
        """Axes, recipes and schedule in a few words."""
        axes = [f"dp={self.dp} {self.data}"] if self.dp > 1 else []
        axes += [f"tp={self.tp} {self.tensor}"] if self.tp > 1 else []
        axes += [f"pp={self.stages}"] if self.stages > 1 else []
        again = ", recompute" if self.recompute == "full" else ""
        return f"{' x '.join(axes) or 'one rank'}, {self.micro_batches} x {self.micro_batch}{again}"

    @property
    def recipe(self) -> str:
        return f"dp:{self.data},tp:{self.tensor}"

    @property
    def mesh(self) -> Mesh:
        return Mesh((("dp", self.dp), ("tp", self.tp)))


@dataclass(frozen=True)
class Priced:
    """A setting with its price."""

    setting: Setting
    seconds: float
    memory_bytes: float
    traffic_bytes: float
    binds: str

    def candidate(self, bound_bytes: float) -> Candidate:
        """As a row of a comparison."""
        return Candidate(
            self.setting.name, self.seconds, self.memory_bytes, self.traffic_bytes, self.binds,
            self.memory_bytes <= bound_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes:
        graph: the captured model, at any batch.
        cluster: where.
        batch: sequences of a step on all ranks.
        precision, software: see `autopar.cost_model`.
        stages: pipeline depths to try.
        tensor_sizes: sizes of tp to try; None for all that divide the ranks.
        recomputes: whether layers may be run again.
    """

    graph: Graph
    cluster: Cluster
    batch: int
    precision: Precision
    software: Software = AUTOPAR
    stages: tuple[int, ...] = (1,)
    tensor_sizes: tuple[int, ...] | None = None
    recomputes: tuple[Recompute, ...] = ("none", "full")

    def price(self) -> list[Priced]:
        """Every legal setting with its price, fastest first. Raises AutoparError if there is none."""
        found: list[Priced] = []
        for data, tensor in itertools.product(DATA, TENSOR):
            plan = self._plan(data, tensor)
            for recompute in self.recomputes:
                legal = [s for s in self._settings(data, tensor, recompute) if self._divides(plan, s)]
                found += self._priced(plan, recompute, legal)
        if not found:
            raise AutoparError(self._nothing())
        return sorted(found, key=lambda each: (each.seconds, each.setting.name))

    def explanation(self, plan: Plan, recompute: Recompute = "none") -> Explanation:
        """The expressions of a plan on this cluster."""
        run = Run(recompute=recompute, precision=self.precision)
        return Explanation(self.graph, plan, self.cluster, run, self.software)

    def _plan(self, data: str, tensor: str) -> Plan:
        return search(
            self.graph, {"dp": 2, "tp": 2}, hardware=self.cluster.hardware,
            recipe=f"dp:{data},tp:{tensor}", memory_bytes=10**18,
        )  # fmt: skip

    def _settings(self, data: str, tensor: str, recompute: Recompute) -> Iterator[Setting]:
        """All ways to write the ranks as dp x tp x stages and the batch as micro-batches."""
        for stages, tp in itertools.product(self.stages, self._tensor_sizes()):
            if self.cluster.ranks % (stages * tp) or self._layers() % stages:
                continue
            dp = self.cluster.ranks // (stages * tp)
            if self.batch % dp or self._is_repeated(data, tensor, dp, tp):
                continue
            for micro_batch in _divisors(self.batch // dp):
                yield Setting(
                    dp, tp, stages, micro_batch, self.batch // dp // micro_batch, data, tensor,
                    recompute,
                )  # fmt: skip

    @staticmethod
    def _is_repeated(data: str, tensor: str, dp: int, tp: int) -> bool:
        """Whether a recipe is on an axis of one rank, where all recipes are the same."""
        return (dp == 1 and data != DATA[0]) or (tp == 1 and tensor != TENSOR[0])

    def _tensor_sizes(self) -> Sequence[int]:
        return self.tensor_sizes or _divisors(self.cluster.ranks)

    def _layers(self) -> int:
        return min((stack.layers for stack in self.graph.stacks), default=1)

    def _divides(self, plan: Plan, setting: Setting) -> bool:
        """Whether the axes divide every factor that the plan splits along them."""
        sizes = {"dp": setting.dp, "tp": setting.tp}
        for op in self.graph.ops:
            for axis, label in zip(plan.mesh.names, plan.ops[op.name], strict=True):
                choice = op.choice(label)
                size = self._size(choice.factor, choice.size, setting)
                if choice.splits and size % sizes[axis]:
                    return False
        return True

    def _size(self, factor: str, size: int, setting: Setting) -> int:
        return setting.micro_batch * setting.dp if factor == "batch" else size

    def _priced(self, plan: Plan, recompute: Recompute, settings: list[Setting]) -> list[Priced]:
        if not settings:
            return []
        columns = [self._values(each) for each in settings]
        values = {name: np.array([c[name] for c in columns], dtype=float) for name in columns[0]}
        step = self.explanation(plan, recompute).at(**values)
        return [
            Priced(setting, float(s), float(m), float(t), b)
            for setting, s, m, t, b in zip(settings, *_figures(step, len(settings)), strict=True)
        ]

    def _values(self, setting: Setting) -> dict[str, float]:
        hardware = self.cluster.hardware
        mesh = Mesh((("pp", setting.stages), ("dp", setting.dp), ("tp", setting.tp)))
        values: dict[str, float] = {
            "dp": setting.dp, "tp": setting.tp, "stages": setting.stages, "chunks": 1,
            "batch": setting.micro_batch * setting.dp, "micro_batches": setting.micro_batches,
            **link_values(boundary_link(self.cluster, setting.mesh, setting.stages), "pp"),
        }  # fmt: skip
        for position, name in enumerate(mesh.names[1:], start=1):
            values |= link_values(hardware.link(mesh, position), name)
        return values

    def _nothing(self) -> str:
        return (
            f"No way to lay {self.batch} sequences on {self.cluster.ranks} ranks: some split of the "
            "ranks must divide the batch and the model's heads or widths. Choose a batch that is a "
            f"multiple of {self.cluster.ranks}, or fewer ranks."
        )


def best_that_fits(priced: Sequence[Priced], bound_bytes: float) -> Priced | None:
    """The fastest setting within the memory of a rank; `priced` is sorted by time."""
    return next((each for each in priced if each.memory_bytes <= bound_bytes), None)


def smallest(priced: Sequence[Priced]) -> Priced:
    """The setting that takes least memory."""
    return min(priced, key=lambda each: (each.memory_bytes, each.seconds))


def compared(
    priced: Sequence[Priced], chosen: Priced | None, bound_bytes: float, count: int = 12
) -> tuple[Candidate, ...]:
    """The chosen setting, the next best, and why they lose; the best of every mesh and recipe."""
    kept: dict[tuple[object, ...], Priced] = {}
    for each in sorted(priced, key=lambda p: (p.memory_bytes > bound_bytes, p.seconds)):
        s = each.setting
        kept.setdefault((s.dp, s.tp, s.stages, s.data, s.tensor, s.recompute), each)
    listed = list(kept.values())[:count]
    return tuple(
        replace(
            each.candidate(bound_bytes), chosen=each is chosen,
            why_not=_why_not(each, chosen, bound_bytes),
        )
        for each in listed
    )  # fmt: skip


def _why_not(each: Priced, chosen: Priced | None, bound_bytes: float) -> str:
    if each is chosen:
        return ""
    if each.memory_bytes > bound_bytes:
        return f"{(each.memory_bytes - bound_bytes) / 1e9:.1f} GB too much"
    if chosen is None:
        return ""
    slower = each.seconds / chosen.seconds - 1
    return f"{100 * slower:.1f} % slower, most of it {each.binds}" if slower > 0 else "as fast"


def _figures(step: Step, count: int) -> tuple[Sequence[float], ...]:
    """Seconds, peak bytes, bytes sent, and what binds, of every configuration."""
    terms = [(t.name, np.broadcast_to(t.value, count)) for t in step.time()]
    peak = np.maximum(total(step.memory("first")), total(step.memory("last")))
    sent = np.broadcast_to(total(step.traffic()), count)
    table = np.stack([values for _, values in terms])
    names = [terms[i][0] for i in np.argmax(table, axis=0)]
    return table.sum(axis=0), np.broadcast_to(peak, count), sent, names  # type: ignore[return-value]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def sizes_of(graph: Graph) -> Mapping[str, int]:
    """The sizes of a model by the names of their symbols."""
    return {str(s): graph.factors[name].size for name, s in factor_symbols(graph).items()}

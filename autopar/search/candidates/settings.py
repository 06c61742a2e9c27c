"""Settings of the outer search: sizes and recipes of the axes, micro-batches, recomputation; and their estimates."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopar.cost_model.breakdown import Candidate
from autopar.ir import PIPELINE_AXIS, Mesh, with_pipeline
from autopar.ir.plan import recipe_in_use
from autopar.ir.recompute import Recompute, words_of_recompute
from autopar.units import counted

DATA = ("ddp", "zero1", "zero2", "zero3")
TENSOR = ("tp", "tp+sp")
INNER = "tq"  # name of the inner one of two axes in place of tp
INNER_DATA = "dp_inner"  # and in place of dp
INSIDE = "zero3"  # recipe of this one: neighbours share out what they store
EXPERT_AXIS = "ep"  # name of an inner axis whose neighbours share out the experts of a mixture
OF_EXPERTS = "ep+zero3"  # recipe of this one


@dataclass(frozen=True)
class ClusterSetting:
    """One way to run a model on a cluster.

    Attributes:
        dp, tp: numbers of ranks of data and of tensor parallelism.
        stages: number of pipeline stages.
        micro_batch: number of samples of a micro-batch on one rank of dp.
        micro_batches: number of micro-batches of a step.
        data, tensor: recipes along dp and tp.
        recompute: recomputed layers of each stage, see `autopar.ir.recompute`.
        inner: size of the inner one of two axes that tensor parallelism has in place of one
            (`autopar.search.candidates.refined`); 1 where it has one.
        cp: number of ranks that share the sequences of one rank of dp (`autopar.search.candidates.proposals`).
        cut: size of the inner one of two axes that data parallelism has in place of one; 1 where it has one. The outer
            one has the recipe `data`.
        inside: recipe of the inner one: parameters are in shards along it, or experts are split.
    """

    dp: int
    tp: int
    stages: int
    micro_batch: int
    micro_batches: int
    data: str
    tensor: str
    recompute: Recompute = "none"
    inner: int = 1
    cp: int = 1
    cut: int = 1
    inside: str = INSIDE

    @property
    def name(self) -> str:
        """Text such as `dp=2,tp=4 dp:zero1,tp:tp, 8 micro-batches`, see `words_of`."""
        kept = (words_of_recompute(self.recompute, self.stages),)
        return words_of(self.world_mesh, self.recipe, self.schedule, self.micro_batches, kept)

    @property
    def schedule(self) -> str:
        """The schedule that the estimate assumes: 1F1B, or GPipe with fewer micro-batches than stages; "" without
        stages.

        The two take the same time, and with so few micro-batches also the same memory.
        """
        if self.stages == 1:
            return ""
        return "1f1b" if self.micro_batches >= self.stages else "gpipe"

    @property
    def recipe(self) -> str:
        tensor = ",".join(f"{name}:{self.tensor}" for name, _ in self._tensor_axes)
        context = "cp:auto," if self.cp > 1 else ""
        inside = f"{self.inner_data}:{self.inside}," if self.cut > 1 else ""
        return f"dp:{self.data},{inside}{context}{tensor}"

    @property
    def inner_data(self) -> str:
        """Name of the inner one of two axes of data parallelism."""
        return EXPERT_AXIS if self.inside == OF_EXPERTS else INNER_DATA

    @property
    def outer(self) -> int:
        """Number of ranks along the axis dp of the mesh."""
        return self.dp // self.cut

    @property
    def mesh(self) -> Mesh:
        """The mesh of one stage."""
        return _mesh(self._axes, 1)

    @property
    def _axes(self) -> tuple[tuple[str, int], ...]:
        """Name and size of every axis of a stage."""
        inside = ((self.inner_data, self.cut),) if self.cut > 1 else ()
        context = (("cp", self.cp),) if self.cp > 1 else ()
        return ("dp", self.outer), *inside, *context, *self._tensor_axes

    @property
    def _tensor_axes(self) -> tuple[tuple[str, int], ...]:
        """Name and size of every axis of tensor parallelism."""
        if self.inner == 1:
            return (("tp", self.tp),)
        return ("tp", self.tp // self.inner), (INNER, self.inner)

    @property
    def world_mesh(self) -> Mesh:
        """The mesh of all ranks, with the axis `pp` if there are several stages."""
        return _mesh(self._axes, self.stages)


def words_of(mesh: Mesh, recipe: str, schedule: str, micro_batches: int, kept: Iterable[str] = ()) -> str:
    """A plan in a few words, in which `--mesh` and `--recipe` take its axes and its recipe.

    >>> words_of(Mesh.of({"pp": 2, "dp": 4}), "pp:1f1b,dp:zero1", "1f1b", 8)
    'pp=2,dp=4 zero1, 1f1b, 8 micro-batches'

    Args:
        mesh: mesh of all ranks.
        recipe: the recipe.
        schedule: the schedule of pipeline stages; "" without stages.
        micro_batches: number of micro-batches of a step.
        kept: clauses on what is recomputed and saved; empty ones are left out.
    """
    parts = [part for part in recipe_in_use(recipe, mesh).split(",") if not part.startswith(f"{PIPELINE_AXIS}:")]
    said = parts[0].rpartition(":")[2] if len(parts) == 1 else ",".join(parts)
    words = (f"{mesh.used or 'one rank'} {said}", schedule, counted(micro_batches, "micro-batch"), *kept)
    return ", ".join(each for each in words if each)


@functools.lru_cache(maxsize=10_000)
def _mesh(axes: tuple[tuple[str, int], ...], stages: int) -> Mesh:
    """The mesh of these axes and stages; a thousand settings have a few meshes, and each is asked for its own often."""
    return Mesh(axes) if stages == 1 else with_pipeline(Mesh(axes), stages, 0)


@dataclass(frozen=True)
class PricedCandidate:
    """A setting with its estimated price.

    Attributes:
        setting: the priced setting.
        seconds: duration of a step.
        memory_bytes: peak memory of a rank.
        traffic_bytes: bytes that one rank sends in a step.
        parts: seconds by cause: "compute", "memory bandwidth", "along tp", "bubble", "host" and so on. Their sum is
            `seconds`; communication that overlaps with compute is subtracted by a negative part.
        movable_bytes: the most of the peak that the host could store in place of the device.
    """

    setting: ClusterSetting
    seconds: float
    memory_bytes: float
    traffic_bytes: float
    parts: Mapping[str, float] = field(default_factory=dict)
    movable_bytes: float = math.inf

    @property
    def binds(self) -> str:
        """The cause that takes the most seconds."""
        return max(self.parts, key=lambda name: self.parts[name], default="")

    def candidate(self, bound_bytes: float) -> Candidate:
        """The setting as a row of a comparison."""
        return Candidate(
            self.setting.name,
            self.seconds,
            self.memory_bytes,
            self.traffic_bytes,
            self.binds,
            self.memory_bytes <= bound_bytes,
        )

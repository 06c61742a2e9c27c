"""How a plan is cut into pipeline stages, as data.

A pipeline of p ranks and v chunks has p * v stages: contiguous parts of the captured graph, in its order.
All stages run on meshes with the same axes, and the layouts of a plan are layouts on the mesh of one stage. The mesh
of all ranks has one more axis, `pp`, along which the stages lie.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.mesh import PIPELINE_AXIS, Mesh

# Schedule -> placement of its stages on the p ranks: "one" stage per rank, in "rounds" (rank r has the stages r,
# r + p, ...), or as a "v" (rank r has the stages r and 2p - 1 - r). All but the last two are torch's, too.
SCHEDULES = {
    "gpipe": "one",
    "1f1b": "one",
    "interleaved": "rounds",
    "looped-bfs": "rounds",
    "zb": "rounds",
    "zbv": "v",
    "dualpipev": "v",
    "v-half": "v",
    "v-min": "v",
}
# Schedules that run the two halves of a backward as separate actions.
SPLIT = ("zb", "zbv", "dualpipev", "v-half", "v-min")
# Schedules that update parameters without waiting until the pipeline is empty, with one stage per rank: see
# `autopar.pipeline.weight_stashing`. Their gradients differ from those of one device, so the search never chooses one;
# a user must name it.
VERSIONED = ("pipedream", "pipedream-sync", "2bw")
PLACEMENTS = SCHEDULES | dict.fromkeys(VERSIONED, "one")


@dataclass(frozen=True)
class Pipeline:
    """The stages of a plan and the order in which they run micro-batches.

    Attributes:
        ranks: size of the pipeline axis.
        schedule: one of `SCHEDULES` or `VERSIONED`.
        cuts: name of the first op of every stage but the first, in the graph's order.
        position: index of the pipeline axis among the placed axes of the mesh of all ranks (`pipeline_position`).
    """

    ranks: int
    schedule: str
    cuts: tuple[str, ...]
    position: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in PLACEMENTS:
            raise PlanError(f"There is no schedule {self.schedule!r}; there are {', '.join(PLACEMENTS)}.")
        if self.stages % self.ranks:
            raise PlanError(
                f"{len(self.cuts)} cuts make {self.stages} stages, but {self.ranks} pipeline ranks "
                f"take a multiple of {self.ranks}."
            )
        if self.schedule in VERSIONED and self.ranks == 1:
            raise PlanError(
                f"The schedule {self.schedule} needs at least 2 pipeline ranks, but the plan has 1: a single stage "
                "waits for nobody. Take the schedule 1f1b."
            )
        shape = PLACEMENTS[self.schedule]
        if (shape == "one" and self.chunks != 1) or (shape == "v" and self.chunks != 2):
            wanted = self.ranks if shape == "one" else 2 * self.ranks
            raise PlanError(
                f"The schedule {self.schedule} takes {wanted} stages on {self.ranks} pipeline ranks, but the plan has "
                f"{self.stages}."
            )

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def chunks(self) -> int:
        """Number of stages that each pipeline rank has."""
        return self.stages // self.ranks

    @property
    def update_every(self) -> int:
        """Number of micro-batches between two updates inside of a step; 0 for the usual single update at its end."""
        if self.schedule not in VERSIONED:
            return 0
        return self.stages if self.schedule == "2bw" else 1

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that runs a stage."""
        if PLACEMENTS[self.schedule] == "v":
            return min(stage, self.stages - 1 - stage)
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in the graph's order."""
        return tuple(s for s in range(self.stages) if self.rank_of(s) == rank)


def pipeline_position(mesh: Mesh) -> int:
    """The index of the pipeline axis among the placed axes of the mesh of all ranks.

    Nothing is split along it, so that its place in the order of the axes means nothing.
    """
    return mesh.placed.index(PIPELINE_AXIS)


def without_pipeline(mesh: Mesh) -> Mesh:
    """The mesh of one stage: the mesh of all ranks without its pipeline axis.

    Where no other axis is left, the result has one axis of size 1, because every mesh needs an axis.
    """
    return mesh.without_axis(PIPELINE_AXIS) or Mesh((("dp", 1),))


def with_pipeline(mesh: Mesh, ranks: int, position: int) -> Mesh:
    """The mesh of all ranks, given the mesh of one stage and the `position` of the new axis `pp` in it."""
    return mesh.with_axis(PIPELINE_AXIS, ranks, position)

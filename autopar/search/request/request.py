"""A request: everything that a user asks of a plan, as one value.

    compile, explain, verify, torch.compile's backend, the command line
        -> Request                                  built from the arguments of each of them, and checked
        -> make_plan(prepared, request)             `autopar.planning.planning`
        -> search_plan, search_pipeline, search     called by `make_plan`

The search decides a field that is None. A request with a contradiction raises an error at once, before a model is
captured, so that users do not wait for a search that cannot succeed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost_model.machines.cluster import Cluster
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.machines.kinds import ranks_of_kinds
from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.errors import AutoparError, MeshError, RecipeError
from autopar.ir import PIPELINE_AXIS, VERSIONED, Meeting, Plan, mesh_of_replica, without_pipeline
from autopar.ir.features import Feature, check_features
from autopar.pipeline.composed import Figures
from autopar.search.request.options import PlanOptions, check_counts
from autopar.search.request.recipe_rows import ON_DEVICE, STORED_ON_HOST, USED_FROM_HOST, Tiering
from autopar.search.request.recipes import check_recipe_axes, check_versions, format_recipe, meeting_of, resolve
from autopar.search.request.single_rank_ops import is_lone_pin

Progress = Callable[[str], None]  # is called with a line of text when a part of the search begins


def silent(message: str) -> None:
    """A progress that shows nothing."""


@dataclass(frozen=True)
class Request(PlanOptions):
    """The options of a plan, with the machine and the batch; the search decides fields that are None.

    Attributes:
        hardware: the machine that the plan is priced for.
        ranks: number of ranks; with a mesh, its size.
        batch: number of samples of a step, over all ranks.
        must_fit: whether a plan must stay within the bound on memory; with False the search ignores memory.
        software: figures of the runtime, such as what it overlaps (`autopar.cost_model.machines.software`).
        streams: whether parameters that the host stores may also stay there during a step, and be copied to the device
            for each use; the search sets it.
        cuts_batch: whether the search may cut the batch of a step without stages into micro-batches, where their number
            is open. `autopar.planning.planning` sees to it that they then give the results of the batch.
        meeting: the meetings of replicas, in a request for the plan of one replica (`of_replica`); else None.
        splits_backward: whether the runtime runs a backward in two halves; if not, zero-bubble schedules are not
            searched, which then gain nothing.
        refines: whether the plan may have two axes in place of one of the mesh (`autopar.search.candidates.refined`),
            and another order of its axes (`autopar.search.refine.orders`). A searched mesh may have both in any case.

    >>> from autopar.cost_model import find_hardware
    >>> asked = Request(find_hardware("h100"), mesh={"dp": 2, "tp": 4}, recipe="dp:zero3")
    >>> asked.ranks, asked.bound_bytes
    (8, 80685400000)

    Raises AutoparError or one of its subclasses if two fields contradict each other, or if a field names something that
    does not exist.
    """

    hardware: Hardware
    ranks: int | None = None
    batch: int | None = None
    must_fit: bool = True
    software: Software = AUTOPAR
    streams: bool = False
    cuts_batch: bool = False
    meeting: Meeting | None = None
    splits_backward: bool = True
    refines: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks is None and self.mesh is not None:
            object.__setattr__(self, "ranks", self.mesh.ranks)
        check_counts({"ranks": self.ranks, "batch": self.batch})
        count = self.micro_batches
        if self.batch is not None and count is not None and self.batch < count:
            raise AutoparError(
                f"Of a batch of {self.batch} sequences {count} micro-batches cannot each have one: ask for at most "
                f"micro_batches={self.batch}."
            )
        self._check_mesh()
        self._check_kinds()
        check_features("You ask for", self.features, RecipeError)
        self._check_versions()

    @classmethod
    def on(cls, cluster: Cluster, **fields: Any) -> Request:
        """A request for all ranks of a cluster."""
        return cls(cluster.hardware, ranks=cluster.ranks, **fields)

    def but(self, **changes: Any) -> Request:
        """A copy of the request with some fields changed, checked again; a new mesh also changes the ranks."""
        if changes.get("mesh") is not None:
            changes.setdefault("ranks", None)
        return replace(self, **changes)

    def of_micro_batches(self, count: int | None) -> Request:
        """The request for a step of this many micro-batches, of which as many run at a time as the number allows."""
        return self.but(micro_batches=count, overlap_batches=math.gcd(self.overlap_batches, count or 1))

    def of_replica(self, given: Plan | None = None) -> Request:
        """The request for the plan of one replica, if the recipe or a given plan has replicas; else the request itself.

        It has the mesh of one replica, its part of the batch, and the copies of parameters that it keeps between
        meetings. Raises RecipeError if other fields rule replicas out.
        """
        meeting = meeting_of(self.recipe, self.mesh) if given is None else given.meeting
        if meeting is None:
            return self
        assert self.mesh is not None, "replicas lie along an axis of a mesh"
        self._check_replicas(meeting)
        return self.but(
            mesh=mesh_of_replica(self.mesh, meeting.axis),
            recipe=self.inside,
            meeting=meeting,
            batch=None if self.batch is None else self.batch // meeting.replicas,
            training_state=replace(self.training_state, meeting_copies=meeting.copies),
        )

    # --- what follows from it

    @property
    def figures(self) -> Figures:
        """The machine, runtime and training state by which a plan is priced: `composed(graph, plan, **figures)`."""
        return {"hardware": self.hardware, "software": self.software, "training_state": self.training_state}

    @property
    def bound_bytes(self) -> int:
        """Bytes that a rank may take: `memory_bytes`, or the hardware's memory less the headroom."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return int(self.hardware.memory_bytes * (1 - self.headroom))

    @property
    def search_bound_bytes(self) -> int | None:
        """The bound on the memory of a rank for the search; None if the plan need not fit."""
        return self.bound_bytes if self.must_fit else None

    @property
    def may_offload(self) -> bool:
        """Whether the search itself may decide to store parameters in the host's memory."""
        is_open = self.offload is None and "offload" not in self.without and not self.has_owners
        stays = self.meeting is not None or self.has_versions  # neither can be on the host yet
        host = None if stays else self.hardware.host
        return is_open and self.must_fit and host is not None and host.memory_bytes > 0

    @property
    def tiers(self) -> tuple[Tiering, ...]:
        """The tiers in which parameters may be stored and used, if no recipe names tiers."""
        found = (ON_DEVICE, STORED_ON_HOST, USED_FROM_HOST)
        return found if self.streams else found[:2] if self.offload else found[:1]

    @property
    def cluster(self) -> Cluster:
        """The nodes that hold the ranks."""
        assert self.ranks is not None, "a number of ranks is known where a cluster is spoken of"
        ranks = self.ranks * (self.meeting.replicas if self.meeting else 1)
        return Cluster(self.hardware, -(-ranks // self.hardware.devices_per_node))

    @property
    def leaves_axes_open(self) -> bool:
        """Whether the mesh is searched, and nothing that a user asks for names its axes or rules one out."""
        says = self.recipe != "auto" or self.pins or self.without - {"offload", "recompute"}
        asks = self.inside_node or self.decompose or self.schedule or self.chunks
        return self.must_fit and self.mesh is None and not says and not asks

    @property
    def may_have_dims(self) -> bool:
        """Whether nothing that a user asks for rules out tensor parallelism in two or three dims on a searched mesh."""
        return self.leaves_axes_open and 1 in (self.depths or (1,))

    @property
    def is_priced_again(self) -> bool:
        """Whether found plans get owners, or overlap, that their search did not price, so that they may get faster."""
        overlaps = bool(self.decompose) or self.overlap_batches > 1
        return overlaps or self.has_owners or self.has_lone_ops

    # --- checks

    def _check_mesh(self) -> None:
        mesh = self.mesh
        if mesh is None:
            return
        if self.ranks != mesh.ranks:
            raise MeshError(
                f"The mesh {mesh} has {mesh.ranks} ranks, but {self.cluster} has {self.ranks}: name axes whose sizes "
                f"multiply to {self.ranks}, or a cluster of {mesh.ranks}."
            )
        depth = dict(mesh.axes).get(PIPELINE_AXIS, 1)
        if self.stages is not None and depth not in self.stages:
            words = ", ".join(map(str, self.stages))
            has = f"{depth} pipeline ranks" if depth > 1 else f"no axis {PIPELINE_AXIS}"
            raise MeshError(
                f"The mesh {mesh} has {has}, but stages asks for {words}: give the mesh {PIPELINE_AXIS}="
                f"{self.stages[-1]}, or leave stages out."
            )
        meeting = meeting_of(self.recipe, mesh)
        inside = mesh if meeting is None else mesh_of_replica(mesh, meeting.axis)
        if self.has_stages:
            resolve(self.inside, without_pipeline(inside))
            return
        if meeting is not None:
            check_recipe_axes(self.recipe, mesh)
        resolve(self.inside if meeting else self.recipe, inside)
        fields = {"schedule": self.schedule, "chunks": self.chunks}
        asked = [f"{name}={value!r}" for name, value in fields.items() if value is not None]
        if asked:
            raise MeshError(
                f"{' and '.join(asked)} can only be used with pipeline stages, but the mesh {mesh} has no axis "
                f"{PIPELINE_AXIS!r}: add one, such as {PIPELINE_AXIS}=2, or leave out {' and '.join(fields)}."
            )

    def _check_kinds(self) -> None:
        """Raises MeshError where the machine is several kinds, and their ranks are not those of the request."""
        of_kinds = ranks_of_kinds(self.hardware)
        ranks = (self.ranks or 0) * (self.meeting.replicas if self.meeting else 1)
        if of_kinds and ranks != of_kinds[-1].stop:
            raise MeshError(
                f"{self.hardware.name} has {of_kinds[-1].stop} ranks of {len(of_kinds)} kinds, and {ranks} are asked "
                f"for: name all of them, or a cluster of {ranks}."
            )

    def _check_versions(self) -> None:
        """Raises RecipeError if a schedule with versions of parameters lacks a needed field, or has a forbidden one."""
        schedule = self.chosen_schedule
        if schedule not in VERSIONED or schedule is None:
            return
        if self.mesh is None or self.micro_batches is None:
            raise RecipeError(
                f"The schedule {schedule} updates after every few micro-batches, so the results of training depend on "
                "the number of micro-batches and of stages: give both, such as mesh={'pp': 4}, micro_batches=16."
            )
        if self.has_stages:
            check_versions(schedule, self.inside, without_pipeline(self.mesh))

    def _check_replicas(self, meeting: Meeting) -> None:
        """Raises RecipeError or AutoparError for fields that replicas do not support."""
        if self.batch is not None and self.batch % meeting.replicas:
            raise AutoparError(
                f"{meeting.replicas} replicas along {meeting.axis} do not divide a batch of {self.batch} sequences."
            )
        for name, choice in self.pins.items():
            if f"@{meeting.axis}" in choice:
                raise RecipeError(
                    f"{name} is pinned to {choice}, but {meeting.axis} is the axis of the replicas, whose values "
                    "differ between synchronisations: none of them can hold a part for another. Pin it along another "
                    "axis."
                )

    @property
    def features(self) -> dict[Feature, str]:
        """Requested features that may exclude each other -> words that name each in an error."""
        pins = [f"{name!r}: {text!r}" for name, text in self.pins.items() if is_lone_pin(text)]
        lone = f"the pin {{{pins[0]}}}," if pins else f"the recipe {format_recipe(self.recipe)!r},"
        depths = self.depths or (1,)
        has_replicas = self.mesh is not None and meeting_of(self.recipe, self.mesh) is not None
        found = {
            Feature.REPLICAS: has_replicas and f"replicas ({format_recipe(self.recipe)})",
            Feature.STAGES: 1 not in depths and f"{' or '.join(map(str, depths))} pipeline ranks",
            Feature.VERSIONS: self.has_versions and f"the schedule {self.chosen_schedule}",
            Feature.LONE_OPS: self.has_lone_ops and f"{lone} which leaves ops to one rank,",
            Feature.OFF_DEVICE: (self.offload or "offload" in self.named_recipes()) and "storage on the host",
            Feature.RECOMPUTED: self.recompute not in (None, "none") and f"recompute={self.recompute!r}",
            Feature.DECOMPOSED: self.decompose and f"decompose={','.join(self.decompose)!r}",
            Feature.OVERLAP: self.overlap_batches > 1 and f"overlap_batches={self.overlap_batches}",
            Feature.PRECISION: self.precision and f"precision={str(self.precision)!r}",
            Feature.OPEN_MESH: self.mesh is None and "a mesh that the search chooses",
        }
        return {feature: str(words) for feature, words in found.items() if words}

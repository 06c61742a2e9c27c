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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.items import TrainingState
from autopar.errors import AutoparError, MeshError, PlanError, RecipeError, did_you_mean
from autopar.ir import (
    PIPELINE_AXIS,
    PLACEMENTS,
    VERSIONED,
    Meeting,
    Mesh,
    MixedPrecision,
    Plan,
    mesh_of_replica,
    without_pipeline,
)
from autopar.ir.recompute import check_wish
from autopar.search.lone_ops import is_lone_pin
from autopar.search.recipe_rows import NAIVE
from autopar.search.recipes import (
    check_recipe_axes,
    check_versions,
    format_recipe,
    meeting_of,
    resolve,
    split_recipe,
)
from autopar.search.request_fields import AUTO_AXES, HEADROOM, RequestFields
from autopar.units import parse_bytes

AXES = ("dp", "tp")
REFUSALS = ("recompute", "offload", "dp", "tp", "sp", "ddp", "zero1", "zero2", "zero3")


def listed_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Names, such as those of axes, which may be given as one text with commas.

    >>> listed_names("dp,tp"), listed_names(("tp",)), listed_names("")
    (('dp', 'tp'), ('tp',), ())
    """
    return tuple(filter(None, given.split(",") if isinstance(given, str) else given))


def listed_depths(given: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Numbers of pipeline ranks, of which one may be given by itself; None for any.

    >>> listed_depths(4), listed_depths([1, 2]), listed_depths(None)
    ((4,), (1, 2), None)
    """
    if given is None:
        return None
    return (given,) if isinstance(given, int) else tuple(given)


def in_bytes(given: int | str | None) -> int | None:
    """A size of memory in bytes, which may be given as text; None where none is given.

    >>> in_bytes(80), in_bytes("70GB"), in_bytes(None)
    (80, 70000000000, None)
    """
    return parse_bytes(given) if isinstance(given, str) else given


@dataclass(frozen=True)
class Request(RequestFields):
    """Everything that a user asks of a plan, checked; see `RequestFields` for its attributes.

    >>> from autopar.cost_model import find_hardware
    >>> asked = Request(find_hardware("h100"), mesh={"dp": 2, "tp": 4}, recipe="dp:zero3")
    >>> asked.ranks, asked.bound_bytes
    (8, 76000000000)

    Raises AutoparError or one of its subclasses if two fields contradict each other, or if a field names something that
    does not exist.
    """

    def __post_init__(self) -> None:
        self._normalize()
        self._check_counts()
        self._check_memory()
        self._check_names()
        self._check_decompose()
        check_wish(self.recompute)
        format_recipe(self.recipe)
        self._check_schedule()
        self._check_mesh()
        self._check_lone_ops()
        self._check_versions()
        self._check_refusals()

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
        """The request for a step of so many micro-batches, of which as many run at a time as the number allows."""
        return self.but(
            micro_batches=count, overlap_batches=math.gcd(self.overlap_batches, count or 1)
        )

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
            mesh=mesh_of_replica(self.mesh, meeting.axis), recipe=self.inside, meeting=meeting,
            batch=None if self.batch is None else self.batch // meeting.replicas,
            training_state=replace(self.training_state, meeting_copies=meeting.copies),
        )  # fmt: skip

    # --- checks

    def _normalize(self) -> None:
        """Replaces values given as text, and takes the number of ranks from the mesh."""

        def become(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        memory: Any = in_bytes(self.memory_bytes)
        if isinstance(memory, float) and memory.is_integer():
            memory = int(memory)  # people write 80e9
        become("memory_bytes", memory)
        become("pins", dict(self.pins or {}))
        become("precision", MixedPrecision.of(self.precision))
        become("training_state", TrainingState.of(self.training_state))
        become("without", frozenset(self.without))
        become("inside_node", tuple(self.inside_node))
        become("decompose", listed_names(self.decompose))
        depths = listed_depths(self.stages)
        become("stages", None if depths is None else tuple(sorted({*depths})))
        if self.mesh is None:
            return
        become("mesh", Mesh.of(self.mesh))
        if self.ranks is None:
            become("ranks", self.mesh.ranks)

    def _check_counts(self) -> None:
        counts = {
            "ranks": self.ranks, "batch": self.batch, "micro_batches": self.micro_batches,
            "chunks": self.chunks, "memory_bytes": self.memory_bytes,
            "overlap_batches": self.overlap_batches,
        } | {f"stages[{i}]": value for i, value in enumerate(self.stages or ())}  # fmt: skip
        for name, value in counts.items():
            if value is not None and type(value) is not int:  # a bool is an int to isinstance
                raise AutoparError(f"{name}={value!r} is no whole number.")
            if value is not None and value < 1:
                raise AutoparError(f"{name}={value!r} is less than 1.")
        if self.stages == ():
            raise AutoparError("stages=() leaves no number of stages; leave it out for any.")
        count = self.micro_batches
        if self.batch is not None and count is not None and self.batch % count:
            raise AutoparError(
                f"{count} micro-batches do not divide a batch of {self.batch} sequences."
            )

        at_a_time = self.overlap_batches
        if at_a_time > 1 and (count or 1) % at_a_time:
            raise AutoparError(
                f"overlap_batches={at_a_time} runs {at_a_time} micro-batches at a time, and micro_batches={count} is "
                f"no multiple of that: name micro_batches={at_a_time}, or another multiple."
            )

    def _check_memory(self) -> None:
        if not isinstance(self.headroom, (int, float)) or not 0 <= self.headroom < 1:
            raise AutoparError(
                f"headroom={self.headroom!r} is a fraction of the memory, from 0 up to, not including, 1; "
                f"the default is {HEADROOM}."
            )

    def _check_names(self) -> None:
        for name, given, known in (
            ("without", self.without, REFUSALS),
            ("inside_node", self.inside_node, AXES),
        ):
            unknown = sorted(set(given) - {*known})
            if unknown:
                near = did_you_mean(unknown[0], known)
                raise AutoparError(
                    f"{name} names {unknown[0]!r}{near}; choose among {', '.join(known)}."
                )

    def _check_decompose(self) -> None:
        names = AXES if self.mesh is None else self.mesh.names
        for axis in self.decompose if self.decompose != AUTO_AXES else ():
            if axis not in names or axis == PIPELINE_AXIS or self.decompose.count(axis) > 1:
                raise AutoparError(
                    f"decompose names the axis {axis!r}, and stages have the axes "
                    f"{', '.join(name for name in names if name != PIPELINE_AXIS)}: name each of these at most once, "
                    "or write 'auto' for those that the price favours."
                )

    def _check_schedule(self) -> None:
        named, _ = split_recipe(self.recipe)
        if self.schedule is not None and self.schedule not in PLACEMENTS:
            raise RecipeError(
                f"There is no schedule {self.schedule!r}{did_you_mean(self.schedule, PLACEMENTS)}; "
                f"choose among {', '.join(PLACEMENTS)}."
            )
        if named and self.schedule not in (None, self.chosen_schedule):
            raise RecipeError(
                f"The recipe names the pipeline {named!r}, and schedule={self.schedule!r} another; "
                "leave out one."
            )
        if named == NAIVE and self.micro_batches not in (None, 1):
            raise RecipeError(
                f"The recipe {NAIVE} runs one micro-batch, and micro_batches={self.micro_batches} was "
                "given; use gpipe."
            )
        if self.chosen_schedule is not None and self.chunks is not None:
            self._check_chunks(self.chosen_schedule, self.chunks)

    @staticmethod
    def _check_chunks(schedule: str, chunks: int) -> None:
        takes = {"one": 1, "v": 2}.get(PLACEMENTS[schedule])
        if takes not in (None, chunks):
            raise PlanError(
                f"The schedule {schedule} runs {takes} stage{'s' * (takes == 2)} on each pipeline rank, "
                f"and chunks={chunks} was given; leave chunks out, or take 'interleaved'."
            )

    def _check_mesh(self) -> None:
        mesh = self.mesh
        if mesh is None:
            return
        if self.ranks != mesh.ranks:
            raise MeshError(
                f"The mesh {mesh} has {mesh.ranks} ranks, and {self.cluster} has {self.ranks}: name axes whose sizes "
                f"multiply to {self.ranks}, or a cluster of {mesh.ranks}."
            )
        depth = dict(mesh.axes).get(PIPELINE_AXIS, 1)
        if self.stages is not None and depth not in self.stages:
            words = ", ".join(map(str, self.stages))
            raise MeshError(
                f"The mesh {mesh} has {depth} pipeline ranks, and stages asks for {words}."
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
                f"{' and '.join(asked)} can be had with pipeline stages alone, and the mesh {mesh} has no axis "
                f"{PIPELINE_AXIS!r}: add one, such as {PIPELINE_AXIS}=2, or leave out {' and '.join(fields)}."
            )

    def _check_versions(self) -> None:
        """Raises RecipeError if a schedule with versions of parameters lacks a needed field, or has a forbidden one."""
        schedule = self.chosen_schedule
        if schedule not in VERSIONED or schedule is None:
            return
        if self.mesh is None or self.micro_batches is None:
            raise RecipeError(
                f"The schedule {schedule} updates after every few micro-batches, so that their number, and that of the "
                "stages, are part of what is trained: give both, such as mesh={'pp': 4}, micro_batches=16."
            )
        if self.precision is not None or self.offload:
            asked = "offload" if self.precision is None else f"precision={str(self.precision)!r}"
            raise RecipeError(
                f"The schedule {schedule} keeps several versions of parameters, which are stored as they are used so "
                f"far, and {asked} was asked for; leave out one of both."
            )
        if self.has_stages:
            check_versions(schedule, self.inside, without_pipeline(self.mesh))

    def _check_replicas(self, meeting: Meeting) -> None:
        """Raises RecipeError or AutoparError for fields that replicas do not support."""
        if self.offload or "offload" in self.named_recipes():
            raise RecipeError(
                f"Replicas along {meeting.axis} whose parameters lie in the host's memory cannot meet yet; choose a "
                "recipe that keeps them on the device, such as zero3."
            )
        if self.batch is not None and self.batch % meeting.replicas:
            raise AutoparError(
                f"{meeting.replicas} replicas along {meeting.axis} do not divide a batch of {self.batch} sequences."
            )
        for name, choice in self.pins.items():
            if f"@{meeting.axis}" in choice:
                raise RecipeError(
                    f"{name} is pinned to {choice}, and along {meeting.axis} lie replicas, whose values differ "
                    f"between meetings: none of them can hold a part for another. Pin it along another axis."
                )

    def _check_lone_ops(self) -> None:
        """Raises RecipeError for fields that pins such as `@0`, and recipes that do the same, do not support yet."""
        if not self.has_lone_ops:
            return
        recomputes = self.recompute not in (None, "none")
        refused = {
            f"updates inside of a step ({self.chosen_schedule})": self.chosen_schedule in VERSIONED,
            "storage on the host": self.offload or "offload" in self.named_recipes(),
            "replicas that meet": meeting_of(self.recipe, self.mesh) is not None,
            f"recompute={self.recompute!r}": recomputes,
            f"decompose={','.join(self.decompose)!r}": bool(self.decompose),
            "a mesh that the search chooses; give mesh=, whose axis has the ranks": self.mesh
            is None,
        }
        pins = [f"{name!r}: {text!r}" for name, text in self.pins.items() if is_lone_pin(text)]
        asked = f"The pin {{{pins[0]}}}" if pins else f"The recipe {format_recipe(self.recipe)!r}"
        for what in (what for what, is_asked in refused.items() if is_asked):
            raise RecipeError(
                f"{asked} leaves ops to one rank, which does not go together with {what} yet; leave out one of both."
            )

    def _check_refusals(self) -> None:
        """Raises an error if `without` names something that another field asks for."""
        if self.offload and "offload" in self.without:
            raise AutoparError("--offload and --no offload cannot both hold; drop one.")
        if "recompute" in self.without and self.recompute not in (None, "none"):
            raise AutoparError(
                f"--recompute {self.recompute} and --no recompute cannot both hold; drop one."
            )
        sizes = dict(self.mesh.axes) if self.mesh else {}
        for axis in sorted(self.without & {*AXES}):
            if sizes.get(axis, 1) > 1:
                raise MeshError(
                    f"The mesh {self.mesh} has {sizes[axis]} ranks along {axis}, and --no {axis} rules the "
                    "axis out; drop one."
                )
        for name in sorted(self.without & self.named_recipes()):
            raise RecipeError(
                f"The recipe {format_recipe(self.recipe)!r} and --no {name} cannot both hold; drop one."
            )

"""The fields of a request, and what follows from them; `autopar.search.request` checks them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.hardware import Hardware
from autopar.cost_model.items import FULL, TrainingState
from autopar.cost_model.software import AUTOPAR, Software
from autopar.ir import PIPELINE_AXIS, VERSIONED, Meeting, Mesh, MixedPrecision
from autopar.ir.recompute import RecomputeWish
from autopar.search.lone_ops import is_lone_pin
from autopar.search.recipe_rows import (
    ALIASES,
    NAIVE,
    ON_DEVICE,
    RECIPES,
    STORED_ON_HOST,
    USED_FROM_HOST,
    Recipe,
    RecipeLike,
    Tiering,
)
from autopar.search.recipes import format_recipe, split_recipe

HEADROOM = 0.05
AUTO_AXES = ("auto",)  # of `RequestFields.decompose`


@dataclass(frozen=True)
class RequestFields:
    """Everything that a user asks of a plan; the search decides the fields that are None.

    Attributes:
        hardware: the machine that the plan is priced for.
        ranks: number of ranks; with a mesh, its size.
        mesh: axes and their sizes; `pp` is the axis of pipeline stages.
        batch: number of samples of a step, over all ranks.
        recipe: constraints on the search along each axis (`autopar.search.recipes`).
        pins: single choices that the user fixes, by name of a parameter or op (`autopar.search.pins`).
        memory_bytes: bound on the memory of a rank, in bytes; None for the memory of the hardware
            less the headroom.
        headroom: fraction of the hardware's memory that a plan leaves free; it does not reduce `memory_bytes`.
        must_fit: whether a plan must stay within the bound; with False the search ignores memory.
        micro_batches: number of micro-batches of a step.
        stages: numbers of pipeline ranks that the search may choose among; one number stands for itself.
        schedule: order in which pipeline stages run micro-batches, one of `autopar.ir.PLACEMENTS`.
        chunks: number of stages of each pipeline rank.
        recompute: recomputation in backward: "none", "full", the number of blocks of every stage, or another value that
            `autopar.ir.recompute.check_wish` lists.
        precision: mixed-precision policy under which the model is captured.
        training_state: bytes of gradients, master weights and optimizer states, also as text such as
            "adamw8bit" (`autopar.cost_model.items.TrainingState`).
        software: figures of the runtime, such as what it overlaps (`autopar.cost_model.software`).
        offload: whether parameters may be stored in the host's memory and updated there; None allows it if no
            other plan fits, or if it gives a faster plan.
        streams: whether parameters that the host stores may also stay there during a step, and be copied to the device
            for each use; the search sets it.
        without: names in `autopar.search.request.REFUSALS` that the plan must not use.
        inside_node: axes whose groups must not span nodes.
        decompose: axes along which all-gathers before products, and reduce-scatters after them, run piece by piece
            while the products are computed, also as text such as "tp"; "auto" for those that make the priced step
            shorter.
        overlap_batches: number of micro-batches that run at a time, so that the collectives of each travel while
            another computes.
        meeting: the meetings of replicas, in a request for the plan of one replica (`of_replica`); else None.
        cuts_batch: whether the search may cut the batch of a step without stages into micro-batches, where their number
            is open. `autopar.planning.planning` sees to it that they then give the results of the batch.
        splits_backward: whether the runtime runs a backward in two halves; if not, zero-bubble schedules are not
            searched, which then gain nothing.
        refines: whether the plan may have two axes in place of one of the mesh (`autopar.search.refined`), and another
            order of its axes (`autopar.search.orders`). A searched mesh may have both in any case.
    """

    hardware: Hardware
    ranks: int | None = None
    mesh: Mesh | None = None
    batch: int | None = None
    recipe: RecipeLike = "auto"
    pins: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int | None = None
    headroom: float = HEADROOM
    must_fit: bool = True
    micro_batches: int | None = None
    stages: tuple[int, ...] | None = None
    schedule: str | None = None
    chunks: int | None = None
    recompute: RecomputeWish | None = None
    precision: MixedPrecision | None = None
    training_state: TrainingState = FULL
    software: Software = AUTOPAR
    offload: bool | None = None
    streams: bool = False
    without: frozenset[str] = frozenset()
    inside_node: tuple[str, ...] = ()
    cuts_batch: bool = False
    meeting: Meeting | None = None
    decompose: tuple[str, ...] = ()
    overlap_batches: int = 1
    splits_backward: bool = True
    refines: bool = False

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
    def inside(self) -> RecipeLike:
        """The recipe of the axes inside a pipeline stage."""
        return split_recipe(self.recipe)[1]

    @property
    def chosen_schedule(self) -> str | None:
        """The schedule that the user asks for, by the field `schedule` or by the recipe; None for any."""
        named, _ = split_recipe(self.recipe)
        return "gpipe" if named == NAIVE else named or self.schedule

    @property
    def has_versions(self) -> bool:
        """Whether the user's schedule updates without a flush, and so keeps several versions of parameters."""
        return self.chosen_schedule in VERSIONED

    @property
    def chosen_micro_batches(self) -> int | None:
        """The number of micro-batches that the user asks for; 1 under the recipe `naive-pp`, None for any."""
        return 1 if split_recipe(self.recipe)[0] == NAIVE else self.micro_batches

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

    @property
    def has_stages(self) -> bool:
        """Whether the mesh has an axis of pipeline stages."""
        return self.mesh is not None and PIPELINE_AXIS in self.mesh.names

    @property
    def depths(self) -> tuple[int, ...] | None:
        """Numbers of pipeline ranks that the mesh or `stages` allows; None for any."""
        if self.mesh is None:
            return self.stages
        return (dict(self.mesh.axes).get(PIPELINE_AXIS, 1),)

    @property
    def text(self) -> str:
        """The user's constraints, written as options of the command line."""
        return ", ".join(self._words()) or "the model's sizes"

    def _words(self) -> Iterator[str]:
        options = {
            "--mesh": self.mesh, "--micro-batches": self.micro_batches, "--schedule": self.schedule,
            "--chunks": self.chunks, "--recompute": self.recompute,
        }  # fmt: skip
        yield from (f"{name} {value}" for name, value in options.items() if value is not None)
        yield from (f"--stages {depth}" for depth in self.stages or ())
        if self.recipe != "auto":
            yield f"--recipe {format_recipe(self.recipe)}"
        yield from (f"--pin {name}={choice}" for name, choice in self.pins.items())
        yield from (f"--keep-inside-node {axis}" for axis in self.inside_node)
        yield from [f"--decompose {','.join(self.decompose)}"] * bool(self.decompose)
        yield from [f"--overlap-batches {self.overlap_batches}"] * (self.overlap_batches > 1)
        yield from ["--offload"] * bool(self.offload)
        yield from (f"--no {what}" for what in sorted(self.without))

    @property
    def has_lone_pins(self) -> bool:
        """Whether a pin leaves ops to one rank of an axis."""
        return any(map(is_lone_pin, self.pins.values()))

    @property
    def has_lone_ops(self) -> bool:
        """Whether a pin or a recipe leaves ops to one rank of an axis."""
        return self.has_lone_pins or any(row.worker is not None for row in self._named_rows())

    @property
    def has_owners(self) -> bool:
        """Whether a recipe stores each parameter on one rank of an axis, or a pin leaves ops to one rank."""
        return self.has_lone_pins or any(row.owner is not None for row in self._named_rows())

    def _named_rows(self) -> list[Recipe]:
        return [RECIPES[name] for name in self.named_recipes() if name in RECIPES]

    def named_recipes(self) -> set[str]:
        """Names of the recipes inside a stage, with "sp" for `tp+sp`, and "offload" for recipes that use the host."""
        inside = self.inside
        given = [inside] if isinstance(inside, str) else inside.values()
        named = {ALIASES.get(name, name) for name in given}
        is_far = any(name in RECIPES and RECIPES[name].tier != "device" for name in named)
        return named | ({"sp"} if "tp+sp" in named else set()) | ({"offload"} if is_far else set())

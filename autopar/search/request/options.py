"""The options of a plan, in Python and on the command line; each is described here once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from autopar.cost_model.items import FULL, TrainingState
from autopar.errors import AutoparError, MeshError, PlanError, RecipeError, did_you_mean
from autopar.ir import PIPELINE_AXIS, PLACEMENTS, VERSIONED, Mesh, MixedPrecision
from autopar.ir.recompute import RecomputeOption, check_wish, parse_wish
from autopar.options import option, options_of
from autopar.search.request.recipe_rows import ALIASES, NAIVE, RECIPES, Recipe, RecipeLike
from autopar.search.request.recipes import format_recipe, split_recipe
from autopar.search.request.single_rank_ops import is_lone_pin
from autopar.units import parse_bytes

HEADROOM = 0.05
AUTO_AXES = ("auto",)  # of the option `decompose`
AXES = ("dp", "tp")
REFUSALS = ("recompute", "offload", "dp", "tp", "sp", "ddp", "zero1", "zero2", "zero3")


def listed_names(given: str | Iterable[str]) -> tuple[str, ...]:
    """Names, such as those of axes, which may be given as one text with commas.

    >>> listed_names("dp,tp"), listed_names(("tp",)), listed_names("")
    (('dp', 'tp'), ('tp',), ())
    """
    return tuple(filter(None, given.split(",") if isinstance(given, str) else given))


def listed_depths(given: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Numbers of pipeline ranks in order, of which one may be given by itself; None for any.

    >>> listed_depths(4), listed_depths([2, 1]), listed_depths(None)
    ((4,), (1, 2), None)
    """
    if given is None:
        return None
    return (given,) if isinstance(given, int) else tuple(sorted({*given}))


def in_bytes(given: float | str | None) -> Any:
    """A size of memory in bytes, which may be given as text or, as people write 80e9, as a float; None for none.

    >>> in_bytes(80e9), in_bytes("70GB"), in_bytes(None)
    (80000000000, 70000000000, None)
    """
    if isinstance(given, str):
        return parse_bytes(given)
    return int(given) if isinstance(given, float) and given.is_integer() else given


def pins_of(given: Mapping[str, str] | Sequence[Any] | str | None) -> dict[str, str]:
    """Pins by name, which may be given as texts `NAME=CHOICE`. Raises AutoparError for another text.

    >>> pins_of("layers.*.up.weight=S(0)@tp"), pins_of([{"up": "tp"}, "down=tp"])
    ({'layers.*.up.weight': 'S(0)@tp'}, {'up': 'tp', 'down': 'tp'})
    """
    if isinstance(given, str):
        name, _, choice = given.partition("=")
        if not name or not choice:
            raise AutoparError(
                f"Cannot read the pin {given!r}; write 'layers.*.mlp.*=tp' or 'layers.*.weight=S(0)@tp'."
            )
        return {name: choice}
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    return {name: choice for each in given for name, choice in pins_of(each).items()}


def _unless_none(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda given: None if given is None else parse(given)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of a plan, checked; where an option has its default, the search decides.

    Attributes:
        mesh: the axes and their sizes, such as `dp=2,tp=4`, or `pp=2,dp=2,tp=2` with pipeline stages; without it they
            are searched too. Ranks along the last axis are neighbours. `dp=2,tp=4 order tp,dp` also names the order in
            which axes nest where several split one dim; else it is searched.
        micro_batches: number of micro-batches that a step cuts the batch into, along dim 0 of every input; by default
            what the search finds best, which is 1 unless memory is scarce, and where several would change a result.
        schedule: order in which stages run micro-batches; by default what the search finds best.
            Under pipedream, pipedream-sync and 2bw stages update inside of a step, which is no longer the result
            of one device (docs/pipeline.md).
        chunks: stages of each pipeline rank, for schedules that take several; by default searched.
        recompute: `none` keeps everything for backward; `full` keeps only the inputs of every layer, and recomputes the
            layer in backward; `partitioned` keeps each rank's slice of these inputs along axes on which they are
            replicated, and gathers them again; `offloaded` moves these slices to the host's memory until backward; 3
            does so with the first three layers of every stage; 0.5 keeps at most half of what recomputation can save.
            By default nothing is recomputed if the step fits into memory; else blocks or single ops, whichever is
            faster within the memory, unless sharding more is.
        stages: numbers of pipeline ranks to choose among, such as 4 or (1, 2); on the command line in addition to 1. By
            default any; under a recipe that does not name `pp`, several only where no plan with one fits.
        recipe: constraints on the search, for all axes or by axis: `pp:1f1b,dp:zero1,tp:tp`. With `local:K`, `geo:K` or
            `diloco:K` for its first axis the ranks along it are replicas that meet every K steps, which is no longer
            the result of one device (docs/replicas.md).
        pins: single choices by name of a parameter, op or submodule: `layers.*.mlp.up.weight=S(0)@tp` says how it is
            split, `towers.left=@0` runs it on one rank, and on the command line `layers.*.mlp.*=tp` splits over an
            axis.
        inside_node: axes, dp or tp, whose ranks must share a node.
        decompose: mesh axes, such as `tp`, along which an all-gather before linear layers, or a reduce-scatter after
            one, runs piece by piece while the pieces that are there are multiplied (docs/splitting.md); `auto` for the
            axes along which that makes the priced step shorter. By default none.
        overlap_batches: number of micro-batches that run at a time, such as 2: their ops take turns, so that the
            collectives of each travel while another computes (docs/splitting.md).
        bucket_bytes: about how much of parameters or gradients one collective carries, in bytes or as text such as
            `100MB`; by default the usual size, or one by which the priced step is at least 1 % shorter
            (docs/search.md).
        offload: whether parameters may be stored in the host's memory, and updated there, also where a plan fits
            without; by default only where that is needed, or promises a faster step (docs/memory.md).
        without: what the plan must not use.
        memory_bytes: bound on the memory of a rank, in bytes or as text such as `70GB` (GB is 1e9 bytes); by default
            the memory of the hardware less the headroom. Where nothing fits on the devices, or where that is faster,
            parameters are stored in the host's memory (docs/memory.md).
        headroom: fraction of the hardware's memory that the plan leaves free, where no bound is given.
        precision: a mixed-precision policy, such as `bf16`, or `bf16 reduce=bf16` to reduce gradients in it too:
            parameters stay in their own format, are cast once a step before they are gathered, and gradients are added
            up and reduced in the format of the policy. By default everything is computed in the model's own formats
            (docs/precision.md).
        skew: rows of the fullest expert over the mean of all, 1 or more, such as 1.3: a mixture of experts is priced as
            if the rank of that expert had so many times its share of the rows, in time and in memory
            (docs/splitting.md). What is computed does not depend on it.
        training_state: what the optimizer will keep for each parameter, such as `adamw8bit` for the AdamW8bit of
            torchao; the memory of a plan is priced with it (docs/precision.md). `adamw8bit gradients=2 masters=0`
            trains bf16 parameters without float32 masters. By default AdamW with two moments in the parameters' own
            formats.

    >>> PlanOptions(micro_batches=4, without="recompute,offload").text
    '--micro-batches 4, --no offload, --no recompute'

    Raises AutoparError or one of its subclasses if two options contradict each other, or if an option names something
    that does not exist.
    """

    has_flags: ClassVar = True

    mesh: Mesh | None = option(None, metavar="AXES", parse=_unless_none(Mesh.of), serves_backend=True)
    micro_batches: int | None = option(None, metavar="N")
    schedule: str | None = option(None, choices=tuple(PLACEMENTS))
    chunks: int | None = option(None, metavar="V")
    recompute: RecomputeOption | None = option(
        None,
        metavar="none|full|partitioned|offloaded|N|PART",
        parse=lambda given: parse_wish(given) if isinstance(given, str) else given,
    )
    stages: tuple[int, ...] | None = option(None, metavar="N", repeats=True, parse=listed_depths, is_limit=True)
    recipe: RecipeLike = option(
        "auto", metavar="R", write=lambda given: (format_recipe(given),), is_limit=True, serves_backend=True
    )
    pins: Mapping[str, str] = option(
        {},
        flag="--pin",
        metavar="NAME=CHOICE",
        repeats=True,
        parse=pins_of,
        write=lambda given: (f"{name}={choice}" for name, choice in given.items()),
        is_limit=True,
    )
    inside_node: tuple[str, ...] = option(
        (), flag="--keep-inside-node", choices=AXES, repeats=True, parse=listed_names, is_limit=True
    )
    decompose: tuple[str, ...] = option((), metavar="AXES", parse=listed_names, write=lambda given: (",".join(given),))
    overlap_batches: int = option(1, metavar="N", parse=lambda given: 1 if given is None else given)
    bucket_bytes: int | None = option(None, metavar="SIZE", parse=in_bytes)
    offload: bool | None = option(None, write=lambda given: [""] * bool(given), is_limit=True)
    without: frozenset[str] = option(
        frozenset(),
        flag="--no",
        choices=REFUSALS,
        repeats=True,
        parse=lambda given: frozenset(listed_names(given)),
        is_limit=True,
    )
    memory_bytes: int | None = option(
        None,
        flag="--max-memory",
        also=("--memory",),
        metavar="SIZE",
        parse=in_bytes,
        is_limit=True,
        is_constraint=False,
        may_differ=True,  # each rank may ask its own device; the bound of the first counts
    )
    headroom: float = option(HEADROOM, metavar="PART", is_constraint=False)
    precision: MixedPrecision | None = option(None, metavar="POLICY", parse=MixedPrecision.of, is_constraint=False)
    skew: float = option(1.0, metavar="FACTOR")
    training_state: TrainingState = option(FULL, metavar="WORDS", parse=TrainingState.of, is_constraint=False)

    def __post_init__(self) -> None:
        for name, parse in _PARSERS:
            object.__setattr__(self, name, parse(getattr(self, name)))
        counts = {
            "micro_batches": self.micro_batches,
            "chunks": self.chunks,
            "memory_bytes": self.memory_bytes,
            "overlap_batches": self.overlap_batches,
            "bucket_bytes": self.bucket_bytes,
        } | {f"stages[{i}]": value for i, value in enumerate(self.stages or ())}
        check_counts(counts)
        self._check_numbers()
        self._check_names()
        self._check_decompose()
        check_wish(self.recompute)
        format_recipe(self.recipe)
        self._check_schedule()
        self._check_refusals()

    # --- what follows from them

    @property
    def text(self) -> str:
        """The user's constraints, written as options of the command line; "" without any."""
        words = [
            text for name, each in _OPTIONS.items() if each.is_constraint for text in each.words(getattr(self, name))
        ]
        return ", ".join(words)

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

    # --- checks

    def _check_numbers(self) -> None:
        if self.stages == ():
            raise AutoparError("stages=() allows no number of stages; leave it out to allow any.")
        count, at_a_time = self.micro_batches, self.overlap_batches
        if at_a_time > 1 and (count or 1) % at_a_time:
            raise AutoparError(
                f"overlap_batches={at_a_time} runs {at_a_time} micro-batches at a time, but micro_batches={count} is "
                f"not a multiple of that: name micro_batches={at_a_time}, or another multiple."
            )
        if not isinstance(self.headroom, (int, float)) or not 0 <= self.headroom < 1:
            raise AutoparError(
                f"headroom={self.headroom!r} must be a fraction of the memory, at least 0 and less than 1; the default "
                f"is {HEADROOM}."
            )
        if not isinstance(self.skew, (int, float)) or not 1 <= self.skew < math.inf:
            raise AutoparError(
                f"skew={self.skew!r} is no ratio of the fullest expert's rows to the mean: write 1 or more, "
                "such as 1.3."
            )

    def _check_names(self) -> None:
        for each in _OPTIONS.values():
            given = getattr(self, each.name) if each.choices and each.repeats else ()
            for unknown in sorted({*given} - {*each.choices}):
                near = did_you_mean(unknown, each.choices)
                raise AutoparError(f"{each.name} names {unknown!r}{near}; choose among {', '.join(each.choices)}.")

    def _check_decompose(self) -> None:
        names = AXES if self.mesh is None else self.mesh.names
        for axis in self.decompose if self.decompose != AUTO_AXES else ():
            inside = [name for name in names if name != PIPELINE_AXIS]
            if axis in inside and self.decompose.count(axis) == 1:
                continue
            what = f"names the axis {axis!r} twice" if axis in inside else f"names {axis!r}, no axis of a stage"
            raise AutoparError(
                f"decompose {what}: name each of {', '.join(inside)} at most once, or write 'auto' to decompose those "
                "where it is predicted to be faster."
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
                f"The recipe names the pipeline {named!r}, and schedule={self.schedule!r} another; leave out one."
            )
        if named == NAIVE and self.micro_batches not in (None, 1):
            raise RecipeError(
                f"The recipe {NAIVE} runs one micro-batch, but micro_batches={self.micro_batches} was given; use gpipe."
            )
        schedule = self.chosen_schedule
        takes = {"one": 1, "v": 2}.get(PLACEMENTS[schedule]) if schedule else None
        if self.chunks is not None and takes not in (None, self.chunks):
            raise PlanError(
                f"The schedule {schedule} runs {takes} stage{'s' * (takes == 2)} on each pipeline rank, but "
                f"chunks={self.chunks} was given; leave chunks out, or take 'interleaved'."
            )

    def _check_refusals(self) -> None:
        """Raises an error if `without` names something that another field asks for."""
        if self.offload and "offload" in self.without:
            raise AutoparError("--offload and --no offload exclude each other; drop one.")
        if "recompute" in self.without and self.recompute not in (None, "none"):
            raise AutoparError(f"--recompute {self.recompute} and --no recompute exclude each other; drop one.")
        sizes = dict(self.mesh.axes) if self.mesh else {}
        for axis in sorted(self.without & {*AXES}):
            if sizes.get(axis, 1) > 1:
                raise MeshError(
                    f"The mesh {self.mesh} has {sizes[axis]} ranks along {axis}, but --no {axis} rules the axis out; "
                    "drop one."
                )
        for name in sorted(self.without & self.named_recipes()):
            raise RecipeError(
                f"The recipe {format_recipe(self.recipe)!r} and --no {name} exclude each other; drop one."
            )


def check_counts(counts: Mapping[str, Any]) -> None:
    """Raises AutoparError for a number, by name, that is none of 1, 2, 3 ...; None is left open."""
    for name, value in counts.items():
        if value is not None and type(value) is not int:  # a bool is an int to isinstance
            raise AutoparError(f"{name}={value!r} is not a whole number.")
        if value is not None and value < 1:
            raise AutoparError(f"{name}={value!r} is less than 1.")


_OPTIONS = options_of(PlanOptions)
_PARSERS = tuple((name, each.parse) for name, each in _OPTIONS.items())

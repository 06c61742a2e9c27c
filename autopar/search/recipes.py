"""Recipes: named sets of constraints on the search, as rows of a table.

A recipe constrains one mesh axis: which factors (named model dimensions) ops may split, which they must split, and how
parameters may be stored. It selects factors by their roles (`autopar.ir.Factor.roles`), never by name:

    batch    the leading dim of an input, or the dim over which ops compute samples separately
    model    a dim of a parameter that is not a dim of an input, is not normalized over and does not number experts:
             Megatron's columns and rows (heads, ffn), but not the residual stream
    seq      any other dim of an input
    expert   the dim of a weight that numbers the experts of a mixture
    width    a dim of a parameter that is normalized over: the width of the residual stream

Under every recipe an op may also run unsplit, or apply a linear op to partial sums. A recipe is written as one name for
all axes, `zero3`, or one for each, `dp:zero3,tp:tp+sp`; axes that are not named are `auto`. Tensor parallelism in
two or three dims is a recipe over several axes, `x,y:2d`, which stands for one of each
(`autopar.search.several_axes`).

The recipes of the pipeline axis `pp` are its schedules, and `naive-pp`, which is GPipe with a single micro-batch. (The
schedules of `autopar.ir.VERSIONED` change the result of training.) `split_recipe` separates these recipes from those of
the other axes. `1f1b` alone leaves all other axes to `auto`; in `pp:1f1b,dp:zero1` the axis `dp` has its own recipe.

Under the recipes `local:K`, `geo:K` and `diloco:K` the ranks along an axis belong to different replicas of the model,
which exchange parameters every K steps (`autopar.ir.meeting`); under `async-server:S` they do so after every step with
one rank that keeps the common parameters, and may be S exchanges ahead of the slowest. The result of training is then
another one, so the search never chooses such a recipe by itself. `meeting_of` reads it, and `split_recipe` leaves it
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from autopar.errors import RecipeError
from autopar.ir import (
    ANY,
    EXCHANGED,
    PIPELINE_AXIS,
    PLACEMENTS,
    Choice,
    Graph,
    Meeting,
    Mesh,
    Op,
    Tier,
)
from autopar.ir.meeting import RULES, SERVER
from autopar.search.several_axes import SEVERAL_AXES, by_axis, over_mesh

Roles = frozenset[str]
Which = Callable[[Roles], bool]


def is_batch(roles: Roles) -> bool:
    return "batch" in roles


def is_model(roles: Roles) -> bool:
    return "parameter" in roles and not roles & {"batch", "input", "normalized", "expert"}


def is_seq(roles: Roles) -> bool:
    return "input" in roles and not roles & {"batch", "parameter"}


def is_expert(roles: Roles) -> bool:
    return "expert" in roles


def is_width(roles: Roles) -> bool:
    return {"parameter", "normalized"} <= roles and not roles & {"batch", "expert"}


def is_feature(roles: Roles) -> bool:
    return "parameter" in roles and not roles & {"batch", "expert"}


class Tiering(NamedTuple):
    """Memory of a parameter: the tier where it is stored between steps, and the tier where it is during a step."""

    stored: Tier
    resident: Tier


ON_DEVICE = Tiering("device", "device")
STORED_ON_HOST = Tiering("host", "device")
USED_FROM_HOST = Tiering("host", "host")


@dataclass(frozen=True)
class Recipe:
    """One row: constraints on one mesh axis.

    Attributes:
        name: name of the recipe, as users write it.
        meaning: description of the recipe for users.
        may: kinds of factors that ops may split; None for any.
        must: kinds of factors of which an op has to split one, if it can split any.
        products_must: the same for products with a parameter only; it comes before `must`.
        stacks_must: the same for ops that stack parameters along a new dim, which is of a kind of `products_must`.
        stages: ZeRO stages that a parameter may have; 3 includes parameters that ops use in their stored layout.
        gathers: whether a parameter that is stored split may be gathered for use.
        tier: memory in which parameters, their gradients and optimizer states are stored.
        resident_tier: memory in which parameters are during a step, if their resident layout is the stored one.
        exchanges: whether an op that splits what it must splits it by an exchange (`t>e`), if it has such a choice.
        only_columns: whether products with a parameter may split only factors that are in both the parameter and the
            result, if they can split one: the columns of the matrix, and never the rows that they sum over.
        saves_slices: whether blocks save a slice of the activations that an axis replicates, and gather it in backward.
        owner: rank of the axis on which all parameters are stored, `ANY` to spread them over the ranks; None where
            parameters have no owner.
    """

    name: str
    meaning: str
    may: tuple[Which, ...] | None = None
    must: tuple[Which, ...] = ()
    products_must: tuple[Which, ...] = ()
    stacks_must: tuple[Which, ...] = ()
    stages: tuple[int, ...] = (0, 1, 2, 3)
    gathers: bool = True
    tier: Tier = "device"
    resident_tier: Tier = "device"
    exchanges: bool = False
    only_columns: bool = False
    saves_slices: bool = False
    owner: int | None = None


_ROWS = (
    Recipe("auto", "anything, whatever is fastest"),
    Recipe("ddp", "batch split, parameters replicated", (), (is_batch,), stages=(0,)),
    Recipe("zero1", "ddp with optimizer states sharded", (), (is_batch,), stages=(1,)),
    Recipe("zero2", "zero1 with gradients sharded", (), (is_batch,), stages=(2,)),
    Recipe("zero3", "zero2 with parameters sharded", (), (is_batch,), stages=(3,)),
    Recipe(
        "zero-offload", "zero2 with parameters stored and updated in the host's memory",
        (), (is_batch,), stages=(2,), tier="host",
    ),
    Recipe(
        "zero3-offload", "zero3 with parameters stored and updated in the host's memory",
        (), (is_batch,), stages=(3,), tier="host",
    ),
    Recipe(
        "zero-infinity", "zero3-offload with parameters on the device during their uses alone",
        (), (is_batch,), stages=(3,), tier="host", resident_tier="host",
    ),
    Recipe(
        "zero-infinity-nvme", "zero-infinity with parameters stored and updated in files on a disk",
        (), (is_batch,), stages=(3,), tier="nvme", resident_tier="host",
    ),
    Recipe(
        "data-parallel", "batch split, parameters stored and updated on the first rank (torch.nn.DataParallel)",
        (), (is_batch,), stages=(1,), owner=0,
    ),
    Recipe(
        "parameter-server", "batch split, every parameter stored and updated on one rank, each rank serving some",
        (), (is_batch,), stages=(1,), owner=ANY,
    ),
    Recipe(
        "tp", "Megatron: columns, then rows, of the matrices",
        (is_model,), (), (is_model,), stages=(0, 3), gathers=False,
    ),
    Recipe(
        "tp+sp", "tp with the rest split along the sequence",
        (is_model, is_seq), (is_seq,), (is_model,), stages=(0, 3), gathers=False,
    ),
    Recipe(
        "cp", "the sequence split everywhere, keys and values of attention going round (ring attention)",
        (is_seq,), (is_seq,), exchanges=True,
    ),
    Recipe(
        "columns", "columns of every matrix, operands gathered before the product: one axis of 2d and 2.5d",
        (is_feature, is_seq), (is_feature, is_seq), (is_feature,), stages=(0, 3), gathers=False,
        only_columns=True, saves_slices=True,
    ),
    Recipe(
        "width", "the width of the residual stream, and the sequence where that stays whole: one axis of 3d",
        (is_width, is_model, is_seq), (is_width, is_seq), (is_width,), stages=(0, 3), gathers=False,
        saves_slices=True,
    ),
    Recipe(
        "ep", "experts of a mixture split, the batch everywhere else",
        (is_expert, is_batch), (is_batch,), (is_expert,), (is_model,), stages=(0, 3), gathers=False,
    ),
)  # fmt: skip

RECIPES: Mapping[str, Recipe] = MappingProxyType({row.name: row for row in _ROWS})
ALIASES: Mapping[str, str] = MappingProxyType({"fsdp": "zero3"})

NAIVE = "naive-pp"  # one micro-batch goes from stage to stage: layer placement without a schedule
PIPELINE_RECIPES: Mapping[str, str] = MappingProxyType(
    {**{name: f"the schedule {name}" for name in PLACEMENTS}, NAIVE: "gpipe with one micro-batch"}
)

MEETING_RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "local:K": "replicas take their average every K steps (local SGD)",
        "geo:K": "replicas add the mean of their differences to a kept base every K steps",
        "diloco:K": "an outer optimizer with momentum takes that mean every K steps (DiLoCo)",
        "async-server:S": "replicas exchange differences with one rank when they like, at most S exchanges ahead",
    }
)

RecipeLike = str | Mapping[str, str]


def split_recipe(recipe: RecipeLike) -> tuple[str, RecipeLike]:
    """The recipe of the pipeline axis ("" for none), and the recipe of the axes inside a stage.

    Raises RecipeError where the pipeline axis is given a recipe that only other axes can have.
    """
    named = _parse(_inside_replica(recipe))
    if isinstance(named, str):
        return (named, "auto") if named in PIPELINE_RECIPES else ("", named)
    if PIPELINE_AXIS not in named:
        return "", named
    schedule = named[PIPELINE_AXIS]
    if schedule != "auto":
        _check_pipeline_recipe(schedule)
    rest = {axis: name for axis, name in named.items() if axis != PIPELINE_AXIS}
    return "" if schedule == "auto" else schedule, rest or "auto"


def meeting_of(recipe: RecipeLike, mesh: Mesh | None) -> Meeting | None:
    """The replicas that a recipe asks for on the mesh of all ranks; None for a recipe without replicas.

    >>> str(meeting_of("far:diloco:10,dp:zero3", Mesh.parse("far=2,dp=4")))
    'every 10 steps diloco momentum=0.9 rate=0.7'

    Raises RecipeError for replicas along several axes, along one that is not the first, or without a mesh.
    """
    named, axes = _parse(recipe), _meetings(recipe)
    if not axes:
        return None
    (axis, name), *others = axes.items()
    if mesh is None:
        raise RecipeError(
            f"The recipe {name!r} was asked for without a mesh. Say along which axis replicas lie, such as "
            f"mesh={{'dp': 4}}, recipe={name!r}."
        )
    if PIPELINE_AXIS in mesh.names:
        raise RecipeError(
            f"The recipe {format_recipe(recipe)!r} was asked for on the mesh {mesh}: replicas and pipeline stages "
            f"cannot be run together yet. Take a mesh without the axis {PIPELINE_AXIS}, such as "
            f"mesh={{'dp': {mesh.size}}}, or a recipe without replicas, such as ddp."
        )
    axis = axis or mesh.names[0]
    if others or (isinstance(named, str) and len(mesh.axes) > 1) or axis != mesh.names[0]:
        sizes = ", ".join(f"{each!r}: {size}" for each, size in mesh.axes)
        raise RecipeError(
            f"The recipe {format_recipe(recipe)!r} was asked for on the mesh {{{sizes}}}: replicas lie along one axis, "
            f"which is the first of the mesh. Name it, such as recipe={{{mesh.names[0]!r}: {name!r}}}, or give the "
            "axes in another order."
        )
    rule, _, number = name.partition(":")
    if rule == SERVER:
        _check_worker(axis, name, mesh)
        return Meeting(axis, mesh.size, 1, SERVER, staleness=int(number))
    return Meeting(axis, dict(mesh.axes)[axis], int(number), rule)  # type: ignore[arg-type]


def _check_worker(axis: str, name: str, mesh: Mesh) -> None:
    """Raises RecipeError for replicas of several ranks that exchange with an asynchronous server."""
    if mesh.size > dict(mesh.axes)[axis]:
        raise RecipeError(
            f"The recipe {axis}:{name} was asked for on the mesh {mesh}: a replica that exchanges with an asynchronous "
            f"server is a single rank so far. Take a mesh of one axis, such as mesh={{{axis!r}: {mesh.size}}}, or "
            f"{axis}:geo:1, whose replicas wait for each other."
        )


def asks_for_replicas(recipe: RecipeLike) -> bool:
    """Whether a recipe asks for replicas, along whichever axis and on whichever mesh.

    >>> asks_for_replicas("far:diloco:10,dp:zero3"), asks_for_replicas("zero3")
    (True, False)
    """
    return bool(_meetings(recipe))


def _meetings(recipe: RecipeLike) -> dict[str, str]:
    """The recipes of replicas by their axes, of which "" is the one that is not named."""
    named = _parse(recipe)
    by_axis = {"": named} if isinstance(named, str) else named
    return {axis: name for axis, name in by_axis.items() if _is_meeting(name)}


def _is_meeting(name: object) -> bool:
    """Whether a recipe asks for replicas, such as `local:4`."""
    if not isinstance(name, str):
        return False
    rule, colon, steps = name.partition(":")
    return rule in RULES and bool(colon) and steps.isascii() and steps.isdigit()


def _inside_replica(recipe: RecipeLike) -> RecipeLike:
    """The recipe of the axes inside a replica."""
    named = _parse(recipe)
    if isinstance(named, str):
        return "auto" if _is_meeting(named) else named
    inside = {axis: name for axis, name in named.items() if not _is_meeting(name)}
    return inside or "auto"


def _check_pipeline_recipe(name: object) -> None:
    if not isinstance(name, str) or name not in PIPELINE_RECIPES:
        raise RecipeError(
            f"There is no recipe {name!r} for the axis {PIPELINE_AXIS}; choose among auto, "
            f"{', '.join(PIPELINE_RECIPES)}."
        )


def resolve(recipe: RecipeLike, mesh: Mesh) -> tuple[Recipe, ...]:
    """The row of the table for every axis of the mesh. Raises RecipeError for an unknown recipe or axis."""
    named = _parse(recipe)
    if isinstance(named, str) and named in SEVERAL_AXES:
        named = over_mesh(named, mesh.names)
    schedule, _ = split_recipe(recipe)
    if schedule:
        raise RecipeError(
            f"The recipe {format_recipe(recipe)!r} is one of pipeline stages, and the mesh {mesh} has no axis "
            f"{PIPELINE_AXIS}; give it one, such as mesh={{'{PIPELINE_AXIS}': {mesh.sizes[0]}}}."
        )
    if isinstance(named, str):
        return tuple(_row(named) for _ in mesh.names)
    check_recipe_axes(recipe, mesh)
    rows = tuple(_row(named.get(axis, "auto"), axis) for axis in mesh.names)
    _check_reductions(rows, mesh)
    return rows


def check_recipe_axes(recipe: RecipeLike, mesh: Mesh) -> None:
    """Raises RecipeError if a recipe names an axis that the mesh does not have."""
    unknown = [axis for axis in recipe_axes(recipe) if axis not in mesh.names]
    if unknown:
        raise RecipeError(
            f"The recipe {format_recipe(recipe)!r} names the axis {unknown[0]!r}, and the mesh "
            f"{mesh} has {', '.join(mesh.names)}."
        )


def format_recipe(recipe: RecipeLike) -> str:
    """The text of a recipe, with aliases resolved; every function here that takes a recipe can read it."""
    named = _parse(recipe)
    if isinstance(named, str):
        whole = named in PIPELINE_RECIPES or named in SEVERAL_AXES or _is_meeting(named)
        return named if whole else _row(named).name
    return ",".join(
        f"{axis}:{name if axis == PIPELINE_AXIS or _is_meeting(name) else _row(name, axis).name}"
        for axis, name in named.items()
    )


def is_open(recipe: RecipeLike) -> bool:
    """Whether a recipe leaves everything on every axis to the search."""
    named = _parse(recipe)
    return set([named] if isinstance(named, str) else named.values()) <= {"auto"}


def recipe_axes(recipe: RecipeLike) -> tuple[str, ...]:
    """The axes that a recipe names; none if it is one recipe for all axes."""
    named = _parse(recipe)
    return () if isinstance(named, str) else tuple(named)


def _parse(recipe: RecipeLike) -> str | Mapping[str, str]:
    if isinstance(recipe, Mapping):
        return by_axis(recipe)
    if not isinstance(recipe, str):
        raise RecipeError(
            f"{recipe!r} is no recipe; write one for all axes such as 'zero3', or one for each: "
            "{'dp': 'zero3', 'tp': 'tp'}. 'auto' leaves everything open."
        )
    if ":" not in recipe or _is_meeting(recipe.strip()):
        return recipe.strip()
    named: dict[str, str] = {}
    axes: list[str] = []  # those of the recipe that is being read
    for part in recipe.split(","):
        axis, colon, name = (piece.strip() for piece in part.partition(":"))
        axes.append(axis)
        if not axis or axis in named:
            raise _unreadable(part, recipe)
        if colon:
            _check_rule(part.strip(), axis, name)
            named[",".join(axes)] = name
            axes = []
    if axes:
        raise _unreadable(axes[0], recipe)
    return by_axis(named)


def _unreadable(part: str, recipe: str) -> RecipeError:
    return RecipeError(f"Cannot read {part!r} in the recipe {recipe!r}; write dp:zero3,tp:tp.")


def _check_rule(text: str, rule: str, steps: str) -> None:
    """Raises RecipeError for `rule:steps` where `rule` is one of meetings, and `steps` no recipe of an axis."""
    if rule not in RULES or steps in {*RECIPES, *ALIASES, *PIPELINE_RECIPES} or _is_meeting(steps):
        return
    if _is_meeting(text):
        raise RecipeError(
            f"{text!r} stands beside the recipes of other axes, and does not say along which axis replicas lie. Put "
            f"the first axis of the mesh before it, such as far:{text}."
        )
    further = " Other numbers of the outer optimizer stand in a plan (docs/local_steps.md)."
    if rule == SERVER:
        raise RecipeError(
            f"Cannot read {text!r}: after '{rule}:' stands the number of exchanges that a replica may be ahead of the "
            f"slowest, and {steps!r} is no whole number. Write {rule}:2, for example."
        )
    raise RecipeError(
        f"Cannot read {text!r}: after '{rule}:' stands the number of steps from one meeting of the replicas to the "
        f"next, and {steps!r} is no whole number. Write {rule}:4, for example.{further if ':' in steps else ''}"
    )


def _row(name: str, axis: str = "") -> Recipe:
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    if _is_meeting(name):
        raise RecipeError(
            f"The recipe {name!r} is one of replicas that meet every so many steps, which autopar.compile and "
            "autopar.explain take; here it cannot be carried out. Choose another recipe, such as ddp."
        )
    if not isinstance(name, str) or name not in RECIPES:
        rule, colon, steps = str(name).partition(":")
        if colon:
            _check_rule(str(name), rule, steps)
        known = ", ".join([*RECIPES, *(f"{a} (= {b})" for a, b in ALIASES.items())])
        known += f"; for several axes {', '.join(SEVERAL_AXES)}"
        known += f"; for the first axis of a mesh {', '.join(MEETING_RECIPES)}"
        known += f"; and for the axis {PIPELINE_AXIS} {', '.join(PIPELINE_RECIPES)}"
        asked = f"There is no recipe {name!r}" + (f" for the axis {axis!r}" if axis else "")
        if str(name).isdigit():
            known += f". Replicas that meet every {name} steps are of local:{name}, geo:{name} or diloco:{name}"
        raise RecipeError(f"{asked}; choose among {known}.")
    return RECIPES[name]


def _check_reductions(rows: Sequence[Recipe], mesh: Mesh) -> None:
    """Raises RecipeError if one axis reduces gradients once per step and another after each micro-batch."""
    stages = {row.stages: (row.name, axis) for row, axis in zip(rows, mesh.names, strict=True)}
    if (1,) in stages and (2,) in stages:
        (once, first), (often, second) = stages[(1,)], stages[(2,)]
        raise RecipeError(
            f"{once} on {first} reduces gradients once per step and {often} on "
            f"{second} per micro-batch, and a gradient is reduced over all axes at once; "
            "name the same on both."
        )


def check_versions(schedule: str, inside: RecipeLike, mesh: Mesh) -> None:
    """Raises RecipeError unless ops use parameters in their stored layout, along every axis inside a stage.

    A schedule without a flush keeps several versions of the parameters. It does not support gathered copies of them.

    Args:
        schedule: name of a schedule without a flush.
        inside: recipe of the axes inside a stage.
        mesh: mesh of a stage.
    """
    for row, (axis, size) in zip(resolve(inside, mesh), mesh.axes, strict=True):
        if size > 1 and row.stages not in ((0,), (0, 3)):
            known = ", ".join(r.name for r in RECIPES.values() if r.stages in ((0,), (0, 3)))
            raise RecipeError(
                f"The schedule {schedule} keeps several versions of parameters, which are stored as they are used so "
                f"far, and the recipe of the axis {axis} is {row.name}. Name one among {known}, such as "
                f"recipe={{'{PIPELINE_AXIS}': {schedule!r}, {axis!r}: 'ddp'}}."
            )


class ChoiceFilter:
    """Selects the choices of an op that the recipe of one mesh axis allows.

    Args:
        graph: the captured model, whose factors have roles.
        recipe: the row of the axis.
    """

    def __init__(self, graph: Graph, recipe: Recipe) -> None:
        self.recipe = recipe
        self._graph = graph
        self._from_parameters = _from_parameters(graph)
        self._activations = _activations(graph)

    def allowed(self, op: Op, legal: Sequence[Choice]) -> list[Choice]:
        """The choices among `legal` that the recipe allows for `op`; at least one if `legal` has the choice `-`."""
        recipe = self.recipe
        if recipe.may is None:
            return list(legal)
        kinds = recipe.products_must if self._is_product(op) else ()
        forced = self._splitting(op, legal, kinds or self._of_stack(op))
        if recipe.only_columns:
            forced = [choice for choice in forced if self._splits_columns(op, choice)]
        if forced:
            return forced
        free = self._splitting(op, legal, recipe.may)
        must = recipe.must if self._makes_activation(op) else _of_batch(recipe.must)
        forced = self._exchanging(self._splitting(op, legal, must))
        if forced and all(choice in forced for choice in self._exchanging(free)):
            return forced
        return [choice for choice in legal if not choice.splits or choice in free]

    def _exchanging(self, choices: list[Choice]) -> list[Choice]:
        """Those that exchange, where the recipe wants these and there are some; else all."""
        found = [choice for choice in choices if EXCHANGED in choice.label]
        return found if self.recipe.exchanges and found else choices

    def _makes_activation(self, op: Op) -> bool:
        return any(name in self._activations for name in op.results)

    def _splitting(self, op: Op, legal: Sequence[Choice], kinds: Iterable[Which]) -> list[Choice]:
        return [
            choice
            for choice in legal
            if choice.splits and any(kind(self.roles(choice)) for kind in kinds)
        ]

    def roles(self, choice: Choice) -> Roles:
        """Roles of the factor that `choice` splits; none if it splits nothing."""
        factor = self._graph.factors.get(choice.factor)
        return factor.roles if factor else frozenset()

    def _of_stack(self, op: Op) -> tuple[Which, ...]:
        """Kinds of factors of which `op` has to split one, if it stacks experts that are separate parameters.

        No dim of such a parameter numbers experts, so each one is stored split along its width. After stacking, an
        all-to-all gives each rank the whole matrices of some experts.
        """
        if not self.recipe.stacks_must or not self._from_parameters.issuperset(op.operands):
            return ()
        before, after = (self._factors(names) for names in (op.operands, op.results))
        roles = [self._graph.factors[name].roles for name in after - before]
        found = any(kind(each) for kind in self.recipe.products_must for each in roles)
        return self.recipe.stacks_must if found else ()

    def _splits_columns(self, op: Op, choice: Choice) -> bool:
        """Whether a choice of a product splits the parameter and the result."""
        pairs = zip(op.operands, choice.operands, strict=True)
        of_parameter = any(n in self._from_parameters and s.kind == "S" for n, s in pairs)
        return of_parameter and all(state.kind == "S" for state in choice.results)

    def _factors(self, names: Iterable[str]) -> set[str]:
        tensors = (self._graph.tensors[name] for name in names)
        return {f for tensor in tensors for dim in tensor.factors for f in dim if f}

    def _is_product(self, op: Op) -> bool:
        """Whether `op` sums over a dim of a matrix that comes from a parameter, as a product or an embedding does."""
        sums = any(c.splits and any(s.kind == "P" for s in c.results) for c in op.choices)
        return sums and any(name in self._from_parameters for name in op.operands)


def _of_batch(must: Iterable[Which]) -> tuple[Which, ...]:
    """The kind `batch` if `must` has it: of every input, ranks can take their own samples."""
    return tuple(kind for kind in must if kind is is_batch)


def _activations(graph: Graph) -> frozenset[str]:
    """Tensors that depend on a parameter.

    Other tensors are position tables, masks and targets. A recipe does not require that these are split along
    the sequence. Splitting them saves little, and an op that needs the whole table would have to gather it, so the
    search decides by cost. A recipe does require that they are split along the batch.
    """
    found = set(graph.parameters.values())
    for op in graph.ops:
        if found.intersection(op.operands):
            found.update(op.results)
    return frozenset(found)


def _from_parameters(graph: Graph) -> frozenset[str]:
    """Tensors of two dims or more that are parameters, or casts and views of one."""
    found = set(graph.parameters.values())
    for op in graph.ops:
        if op.operands and all(name in found for name in op.operands):
            found.update(op.results)
    return frozenset(name for name in found if len(graph.tensors[name].dims) >= 2)

"""What people want of a plan, as intents rather than placements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from autopar.cost_model.compute import is_product
from autopar.cost_model.hardware import Hardware
from autopar.errors import AutoparError, RecipeError
from autopar.ir import PIPELINE_AXIS, Graph, Mesh
from autopar.ir.recompute import RecomputeWish, check_wish
from autopar.search import search
from autopar.search.candidates import DATA, TENSOR, UNBOUNDED_BYTES, Setting
from autopar.search.recipes import ALIASES, NAIVE, PIPELINE_RECIPES, RECIPES, split_recipe

AXES = ("dp", "tp")
REFUSALS = ("recompute", "dp", "tp", "sp", *DATA)


@dataclass(frozen=True)
class Wishes:
    """Constraints on a plan.

    Attributes:
        mesh: axes to use, None to search them.
        recipe: constraints on the search along the axes.
        pins: single choices that are fixed, `layers.*.mlp.*` -> `tp` or as `autopar.search.pins`.
        micro_batches: of a step; None to search.
        stages: pipeline depths that may be chosen, where the mesh does not say.
        schedule: of the pipeline, one of `autopar.ir.SCHEDULES`; None to search.
        chunks: stages of each pipeline rank; None to search.
        recompute: how many layers of a stage run again in backward, or the part of the memory for
            activations that may be kept (`autopar.ir.recompute`); None to search.
        max_memory_bytes: of a rank; None for what the hardware has.
        inside_node: axes whose groups must not leave a node.
        without: of `REFUSALS`, what must not be used.
    """

    mesh: Mesh | None = None
    recipe: str = "auto"
    pins: Mapping[str, str] = field(default_factory=dict)
    micro_batches: int | None = None
    stages: tuple[int, ...] = (1,)
    schedule: str | None = None
    chunks: int | None = None
    recompute: RecomputeWish | None = None
    max_memory_bytes: int | None = None
    inside_node: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """Those that were expressed, as a command line has them."""
        words = [f"--mesh {self.mesh}"] if self.mesh else []
        words += [f"--recipe {self.recipe}"] if self.recipe != "auto" else []
        words += [f"--pin {name}={choice}" for name, choice in self.pins.items()]
        words += [f"--micro-batches {self.micro_batches}"] if self.micro_batches else []
        words += [f"--schedule {self.schedule}"] if self.schedule else []
        words += [f"--recompute {self.recompute}"] if self.recompute else []
        words += [f"--keep-inside-node {axis}" for axis in self.inside_node]
        words += [f"--no {what}" for what in sorted(self.without)]
        return ", ".join(words) or "the model's sizes"

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of pipeline ranks that may be."""
        sizes = dict(self.mesh.axes) if self.mesh else {}
        return (sizes[PIPELINE_AXIS],) if PIPELINE_AXIS in sizes else self.stages

    @property
    def recomputes(self) -> tuple[RecomputeWish, ...]:
        """What may be; between "none" and "full" any number of layers, where both are here.

        Raises AutoparError where recomputation is both asked for and ruled out.
        """
        check_wish(self.recompute)
        if "recompute" not in self.without:
            return (self.recompute,) if self.recompute else ("none", "full")
        if self.recompute not in (None, "none"):
            raise AutoparError(
                f"--recompute {self.recompute} and --no recompute cannot both hold; drop one."
            )
        return ("none",)

    def check(self) -> None:
        """Raises RecipeError for what a search of meshes has no price for.

        That are recipes of other axes than dp, tp and pp, schedules other than 1F1B and GPipe, and a part
        of the memory for activations.
        """
        if isinstance(self.recompute, float):
            raise RecipeError(
                f"--recompute {self.recompute} is searched for a given mesh of a model with all its layers; "
                "give a number of layers, or bound what a rank has with --max-memory."
            )
        self._recipes()
        wanted = self._schedule
        if wanted not in ("", "1f1b", "gpipe") or self.chunks not in (None, 1):
            chunks = f" of {self.chunks} chunks" if self.chunks else ""
            raise RecipeError(
                f"The schedule {wanted or 'of the search'}{chunks} has no closed form here, which is what "
                "meshes are compared by, and models of which only some layers are captured. Take 1f1b or "
                "gpipe, or name a mesh for the whole model: package.module:function --mesh pp=2,..."
            )

    @property
    def _schedule(self) -> str:
        """The schedule that is asked for, by option or by recipe; "" for any."""
        named, _ = split_recipe(self.recipe)
        return "gpipe" if named == NAIVE else named or self.schedule or ""

    def allow(self, setting: Setting, devices_per_node: int) -> bool:
        """Whether a setting is left."""
        return (
            self._allow_mesh(setting)
            and self._allow_recipe(setting)
            and self.micro_batches in (None, setting.micro_batches)
            and self._schedule in ("", setting.schedule)
            and (setting.recompute in self.recomputes or len(self.recomputes) > 1)
            and self._stays_inside(setting, devices_per_node)
            and not any(_uses(setting, what) for what in self.without)
            and not any(_size(setting, axis) == 1 for axis in self._pinned_axes())
        )

    def _allow_mesh(self, setting: Setting) -> bool:
        sizes = {"dp": setting.dp, "tp": setting.tp, "pp": setting.stages}
        given = dict(self.mesh.axes) if self.mesh else sizes
        return all(given.get(axis, 1) == size for axis, size in sizes.items())

    def _allow_recipe(self, setting: Setting) -> bool:
        own = {"dp": setting.data, "tp": setting.tensor}
        return all(
            _size(setting, axis) == 1 if wanted == "" else wanted in ("auto", own[axis])
            for axis, wanted in self._recipes().items()
            if _size(setting, axis) > 1 or wanted == ""
        )

    def _recipes(self) -> Mapping[str, str]:
        """The recipe of dp and of tp; "" where the axis must have one rank."""
        _, inside = split_recipe(self.recipe)
        if isinstance(inside, str):
            name = ALIASES.get(inside, inside)
            if name not in RECIPES:
                known = ", ".join([*RECIPES, *ALIASES, *PIPELINE_RECIPES])
                raise RecipeError(f"There is no recipe {self.recipe!r}; choose among {known}.")
            if name == "auto":
                return {"dp": name, "tp": name}
            return {"dp": name, "tp": ""} if name in DATA else {"dp": "", "tp": name}
        return {"dp": "auto", "tp": "auto"} | self._named_recipes(inside)

    def _named_recipes(self, inside: Mapping[str, str]) -> dict[str, str]:
        known = {"dp": ("auto", *DATA), "tp": ("auto", *TENSOR)}
        found = {axis: ALIASES.get(name, name) for axis, name in inside.items()}
        for axis, name in found.items():
            if name not in known.get(axis, ()):
                raise RecipeError(
                    f"Cannot search meshes for the recipe {self.recipe!r}: '{axis}:{name}' is none of "
                    f"dp:{'|'.join(DATA)} and tp:{'|'.join(TENSOR)}. Give --mesh to use it as it is."
                )
        return found

    def _stays_inside(self, setting: Setting, devices_per_node: int) -> bool:
        reach = {"tp": setting.tp, "dp": setting.tp * setting.dp}
        return all(devices_per_node % reach.get(axis, 1) == 0 for axis in self.inside_node)

    def _pinned_axes(self) -> set[str]:
        return {choice for choice in self.pins.values() if choice in AXES}


def _size(setting: Setting, axis: str) -> int:
    return setting.dp if axis == "dp" else setting.tp


def _uses(setting: Setting, what: str) -> bool:
    return {
        "recompute": setting.recompute != "none",
        "tp": setting.tp > 1,
        "dp": setting.dp > 1,
        "sp": setting.tp > 1 and setting.tensor == "tp+sp",
    }.get(what, setting.data == what and setting.dp > 1)


def is_intent(choice: str) -> bool:
    """Whether a pin's choice is an axis alone, and no label or state along one."""
    return "@" not in choice and choice.isidentifier()


def expand_pins(pins: Mapping[str, str], graph: Graph, hardware: Hardware) -> dict[str, str]:
    """Pins as the search reads them: `layers.*.mlp.*` -> `tp` splits those matrices as Megatron does.

    Columns or rows, whichever the recipe `tp` finds for each of them alone. Raises RecipeError if no
    product of matrices has such a parameter.
    """
    found = {name: choice for name, choice in pins.items() if not is_intent(choice)}
    for pattern, axis in pins.items():
        if is_intent(axis):
            found |= _split_over(pattern, axis, graph, hardware)
    return found


def _split_over(pattern: str, axis: str, graph: Graph, hardware: Hardware) -> dict[str, str]:
    plan = search(
        graph, {axis: 2}, hardware=hardware, recipe="tp", memory_bytes=UNBOUNDED_BYTES
    )  # fmt: skip
    origin = _parameters_behind(graph)
    found = {
        op.name: f"{plan.ops[op.name][0]}@{axis}"
        for op in graph.ops
        if is_product(op) and op.choice(plan.ops[op.name][0]).splits
        if any(fnmatchcase(origin.get(name, ""), pattern) for name in op.operands)
    }
    if not found:
        raise RecipeError(
            f"The pin {pattern!r}={axis} matches no product of matrices that could be split; "
            f"parameters are named like {', '.join(list(graph.parameters)[:3])}."
        )
    return found


def _parameters_behind(graph: Graph) -> dict[str, str]:
    """Tensors that are a parameter, or a cast or view of one, with its name."""
    found = {tensor: name for name, tensor in graph.parameters.items()}
    for op in graph.ops:
        if len(op.operands) == 1 and op.operands[0] in found:
            found.update(dict.fromkeys(op.results, found[op.operands[0]]))
    return found

"""Checks that every axis of the mesh can split something; the errors say which sizes could."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopar.errors import MeshError, SearchError
from autopar.ir import EXCHANGED, Choice, Graph, Mesh, Plan
from autopar.search.exact.choice_filter import ChoiceFilter
from autopar.search.request.recipe_rows import Recipe, Which, is_batch, is_seq


def check_axes(graph: Graph, mesh: Mesh, recipes: Sequence[Recipe] = ()) -> None:
    """Raises MeshError if some axis can split no factor, and no dim of any parameter.

    An axis whose recipe leaves all ops to one rank divides nothing, and one whose recipe asks for sharded parameters
    may store them in parts of different sizes.
    """
    others = [
        axis
        for axis, row in zip(mesh.names, recipes, strict=False)
        if row.worker is not None or (row.owner is None and 0 not in row.stages)
    ]
    factors = {(c.factor or c.label, c.size) for op in graph.ops for c in op.choices if c.splits}
    stored = {
        (f"dim {dim} of {name}", math.prod(sizes))
        for name, tensor in graph.parameters.items()
        for dim, sizes in enumerate(graph.tensors[tensor].dims)
    }
    for axis, size in mesh.axes:
        can_cut = any(graph.can_cut(c, size) for op in graph.ops for c in op.choices if c.splits)
        if axis not in others and not can_cut and all(found % size for _, found in stored):
            closest = _closest(size, factors or stored)
            remedy = (
                f"The closest sizes in it are {closest}; choose fewer ranks, or a size that divides one of them."
                if closest
                else "None of its sizes is above 1."
            )
            raise MeshError(
                f"Axis {axis} has size {size}, but no dim of this model can be split into {size} parts. {remedy}"
            )


def _closest(size: int, named: Iterable[tuple[str, int]]) -> str:
    by_size: dict[int, list[str]] = {}
    for name, found in sorted(named):
        if found > 1:
            by_size.setdefault(found, []).append(name)
    nearest = sorted(by_size, key=lambda found: (abs(math.log(found / size)), found))[:3]
    return ", ".join(f"{found} ({by_size[found][0]})" for found in nearest)


def check_used(graph: Graph, plan: Plan, recipes: Sequence[Recipe]) -> None:
    """Raises SearchError if a user's recipe for an axis splits nothing along it.

    A recipe that shards parameters (ZeRO) is useful even if no op is split: with a batch of 1 every rank does all the
    work, but stores only a part of parameters, gradients and optimizer states. A recipe with owners of parameters must
    split the batch, or leave all ops to one rank.
    """
    for position, (axis, size) in enumerate(plan.mesh.axes):
        recipe = recipes[position]
        if recipe.may is None or recipe.worker is not None or size == 1:
            continue
        split = (op.choice(plan.ops[op.name][position]) for op in graph.ops)
        if _shards_parameters(plan, recipe, position):
            continue
        if not any(choice.splits and _is_own(graph, recipe, choice) for choice in split):
            words = _splits_nothing(graph, recipe, f"{axis}={size}")
            raise SearchError(words if _own(recipe) else _about_batch(graph, words, axis, size))


def _shards_parameters(plan: Plan, recipe: Recipe, position: int) -> bool:
    """Whether a recipe asks for sharded parameters along an axis, and the plan shards some there."""
    asks = 0 not in recipe.stages
    return asks and any(each.storage[position].kind == "S" for each in plan.parameters.values())


def _about_batch(graph: Graph, words: str, axis: str, size: int) -> str:
    """The error of a batch that is not split: `words` with the dims that are the batch, and what helps."""
    found = {
        f"dim {dim} of {name}": math.prod(graph.tensors[tensor].dims[dim])
        for name, tensor in graph.inputs.items()
        for dim, factors in enumerate(graph.tensors[tensor].factors)
        if any(is_batch(graph.factors[factor].roles) for factor in factors)
    }
    able = ((op.name, c.label) for op in graph.ops for c in op.choices if op.flops and c.splits and c.size % size == 0)
    pin = next((f", with pins such as {{{name!r}: '{label}@{axis}'}}" for name, label in able), "")
    rings = [c for op in graph.ops for c in op.choices if EXCHANGED in c.label]
    lengths = [c.size for c in rings if is_seq(graph.factors[c.factor].roles)]
    by_sequence = "'cp', which splits the sequence, or " * any(x % size == 0 for x in lengths)
    else_ = f"take the recipe {by_sequence}'auto', which may split any dim{pin}."
    dims = ", ".join(f"{dim} (size {each})" for dim, each in [*found.items()][:4])
    return (
        f"{words} Here the batch is {dims or 'no dim above size 1'}. It is dim 0 of an input, unless all ops "
        "that know theirs (recurrent layers, attention, convolutions) have another dim for it. Put the samples into "
        f"dim 0 (batch_first=True in torch.nn), at least two of them; or {else_}"
    )


def _own(recipe: Recipe) -> tuple[Which, ...]:
    """The kinds of factors that are a recipe's purpose; splitting the batch is not."""
    return tuple(kind for kind in recipe.may or () if kind is not is_batch)


def _is_own(graph: Graph, recipe: Recipe, choice: Choice) -> bool:
    own, factor = _own(recipe), graph.factors.get(choice.factor)
    return not own or (factor is not None and any(kind(factor.roles) for kind in own))


def _splits_nothing(graph: Graph, recipe: Recipe, axis: str) -> str:
    choices = ChoiceFilter(graph, recipe)
    kinds = _own(recipe) or (*recipe.must, *recipe.products_must)
    sizes = {
        (choice.factor, choice.size)
        for op in graph.ops
        for choice in op.choices
        if choice.splits and any(kind(choices.roles(choice)) for kind in kinds)
    }
    listed = ", ".join(f"{name} of size {size}" for name, size in sorted(sizes)[:4])
    if listed:
        found = f"it splits {listed}, in addition to what the other axes split."
        return f"The recipe {recipe.name} splits nothing along {axis}: {found}"
    found = f"it asks for {recipe.meaning!r}, but no op of this model can run like that."
    return f"The recipe {recipe.name} splits nothing of this model: {found}"

"""Notes on large dims, and heads of attention, that an axis of the mesh may split and cannot cut, with what helps."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from autopar.ir import Graph, Plan
from autopar.ir.note import Note
from autopar.search.request.notes import any_layer, head_factors, place_of
from autopar.search.request.recipe_rows import is_model
from autopar.search.request.recipes import resolve, split_recipe

_LARGE = 0.05  # smallest part of the bytes of all parameters that is worth a note


def undivided_lines(graph: Graph, plan: Plan) -> tuple[Note, ...]:
    """Lines on large dims, and heads of attention, that an axis may split and cannot cut: one line for each."""
    may = [row.may is None or is_model in row.may for row in resolve(split_recipe(plan.recipe)[1], plan.mesh)]
    large, heads = _large_factors(graph), head_factors(graph)
    return tuple(
        Note(_undivided_line(graph, plan, axis, factors, factors[0] in heads), "undivided")
        for axis, (_, size) in enumerate(plan.mesh.axes)
        if may[axis]
        for factors in _by_layer(graph, large | heads)
        if not all(graph.can_cut(c, size) for op in graph.ops for c in op.choices if c.factor in factors)
    )


def _large_factors(graph: Graph) -> dict[str, None]:
    """Names of the factors that are a whole dim of large parameters."""
    sizes: Counter[str] = Counter()
    for name, tensor in graph.parameters.items():
        found = graph.tensors[tensor]
        bytes_ = math.prod(found.shape) * found.itemsize_bytes * graph.layer_count.get(name, 1)
        for dim in found.factors:
            sizes.update({any_layer(f): bytes_ for f in dim if len(dim) == 1})
        sizes["all"] += bytes_
    splittable = {choice.factor for op in graph.ops for choice in op.choices}
    return {
        name: None
        for name, factor in graph.factors.items()
        if "parameter" in factor.roles
        and name in splittable
        and not factor.roles & {"batch", "input"}
        and sizes[any_layer(name)] >= _LARGE * sizes["all"]
    }


def _by_layer(graph: Graph, factors: Iterable[str]) -> list[list[str]]:
    """Groups factors that have one size, and the same name except for the number of the layer."""
    found: dict[tuple[str, int], list[str]] = {}
    for name in factors:
        found.setdefault((any_layer(name), graph.factors[name].size), []).append(name)
    return list(found.values())


def _undivided_line(graph: Graph, plan: Plan, axis: int, factors: Sequence[str], is_heads: bool) -> str:
    (axis_name, parts), size = plan.mesh.axes[axis], graph.factors[factors[0]].size
    taken: Counter[str] = Counter()
    for op in graph.ops:
        if any(choice.factor in factors for choice in op.choices):
            factor = op.choice(plan.ops[op.name][axis]).factor
            taken[place_of(factor) if factor else ""] += graph.layer_count.get(op.name, 1)
    instead = next((f" is split by {each} instead" for each in _most(taken) if each), " is not split")
    above = -(-size // parts) * parts
    remedy = f"{above} would be split"
    if is_heads:
        what, whose = f"{size} attention heads", "attention"
    elif _is_vocabulary(graph, factors):
        what, whose = f"A vocabulary of {size}", "it"
        remedy = f"pad it to {above}, with resize_token_embeddings({above})"
    else:
        what, whose = f"Size {size} ({place_of(factors[0])})", "it"
    if inner := _two_axes(graph, factors, parts):
        remedy += f", or two axes {inner} in place of {axis_name}"
    return f"{what} cannot be split over {axis_name}={parts}, so {whose}{instead}; {remedy}."


def _most(taken: Counter[str]) -> list[str]:
    return [name for name, _ in taken.most_common()]


def _two_axes(graph: Graph, factors: Sequence[str], parts: int) -> str:
    """Sizes of two axes that could split a factor and the factor after it, such as key-value heads and their queries.

    "" if there are none.
    """
    outer = math.gcd(graph.factors[factors[0]].size, parts)
    following = {
        graph.factors[inner].size
        for tensor in graph.parameters.values()
        for dim in graph.tensors[tensor].factors
        for before, inner in itertools.pairwise(dim)
        if before in factors
    }
    splits = outer == graph.factors[factors[0]].size and any(size % (parts // outer) == 0 for size in following)
    return f"of {outer} and {parts // outer} ranks" if splits and outer < parts else ""


def _is_vocabulary(graph: Graph, factors: Sequence[str]) -> bool:
    """Whether one of these factors is the vocabulary: the rows of an embedding table."""
    return any(
        op.kind == "aten.embedding" and graph.tensors[op.operands[0]].factors[0][:1] == (name,)
        for op in graph.ops
        for name in factors
    )

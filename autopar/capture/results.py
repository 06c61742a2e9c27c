"""The results of a step: the loss, and other values that the loss function or the model returned.

A step that returns `(loss, {"acc": acc, "logits": logits})` is captured as a graph with the outputs
`(acc, logits, loss)`: the loss is the last output, and backward starts from it alone. The other outputs, the extra
results, are detached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopar._torch import pytree


def loss_in(result: Any) -> Any:
    """The loss, if the result contains one among other values, as in models of transformers; else the result."""
    if isinstance(result, Mapping) and "loss" in result:
        return result["loss"]
    return getattr(result, "loss", result)


def loss_last(result: Any) -> Any:
    """`(loss, *extras)` as `(*extras, loss)`, the extras detached; the loss alone where there are none.

    A named tuple keeps its type, under which the names of its fields are those of other values until `loss_first`.
    """
    if not isinstance(result, tuple) or not result:
        return result
    loss, *extras = result
    if not extras:
        return loss
    return _as_type_of(result, (*pytree.tree_map(_detached, tuple(extras)), loss))


def loss_first(result: Any) -> Any:
    """The result of a captured step as the user returned it: the inverse of `loss_last`."""
    if not isinstance(result, tuple):
        return result
    return _as_type_of(result, (result[-1], *result[:-1]))


def _as_type_of(result: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values as a named tuple where the result is one."""
    make = getattr(type(result), "_make", tuple)
    made: tuple[Any, ...] = make(values)
    return made


def extra_names(spec: pytree.TreeSpec) -> tuple[str, ...]:
    """The place of every result except the loss, such as `result[1]['acc']`."""
    if spec.is_leaf():
        return ()
    numbered = loss_first(pytree.tree_unflatten(range(spec.num_leaves), spec))
    pairs, _ = pytree.tree_flatten_with_path(numbered)
    places = {number: f"result{pytree.keystr(path)}" for path, number in pairs}
    return tuple(places[i] for i in range(spec.num_leaves - 1))


def _detached(x: Any) -> Any:
    has_gradient = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
    return x.detach() if has_gradient else x

"""Nested containers of tensors, flattened to their leaves and put together again."""

from collections.abc import Sequence
from typing import Any

from torch.utils._pytree import (
    GetAttrKey,
    TreeSpec,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "TreeSpec", "are_inside", "keystr", "register_container", "register_pytree_node", "tree_flatten",
    "tree_flatten_with_path", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten", "treespec_dumps",
    "treespec_loads",
]  # fmt: skip


def register_container(kind: type, names: Sequence[str]) -> None:
    """Registers a class as a container of tensors.

    Its contents are the attributes with these names; its constructor takes them in this order.
    """

    def contents(x: Any) -> list[Any]:
        return [getattr(x, name) for name in names]

    register_pytree_node(
        kind,
        lambda x: (contents(x), None),
        lambda values, _: kind(*values),
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=lambda x: (
            [(GetAttrKey(name), value) for name, value in zip(names, contents(x), strict=True)],
            None,
        ),
    )


def are_inside(spec: TreeSpec, kind: type) -> list[bool]:
    """For each leaf, whether it lies in a container of a class or of one derived from it."""
    if spec.is_leaf():
        return [False]
    found = [is_inside for child in spec.children() for is_inside in are_inside(child, kind)]
    is_kind = isinstance(spec.type, type) and issubclass(spec.type, kind)
    return [True] * len(found) if is_kind else found

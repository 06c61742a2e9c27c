"""Nested containers of tensors, flattened to their leaves and put together again."""

from collections.abc import Sequence
from typing import Any

from torch.utils._pytree import (
    SERIALIZED_TYPE_TO_PYTHON_TYPE,
    SUPPORTED_SERIALIZED_TYPES,
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
)

__all__ = [
    "TreeSpec",
    "are_inside",
    "keystr",
    "read_tree",
    "register_container",
    "register_pytree_node",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "write_tree",
]

Json = Any
_PLAIN = (type(None), bool, int, float, str)


def write_tree(spec: TreeSpec) -> Json:
    """A tree as JSON: None for a leaf, else the container's name, its context, and its children.

    Raises ValueError for a container whose class has no name, or that keeps more than plain data.

    >>> write_tree(tree_flatten({"x": [1, 2]})[1])
    ['builtins.dict', ['x'], [['builtins.list', None, [None, None]]]]
    """
    if spec.is_leaf():
        return None
    found = SUPPORTED_SERIALIZED_TYPES.get(spec.type)
    name = found.serialized_type_name if found else None
    if name is None or _container(name) is not spec.type or not _is_plain(spec.context):
        raise ValueError(f"{spec.type.__name__} has no text")
    return [name, spec.context, [write_tree(child) for child in spec.children()]]


def read_tree(document: Json) -> TreeSpec:
    """The tree that `write_tree` has written.

    Nothing is imported, and no function of a container's class reads its data. Raises ValueError for another document.
    """
    if document is None:
        return tree_flatten(0)[1]
    name, context, children = document
    kind = _container(name)
    if kind is None or not _is_plain(context):
        raise ValueError(f"there is no container {name!r} with {context!r}")
    return TreeSpec(kind, context, [read_tree(child) for child in children])


def _container(name: str) -> type | None:
    """The class of containers that this process has under a name; None where it reads its data by a function."""
    kind = SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    found = SUPPORTED_SERIALIZED_TYPES.get(kind) if kind is not None else None
    return kind if found is not None and found.from_dumpable_context is None else None


def _is_plain(context: Any) -> bool:
    values = context if type(context) is list else [context]
    return all(type(x) in _PLAIN for x in values)


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

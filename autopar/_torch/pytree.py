"""Nested containers of tensors, flattened to their leaves and put together again."""

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import (
    SERIALIZED_TYPE_TO_PYTHON_TYPE,
    SUPPORTED_SERIALIZED_TYPES,
    GetAttrKey,
    KeyEntry,
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

from autopar.errors import CaptureError

__all__ = [
    "TreeSpec",
    "are_inside",
    "keystr",
    "read_tree",
    "objects_in",
    "register_container",
    "register_objects",
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
_OBJECTS = set[type]()  # classes of objects that `register_objects` has met


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


def register_objects(tree: Any, _outer: tuple[Any, ...] = ()) -> None:
    """Makes containers of the classes of a tree's own objects that hold tensors: of their attributes, by name.

    Such as a batch of a class of the script's, or a cache of keys. Modules and objects without tensors stay leaves.
    Raises CaptureError for an object that holds itself.
    """
    for x in tree_leaves(tree):
        attributes = getattr(x, "__dict__", None)
        if not isinstance(attributes, dict) or isinstance(x, Tensor | nn.Module | ModuleType) or type(x) in _OBJECTS:
            continue
        if any(x is one for one in _outer):
            raise CaptureError(
                f"A {type(x).__name__} among the arguments or results holds itself, through its attributes. Give or "
                "return the tensors in it instead."
            )
        register_objects(attributes, (*_outer, x))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(attributes)):
            _register_object(type(x))


def objects_in(tree: Any) -> list[Any]:
    """The objects in a tree whose classes `register_objects` has made containers, also those inside of others."""
    found = [x for x in tree_leaves(tree, is_leaf=lambda x: type(x) in _OBJECTS) if type(x) in _OBJECTS]
    return found + [inner for x in found for inner in objects_in(vars(x))]


def _register_object(kind: type) -> None:
    """Attributes of tensors and plain values are the contents, and all others a part of the tree."""
    _OBJECTS.add(kind)

    def keyed(x: Any) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        held = sorted(vars(x).items())
        contents = {name: value for name, value in held if _is_content(tree_leaves(value))}
        others = {name: value for name, value in held if name not in contents}
        context = [*contents, *([others] if others else [])]
        return [(GetAttrKey(name), value) for name, value in contents.items()], context

    def flattened(x: Any) -> tuple[list[Any], Any]:
        pairs, context = keyed(x)
        return [value for _, value in pairs], context

    def put_together(values: Iterable[Any], context: Any) -> Any:
        new: Any = object.__new__(kind)
        contents = list(values)
        vars(new).update(zip(context, contents, strict=False))
        for others in context[len(contents) :]:
            vars(new).update(others)
        return new

    name = f"{kind.__module__}.{kind.__qualname__}"
    register_pytree_node(kind, flattened, put_together, serialized_type_name=name, flatten_with_keys_fn=keyed)


def _is_content(leaves: Sequence[Any]) -> bool:
    return any(isinstance(x, Tensor) for x in leaves) or all(type(x) in _PLAIN for x in leaves)


def are_inside(spec: TreeSpec, kind: type) -> list[bool]:
    """For each leaf, whether it lies in a container of a class or of one derived from it."""
    if spec.is_leaf():
        return [False]
    found = [is_inside for child in spec.children() for is_inside in are_inside(child, kind)]
    is_kind = isinstance(spec.type, type) and issubclass(spec.type, kind)
    return [True] * len(found) if is_kind else found

"""Nested containers of tensors, flattened to their leaves and put together again."""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
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
    tree_is_leaf,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from autopar.errors import CaptureError

__all__ = [
    "TreeSpec",
    "are_inside",
    "changeable_in",
    "contents_of",
    "keystr",
    "read_tree",
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
_SYMBOLS = (torch.SymBool, torch.SymInt, torch.SymFloat)
_FIXED = (type, FunctionType, BuiltinFunctionType, Enum, torch.device, torch.dtype)
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


def register_objects(tree: Any) -> None:
    """Makes containers of the classes of a tree's own objects that hold tensors: of their attributes, by name.

    Such as a batch of a class of the script's, or a cache of keys. Modules and objects without tensors stay leaves.
    Raises CaptureError for an object that cannot be made again from its attributes, that is met twice, or that has an
    attribute which may change unseen.
    """
    met: dict[int, Any] = {}
    for x in tree_leaves(tree, is_leaf=lambda x: type(x) in _OBJECTS):
        if _is_opened(x):
            _open_object(x, "an argument or result", met)


def _is_opened(x: Any) -> bool:
    return type(x) in _OBJECTS or (_has_attributes(x) and _holds_tensor(x))


def _has_attributes(x: Any) -> bool:
    """Whether this is an object of a class of the script's, rather than a leaf or a container that torch knows."""
    others = (Tensor, nn.Module, ModuleType, *_FIXED)
    is_known = type(x) not in _OBJECTS and not tree_is_leaf(x)
    return isinstance(getattr(x, "__dict__", None), dict) and not is_known and not isinstance(x, others)


def _holds_tensor(x: Any) -> bool:
    waiting, seen = [x], dict[int, Any]()  # objects are kept, so that no other has their id
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            return True
        if id(value) not in seen:
            seen[id(value)] = value
            waiting += vars(value).values() if _has_attributes(value) else _children(value)
    return False


def _children(x: Any) -> list[Any]:
    """The contents of a container, not opened; a leaf is its own."""
    answers = iter([False])
    return tree_leaves(x, is_leaf=lambda _: next(answers, True))


def _open_object(x: Any, place: str, met: dict[int, Any]) -> None:
    kind: Any = type(x)
    has_slots = any(isinstance(value, MemberDescriptorType) for base in kind.__mro__ for value in vars(base).values())
    if kind.__new__ is not object.__new__ or has_slots:
        raise CaptureError(
            f"A {kind.__name__} among the arguments or results cannot be made again from its attributes alone: it has "
            "__slots__, a __new__ of its own, or a base that is built in. Give or return the tensors in it instead."
        )
    _refuse_met(x, place, met)
    for name, value in vars(x).items():
        _open_attribute(value, f"{kind.__name__}.{name}", met)
    if kind not in _OBJECTS:
        _register_object(kind)


def _open_attribute(value: Any, place: str, met: dict[int, Any]) -> None:
    if isinstance(value, (Tensor, *_SYMBOLS, *_FIXED)) or type(value) in _PLAIN:
        return
    if _is_opened(value):
        _open_object(value, place, met)
    elif tree_is_leaf(value):
        remedy = "torch.from_numpy of it" if isinstance(value, np.ndarray) else "numbers or tensors"
        raise CaptureError(f"{place} is a {type(value).__name__}, which may change unseen: give {remedy} in its place.")
    else:
        if not isinstance(value, tuple):
            _refuse_met(value, place, met)
        for child in _children(value):
            _open_attribute(child, f"{place}[...]", met)


def _refuse_met(x: Any, place: str, met: dict[int, Any]) -> None:
    """Raises CaptureError for an object or container that was met before, since a program makes two of it."""
    if id(x) in met:
        raise CaptureError(
            f"One {type(x).__name__} is met twice among the arguments or results, the second time as {place}, and a "
            "captured program makes two of it. Give copy.copy of it there, or the tensors in it."
        )
    met[id(x)] = x


def changeable_in(tree: Any) -> list[Any]:
    """The lists, deques, dicts and objects in a tree, also those inside of others; objects of `register_objects`.

    Of another container only the objects: a cache of keys notes in a dict of its own what it need not compute again.
    """
    if tree_is_leaf(tree):
        return []
    found = [x for child in _children(tree) for x in changeable_in(child)]
    if isinstance(tree, (list, deque, dict)) or type(tree) in _OBJECTS:
        return [tree, *found]
    return found if isinstance(tree, tuple) else [x for x in found if type(x) in _OBJECTS]


def contents_of(x: Any) -> dict[Any, Any]:
    """What a list, a deque, a dict or an object holds now, by place, key or name."""
    if isinstance(x, (list, deque)):
        return dict(enumerate(x))
    return dict(x if isinstance(x, dict) else vars(x))


def _register_object(kind: type) -> None:
    """Attributes of fixed values are a part of the tree, and all others the contents, whatever they are mapped to."""
    _OBJECTS.add(kind)

    def keyed(x: Any) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        held = sorted(vars(x).items())
        fixed = {name: value for name, value in held if isinstance(value, _FIXED)}
        contents = {name: value for name, value in held if name not in fixed}
        return [(GetAttrKey(name), value) for name, value in contents.items()], [*contents, *([fixed] if fixed else [])]

    def flattened(x: Any) -> tuple[list[Any], Any]:
        pairs, context = keyed(x)
        return [value for _, value in pairs], context

    def put_together(values: Iterable[Any], context: Any) -> Any:
        new: Any = object.__new__(kind)
        contents = list(values)
        vars(new).update(zip(context, contents, strict=False))
        for fixed in context[len(contents) :]:
            vars(new).update(fixed)
        return new

    name = f"{kind.__module__}.{kind.__qualname__}"
    register_pytree_node(kind, flattened, put_together, serialized_type_name=name, flatten_with_keys_fn=keyed)


def are_inside(spec: TreeSpec, kind: type) -> list[bool]:
    """For each leaf, whether it lies in a container of a class or of one derived from it."""
    if spec.is_leaf():
        return [False]
    found = [is_inside for child in spec.children() for is_inside in are_inside(child, kind)]
    is_kind = isinstance(spec.type, type) and issubclass(spec.type, kind)
    return [True] * len(found) if is_kind else found

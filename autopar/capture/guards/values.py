"""Python values that a capture meets: copies of them, and whether two are the same.

A value is *plain* if equality of value and type means that it is the same (numbers, text, dtypes, tuples of them). A
container is compared element by element, a tensor by identity and version, and any other object by identity alone; so
is a number or container of a class of the user's that has attributes of its own. The attributes of such an object are
watched separately (`autopar.capture.guards.watch`).
"""

from __future__ import annotations

import enum
import operator
from collections import deque
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    range,
    enum.Enum,
    np.generic,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)

_IS_HEAP_TYPE = 1 << 9  # of a class that Python code has defined
MUTABLE = (list, dict, set, deque)
CONTAINERS = (*MUTABLE, tuple, frozenset)


class _Missing:
    """The value of an attribute that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


@dataclass(frozen=True, eq=False)
class SeenTensor:
    """A tensor as it was: the object, and the number of writes into it so far."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, eq=False)
class SeenContainer:
    """A container as it was.

    Attributes:
        kind: its type.
        elements: its elements as they were; for a dict its keys and values in turn.
        owner: the container itself if it has attributes of its own, else None.
    """

    kind: type
    elements: tuple[Any, ...]
    owner: Any


def is_plain(value: Any) -> bool:
    """Whether two such values are the same if their types and values are equal."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def seen(value: Any) -> Any:
    """A value as it is now, for `is_same` to compare with later."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return SeenTensor(value, version(value))
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, (*MUTABLE, tuple)) and not is_plain(value):
        return SeenContainer(type(value), tuple(map(seen, elements(value))), _owner(value))
    return value


def has_own(value: Any) -> bool:
    """Whether a number or container has attributes besides those of its class."""
    names = slots(type(value))
    return bool(getattr(value, "__dict__", None)) or any(hasattr(value, name) for name in names)


def _owner(value: Any) -> Any:
    return value if has_own(value) else None


def elements(container: Any) -> list[Any]:
    """The elements of a container; keys and values of a dict in turn, a set as one element."""
    if isinstance(container, dict):
        return [x for pair in container.items() for x in pair]
    return [frozenset(container)] if isinstance(container, set) else list(container)


def is_same(value: Any, before: Any) -> bool:
    """Whether a value equals the note that `seen` made of it before."""
    if value is before:
        return True
    if isinstance(before, SeenTensor):
        return value is before.tensor and version(value) == before.version
    if isinstance(before, SeenContainer):
        is_alike = type(value) is before.kind and _owner(value) is before.owner
        return is_alike and _all_same(elements(value), before.elements)
    if type(value) is not type(before):
        return False
    if isinstance(before, np.ndarray):
        return value.dtype == before.dtype and np.array_equal(value, before)
    if has_own(value) or has_own(before):
        return False
    if isinstance(before, tuple):
        return _all_same(value, before)
    return is_plain(before) and bool(value == before or (value != value and before != before))


def _all_same(values: Any, before: Any) -> bool:
    return len(values) == len(before) and all(map(is_same, values, before))


def is_number(value: Any) -> bool:
    """Whether a value is a float, an int, or a floating tensor without dims that requires no gradient."""
    if type(value) is Tensor:
        return value.ndim == 0 and value.is_floating_point() and not value.requires_grad
    return type(value) in (float, int)


def is_number_like(value: Any, before: Any) -> bool:
    """Whether a value is a number of the kind of one that `seen` has noted: of its type, dtype and device."""
    if not is_number(value):
        return False
    if isinstance(before, SeenTensor):
        old = before.tensor
        same_kind = type(value) is Tensor and (value.dtype, value.device) == (old.dtype, old.device)
        return same_kind and is_number(old)
    return type(value) is type(before)


def version(x: Tensor) -> int:
    """The number of writes into a tensor; inference tensors count none."""
    return 0 if x.is_inference() else x._version


def in_words(value: Any) -> str:
    """A value for people, in a few words."""
    if isinstance(value, SeenTensor):
        value = value.tensor
    if isinstance(value, SeenContainer):
        return f"a {value.kind.__name__} with other elements"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {list(value.shape)}"
    if is_plain(value) or value is MISSING or isinstance(value, MUTABLE):
        text = repr(value)
        return text if len(text) < 60 else f"{text[:57]}..."
    return f"{'an' if type(value).__name__[0] in 'AEIOU' else 'a'} {type(value).__name__}"


def slots(kind: type) -> list[str]:
    names = [getattr(k, "__slots__", ()) for k in kind.__mro__]
    return [n for each in names for n in ((each,) if isinstance(each, str) else each)]


def copied(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else type(elements(container))(container)


def is_copy(container: Any, copy: Any) -> bool:
    """Whether a container holds the objects that its copy does."""
    if isinstance(container, set):
        return container == set(copy)
    now, then = elements(container), elements(copy)
    return len(now) == len(then) and all(map(operator.is_, now, then))


def noted_in(container: Any, copy: Any) -> dict[Any, Any] | None:
    """The entries that a dict has gained since it was copied, if it changed in nothing else and they hold no data.

    So libraries note which of their parts serves a type or a name (einops), and find it there the next time.
    """
    if type(container) is not dict or not all(container.get(k, MISSING) is v for k, v in copy.items()):
        return None
    gained = {k: v for k, v in container.items() if k not in copy}
    is_note = all((isinstance(k, type) or is_plain(k)) and _holds_no_data(v) for k, v in gained.items())
    return gained if is_note else None


def _holds_no_data(value: Any) -> bool:
    """Whether a value is a class, a module, a function without a closure, or an object of the user's made of such."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None and not value.__defaults__
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    if isinstance(value, (type, ModuleType)):
        return True
    is_object = type(value).__flags__ & _IS_HEAP_TYPE and not isinstance(value, (Tensor, nn.Module, *CONTAINERS))
    return bool(is_object) and not slots(type(value)) and all(map(_holds_no_data, vars(value).values()))


def refill(container: Any, copy: Any) -> None:
    container.clear()
    container.update(copy) if isinstance(container, (dict, set)) else container.extend(copy)

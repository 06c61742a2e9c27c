"""Parts of the state of Python as text: plain values, tensors, code."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar._torch import OpOverload, is_torchs_operator
from autopar.capture.guards.user_code import OTHERS, file_of

_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
# Entries of a class that no code reads, or that Python fills in when it likes.
UNREAD = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__annotations__",
        "__annotate__",
        "__firstlineno__",
        "__static_attributes__",
        "__slotnames__",
        "_abc_impl",
        "__abstractmethods__",
        "__annotations_cache__",
    }
)
# What a code object does, and the lines that errors name.
_OF_CODE = (
    "co_code",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_flags",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_exceptiontable",
    "co_filename",
    "co_qualname",
    "co_firstlineno",
    "co_linetable",
)


def hash_of_code(code: types.CodeType, known: dict[types.CodeType, str]) -> str:
    """A hash of everything that a code does, with that of the functions it makes.

    Args:
        code: the code.
        known: hashes of codes, to which those of this code and of the functions that it makes are added.
    """
    if code not in known:
        said = [getattr(code, name) for name in _OF_CODE]
        said += [hash_of_code(c, known) if isinstance(c, types.CodeType) else plain_text(c) for c in code.co_consts]
        known[code] = hashlib.sha256(repr(said).encode()).hexdigest()
    return known[code]


def bytes_of(x: Tensor | np.ndarray[Any, Any]) -> bytes:
    """The values of a tensor or array, row by row."""
    if isinstance(x, Tensor):
        return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return x.tobytes()


def plain_text(value: Any) -> str:
    """A plain value as text that is the same in every process."""
    if isinstance(value, frozenset):
        return f"frozenset{sorted(map(plain_text, value))}"
    if type(value) is tuple:
        return f"({', '.join(map(plain_text, value))})"
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__} {value!r}"


def likeness(x: Tensor) -> str:
    """The properties of a tensor that a trace knows, as text."""
    kind = "parameter" if isinstance(x, nn.Parameter) else ""
    return f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device} {x.requires_grad} {x.layout} {kind}"


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from with_inner(constant)


def belongs_to_torch(value: Any) -> bool:
    """Whether a value is one of torch's operators, or a module or class of torch, Python or numpy."""
    if isinstance(value, OpOverload):
        return is_torchs_operator(value)
    if isinstance(value, types.ModuleType):
        return is_versioned(value.__name__)
    return isinstance(value, type) and is_others(value)


def is_versioned(module: str) -> bool:
    """Whether the name of a module is that of one which nobody edits between two starts: its version is known."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in OTHERS


def is_others(kind: type) -> bool:
    return is_versioned(kind.__module__) and kind.__module__ != "__main__"


def has_source(kind: type) -> bool:
    """Whether a class is written in Python, so that its code has a text."""
    is_python = kind.__module__ == "__main__" or file_of(kind).endswith(".py")
    is_made = is_python and bool(kind.__flags__ & _MADE_BY_PYTHON)
    return is_made or kind is types.SimpleNamespace

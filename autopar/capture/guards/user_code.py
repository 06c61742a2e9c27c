"""Questions about code: who wrote it, which names it reads and stores, and on which lines.

The user's code is all code that does not belong to torch, numpy, autopar or the standard library. For attributes
installed libraries count as the user's code; for globals they do not, because they keep caches in them.
"""

from __future__ import annotations

import datetime
import dis
import inspect
import os
import random
import sys
import threading
import types
from collections.abc import Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

_STANDARD = os.path.dirname(os.__file__) + os.sep
_HERE = str(Path(__file__).parents[2])
OTHERS = ("torch", "numpy", "autopar", "sympy", "mpmath", "networkx", "optree")
_SITE = os.path.dirname(os.path.dirname(torch.__file__))
_FOLDERS = (_HERE + os.sep, *(os.path.join(_SITE, name) + os.sep for name in OTHERS))
_GENERATED = ("<frozen", "<string>", "<eval_with_key>", "<attrs", "<__array_function__")
_INSTALLED = ("site-packages", "dist-packages")
GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_FILLING = ("CACHE", "EXTENDED_ARG")
_COUNTS = ("+", "+=", "-", "-=")


@cache
def is_users(filename: str) -> bool:
    """Whether code of a file is the user's, or of a library between the user and torch."""
    return not (filename.startswith((*_GENERATED, *_FOLDERS)) or is_standard(filename))


@cache
def is_standard(filename: str) -> bool:
    """Whether code of a file belongs to the standard library."""
    return filename.startswith(_STANDARD) and not is_installed(filename)


def is_installed(filename: str) -> bool:
    """Whether code of a file belongs to an installed library."""
    return any(part in filename for part in _INSTALLED)


def file_of(kind: type) -> str:
    """The file of a class; "" where it has none."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def is_users_type(kind: type) -> bool:
    """Whether attributes of a type's objects are watched: the user's own classes, namespaces and those of threads."""
    if kind.__name__ in ("SimpleNamespace", "Namespace") or kind is threading.local:
        return True
    top = kind.__module__.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in OTHERS


def calling(frame: types.FrameType | None) -> types.FrameType | None:
    """The frame that called into the standard library, or the frame itself."""
    while frame is not None and is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def place_of(frame: types.FrameType | None) -> str:
    """The line of the user's that is running: `file:line`."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "a line of torch" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_count(frame: types.FrameType, name: str) -> bool:
    """Whether an attribute is only read to add a constant to it, as in `self.calls += 1`."""
    return _counts(frame.f_code, frame.f_lasti, name)


@lru_cache(maxsize=10_000)  # the layers of a model run the same code
def _counts(code: types.CodeType, offset: int, name: str) -> bool:
    ops = list(dis.get_instructions(code))
    at = next((i for i, op in enumerate(ops) if op.offset == offset), None)
    if at is None or ops[at].argval != name:
        return False
    after = [op for op in ops[at + 1 : at + 8] if op.opname != "CACHE"]
    if len(after) < 2:  # `return self.calls`
        return False
    constant, add, *rest = after
    stored = next((op for op in rest if not op.opname.startswith(("SWAP", "LOAD_FAST"))), None)
    return (
        constant.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
        and add.opname == "BINARY_OP"
        and add.argrepr in _COUNTS
        and stored is not None
        and stored.opname == "STORE_ATTR"
        and stored.argval == name
    )


def globals_of(code: types.CodeType) -> Iterator[tuple[str, int]]:
    """The globals that a code names, each with its first line."""
    line, found = code.co_firstlineno, set()
    for op in dis.get_instructions(code):
        line = op.positions.lineno if op.positions and op.positions.lineno else line
        if op.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME") and op.argval not in found:
            found.add(op.argval)
            yield op.argval, line


def imports_of(code: types.CodeType, package: str) -> Iterator[tuple[str, int]]:
    """The modules that a code of a package imports while it runs, by their full names, each with its line."""
    ops = [op for op in dis.get_instructions(code) if op.opname not in _FILLING]
    line, path = code.co_firstlineno, package.split(".")
    for i, op in enumerate(ops):
        line = op.positions.lineno if op.positions and op.positions.lineno else line
        if op.opname == "IMPORT_NAME":
            dots = ops[i - 2].argval  # on the stack below the names that are imported
            parents = path[: max(0, len(path) - dots + 1)] if dots else []
            yield ".".join(filter(None, [*parents, op.argval])), line


def is_state_of_numpy(state: Any, other: Any) -> bool:
    """Whether two states of numpy's generator are the same."""
    mine, others = state["state"], other["state"]
    return mine["pos"] == others["pos"] and np.array_equal(mine["key"], others["key"])


def draws(function: Any) -> bool:
    """Whether a built-in function draws from a generator of Python or numpy."""
    source = getattr(function, "__self__", None)
    return isinstance(source, GENERATORS) and "state" not in function.__name__


def draws_from_own(function: Any) -> bool:
    """Whether a built-in function draws from a `random.Random` that is not Python's own, which Dynamo gets wrong."""
    source = getattr(function, "__self__", None)
    pythons = getattr(random.random, "__self__", None)
    return isinstance(source, random.Random) and source is not pythons


def reads_clock(function: Any) -> bool:
    """Whether a built-in function returns the time or noise of the machine."""
    name = getattr(function, "__name__", "")
    is_clock = getattr(function, "__module__", "") == "time" and name not in ("sleep", "strftime")
    return is_clock or name == "urandom" or (name in ("now", "utcnow", "today") and _is_date(function))


def _is_date(function: Any) -> bool:
    source = getattr(function, "__self__", None)
    return isinstance(source, type) and issubclass(source, datetime.date)


def line_naming_numpy(code: types.CodeType, values: dict[str, Any]) -> int | None:
    """The first line of a code that names `numpy.random` or a function of it."""
    line = code.co_firstlineno
    for op in dis.get_instructions(code):
        line = op.positions.lineno if op.positions and op.positions.lineno else line
        value = values.get(op.argval) if isinstance(op.argval, str) else None
        if op.argval == "random" or isinstance(getattr(value, "__self__", None), GENERATORS):
            return line
    return None


def line_of(value: Any) -> str:
    """Where a function, or the forward or call of an object, is written."""
    value = value.func if isinstance(value, partial) else value
    if isinstance(value, nn.Module):
        value = value.forward
    elif not inspect.isroutine(value):
        value = inspect.getattr_static(type(value), "__call__", value)
    code = getattr(inspect.unwrap(value), "__code__", None)
    return "torch" if code is None else f"{code.co_filename}:{code.co_firstlineno}"

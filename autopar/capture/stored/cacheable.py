"""Which captures another process may use: those that are made of nothing but the Python state that a key tells.

The key of a stored capture is a hash of `PythonState`, of the arguments, and of torch's switches. A capture is right
for every process with the same key if the Python that ran could read nothing else. Watching the capture has shown
what ran and what was read (`autopar.capture.guards.watch`); here each of it has to be a part of the state.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

from autopar.capture.captured import Captured
from autopar.capture.guards.user_code import globals_of, imports_of, is_installed
from autopar.capture.stored.python_state import NoText, PythonState

# Modules of the standard library that compute, and read nothing of the machine.
_PURE = frozenset(
    {
        "__future__",
        "abc",
        "bisect",
        "builtins",
        "cmath",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "math",
        "numbers",
        "operator",
        "re",
        "statistics",
        "string",
        "types",
        "typing",
        "warnings",
    }
)
# Names by which code asks the process, the machine or a file, or finds a value in a way that is not watched.
_ASKING = frozenset(
    {
        "__annotations__",
        "__config__",
        "__dataclass_fields__",
        "__dict__",
        "__doc__",
        "__import__",
        "__version__",
        "_C",
        "accelerator",
        "are_deterministic_algorithms_enabled",
        "argv",
        "backends",
        "cuda",
        "distributed",
        "environ",
        "eval",
        "exec",
        "fields",
        "from_file",
        "fromfile",
        "genfromtxt",
        "get_num_threads",
        "get_rank",
        "get_rng_state",
        "get_world_size",
        "getenv",
        "globals",
        "hash",
        "hub",
        "id",
        "import_module",
        "initial_seed",
        "input",
        "is_available",
        "is_initialized",
        "jit",
        "load",
        "loadtxt",
        "memmap",
        "mps",
        "open",
        "version",
        "xpu",
    }
)
_LOOKING = frozenset({"attrgetter", "getattr", "vars"})  # find an entry by a name that is computed
_LIBRARIES = ("torch", "numpy")
_PROCESS = tuple(f"torch.{name}" for name in ("distributed", "cuda", "backends", "hub", "serialization", "jit"))


def refuse_unportable(captured: Captured, state: PythonState) -> None:
    """Raises NoText for a capture that may depend on more than a state says.

    Args:
        captured: the capture.
        state: what Python could read before the capture.
    """
    if captured.sets_up:
        raise NoText("a library has set values of the model while it was captured")
    if captured.numbers:
        raise NoText("numbers of Python are inputs of the graph")
    if not captured.guards.hold():
        raise NoText("a value that was read has changed since")
    for code, space in captured.ran:
        where = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
        if is_installed(code.co_filename):
            raise NoText(f"{where} belongs to an installed library")
        if not state.has_code(code):
            raise NoText(f"{where} is reached in a way that only a run shows")
        if state.has_unknown_default(code):
            raise NoText(f"a default of {where} can be another one at every start")
        _refuse_asking(code, space, where)
    for guard in captured.guards:
        state.address(guard.place)


def _refuse_asking(code: types.CodeType, space: Mapping[str, Any], where: str) -> None:
    """Raises NoText for code that may ask the process, the machine or a file."""
    named = sorted(_ASKING & set(code.co_names))
    if named:
        raise NoText(f"{where} names {named[0]}, which may have another value at every start")
    package = space.get("__package__") or ""
    imported = [name for name, _ in imports_of(code, package) if not _is_pure(name)]
    if imported:
        raise NoText(f"{where} imports {imported[0]}")
    for name, _ in globals_of(code):
        value = space.get(name)
        module = _module_of(value)
        if not _is_pure(module):
            raise NoText(f"{where} uses {module}, which may have another value at every start")
        is_users = isinstance(value, types.ModuleType) and module.partition(".")[0] not in _LIBRARIES
        if is_users and _LOOKING & set(code.co_names):
            raise NoText(f"{where} may ask the module {module} for anything")


def _module_of(value: object) -> str:
    """The name of a module, or of the module that a function or class belongs to; "" for another value."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    found = getattr(value, "__module__", None)
    return found if isinstance(found, str) else ""


def _is_pure(module: str) -> bool:
    """Whether what stands in a module depends on its version alone; true for modules of the user's."""
    if module.startswith(_PROCESS):
        return False
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names or top in _PURE

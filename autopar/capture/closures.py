"""The functions with a closure that were there before a forward ran: which of them runs now.

A profile shows the code that runs and the values of its variables, and not the function. Functions that one function
has made have equal code, and each its own cells (`[scaled_by(rate) for rate in rates]`). So the running one is among
those with this code whose cells hold these values. What the forward itself makes is left out; its cells hold the
forward's own variables.
"""

from __future__ import annotations

import gc
import inspect
import types
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

from autopar.capture.user_code import is_installed, is_users
from autopar.capture.values import MISSING

_AT_ONCE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # which run where they are made


class Closures:
    """The user's functions with a closure, from before the first run."""

    def look(self, code: types.CodeType) -> None:
        """Finds the functions, before a code runs that may be one of them or make others."""
        if has_closure(code) or makes_closures(code):
            _ = self._found

    def running(
        self, code: types.CodeType, variables: Mapping[str, Any]
    ) -> list[types.FunctionType]:
        """The functions that may be running: those with this code whose cells hold the values of its free variables."""

        def is_it(function: types.FunctionType) -> bool:
            return all(
                content_of(cell) is variables.get(n, MISSING) for n, cell in cells_of(function)
            )

        return [function for function in self._found.get(code, ()) if is_it(function)]

    @cached_property
    def _found(self) -> dict[types.CodeType, list[types.FunctionType]]:
        """By code.

        The garbage collector knows all functions, but for those that `gc.freeze()` has put out of its sight: they are
        thawed, and stay so, since freezing again would keep for ever whatever garbage there is at this moment.
        """
        if gc.get_freeze_count():
            gc.unfreeze()
        found: dict[types.CodeType, list[types.FunctionType]] = {}
        for function in gc.get_objects():
            # Most functions have no closure, and most others are not the user's: codes are slow to look up in a table.
            if type(function) is not types.FunctionType or function.__closure__ is None:
                continue
            code = function.__code__
            if is_users(code.co_filename) and has_closure(code):
                found.setdefault(code, []).append(function)
        return found


@lru_cache(maxsize=10_000)
def has_closure(code: types.CodeType) -> bool:
    """Whether a code of the user's has variables around it that are more than the class of a method."""
    is_own = bool(set(code.co_freevars) - {"__class__"}) and code.co_name not in _AT_ONCE
    return is_own and is_users(code.co_filename) and not is_installed(code.co_filename)


@lru_cache(maxsize=10_000)
def makes_closures(code: types.CodeType) -> bool:
    """Whether a code may make functions with a closure."""
    return any(has_closure(inner) for inner in code.co_consts if inspect.iscode(inner))


def cells_of(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    """The cells of a function's closure, each with its name."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def content_of(cell: types.CellType) -> Any:
    """What a cell holds; MISSING for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING

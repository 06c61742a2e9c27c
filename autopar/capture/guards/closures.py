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
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from autopar.capture.guards.user_code import is_installed, is_users
from autopar.capture.guards.values import MISSING

_LOOKS_BY_CODE = 2  # before all functions are looked for at once
_AT_ONCE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # which run where they are made


class Closures:
    """The user's functions with a closure, from before the first run."""

    def __init__(self) -> None:
        # By the identity of their code: equal codes of two modules are the codes of different functions.
        self._found: dict[int, list[types.FunctionType]] = {}
        self._looked_for: list[tuple[types.CodeType, ...]] = []

    def look(self, code: types.CodeType) -> None:
        """Finds the functions, before a code runs that may be one of them or make others."""
        wanted = (code, *filter(inspect.iscode, code.co_consts)) if may_matter(code) else ()
        wanted = tuple(x for x in wanted if has_closure(x) and id(x) not in self._found)
        if not wanted or len(self._looked_for) > _LOOKS_BY_CODE:
            return
        self._looked_for.append(wanted)  # which keeps the identities of the codes
        # The garbage collector knows all functions, except those that `gc.freeze()` has hidden from it: they are
        # unfrozen, and stay so, since freezing again would also keep all garbage of this moment.
        if gc.get_freeze_count():
            gc.unfreeze()
        by_code = len(self._looked_for) <= _LOOKS_BY_CODE
        functions = _with_codes(wanted) if by_code else _all_functions()
        known = set(self._found)
        for function in functions:
            if id(function.__code__) not in known:
                self._found.setdefault(id(function.__code__), []).append(function)
        for each in wanted:
            self._found.setdefault(id(each), [])

    def running(self, code: types.CodeType, variables: Mapping[str, Any]) -> list[types.FunctionType]:
        """The functions that may be running: those with this code whose cells hold the values of its free variables."""

        def is_it(function: types.FunctionType) -> bool:
            return all(content_of(cell) is variables.get(n, MISSING) for n, cell in cells_of(function))

        return [function for function in self._found.get(id(code), ()) if is_it(function)]


def _with_codes(codes: Sequence[types.CodeType]) -> Iterator[types.FunctionType]:
    """The functions with these codes, in half the time of a look at all functions."""
    for x in gc.get_referrers(*codes):
        if type(x) is types.FunctionType and any(x.__code__ is code for code in codes):
            yield x


def _all_functions() -> Iterator[types.FunctionType]:
    """All functions of the user's with a closure."""
    for x in gc.get_objects():
        # Most functions have no closure, and most others are not the user's: codes are slow to look up in a table.
        if type(x) is not types.FunctionType or x.__closure__ is None:
            continue
        if is_users(x.__code__.co_filename) and has_closure(x.__code__):
            yield x


def may_matter(code: types.CodeType) -> bool:
    """Whether a code has a closure, or makes functions with one."""
    return has_closure(code) or makes_closures(code)


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
    """The content of a cell; MISSING for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING

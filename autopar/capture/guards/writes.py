"""Writes of a forward to attributes of modules: who makes them, which are undone, and which every step repeats."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar._torch import pytree
from autopar.capture.guards import refusals
from autopar.capture.guards.guards import Place
from autopar.capture.guards.user_code import is_installed, is_users, line_of, place_of
from autopar.capture.guards.values import MISSING, is_plain


@dataclass(frozen=True)
class Write:
    """A change that a forward makes to an attribute of a module, or an entry that it adds to a dict.

    Attributes:
        attributes: `__dict__` of the module, or the dict.
        name: name of the attribute, or the key.
        value: its value after the forward, or the number that the forward adds to it.
        adds: whether `value` is added.
    """

    attributes: dict[Any, Any]
    name: Any
    value: Any
    adds: bool

    def repeat(self) -> None:
        """Makes the change once more."""
        self.attributes[self.name] = self.attributes[self.name] + self.value if self.adds else self.value


class Writes:
    """Notes writes to attributes of modules, and decides for each whether to restore, repeat or refuse it after a run.

    Args:
        paths: id of a module -> its path, such as `model.layers.0`.
        modules: the modules of the model and of its loss.

    Attributes:
        kept: the places (id of the holder, key) of values that stay as the forward has set them.
    """

    def __init__(self, paths: Mapping[int, str], modules: Sequence[nn.Module]) -> None:
        self._paths, self._modules = paths, modules
        self._lines: dict[tuple[int, str], str] = {}  # of writes by the user's code
        self._internal: set[tuple[int, str]] = set()  # attributes that torch's code sets
        self.kept: set[tuple[int, Any]] = set()

    def sets(self, module: nn.Module, name: str, frame: types.FrameType) -> None:
        """Notes that code in a frame sets an attribute."""
        if is_users(frame.f_code.co_filename) or (id(module), name) in self._lines:
            self._lines[id(module), name] = place_of(frame)
        else:
            self._internal.add((id(module), name))

    def deletes(self, module: nn.Module, name: str, frame: types.FrameType) -> None:
        """Notes that code in a frame deletes an attribute."""
        self._lines[id(module), name] = place_of(frame)

    def has_set(self, module: nn.Module, name: str) -> bool:
        """Whether the forward has set an attribute of the module, which still has it."""
        key = id(module), name
        return name in vars(module) and (key in self._lines or key in self._internal)

    def attributes(self) -> list[dict[str, Any]]:
        """The attributes of every module as they are now."""
        return [dict(vars(m)) for m in self._modules]

    def written(self, before: list[dict[str, Any]]) -> Iterator[tuple[nn.Module, str, Any, Any]]:
        """Yields the attributes that a run has replaced: module, name, value before and value after."""
        for module, old in zip(self._modules, before, strict=True):
            new = vars(module)
            for name in [*old, *(n for n in new if n not in old)]:
                if old.get(name, MISSING) is not new.get(name, MISSING):
                    yield module, name, old.get(name, MISSING), new.get(name, MISSING)

    def keeps(self, module: nn.Module, name: str, new: Any) -> bool:
        """Whether an attribute stays as the forward has set it, because a library uses it to note a set-up."""
        if is_plain(new) and is_installed(self._lines.get((id(module), name), "")):
            self.kept |= {(id(module), name), (id(vars(module)), name)}
        return (id(module), name) in self.kept

    def stays(self, place: Place) -> bool:
        """Whether another value stays as the forward has set it, such as an entry of a library's configuration."""
        key = id(place.holder), place.key
        if is_plain(place.get()) and is_installed(place.line):
            self.kept.add(key)
        return key in self.kept

    def is_internal(self, module: nn.Module, name: str) -> bool:
        """Whether torch alone has set an attribute, as an LSTM does with its list of weights."""
        key = id(module), name
        return key in self._internal and key not in self._lines

    def effect(self, module: nn.Module, name: str, old: Any, new: Any, *, is_counter: bool) -> Write | None:
        """The write that repeats a forward's change of an attribute after every step.

        None, with a warning, for a write of an installed library that cannot be repeated; CaptureError for such
        a write of other code.

        Args:
            module: the module that has the attribute.
            name: name of the attribute.
            old: value before the forward.
            new: value after it.
            is_counter: whether the forward reads the attribute only to count it up or down.
        """
        attributes, line = vars(module), self._lines.get((id(module), name), line_of(module))
        if is_counter and type(old) is type(new) is int:
            return Write(attributes, name, new - old, adds=True)
        if new is MISSING or not all(map(is_plain, pytree.tree_leaves(new))):
            words = f"{self._paths[id(module)]}.{name}"
            if is_installed(line):
                refusals.warn_of_library(f"sets {words}", line)
                return None
            raise refusals.sets_attribute(words, name, line, deletes=new is MISSING)
        return Write(attributes, name, new, adds=False)


def of_users(changed: list[Place]) -> list[Place]:
    """The places that the user's own code changes; warns of places that libraries change, such as their caches."""
    for place in changed:
        if is_installed(place.line):
            refusals.warn_of_library(f"changes {place.words}", place.line)
    return [place for place in changed if not is_installed(place.line)]

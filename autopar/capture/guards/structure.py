"""The structure of a model (submodules, parameters with their flags, hooks), and whether it has changed.

Tables of modules are looked at only where they were written (`autopar.capture.guards.dict_versions`), and hooks where
one was registered since. The flags of parameters are read before every step: no write into a dict shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from autopar._torch import GradientFlags, has_backward_hooks, hooks_of_all_modules
from autopar.capture.guards.dict_versions import Check, Unwritten
from autopar.capture.guards.guards import ChangedValue, Guard, Place
from autopar.capture.guards.user_code import is_users_type
from autopar.capture.guards.values import MISSING

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, eq=False)
class _Table:
    """The submodules or the parameters of a module.

    Attributes:
        module: the module that has the table.
        now: the table, from names to objects.
        before: a copy of the table as it was at the capture.
    """

    module: nn.Module
    now: dict[str, Any]
    before: dict[str, Any]

    def holds(self) -> bool:
        """Whether the same objects have the same names. No tensor is compared by value."""
        same = all(self.now.get(name, MISSING) is x for name, x in self.before.items())
        return same and len(self.now) == len(self.before)


@dataclass(frozen=True, eq=False)
class _BufferNames:
    """The names of a module's buffers; which tensors they are, programs find out where they read them.

    Attributes:
        now: the buffers by name.
        before: the names as they were at the capture.
    """

    now: dict[str, Any]
    before: frozenset[str]

    def holds(self) -> bool:
        """Whether the names are the same."""
        return self.now.keys() == self.before


_mro = attrgetter("__mro__")
_own_forward = methodcaller("get", "forward", MISSING)  # of the body of a class


class _ClassForwards:
    """The forwards of classes, as they stand in the bodies of the classes or of their bases.

    Bodies are looked into, as `kind.forward` may be another object at each reading.

    Args:
        kinds: the classes.
    """

    def __init__(self, kinds: Iterable[type[Any]]) -> None:
        self._kinds = tuple(kinds)
        self._mros = tuple(map(_mro, self._kinds))
        self._bodies = [body for mro in self._mros for body in _bodies_to_forward(mro)]
        self._before = tuple(map(_own_forward, self._bodies))

    def hold(self) -> bool:
        """Whether nobody has patched the forward of a class or of its bases, or changed which bases it has."""
        same_bases = all(map(is_, map(_mro, self._kinds), self._mros))
        return same_bases and all(map(is_, map(_own_forward, self._bodies), self._before))


def _bodies_to_forward(mro: tuple[type[Any], ...]) -> list[Any]:
    """The bodies in which Python looks for forward: the first one that has it, and all before that one."""
    bodies = [vars(each) for each in mro]
    has_it = next(i for i, body in enumerate(bodies) if "forward" in body)
    return bodies[: has_it + 1]


class Structure:
    """Guards of the structure of a model.

    Of buffers it has the names: they may be replaced between steps, and programs read them where they are.

    Args:
        model: the model as it was captured.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._names = {id(module): f"model.{path}".rstrip(".") for path, module in modules.items()}
        self._tables = [
            _Table(module, table, dict(table))
            for module in modules.values()
            for table in (module._modules, module._parameters)
            if table
        ]
        self._present = [p for m in modules.values() for p in m._parameters.values() if p is not None]
        self._flags = GradientFlags(self._present)
        self._hooks = [getattr(m, name) for m in modules.values() for name in _HOOKS]
        self._of_all = hooks_of_all_modules()
        self._hooked = [hooks for hooks in self._hooks if hooks]
        self._known = [dict(hooks) for hooks in self._hooked]
        self._free = [hooks for hooks in self._hooks if not hooks]
        self._handles = RemovableHandle.next_id
        users = [m for m in modules.values() if is_users_type(type(m))]
        plain = (vars(m) for m in modules.values() if "forward" not in vars(m))
        self._own_forwards = [Guard(Place(attributes, "forward", "", ""), MISSING) for attributes in plain]
        checks: list[tuple[dict[str, Any], Check]] = [(table.now, table) for table in self._tables]
        checks += [(guard.place.holder, guard) for guard in self._own_forwards]
        self._buffers = [_BufferNames(m._buffers, frozenset(m._buffers)) for m in modules.values() if m._buffers]
        checks += [(names.now, names) for names in self._buffers]
        self._forwards = _ClassForwards(dict.fromkeys(map(type, users)))
        self._in_dicts: Unwritten[Check] = Unwritten(checks)

    def hold(self) -> bool:
        """Whether the model is made of the same modules, parameters, flags and hooks."""
        return self.has_parts() and self.has_flags()

    def has_parts(self) -> bool:
        """Whether the model is made of the same modules, parameters and hooks."""
        return self._in_dicts.hold() and self._has_hooks() and self._forwards.hold()

    def has_flags(self) -> bool:
        """Whether the same parameters are frozen."""
        return self._flags.hold()

    def broken(self) -> ChangedValue | None:
        """The first difference in words, None where there is none."""
        return next(self._differences(), None)

    def _has_hooks(self) -> bool:
        """Whether modules have the hooks that they had, and parameters none.

        Every registration takes a number from one counter: while that stands still, hooks were at most removed.
        """
        if self._hooked != self._known or self._of_all != hooks_of_all_modules():
            return False
        if self._handles == RemovableHandle.next_id:
            return True
        if any(self._free) or any(map(has_backward_hooks, self._present)):
            return False
        self._handles = RemovableHandle.next_id
        return True

    def _differences(self) -> Iterator[ChangedValue]:
        for table in self._tables:
            for name in {**table.before, **table.now}:
                yield from self._other(table, name)
        for parameter in self._flags.changed():
            words = f"requires_grad of a parameter of shape {list(parameter.shape)}"
            yield _changed(words, not parameter.requires_grad, parameter.requires_grad)
        if not self._has_hooks():
            yield _changed("the hooks of the model", "as captured", "others")
        for names in self._buffers:
            if not names.holds():
                yield _changed("the buffers of a module", sorted(names.before), sorted(names.now))
        if not (all(guard.holds() for guard in self._own_forwards) and self._forwards.hold()):
            yield _changed("the forward of a module", "that of its class", "another")

    def _other(self, table: _Table, name: str) -> Iterator[ChangedValue]:
        before, now = table.before.get(name, MISSING), table.now.get(name, MISSING)
        if before is not now:
            kinds = ["missing" if x is MISSING else type(x).__name__ for x in (before, now)]
            same = "another " if kinds[0] == kinds[1] else ""
            yield _changed(f"{self._names[id(table.module)]}.{name}", kinds[0], f"{same}{kinds[1]}")


def _changed(words: str, before: object, now: object) -> ChangedValue:
    return ChangedValue(words, "the model's structure", str(before), str(now))

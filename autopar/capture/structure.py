"""What a model is made of: submodules, parameters with their flags, hooks; and whether it still is.

The checks are expressions over whole tables, which C code runs: a model of a thousand modules takes
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from operator import contains
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from autopar._torch import has_backward_hooks
from autopar.capture.guards import ChangedValue
from autopar.capture.user_code import is_users_type

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Structure:
    """Guards of what a model is made of.

    Buffers are not among it: they may be replaced between steps, and programs read them where they are.

    Args:
        model: the model as it was captured.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._names = {id(module): f"model.{path}".rstrip(".") for path, module in modules.items()}
        self._places = [
            (m, table) for m in modules.values() for table in (m._modules, m._parameters) if table
        ]
        self._tables: list[dict[str, Any]] = [table for _, table in self._places]
        self._entries: list[dict[str, Any]] = [dict(table) for table in self._tables]
        self._present = [
            p for m in modules.values() for p in m._parameters.values() if p is not None
        ]
        # A tensor of one element may equal another.
        small = [
            (t, k)
            for t in self._tables
            for k, x in t.items()
            if getattr(x, "numel", lambda: 2)() < 2
        ]
        self._small = [(table, key, table[key]) for table, key in small]
        self._flags = [p.requires_grad for p in self._present]
        self._hooks = [getattr(m, name) for m in modules.values() for name in _HOOKS]
        self._hooked = [hooks for hooks in self._hooks if hooks]
        self._known = [dict(hooks) for hooks in self._hooked]
        self._free = [hooks for hooks in self._hooks if not hooks]
        self._handles = RemovableHandle.next_id
        users = [m for m in modules.values() if is_users_type(type(m))]
        self._plain = [vars(m) for m in users if "forward" not in vars(m)]

    def hold(self) -> bool:
        """Whether the model is made of the same modules, parameters, flags and hooks."""
        return (
            self._has_entries()
            and self.has_flags()
            and self._has_hooks()
            and not any(map(contains, self._plain, repeat("forward")))
        )

    def has_flags(self) -> bool:
        """Whether the same parameters are frozen."""
        return [p.requires_grad for p in self._present] == self._flags

    def broken(self) -> ChangedValue | None:
        """The first difference in words, None where there is none."""
        return next(self._differences(), None)

    def _has_entries(self) -> bool:
        """Whether modules hold the same submodules and parameters.

        Tables that hold the same objects are equal, and nothing is compared by value; tensors that do not are
        refused by torch, as their comparison is no single truth.
        """
        try:
            same = self._tables == self._entries
        except (RuntimeError, TypeError, ValueError):
            return False
        return same and all(table.get(key) is x for table, key, x in self._small)

    def _has_hooks(self) -> bool:
        """Whether modules have the hooks that they had, and parameters none.

        Every registration takes a number from one counter: while that stands still, hooks were at most removed.
        """
        if self._hooked != self._known:
            return False
        if self._handles == RemovableHandle.next_id:
            return True
        if any(self._free) or any(map(has_backward_hooks, self._present)):
            return False
        self._handles = RemovableHandle.next_id
        return True

    def _differences(self) -> Iterator[ChangedValue]:
        for (module, now), before in zip(self._places, self._entries, strict=True):
            for name in {**before, **now}:
                yield from self._other(module, name, before.get(name), now.get(name))
        for parameter, flag in zip(self._present, self._flags, strict=True):
            if parameter.requires_grad != flag:
                shape = list(parameter.shape)
                words = f"requires_grad of a parameter of shape {shape}"
                yield _changed(words, flag, not flag)
        if not self._has_hooks():
            yield _changed("the hooks of the model", "as captured", "others")
        if any(map(contains, self._plain, repeat("forward"))):
            yield _changed("the forward of a module", "that of its class", "another")

    def _other(self, module: nn.Module, name: str, before: Any, now: Any) -> Iterator[ChangedValue]:
        if before is not now:
            kinds = [type(x).__name__ for x in (before, now)]
            same = "another " if kinds[0] == kinds[1] else ""
            yield _changed(f"{self._names[id(module)]}.{name}", kinds[0], f"{same}{kinds[1]}")


def _changed(words: str, before: object, now: object) -> ChangedValue:
    return ChangedValue(words, "the model's structure", str(before), str(now))

"""Dicts that count the writes into them, as the guards of Dynamo use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DictVersions:
    """A snapshot of the versions of many dicts, from which one can tell later which dicts were written since.

    Python gives a dict another version whenever an entry is added, replaced by another object or removed. What changes
    inside a value, such as an append to a list, is no write into the dict. All versions are compared in C++, which
    takes some 20 ns for a dict.

    Args:
        dicts: the dicts, which are kept alive.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        from torch._C._dynamo import guards
        from torch._dynamo.guards import GuardManagerType

        self._dicts = list(dicts)
        self._versions = [guards.dict_version(each) for each in self._dicts]
        self._manager = guards.RootGuardManager()
        for i, each in enumerate(self._dicts):
            manager = self._manager.list_getitem_manager(
                i, str(i), each, GuardManagerType.GUARD_MANAGER
            )
            manager.add_dict_version_guard(each, [""], None)

    def hold(self) -> bool:
        """Whether no dict was written since the snapshot."""
        return self._manager.check(self._dicts)

    def written(self, earlier: DictVersions) -> list[int]:
        """The indices of the dicts that were written since an earlier snapshot of the same dicts."""
        pairs = zip(self._versions, earlier._versions, strict=True)
        return [i for i, (now, before) in enumerate(pairs) if now != before]

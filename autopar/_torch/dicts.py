"""Dicts that count the writes into them, as the guards of Dynamo use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class _Dicts(list[dict[Any, Any]]):
    """Dicts in a list that can have weak references, which Dynamo needs."""


class DictVersions:
    """A snapshot of the versions of many dicts, which tells later which dicts were written since.

    Python gives a dict another version whenever an entry is added, replaced by another object or removed. A change
    inside a value, such as an append to a list, is not a write into the dict. All versions are compared in C++. The
    first check goes through a tree of Dynamo's guards, one for each dict, and notes the dicts and versions that it
    finds there; later checks compare the noted versions in one loop, which takes some 2 ns for a dict. From Python 3.12
    on Python itself says when a noted dict is written.

    Args:
        dicts: the dicts, which are kept alive.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        from torch._C._dynamo import guards
        from torch._dynamo.guards import GuardManagerType

        # The dicts of a list are noted under the list, and its guard has to stand below the root's.
        self._top = [_Dicts(dicts)]
        self._versions = [guards.dict_version(each) for each in dicts]
        self._manager = guards.RootGuardManager()
        plain = GuardManagerType.GUARD_MANAGER
        of_list = self._manager.list_getitem_manager(0, "dicts", self._top[0], plain)
        for i, each in enumerate(dicts):
            of_dict = of_list.list_getitem_manager(i, str(i), each, plain)
            of_dict.add_dict_version_guard(each, [""], None)
            of_dict.mark_tag_safe()
        of_list.mark_tag_safe()
        of_list.mark_tag_safe_root()

    def hold(self) -> bool:
        """Whether no dict was written since the snapshot."""
        return self._manager.check(self._top)

    def written(self, earlier: DictVersions) -> list[int]:
        """The indices of the dicts that were written since an earlier snapshot of the same dicts."""
        pairs = zip(self._versions, earlier._versions, strict=True)
        return [i for i, (now, before) in enumerate(pairs) if now != before]

"""Gathers a text of every rank about a call, through the store of the process group.

Ranks compare what they were given where it is new to them, and so at times when another rank may be in the
middle of a step. A collective would then wait for it, or meet one of that step and mix the two up; through
the store those who wait can say whom they wait for.

[Note: one verdict] Each rank writes its text. The first rank waits for all texts and writes a verdict, for which the
others wait: of N ranks a comparison asks the store for about 4 N things, where each rank reading all texts would ask
for N * N. A verdict has every different text once, and which of them each rank gave.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from autopar import _torch
from autopar.errors import PeerError, StepError
from autopar.runtime.failures.failures import told_to_end

log = logging.getLogger("autopar")

_PATIENCE_SECONDS = 30.0  # before those who wait say so
# Pauses between two looks into the store: short at first, as ranks come within milliseconds of each other.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0002, 0.05
# The others wait so much longer than the first rank, which names the ranks that are missing.
_GRACE_SECONDS = 1.0
SAME_SHAPES = (
    "Give all ranks batches of the same shapes, and as many (DistributedSampler(..., drop_last=True) and "
    "DataLoader(..., drop_last=True))."
)


class Comparison:
    """Gathers one text from every rank at each call, through the store of the process group.

    The n-th call of one rank waits for the n-th call of every other. The first call also runs a broadcast, by which the
    ranks agree on a prefix of the keys; later calls run no collective.

    Args:
        timeout_seconds: seconds that a call waits for the other ranks; None for the timeout of the store.
        ranks: global ranks that compare, in order; by default all.
    """

    def __init__(self, timeout_seconds: float | None, ranks: Sequence[int] | None = None) -> None:
        self._timeout_seconds, self._ranks = timeout_seconds, ranks
        self._name = ""
        self._times = 0

    def gather(self, text: str, why: str, remedy: str = SAME_SHAPES, kind: str = "shapes") -> list[str]:
        """The texts of all ranks, by rank.

        Raises StepError, naming the ranks that are missing, when the time is over, and where another rank compares
        something else, because it is at another place of the program.

        Args:
            text: the text of this rank.
            why: what is compared, in words for people.
            remedy: what to do where a rank does not come.
            kind: kind of the text, which all ranks share.
        """
        if self.is_alone:
            return [text]
        if not self._name:
            self._name = _new_name()
        store = self._store()
        self._times += 1
        keys, own = self._keys(self._times), dist.get_rank()
        store.set(keys[own], json.dumps([kind, f"{why} {remedy}", text]))
        if own == self._first:
            self._wait(store, keys, why, remedy)
            store.set(self._verdict(), _summary([store.get(key).decode() for key in keys.values()]))
            store.delete_key(self._verdict(self._times - 1))
        verdict = self._hear(store, keys, why, remedy)
        # All ranks are here, and so have read the verdict of the time before.
        store.delete_key(self._keys(self._times - 1)[own])
        said = [json.loads(verdict["texts"][i]) for i in verdict["given"]]
        if len({found for found, _, _ in said}) > 1:
            whys = "; ".join(f"rank {rank}: {reason}" for rank, (_, reason, _) in zip(keys, said, strict=True))
            raise StepError(f"The ranks are at different places of the program. {whys}")
        return [found for _, _, found in said]

    def waiting(self) -> dict[int, str]:
        """Rank -> reason and remedy, for each rank that waits for this rank or gave up waiting.

        For the error of a collective in which other ranks did not take part; empty where the store has gone with them.
        """
        if not self._name:
            return {}
        try:
            store, keys = self._store(), self._keys(self._times + 1)
            found = [rank for rank, key in keys.items() if store.check([key])]
            return {rank: json.loads(store.get(keys[rank]))[1] for rank in found}
        except RuntimeError as error:
            log.debug("The store of the process group does not answer: %s", error)
            return {}

    def _store(self) -> dist.Store:
        return dist.PrefixStore(self._name, _torch.default_store())

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank, or the others are imagined, as torch's fake backend does to trace one."""
        return not dist.is_initialized() or len(self.ranks) == 1 or dist.get_backend() == "fake"

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks that compare, this one among them."""
        return self._ranks or range(dist.get_world_size())

    @property
    def _first(self) -> int:
        """The rank that gives the verdict."""
        return self.ranks[0]

    def _key(self, what: object, times: int | None = None) -> str:
        """A key of a comparison, counted from one; by default of the present one."""
        return f"{self._times if times is None else times}/{what}"

    def _verdict(self, times: int | None = None) -> str:
        """The key of what the first rank says of all texts, by default of the present comparison."""
        return self._key(f"verdict of {self._first}", times)

    def _keys(self, times: int) -> dict[int, str]:
        """Rank -> the key of its text in a comparison."""
        return {rank: self._key(rank, times) for rank in self.ranks}

    @property
    def _limit_seconds(self) -> float:
        return self._timeout_seconds or _torch.store_seconds(_torch.default_store())

    def _wait(self, store: dist.Store, keys: Mapping[int, str], why: str, remedy: str) -> None:
        """Waits for the texts of all ranks; the others are told where it is in vain."""
        limit = self._limit_seconds
        patience = min(_PATIENCE_SECONDS, limit)
        with told_to_end() as signals:
            missing = _missing(store, keys, patience, signals)
            if missing and patience < limit and not signals:
                log.warning("%s Waiting for ranks %s since %g s.", why, missing, patience)
                missing = _missing(store, keys, limit - patience, signals)
            if missing:
                store.set(self._verdict(), json.dumps({"missing": missing, "signals": signals}))
                self._refuse(missing, signals, why, remedy)

    def _hear(self, store: dist.Store, keys: Mapping[int, str], why: str, remedy: str) -> dict[str, Any]:
        """The verdict of the first rank; where it does not come, each rank looks who is missing."""
        key = self._verdict()
        with told_to_end() as signals:
            if _missing(store, {self._first: key}, self._limit_seconds + _GRACE_SECONDS, signals):
                missing = [rank for rank, each in keys.items() if not store.check([each])]
                self._refuse(missing or [self._first], signals, why, remedy)
            verdict: dict[str, Any] = json.loads(store.get(key))
            if "missing" in verdict:
                self._refuse(verdict["missing"], signals or verdict["signals"], why, remedy)
        return verdict

    def _refuse(self, missing: Sequence[int], signals: Sequence[int], why: str, remedy: str) -> NoReturn:
        """Raises the error of a wait in vain."""
        if signals:
            raise PeerError(
                f"This rank was told to end while it waited for ranks {missing}: another rank has died or was ended. "
                f"It waited because: {why}",
                collective="comparison",
                group=self._name,
                reason="SIGTERM",
            )
        raise StepError(
            f"{why} Ranks {missing} did not come within {self._limit_seconds:g} s: they did not have to compare this, "
            f"or have no batch left, or died. {remedy}"
        )


def _summary(texts: Sequence[str]) -> str:
    """The verdict: the different texts, and for every rank the number of its own."""
    numbers = dict[str, int]()
    given = [numbers.setdefault(text, len(numbers)) for text in texts]
    return json.dumps({"texts": [*numbers], "given": given})


def _new_name() -> str:
    """A name that no other comparison has; all ranks must call this together."""
    name = [""]
    if dist.get_rank() == 0:
        name = [f"autopar/comparison/{_torch.default_store().add('autopar/comparisons', 1)}"]
    dist.broadcast_object_list(name, src=0)
    return name[0]


def _missing(store: dist.Store, keys: Mapping[int, str], seconds: float, signals: Sequence[int]) -> list[int]:
    """The ranks whose keys are missing from the store after a timeout, or after a signal has come.

    The store is asked again and again. A wait inside of it would let Python handle no signal, and prints a warning when
    it ends in vain.
    """
    deadline, pause_seconds = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    while not store.check(list(keys.values())):
        if signals or time.monotonic() >= deadline:
            return [rank for rank, key in keys.items() if not store.check([key])]
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
    return []

"""Which rank everybody waits for: where a collective broke, each rank says where it waited, and who says nothing.

A rank whose collective breaks knows its own place alone. It writes this to the store of the process group and reads the
places of the others, which break in the same moment or within the time that collectives wait. A rank that died, hangs,
or computes writes nothing: it is the one that the others wait for.

Under torchrun nothing is asked. Its agent ends all ranks as soon as one has died, so that a rank has no time to wait
for the words of others; what uncaught errors say of silent ranks there is in `autopar.runtime.failures.failures`.
"""

from __future__ import annotations

import logging
import threading
import time

import torch.distributed as dist

from autopar import _torch

log = logging.getLogger("autopar")

_PATIENCE_SECONDS = 2.0  # for the places of the others
_POLL_SECONDS = 0.05
_PREFIX = "autopar/waits"


def who_waits(place: str) -> str:
    """Where the other ranks wait and which say nothing, in one sentence; "" where the store does not answer.

    Returns within `_PATIENCE_SECONDS`, also where the store hangs.

    Args:
        place: what this rank did, and in which collective it waited.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake" or dist.get_world_size() == 1:
        return ""
    if dist.is_torchelastic_launched():
        return ""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = _torch.default_store()
    found: dict[int, str] = {}

    def ask() -> None:
        _ask(store, rank, ranks, place, found)

    # A store whose process hangs answers no call, and a call has no limit of its own. The thread may outlive the
    # process group, so that it knows its rank beforehand.
    asking = threading.Thread(target=ask, daemon=True, name="autopar waits")
    asking.start()
    asking.join(_PATIENCE_SECONDS)
    return _sentence(dict(found), ranks)


def _ask(store: dist.Store, own: int, ranks: int, place: str, found: dict[int, str]) -> None:
    """Says where this rank waits, and collects what others say, until all have."""
    end = time.monotonic() + _PATIENCE_SECONDS
    try:
        store = dist.PrefixStore(_PREFIX, store)
        store.set(str(own), place)
        while len(found) < ranks and time.monotonic() < end:
            for rank in set(range(ranks)) - set(found):
                if store.check([str(rank)]):
                    found[rank] = store.get(str(rank)).decode()
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:
        log.debug("The store of the process group does not answer: %s", error)


def _sentence(found: dict[int, str], ranks: int) -> str:
    """A sentence about the ranks: where each one waits, and which ones are silent.

    >>> _sentence({0: "Step 3: all_reduce", 2: "Step 3: all_reduce"}, 3)
    'ranks 0, 2 waited in Step 3: all_reduce. Rank 1 says nothing: it died, hangs, or computes'
    """
    if not found:
        return ""
    places: dict[str, list[int]] = {}
    for rank, place in sorted(found.items()):
        places.setdefault(place, []).append(rank)
    said = "; ".join(f"{_ranks(own)} waited in {place}" for place, own in places.items())
    silent = sorted(set(range(ranks)) - set(found))
    if not silent:
        return f"{said}. All of them answer: they run different programs, or a link between them is lost"
    verbs = (
        "says nothing: it died, hangs, or computes" if len(silent) == 1 else "say nothing: they died, hang, or compute"
    )
    return f"{said}. {_ranks(silent).capitalize()} {verbs}"


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"

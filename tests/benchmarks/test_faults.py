"""Six of the runs of benchmarks/faults, two of them slow: each accident once, each plan twice, twice on with half."""

from __future__ import annotations

import pytest

from benchmarks.faults.run import PLACES, Fault, met
from tests.support.tables import often

SLICE = [0, 4, 8, 27, 13, 35]  # numbers of runs; from 18 on they go on with half of the ranks
# tests/runtime has ranks that die in a collective, and files that were cut short.
OFTEN = [0, 8, 27, 13]


def test_the_slice_has_every_accident_and_every_plan_twice() -> None:
    faults = [Fault.drawn(number) for number in SLICE]
    assert sorted(fault.place for fault in faults) == sorted(PLACES)
    assert sorted(fault.plan for fault in faults) == ["ddp"] * 2 + ["pp=2 x dp=2"] * 2 + ["zero3"] * 2
    assert [fault.after < fault.ranks for fault in faults].count(True) == 2


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", often(SLICE, OFTEN))
def test_nothing_hangs_no_checkpoint_is_lost_and_losses_stay(number: int) -> None:
    result = met(Fault.drawn(number, ranks=2))
    assert not (result.hung or result.lost), result
    assert result.problem == ""

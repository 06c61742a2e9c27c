"""The order in which a rank starts its sends and receives."""

from __future__ import annotations

from autopar.ir.pipeline import Pipeline
from autopar.pipeline.schedules import actions
from autopar.runtime.pipeline.stage_actions import _groups


def test_1f1b_exchanges_with_the_same_neighbour_on_both_ranks() -> None:
    """NCCL has a communicator for batches and others for single sends: both ends have to take the same one."""
    lists = actions(Pipeline(3, "1f1b", ("a", "b")), 5)
    pairs = [{tuple(map(str, group)) for group in _groups(own, True) if len(group) == 2} for own in lists]
    assert ("0SEND_F2", "0RECV_B0") in pairs[0] and ("1SEND_B0", "1RECV_F2") in pairs[1]
    ahead = {(sent[-1], back[-1]) for sent, back in pairs[0]}
    behind = {(come[-1], back[-1]) for back, come in pairs[1] if back.startswith("1SEND_B")}
    assert ahead == behind == {("2", "0"), ("3", "1"), ("4", "2")}


def test_other_schedules_start_each_by_itself() -> None:
    for own in actions(Pipeline(2, "gpipe", ("a",)), 3):
        assert [list(group) for group in _groups(own, False)] == [[each] for each in own]

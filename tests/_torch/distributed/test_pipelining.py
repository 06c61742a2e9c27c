"""torch.distributed.pipelining: the lists of actions that its classes make."""

import pytest
from torch.distributed import pipelining

from autopar import _torch
from autopar._torch.distributed.pipelining import _flat_actions, _places
from autopar.ir.pipeline import Pipeline
from autopar.pipeline.schedules import actions

SEVERAL = pytest.mark.parametrize(
    ("name", "stages_of"),
    [
        ("ScheduleInterleaved1F1B", [(0, 2), (1, 3)]),
        ("ScheduleLoopedBFS", [(0, 2), (1, 3)]),
        ("ScheduleInterleavedZeroBubble", [(0, 2), (1, 3)]),
        ("ScheduleZBVZeroBubble", [(0, 3), (1, 2)]),
        ("ScheduleDualPipeV", [(0, 3), (1, 2)]),
    ],
)


@SEVERAL
def test_every_stage_runs_every_micro_batch_and_what_is_sent_is_received(name, stages_of):
    lists = _torch.pipeline_actions(name, stages_of, 4)
    every = [each for own in lists for each in own]
    assert len({*every}) == len(every)
    for rank, own in enumerate(lists):
        assert {stage for _, stage, _ in own} == {*stages_of[rank]}
    forwards = {(stage, i) for kind, stage, i in every if kind == "F"}
    assert forwards == {(stage, i) for stage in range(4) for i in range(4)}
    sent = {(stage + 1, i) for kind, stage, i in every if kind == "SEND_F"}
    assert sent == {(stage, i) for kind, stage, i in every if kind == "RECV_F"}
    back = {(stage - 1, i) for kind, stage, i in every if kind == "SEND_B"}
    assert back == {(stage, i) for kind, stage, i in every if kind == "RECV_B"}


@SEVERAL
def test_computations_are_the_actions_without_sends_and_receives(name, stages_of):
    for micro_batches in (4, 8):
        every = _torch.pipeline_actions(name, stages_of, micro_batches)
        computed = [tuple(each for each in own if len(each[0]) == 1) for own in every]
        assert list(_torch.pipeline_computations(name, stages_of, micro_batches)) == computed


def test_our_lists_of_one_stage_a_rank_are_those_that_torch_tells_but_for_the_last_rank():
    for schedule, name in (("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")):
        (place,) = _places([(0,), (1,), (2,)])
        told = getattr(pipelining, name)(place, 4).pipeline_order
        for rank, found in enumerate(actions(Pipeline(3, schedule, ("a", "b")), 4)):
            computed = [tuple(each) for each in found if each.kind in ("F", "B")]
            if rank < 2 or schedule == "gpipe":
                assert computed == [each for each in _flat_actions(filter(None, told[rank]))]
            # Of 1F1B's last rank it tells 1F, 0B, 2F, 1B, ..., a micro-batch that there is not.
            assert sorted(n for kind, _, n in computed if kind == "F") == [0, 1, 2, 3]

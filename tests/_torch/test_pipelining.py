"""torch.distributed.pipelining: the actions of a schedule, and a stage that frees what it received."""

import pytest
from torch.distributed import pipelining

from autopar import _torch
from autopar._torch.pipelining import _flat_actions, _StandInStage


class _RecordedStage(_StandInStage):
    """A stand-in for the schedules of several stages a rank, which split backwards and pass on V's foot."""

    def __init__(self, log, *place):
        super().__init__(*place)
        self.log = log

    def backward_one_chunk(self, micro_batch, *, full_backward, **_):
        self._note("B" if full_backward else "I", micro_batch)

    def backward_weight_one_chunk(self, micro_batch, **_):
        self._note("W", micro_batch)

    def set_local_fwd_input(self, output, micro_batch):
        pass

    def set_local_bwd_input(self, gradient, micro_batch):
        pass

    def get_local_bwd_output(self, micro_batch):
        pass


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
def test_the_actions_of_a_schedule_are_those_that_it_runs(name, stages_of):
    schedule = getattr(pipelining, name)
    for rank, expected in enumerate(_torch.pipeline_actions(schedule, stages_of, 4)):
        log = []
        built = schedule([_RecordedStage(log, index, 4, rank, 2) for index in stages_of[rank]], 4)
        built._stages_forward_initialized = True
        built._step_microbatches()
        assert tuple(log) == expected


@SEVERAL
def test_computations_are_the_actions_without_sends_and_receives(name, stages_of):
    schedule = getattr(pipelining, name)
    for micro_batches in (4, 8):
        every = _torch.pipeline_actions(schedule, stages_of, micro_batches)
        computed = [tuple(each for each in own if len(each[0]) == 1) for own in every]
        assert list(_torch.pipeline_computations(schedule, stages_of, micro_batches)) == computed


def test_the_actions_of_a_loop_are_those_that_it_tells_of_itself_but_for_the_last_rank():
    for schedule in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        told = schedule(_StandInStage(0, 3, 0, 3), 4).pipeline_order
        for rank, found in enumerate(_torch.pipeline_actions(schedule, [(0,), (1,), (2,)], 4)):
            computed = [each for each in found if each[0] in ("F", "B")]
            if rank < 2 or schedule is pipelining.ScheduleGPipe:
                assert computed == list(_flat_actions(told[rank]))
            # Of 1F1B's last rank it tells 1F, 0B, 2F, 1B, ..., a micro-batch that there is not.
            assert sorted(n for kind, _, n in computed if kind == "F") == [0, 1, 2, 3]

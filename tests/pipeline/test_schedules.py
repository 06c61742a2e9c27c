"""The lists of actions: counted, compared with written ones, and refused where torch would."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
from torch.distributed import pipelining

from autopar.errors import PlanError
from autopar.ir.pipeline import SCHEDULES, SPLIT, Pipeline
from autopar.pipeline.schedules import (
    Action,
    ActionLists,
    actions,
    check_micro_batches,
    computations,
    fewest_micro_batches,
    takes,
)

CHUNKS = {"one": (1,), "rounds": (1, 2, 3), "v": (2,)}
# Schedules that torch has, and their classes.
TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def pipeline(schedule: str, ranks: int, chunks: int = 1) -> Pipeline:
    return Pipeline(ranks, schedule, tuple(f"op{i}" for i in range(ranks * chunks - 1)))


def cases():
    for schedule, ranks in itertools.product(SCHEDULES, (1, 2, 3, 4)):
        for chunks in CHUNKS[SCHEDULES[schedule]]:
            found = pipeline(schedule, ranks, chunks)
            for micro_batches in (fewest_micro_batches(found), 2 * ranks, 4 * ranks):
                yield found, micro_batches


def text(rank_actions) -> str:
    return " ".join(map(str, rank_actions))


def test_1f1b_is_written_out():
    first, last = actions(pipeline("1f1b", 2), 3)
    assert text(first) == ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2")
    assert text(last) == ("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2")


def test_gpipe_is_written_out():
    first, last = actions(pipeline("gpipe", 2), 2)
    assert text(first) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert text(last) == "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"


def test_the_two_stages_at_the_foot_of_a_v_send_each_other_nothing():
    for schedule in ("zbv", "dualpipev"):
        for each in actions(pipeline(schedule, 2, 2), 4)[1]:
            assert (each.kind, each.stage) not in {("SEND_F", 1), ("RECV_F", 2)}
            assert (each.kind, each.stage) not in {("SEND_B", 2), ("RECV_B", 1)}


def test_every_micro_batch_passes_every_stage_once_each_way():
    for found, micro_batches in cases():
        lists = actions(found, micro_batches)
        counted = Counter(each for rank in lists for each in rank)
        assert set(counted.values()) == {1}
        for rank, stage in ((r, s) for r in range(found.ranks) for s in found.stages_of(r)):
            own = [each for each in lists[rank] if each.stage == stage]
            assert all(each.stage in found.stages_of(rank) for each in lists[rank])
            for number in range(micro_batches):
                kinds = "".join(e.kind for e in own if e.micro_batch == number and len(e.kind) == 1)
                assert kinds in (("FB", "FIW") if found.schedule in SPLIT else ("FB",))


def test_what_is_sent_is_received():
    for found, micro_batches in cases():
        lists = actions(found, micro_batches)
        every = {each for rank in lists for each in rank}
        for kind, stage, number in every:
            if kind.startswith("SEND"):
                offset = 1 if kind == "SEND_F" else -1
                assert Action(kind.replace("SEND", "RECV"), stage + offset, number) in every
        sends = sum(e.kind.startswith("SEND") for e in every)
        assert sends == sum(e.kind.startswith("RECV") for e in every)
        borders = sum(found.rank_of(s) != found.rank_of(s + 1) for s in range(found.stages - 1))
        assert sends == 2 * micro_batches * borders


def test_one_order_of_all_ranks_gives_every_action_its_inputs():
    for found, micro_batches in cases():
        lists = actions(found, micro_batches)
        order = lists.in_order
        place = {each: index for index, each in enumerate(order)}
        assert len(order) == sum(map(len, lists))
        for rank in lists:
            assert [place[each] for each in rank] == sorted(place[each] for each in rank)
        backward = {(e.stage, e.micro_batch): place[e] for e in order if e.kind in ("B", "I")}
        for stage, number in itertools.product(range(found.stages), range(micro_batches)):
            forward = place[Action("F", stage, number)]
            assert forward < backward[stage, number]
            if stage:
                assert place[Action("F", stage - 1, number)] < forward
                assert backward[stage, number] < backward[stage - 1, number]


def test_a_deadlock_names_what_waits():
    first = [Action("RECV_B", 0, 0), Action("F", 0, 0), Action("SEND_F", 0, 0), Action("B", 0, 0)]
    last = [Action("RECV_F", 1, 0), Action("F", 1, 0), Action("B", 1, 0), Action("SEND_B", 1, 0)]
    with pytest.raises(AssertionError) as found:
        list(ActionLists.of([first, last]).in_order)
    assert "rank 0 at 0RECV_B0 for 1SEND_B0" in str(found.value)
    assert "rank 1 at 1RECV_F0 for 0SEND_F0" in str(found.value)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "micro_batches", "words"),
    [
        (
            "1f1b",
            4,
            1,
            3,
            "The schedule 1f1b takes at least as many micro-batches as there are stages, but there are 3 "
            "for 4 stages. Take 4 micro-batches, or the schedule gpipe, which takes any number.",
        ),
        (
            "interleaved",
            4,
            2,
            9,
            "The schedule interleaved runs 9 micro-batches on 4 pipeline ranks in 2 rounds (9 // 4), but "
            "2 does not divide 9. Take 8 or 10 micro-batches, or the schedule looped-bfs, which takes "
            "any number.",
        ),
        ("zb", 2, 1, 5, "Take 4 or 6 micro-batches, or the schedule looped-bfs"),
        ("dualpipev", 2, 2, 3, "are 3 for 4 stages. Take 4 micro-batches, or the schedule zbv"),
        ("gpipe", 2, 1, 0, "A pipeline runs at least one micro-batch, but 0 were asked for."),
    ],
)
def test_a_number_of_micro_batches_is_refused_in_words(schedule, ranks, chunks, micro_batches, words):
    with pytest.raises(PlanError) as found:
        actions(pipeline(schedule, ranks, chunks), micro_batches)
    assert words in str(found.value)


def torch_lists(found: Pipeline, micro_batches: int):
    """What the class of torch.distributed.pipelining lists for all ranks, once it knows where rank 0 stands."""
    places = [
        SimpleNamespace(stage_index=s, num_stages=found.stages, group_rank=0, group_size=found.ranks, submod=None)
        for s in found.stages_of(0)
    ]
    single = SCHEDULES[found.schedule] == "one"
    made = getattr(pipelining, TORCH[found.schedule])(places[0] if single else places, micro_batches)
    return [[*_flat(made.pipeline_order[rank])] for rank in range(found.ranks)]


def _flat(listed):
    """The computations of a list, without its gaps; a forward and a backward at once, one after the other."""
    for part in (part for each in listed if each for part in each.sub_actions or (each,)):
        if part.computation_type.value in "FBIW":
            yield Action(part.computation_type.value, part.stage_index, part.microbatch_index)


@pytest.mark.parametrize("schedule", [each for each in TORCH if SCHEDULES[each] != "one"])
def test_computations_are_those_of_torch(schedule):
    for ranks, chunks in itertools.product((1, 2, 3, 5), CHUNKS[SCHEDULES[schedule]]):
        found = pipeline(schedule, ranks, chunks)
        for micro_batches in (1, 2, 4, 5, 8, 10, 15):
            if takes(found, micro_batches):
                assert computations(found, micro_batches) == torch_lists(found, micro_batches)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_computations_of_one_stage_a_rank_are_those_of_torch_but_for_the_last_rank(schedule):
    found = pipeline(schedule, 3)
    listed, own = torch_lists(found, 4), computations(found, 4)
    assert own[:2] == listed[:2]
    if schedule == "gpipe":
        assert own == listed
    # Of 1F1B's last rank torch tells 1F, 0B, 2F, 1B, ..., a micro-batch that there is not.
    assert sorted(each.micro_batch for each in own[2] if each.kind == "F") == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [("v-half", {2: 4, 3: 4, 4: 6, 6: 8, 8: 10, 16: 18}), ("v-min", {2: 4, 3: 4, 4: 4, 6: 6, 8: 8, 16: 12})],
)
def test_a_lean_schedule_holds_a_half_or_a_third_of_what_1f1b_holds(schedule, counts):
    """Of 2p stages in flight p + 2, and 2p/3 + 2, at most: the numbers of arXiv:2405.15362 and of its authors' code."""
    for ranks, most in counts.items():
        held = [_most_held(each) for each in computations(pipeline(schedule, ranks, 2), 4 * ranks)]
        assert max(held) == most


def _most_held(own) -> int:
    """Largest number of a rank's stages and micro-batches whose backward has not ended."""
    return max(itertools.accumulate({"F": 1, "B": -1, "I": 0, "W": -1}[each.kind] for each in own))


def test_we_refuse_what_torch_refuses_and_nothing_else():
    for schedule, ranks in itertools.product(TORCH, (1, 2, 3, 5)):
        for chunks in CHUNKS[SCHEDULES[schedule]][:2]:
            found = pipeline(schedule, ranks, chunks)
            for micro_batches in range(1, 12):
                assert _is_taken(found, micro_batches) == _is_taken_by_torch(found, micro_batches)


def _is_taken(found: Pipeline, micro_batches: int) -> bool:
    try:
        check_micro_batches(found, micro_batches)
    except PlanError:
        return False
    return True


def _is_taken_by_torch(found: Pipeline, micro_batches: int) -> bool:
    try:
        torch_lists(found, micro_batches)
    except ValueError:
        return False
    return True

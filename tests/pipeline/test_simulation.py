"""Simulated steps: textbook formulas, answers worked out by hand, and laws."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.explanation.report import as_text
from autopar.ir.pipeline import SCHEDULES, Pipeline
from autopar.pipeline.schedules import actions, fewest_micro_batches, waits_for_sends
from autopar.pipeline.simulation import Simulation, Span, StageCosts, StepTimer, simulate
from autopar.views.gantt import Gantt

FORWARD, BACKWARD = 1.0, 2.0  # of a rank's layers, whatever its number of stages
SENDS = {"send_forward_seconds": 0.02, "send_backward_seconds": 0.02}


def pipeline(schedule: str, ranks: int, chunks: int = 1) -> Pipeline:
    return Pipeline(ranks, schedule, tuple(f"op{i}" for i in range(ranks * chunks - 1)))


def equal(stages: int, chunks: int = 1, **changes) -> list[StageCosts]:
    """Stages alike; a rank saves one byte for every micro-batch in flight on all of its stages."""
    each = StageCosts(FORWARD / chunks, BACKWARD / chunks, BACKWARD / chunks / 2, saved_bytes=1 / chunks)
    return [replace(each, **changes)] * stages


def run(schedule, ranks, micro_batches, chunks=1, **changes) -> Simulation:
    found = pipeline(schedule, ranks, chunks)
    return simulate(actions(found, micro_batches), equal(found.stages, chunks, **changes))


GRID = [(1, 1), (1, 4), (2, 2), (2, 6), (3, 3), (4, 8), (8, 16)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_the_bubble_of_equal_stages(schedule, ranks, micro_batches):
    found = run(schedule, ranks, micro_batches)
    assert found.step_seconds == pytest.approx((micro_batches + ranks - 1) * (FORWARD + BACKWARD))
    assert found.bubble_fraction == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_chunks_divide_the_bubble(schedule, chunks):
    found = run(schedule, 4, 8, chunks)
    assert found.bubble_seconds == pytest.approx(3 / chunks * (FORWARD + BACKWARD))


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_memory_in_flight(ranks, micro_batches):
    assert run("gpipe", ranks, micro_batches).peak_bytes == (micro_batches,) * ranks
    in_flight = tuple(min(micro_batches, ranks - rank) for rank in range(ranks))
    assert run("1f1b", ranks, micro_batches).peak_bytes == in_flight


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (8, 16)])
def test_halved_backwards_fill_the_bubble(ranks, micro_batches):
    # ZB-H1 (Zero Bubble Pipeline Parallelism, table 1): (p - 1)(F + B - W), and B = W here.
    assert run("zb", ranks, micro_batches).bubble_seconds == pytest.approx((ranks - 1) * FORWARD)
    whole = run("1f1b", ranks, micro_batches).bubble_seconds
    for schedule, chunks in (("zb", 1), ("zb", 2), ("zbv", 2), ("dualpipev", 2)):
        assert run(schedule, ranks, micro_batches, chunks).bubble_seconds < whole


def test_the_order_of_the_schedules_on_eight_ranks():
    """First halves of backwards take longer than forwards, second halves less, and a message 2 % of a forward.

    V-Min hurries every micro-batch, so that whatever delays one delays all.
    """

    def seconds(schedule: str, chunks: int, micro_batches: int) -> float:
        costs = equal(8 * chunks, chunks, weight_seconds=0.8 / chunks, **SENDS)
        lists = actions(pipeline(schedule, 8, chunks), micro_batches)
        return simulate(lists, costs, waits_for_sends=waits_for_sends(schedule)).step_seconds

    for micro_batches in (16, 32, 64):
        faster = [("zb", 4), ("zbv", 2), ("interleaved", 2), ("v-half", 2), ("1f1b", 1), ("v-min", 2)]
        times = [seconds(schedule, chunks, micro_batches) for schedule, chunks in faster]
        assert times == sorted(set(times))


def test_what_waits_for_its_weights_gradients_is_held():
    held = run("zb", 4, 8).peak_bytes
    let_go = run("zb", 4, 8, late_bytes=0.0).peak_bytes
    assert held == (4, 4, 4, 4)
    assert let_go == (4, 3, 2, 1)  # as 1F1B
    assert run("zb", 4, 8, late_bytes=2.0).peak_bytes == (5, 6, 7, 8)  # 3 - r whole, r + 1 late


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("slow", range(4))
def test_the_slowest_stage_sets_the_pace(schedule, slow):
    costs = equal(4)
    costs[slow] = StageCosts(10.0, 20.0)
    found = simulate(actions(pipeline(schedule, 4), 8), costs)
    pace = 8 * (10.0 + 20.0)
    if schedule == "1f1b":  # the stages after it run beside it
        assert found.step_seconds == pytest.approx(pace + slow * (FORWARD + BACKWARD))
    else:  # they are waited for once, between all forwards and all backwards
        assert found.step_seconds == pytest.approx(pace + 3 * (FORWARD + BACKWARD))
    assert found.busy_seconds[slow] == pytest.approx(pace)


def test_sends_delay_the_ends_of_a_fill_and_drain():
    # 3 hops there and 3 back are waited for; all others run beside compute.
    found = run("gpipe", 4, 8, send_forward_seconds=0.1, send_backward_seconds=0.2)
    assert found.step_seconds == pytest.approx(11 * 3 + 3 * 0.1 + 3 * 0.2)


def test_sends_slow_the_loop_of_1f1b():
    # The first rank has 4 micro-batches in flight: it gets one back every quarter of their way,
    # 4 forwards, 4 backwards and 6 hops.
    sends = dict(send_forward_seconds=0.1, send_backward_seconds=0.1)
    longer = run("1f1b", 4, 40, **sends).step_seconds - run("1f1b", 4, 20, **sends).step_seconds
    assert longer == pytest.approx(20 * (3 + 6 * 0.1 / 4))


def test_a_link_takes_one_send_after_the_other():
    # seconds:  1     4      7 8 9 10   12 13 15 16
    # rank 0    F0 F1                    B0    B1
    # there       0---- 1-----
    # rank 1          F0     F1 B0 B1
    # back                        0----- 1-----
    costs = [StageCosts(1, 1, send_forward_seconds=3), StageCosts(1, 1, send_backward_seconds=3)]
    found = simulate(actions(pipeline("gpipe", 2), 2), costs)
    assert found.step_seconds == 16
    assert sorted(span for span in found.spans if len(span.kind) > 1) == [
        Span(0, 0, 0, "SEND_F", 1, 4),
        Span(0, 0, 1, "SEND_F", 4, 7),
        Span(1, 1, 0, "SEND_B", 9, 12),
        Span(1, 1, 1, "SEND_B", 12, 15),
    ]
    assert [s.begin_seconds for s in sorted(found.spans) if s[:4] == (0, 0, 1, "B")] == [15]


def test_the_peak_and_when_it_is_reached():
    # Kept 100; the second forward, at 1 s, holds 2 micro-batches of 10 and works with 5.
    costs = [StageCosts(1, 1, saved_bytes=10, working_bytes=5, kept_bytes=100)]
    found = simulate(actions(pipeline("gpipe", 1), 2), costs)
    assert found.peak_bytes == (125,)
    assert found.peak_seconds == (1,)


def test_a_rank_keeps_all_of_its_stages():
    costs = [StageCosts(1, 1, kept_bytes=10 ** (stage)) for stage in range(4)]
    assert simulate(actions(pipeline("interleaved", 2, 2), 2), costs).peak_bytes == (101, 1010)
    assert simulate(actions(pipeline("zbv", 2, 2), 2), costs).peak_bytes == (1001, 110)


def test_stages_and_costs_must_agree():
    with pytest.raises(AssertionError, match=r"2 costs are given for the stages \[0, 1, 2\]"):
        simulate(actions(pipeline("gpipe", 3), 2), equal(2))
    with pytest.raises(AssertionError, match=r"one half of the backward takes 3\.0 s, and both together 2\.0 s"):
        StageCosts(1.0, 2.0, weight_seconds=3.0)


# --- laws

SECONDS = st.floats(0.01, 10.0)
COSTS = st.builds(
    lambda forward, backward, share, send, saved: StageCosts(
        forward, backward, share * backward, saved, send_forward_seconds=send, send_backward_seconds=send
    ),
    SECONDS,
    SECONDS,
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 9),
)


@st.composite
def priced(draw, schedules=tuple(SCHEDULES)):
    """A pipeline with a number of micro-batches that it takes, and costs of its stages."""
    schedule = draw(st.sampled_from(schedules))
    ranks = draw(st.integers(1, 4))
    chunks = {"one": 1, "rounds": draw(st.integers(1, 2)), "v": 2}[SCHEDULES[schedule]]
    found = pipeline(schedule, ranks, chunks)
    micro_batches = max(fewest_micro_batches(found), ranks * draw(st.integers(1, 3)))
    costs = draw(st.lists(COSTS, min_size=found.stages, max_size=found.stages))
    return found, micro_batches, costs


@settings(max_examples=60, deadline=None)
@given(priced())
def test_a_rank_does_one_thing_at_a_time_and_all_of_it(case):
    found, micro_batches, costs = case
    result = simulate(actions(found, micro_batches), costs)
    for rank in range(found.ranks):
        mine = [s for s in result.spans if s.rank == rank and len(s.kind) == 1]
        assert all(a.end_seconds <= b.begin_seconds for a, b in itertools.pairwise(mine))
        own = [costs[stage] for stage in found.stages_of(rank)]
        work = micro_batches * sum(c.forward_seconds + c.backward_seconds for c in own)
        assert result.busy_seconds[rank] == pytest.approx(work)
        assert result.step_seconds >= work * (1 - 1e-9)
        assert result.peak_bytes[rank] <= micro_batches * sum(c.saved_bytes for c in own)
    assert 0 <= result.bubble_fraction + 1e-9 < 1


@settings(max_examples=60, deadline=None)
@given(priced(), st.booleans())
def test_a_timer_gives_the_seconds_of_the_simulation_to_the_last_bit(case, waits):
    found, micro_batches, costs = case
    lists = actions(found, micro_batches)
    whole = simulate(lists, costs, waits_for_sends=waits).step_seconds
    assert StepTimer.of(lists, waits_for_sends=waits).seconds(costs) == whole


@settings(max_examples=60, deadline=None)
@given(priced(), st.data())
def test_a_longer_stage_never_makes_a_shorter_step(case, data):
    found, micro_batches, costs = case
    lists = actions(found, micro_batches)
    stage = data.draw(st.integers(0, found.stages - 1))
    more = data.draw(st.floats(0.0, 5.0))
    longer = [*costs]
    longer[stage] = replace(
        costs[stage],
        forward_seconds=costs[stage].forward_seconds + more,
        backward_seconds=costs[stage].backward_seconds + more,
    )
    before, after = simulate(lists, costs).step_seconds, simulate(lists, longer).step_seconds
    assert after >= before * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(priced(("gpipe",)), st.integers(1, 4))
def test_more_micro_batches_never_make_more_bubble(case, more):
    found, micro_batches, costs = case
    few = simulate(actions(found, micro_batches), costs)
    many = simulate(actions(found, micro_batches + more), costs)
    assert many.bubble_fraction <= few.bubble_fraction + 1e-9


@settings(max_examples=60, deadline=None)
@given(priced(("1f1b",)), st.integers(1, 4))
def test_nor_does_1f1b_where_sending_takes_no_time(case, more):
    found, micro_batches, costs = case
    instant = [replace(c, send_forward_seconds=0.0, send_backward_seconds=0.0) for c in costs]
    few = simulate(actions(found, micro_batches), instant)
    many = simulate(actions(found, micro_batches + more), instant)
    assert many.bubble_fraction <= few.bubble_fraction + 1e-9


def test_1f1b_waits_for_each_round_trip():
    """Two stages, sending takes 1 s: rank 0 waits for the backward of one micro-batch before the next forward."""
    found = pipeline("1f1b", 2)
    sends = {"send_forward_seconds": 1.0, "send_backward_seconds": 1.0}
    costs = [StageCosts(1.0, backward, **sends) for backward in (2.0, 1.0)]
    two, three = (simulate(actions(found, n), costs) for n in (2, 3))
    assert (two.step_seconds, three.step_seconds) == (9.0, 14.0)
    assert three.bubble_fraction > two.bubble_fraction


# --- docs/pipeline.md

DOCUMENT = Path(__file__).parents[2] / "docs" / "pipeline.md"
ROW = re.compile(r"\| `(\S+)` \| (\d) \| (\S+) \| (\S+) \| (\S+ %) \| ([\d. ]+) \|")


def test_the_worked_example_of_the_document():
    rows = ROW.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert {row[0] for row in rows} == set(SCHEDULES)
    for schedule, chunks, step, bubble, share, peaks in rows:
        found = run(schedule, 4, 8, int(chunks))
        assert f"{found.step_seconds:.1f}" == step
        assert f"{found.bubble_seconds:.1f}" == bubble
        assert f"{100 * found.bubble_fraction:.1f} %" == share
        assert " ".join(f"{size:g}" for size in found.peak_bytes) == peaks


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_the_pictures_of_the_document(schedule):
    picture = as_text(Gantt(run(schedule, 4, 8, saved_bytes=1e9)), width=81)
    assert "\n".join(f"    {line.rstrip()}" for line in picture.splitlines()) in DOCUMENT.read_text(encoding="utf-8")

"""Pictures of simulated steps: every action is in them, at its place, or they say that it is not."""

import re

import pytest

from autopar.explanation.report import as_text
from autopar.ir.pipeline import Pipeline
from autopar.pipeline.schedules import actions
from autopar.pipeline.simulation import StageCosts, simulate
from autopar.views.gantt import Gantt, caption, events, gantt
from autopar.views.palette import PALETTE, REST
from autopar.views.trace import to_trace


def step(schedule="1f1b", ranks=2, chunks=1, micro_batches=3, **costs):
    found = Pipeline(ranks, schedule, tuple(f"op{i}" for i in range(ranks * chunks - 1)))
    each = StageCosts(1 / chunks, 2 / chunks, 1 / chunks, **costs)
    return simulate(actions(found, micro_batches), [each] * found.stages)


def lines(simulation, width: int) -> list[str]:
    return [line.rstrip() for line in as_text(Gantt(simulation), width=width).splitlines()]


def test_a_step_in_a_terminal():
    assert lines(step(), 32) == [
        "step 12.0 s, bubble 25.0 %",
        "rank 0 0█1█    0▓▓▓2█1▓▓▓  2▓▓▓",
        "rank 1   0█0▓▓▓1█1▓▓▓2█2▓▓▓",
        "█ forward   ▓ backward",
    ]


def test_updates_are_bars():
    found = lines(step("pipedream", update_seconds=1.0), 40)
    assert found[-1] == "█ forward   ▓ backward   ░ update"
    assert [line.count("░") for line in found[1:3]] == [3, 3]


def test_peaks_stand_at_the_end_of_their_rows():
    found = lines(step(saved_bytes=1e9), 60)
    assert found[0] == "step 12.0 s, bubble 25.0 %, peak 2.00 GB on rank 0 at 1.00 s"
    assert [line[-7:] for line in found[1:3]] == ["2.00 GB", "1.00 GB"]


def test_halves_of_backwards_look_different():
    assert lines(step("zb"), 28) == [
        "step 10.0 s, bubble 10.0 %",
        "rank 0 0█1█  0▒0▚2█1▒1▚2▒2▚",
        "rank 1   0█0▒1█1▒0▚2█2▒1▚2▚",
        "█ forward   ▒ backward, of",
        "inputs   ▚ backward, of",
        "weights",
    ]


@pytest.mark.parametrize("width", [80, 160])
def test_a_long_step_shows_its_ends(width):
    simulation = step("1f1b", 4, 1, 100)
    found = lines(simulation, width)
    assert all(len(line) <= width for line in found)
    assert [line for line in found if line.startswith("the ")] == [found[1], found[6]]
    assert re.fullmatch(r"the first [\d.]+ s", found[1])
    assert re.fullmatch(r"the last [\d.]+ s", found[6])
    assert found[2].startswith("rank 0 ███") and found[7].startswith("rank 0 ")


def test_a_step_as_svg():
    simulation = step(saved_bytes=1e9)
    picture = gantt(simulation)
    assert picture.count('class="event busy"') == 12  # 2 ranks, 3 micro-batches, there and back
    assert picture.count("<figure>") == 1
    assert caption(simulation) in picture
    assert ">2.00 GB</text>" in picture and ">1.00 GB</text>" in picture
    assert "forward of micro-batch 2 on stage 1: 1.00 s\nfrom 7.00 s" in picture
    bars = re.findall(r'<rect x="([\d.]+)" y="8" width="([\d.]+)"[^>]*class="event', picture)
    forward, backward = float(bars[0][1]), float(bars[2][1])
    assert backward == pytest.approx(2 * forward, abs=0.1)


def test_every_second_stage_of_a_rank_is_pale():
    picture = gantt(step("interleaved", 2, 2, 2))
    assert picture.count('class="event busy"') == 2 * picture.count("fill-opacity") == 16
    assert "Every second stage of a rank is pale." in picture
    assert "dim: every second stage of a rank" in as_text(Gantt(step("interleaved", 2, 2, 2)))


def test_what_is_too_narrow_is_grey_and_looked_at_closely():
    picture = gantt(step("1f1b", 2, 1, 300))
    assert picture.count("<figure>") == 3
    assert "A closer look at the start" in picture and "A closer look at the end" in picture
    whole = picture.split("<figure>")[1]
    assert REST.fill in whole and PALETTE[0].fill not in whole
    counted = sum(int(n) for n in re.findall(r": (\d+) actions", whole))
    assert counted + whole.count('class="event busy"') == 2 * 2 * 300
    assert len(picture) < 100_000


def test_a_step_as_a_trace():
    found = events(step(send_forward_seconds=0.25))
    assert {each.lane for each in found} == {"rank 0", "rank 1", "rank 0 sends"}
    named = {each.name: each for each in found}
    assert named["0SEND_F0"].start_seconds == 1 and named["1F0"].start_seconds == 1.25
    assert named["1F0"].detail == {"stage": 1, "micro_batch": 0}
    complete = [each for each in to_trace(found)["traceEvents"] if each["ph"] == "X"]
    assert len(complete) == len(found) == 12 + 3

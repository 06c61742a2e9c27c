"""Weight versions: by hand on two and four stages, as formulas, and what a schedule without a flush takes."""

import itertools

import pytest

from autopar.errors import PlanError
from autopar.ir import VERSIONED, Pipeline
from autopar.pipeline.schedules import actions, check_micro_batches
from autopar.pipeline.simulation import Simulation, StageCosts, simulate
from autopar.pipeline.weight_stashing import WeightVersions
from benchmarks.versions.idle import full_seconds, idle_seconds


def pipeline(schedule: str, ranks: int) -> Pipeline:
    return Pipeline(ranks, schedule, tuple(f"op{i}" for i in range(1, ranks)))


def versions(schedule: str, ranks: int, micro_batches: int) -> WeightVersions:
    return WeightVersions(pipeline(schedule, ranks), micro_batches)


def computed(schedule: str, ranks: int, micro_batches: int) -> list[str]:
    """Forwards, backwards and updates of every rank, without the stage's number."""
    lists = actions(pipeline(schedule, ranks), micro_batches)
    return [" ".join(f"{a.kind}{a.micro_batch}" for a in own if a.kind in "FBU") for own in lists]


def test_updates_on_two_stages_are_written_out() -> None:
    assert computed("pipedream", 2, 4) == ["F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 B3 U3", "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3"]
    assert computed("pipedream-sync", 2, 4) == computed("pipedream", 2, 4)
    assert computed("2bw", 2, 4) == ["F0 F1 B0 F2 B1 U1 F3 B2 B3 U3", "F0 B0 F1 B1 U1 F2 B2 F3 B3 U3"]


def test_versions_on_two_stages_by_hand() -> None:
    stashed = versions("pipedream", 2, 4)
    assert stashed.seen == ((0, 0, 1, 2), (0, 1, 2, 3))
    # Stage 0 has the old one, which micro-batch 1 needs, and the new one; stage 1 writes over its only one.
    assert stashed.alive == (2, 1) and stashed.delays == (1, 0) and stashed.updates == 4
    both = versions("pipedream-sync", 2, 4)
    assert both.seen == ((0, 0, 1, 2), (0, 0, 1, 2))
    assert both.alive == (2, 2) and both.delays == (1, 1)
    double = versions("2bw", 2, 8)
    assert double.seen == ((0, 0, 0, 0, 1, 1, 2, 2),) * 2
    assert double.alive == (2, 2) and double.delays == (1, 1) and double.updates == 4


def test_versions_on_four_stages_by_hand() -> None:
    stashed = versions("pipedream", 4, 8)
    assert stashed.seen == (
        (0, 0, 0, 0, 1, 2, 3, 4),
        (0, 0, 0, 1, 2, 3, 4, 5),
        (0, 0, 1, 2, 3, 4, 5, 6),
        (0, 1, 2, 3, 4, 5, 6, 7),
    )
    assert stashed.alive == (4, 3, 2, 1) and stashed.delays == (3, 2, 1, 0)
    together = versions("pipedream-sync", 4, 8)
    assert together.seen == ((0, 0, 0, 0, 1, 2, 3, 4),) * 4
    assert together.alive == (4, 4, 4, 4) and together.delays == (3, 3, 3, 3)
    double = versions("2bw", 4, 16)
    assert double.seen == ((0,) * 8 + (1,) * 4 + (2,) * 4,) * 4
    assert double.alive == (2, 2, 2, 2) and double.delays == (1, 1, 1, 1)


GRID = [(p, m * p) for p, m in itertools.product((2, 3, 4, 5, 8), (1, 2, 3, 5))]


@pytest.mark.parametrize(("p", "m"), GRID)
def test_formulas(p: int, m: int) -> None:
    """Those of the table in `autopar.pipeline.weight_stashing`."""
    stashed, synchronous, double = (versions(name, p, m) for name in VERSIONED)
    assert stashed.seen == tuple(tuple(max(0, i - (p - 1 - s)) for i in range(m)) for s in range(p))
    assert all(alive <= p - s for s, alive in enumerate(stashed.alive))
    assert stashed.alive == tuple(p - s for s in range(p)) or m < 2 * p
    assert stashed.delays == tuple(range(p - 1, -1, -1))
    assert synchronous.seen == (tuple(max(0, i - (p - 1)) for i in range(m)),) * p
    assert max(synchronous.alive) <= p and synchronous.delays == (p - 1,) * p
    assert double.seen == (tuple(max(0, i // p - 1) for i in range(m)),) * p
    assert double.alive == (min(2, m // p),) * p and double.delays == (min(1, m // p - 1),) * p


@pytest.mark.parametrize("schedule", VERSIONED)
@pytest.mark.parametrize(("p", "m"), GRID)
def test_no_forward_sees_a_version_that_is_not_there_yet(schedule: str, p: int, m: int) -> None:
    found = versions(schedule, p, m)
    for seen, newest in zip(found.seen, found.newest, strict=True):
        assert all(v <= n for v, n in zip(seen, newest, strict=True))
        assert list(seen) == sorted(seen)


# --- in time


def run(schedule: str, ranks: int, micro_batches: int, update_seconds: float = 0.5) -> Simulation:
    costs = [StageCosts(1.0, 2.0, saved_bytes=1.0, update_seconds=update_seconds)] * ranks
    return simulate(actions(pipeline(schedule, ranks), micro_batches), costs)


@pytest.mark.parametrize("schedule", VERSIONED)
@pytest.mark.parametrize("ranks", [2, 4])
def test_between_warm_up_and_drain_no_rank_waits(schedule: str, ranks: int) -> None:
    # With an update a stage's turn lasts F + B + U = 3.5; 2bw has one in p turns only, which the others wait for.
    found = run(schedule, ranks, 8 * ranks, 0.0 if schedule == "2bw" else 0.5)
    begin, end = full_seconds(found)
    assert end - begin > 0.7 * found.step_seconds
    assert idle_seconds(found, begin, end) == (0.0,) * ranks
    assert max(idle_seconds(found, 0.0, found.step_seconds)) > 0  # it fills and runs empty once a step


def test_a_flush_after_every_update_waits_every_time() -> None:
    # 8 updates: 1F1B flushes after each one's 4 micro-batches and waits (p - 1) (F + B) = 9 s each time.
    flushed = 8 * run("1f1b", 4, 4, 0.0).bubble_seconds
    assert flushed == pytest.approx(8 * 9)
    assert run("2bw", 4, 32, 0.0).bubble_seconds == pytest.approx(9)


def test_activations_are_those_of_1f1b() -> None:
    assert run("pipedream", 4, 8).peak_bytes == run("1f1b", 4, 8).peak_bytes == (4, 3, 2, 1)


# --- what is refused


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "says"),
    [
        ("pipedream", 3, "takes at least as many micro-batches as there are stages, but there are 3 for 4 stages"),
        ("2bw", 6, "updates after every 4 micro-batches, as many as there are stages, but there are 6. Take 4 or 8"),
    ],
)
def test_numbers_of_micro_batches_that_are_refused(schedule: str, micro_batches: int, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_micro_batches(pipeline(schedule, 4), micro_batches)
    assert says in str(caught.value) and "gpipe" not in str(caught.value)


def test_one_stage_has_no_such_schedule() -> None:
    with pytest.raises(PlanError, match="pipedream needs at least 2 pipeline ranks, but the plan has 1"):
        pipeline("pipedream", 1)

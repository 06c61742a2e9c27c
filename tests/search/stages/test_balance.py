"""Cuts: what brute force finds, laws, and what is said where nothing fits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.errors import PlanError, SearchError
from autopar.pipeline.schedules import actions
from autopar.pipeline.simulation import simulate
from autopar.pipeline.stage_table import StageTable
from autopar.search.stages.balance import balance, balance_of, refusal
from autopar.search.stages.shape import Shape

SHAPES = [
    *((schedule, 1) for schedule in ("gpipe", "1f1b", "zb")),
    *((schedule, 2) for schedule in ("interleaved", "looped-bfs", "zb", "zbv", "dualpipev")),
]


def table(
    forward: Sequence[float],
    *,
    backward: Sequence[float] | None = None,
    kept: Sequence[float] | None = None,
    saved: Sequence[float] | None = None,
    late: Sequence[float] | None = None,
    transient: Sequence[float] | None = None,
    send: float = 0.0,
) -> StageTable:
    """Blocks whose figures add up; sending takes the same between any two."""
    n = len(forward)
    zeros = [0.0] * n
    sends = np.array([0.0, *[send] * (n - 1), 0.0])
    moment = np.zeros((n + 1, n + 1))
    for i, j in itertools.combinations(range(n + 1), 2):
        moment[i, j] = max((transient or zeros)[i:j])
    return StageTable(
        starts=tuple(f"op{i}" for i in range(n)),
        recompute="none",
        repeating=(True,) * n,
        forward_seconds=_sums(forward),
        backward_seconds=_sums(zeros if backward is None else backward),
        weight_seconds=_sums(zeros),
        split_seconds=_sums(zeros),
        once_seconds=_sums(zeros),
        saved_bytes=_sums(saved or zeros),
        late_bytes=_sums(late or saved or zeros),
        kept_bytes=_sums(kept or zeros),
        version_bytes=_sums(zeros),
        transient_bytes=moment,
        sent_bytes=sends,
        gradient_bytes=sends,
        send_seconds=sends,
        gradient_seconds=sends,
    )


def _sums(values: Sequence[float]) -> np.ndarray:
    sums = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=float))])
    return np.maximum(0, sums[None, :] - sums[:, None])


def test_by_hand() -> None:
    """1 2 3 | 4 | 5: 6, 4 and 5 seconds; any other two cuts have a stage of 7 or more."""
    found = balance(table([1, 2, 3, 4, 5]), Shape(3, 1, "gpipe", 4), memory_bytes=np.inf)
    assert found.cuts == (3, 4)
    assert found.rank_seconds == (6, 4, 5)


def test_of_cuts_as_fast_the_smallest_then_the_earliest() -> None:
    """The last block takes longest, so that the others may be cut anywhere."""
    last = [1.0, 1, 1, 1, 9]
    assert balance(table(last), Shape(3, 1, "1f1b", 4), memory_bytes=np.inf).cuts == (1, 4)
    holding = table(last, saved=[1] * 5)
    gpipe = balance(holding, Shape(3, 1, "gpipe", 4), memory_bytes=np.inf)
    assert (gpipe.cuts, gpipe.rank_bytes) == ((2, 4), (8, 8, 4))  # 4 in flight of 2, 2 and 1
    one = balance(holding, Shape(3, 1, "1f1b", 4), memory_bytes=np.inf)
    assert (one.cuts, one.rank_bytes) == ((1, 4), (3, 6, 1))  # as small as (2, 4) with (6, 4, 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(12))
def test_brute_force_of_one_stage_a_rank(schedule: str, seed: int) -> None:
    draw = random.Random(f"{schedule} {seed}")
    n, stages, m = draw.randint(3, 9), draw.randint(1, 3), draw.randint(3, 6)
    numbers = [[draw.randint(1, 9) for _ in range(n)] for _ in range(5)]
    made = table(
        numbers[0],
        backward=numbers[1],
        kept=numbers[2],
        saved=numbers[3],
        transient=numbers[4],
        send=draw.choice([0.0, 2.0]),
    )
    shape = Shape(stages, 1, schedule, m)
    flights = shape.in_flight()
    every = [_figures(made, cuts, flights) for cuts in itertools.combinations(range(1, n), stages - 1)]
    room = sorted(size for _, size, _ in every)
    for bound in (room[0] - 1, room[0], room[len(room) // 2], room[-1]):
        fitting = [each for each in every if each[1] <= bound]
        if not fitting:
            assert "too much" in str(refusal(made, shape, memory_bytes=bound))
            least = balance(made, shape, memory_bytes=bound)
            assert max(least.rank_bytes) == room[0]
        else:
            found = balance(made, shape, memory_bytes=bound)
            assert (found.seconds, max(found.rank_bytes), found.cuts) == min(fitting)


def _figures(made: StageTable, cuts: tuple[int, ...], flights: Sequence[int]) -> tuple[float, float, tuple[int, ...]]:
    edges = list(itertools.pairwise((0, *cuts, made.blocks)))
    seconds = max(made.seconds[edge] for edge in edges)
    held = max(
        made.kept_bytes[edge] + flight * made.saved_bytes[edge] + made.transient_bytes[edge]
        for edge, flight in zip(edges, flights, strict=True)
    )
    return seconds, held, cuts


@pytest.mark.parametrize("seed", range(8))
def test_laws(seed: int) -> None:
    """More memory is never slower; more stages have no slower slowest one, if sending is free."""
    draw = random.Random(seed)
    n = 8
    made = table([draw.randint(1, 9) for _ in range(n)], saved=[draw.randint(1, 9) for _ in range(n)])
    shape = Shape(3, 1, "1f1b", 4)
    least = max(balance(made, shape, memory_bytes=0).rank_bytes)
    slowest = [balance(made, shape, memory_bytes=least * more).seconds for more in (1, 1.2, 1.5, 3)]
    assert slowest == sorted(slowest, reverse=True)
    deeper = [balance(made, Shape(p, 1, "gpipe", 1), memory_bytes=np.inf).seconds for p in range(1, n + 1)]
    assert deeper == sorted(deeper, reverse=True)
    assert deeper[0] == made.seconds[0, n] and deeper[-1] == max(np.diff(made.forward_seconds[0]))


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("zbv", 2)])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_with_several_stages_are_near_the_best(schedule: str, chunks: int, seed: int) -> None:
    """A descent from four places: on tiny cases within a quarter of what brute force finds."""
    draw = random.Random(f"{schedule} {seed}")
    n, shape = 8, Shape(2, chunks, schedule, 4)
    made = table([draw.randint(1, 9) for _ in range(n)], saved=[1.0] * n)
    rank_of = [shape.blank.rank_of(stage) for stage in range(shape.stages)]
    best = min(
        max(_rank_sums(made, cuts, rank_of, shape.ranks))
        for cuts in itertools.combinations(range(1, n), shape.stages - 1)
    )
    found = balance(made, shape, memory_bytes=np.inf)
    assert found.rank_seconds == tuple(_rank_sums(made, found.cuts, rank_of, shape.ranks))
    assert best <= found.seconds <= 1.25 * best


@pytest.mark.parametrize("seed", range(4))
def test_executed_cuts_end_no_later(seed: int) -> None:
    draw = random.Random(seed)
    shape = Shape(2, 2, "interleaved", 4)
    made = table([draw.randint(1, 9) for _ in range(9)], backward=[draw.randint(1, 9) for _ in range(9)])

    def seconds(cuts: Sequence[int]) -> float:
        return simulate(actions(shape.blank, 4), made.stages(cuts)).step_seconds

    plain = balance(made, shape, memory_bytes=np.inf)
    executed = balance(made, shape, memory_bytes=np.inf, executed=True)
    best = min(map(seconds, itertools.combinations(range(1, 9), 3)))
    assert best <= seconds(executed.cuts) <= min(1.1 * best, seconds(plain.cuts))


def _rank_sums(made: StageTable, cuts: Sequence[int], rank_of: Sequence[int], ranks: int) -> list[float]:
    sums = [0.0] * ranks
    for rank, edge in zip(rank_of, itertools.pairwise((0, *cuts, made.blocks)), strict=True):
        sums[rank] += made.seconds[edge]
    return sums


def test_memory_moves_the_cuts_of_ranks_with_several_stages() -> None:
    """The first block keeps so much that its rank has room for little else."""
    made = table([1.0] * 8, kept=[10, 1, 1, 1, 1, 1, 1, 1])
    shape = Shape(2, 2, "interleaved", 4)
    free = balance(made, shape, memory_bytes=100)
    tight = balance(made, shape, memory_bytes=11)
    assert free.rank_seconds == (4, 4) and max(free.rank_bytes) == 13
    assert max(tight.rank_bytes) <= 11 and tight.seconds > free.seconds


def test_micro_batches_in_flight() -> None:
    assert Shape(4, 1, "gpipe", 8).in_flight() == (8, 8, 8, 8)
    assert Shape(4, 1, "1f1b", 8).in_flight() == (4, 3, 2, 1)
    assert Shape(4, 1, "1f1b", 8).in_flight() == _counted(Shape(4, 1, "1f1b", 8))
    assert Shape(4, 1, "gpipe", 8).in_flight() == _counted(Shape(4, 1, "gpipe", 8))
    assert Shape(2, 2, "looped-bfs", 4).in_flight() == (4, 4, 4, 4)
    assert Shape(2, 2, "interleaved", 4).in_flight() == (4, 3, 2, 1)


@pytest.mark.parametrize(("schedule", "chunks"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_takes_what_the_simulated_step_holds_at_most(schedule: str, chunks: int, seed: int) -> None:
    """Stages of one rank do not hold their most at the same time."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 4)
    shape = Shape(ranks, chunks, schedule, 3 * ranks)
    made = table(
        [1.0] * 12,
        backward=[2.0] * 12,
        saved=[draw.randint(1, 9) for _ in range(12)],
        kept=[draw.randint(1, 9) for _ in range(12)],
        late=[draw.randint(1, 15) for _ in range(12)],
    )
    cuts = tuple(sorted(draw.sample(range(1, 12), shape.stages - 1)))
    run = simulate(actions(shape.blank, shape.micro_batches), made.stages(cuts))
    assert balance_of(made, shape, cuts).rank_bytes == run.peak_bytes


def test_the_fullest_moments_of_interleaved_stages() -> None:
    """Two ranks of two stages, 4 micro-batches. Rank 0 has 5 in flight, although its stages reach 4 and 2.

    rank 0    0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 ...
    rank 1    1F0 1F1 3F0 3B0 3F1 3B1 1F2 ...
    """
    (first, second), late = Shape(2, 2, "interleaved", 4).flights.tolist()
    assert not np.any(late)  # backward is not split
    assert first == [[3, 4], [2, 1]]
    assert second == [[2, 3], [1, 0]]


def _counted(shape: Shape) -> tuple[int, ...]:
    """From the lists of actions, as for schedules without a formula."""
    most = [0] * shape.stages
    for stage in range(shape.stages):
        now = 0
        for action in itertools.chain.from_iterable(actions(shape.blank, shape.micro_batches)):
            if action.stage == stage and action.kind in "FB":
                now += 1 if action.kind == "F" else -1
                most[stage] = max(most[stage], now)
    return tuple(most)


def test_says_which_stage_does_not_fit_and_by_how_much() -> None:
    """Two blocks a stage at best: 2 kept + 4 x 2 saved = 2 kB + 8 kB on the first of GPipe."""
    made = table([1.0] * 4, kept=[1000.0] * 4, saved=[1000.0] * 4)
    text = str(refusal(made, Shape(2, 1, "gpipe", 4), memory_bytes=7000))
    assert "No cuts into 2 stages fit into 7.00 kB under gpipe" in text
    assert "pipeline rank 0 takes 10.0 kB, 3.00 kB too much" in text
    assert "stage 0 from op0, 2 of 4 parts: 2.00 kB kept, 4 x 2.00 kB of micro-batches in flight" in text
    assert "schedule='1f1b', which holds at most 2 of them at once" in text
    assert "memory_bytes=10000" in text


def test_refuses_more_stages_than_blocks() -> None:
    with pytest.raises(SearchError, match="The model has 3 blocks, but 2 pipeline ranks with 2 chunks take 4"):
        balance(table([1.0] * 3), Shape(2, 2, "interleaved", 2), memory_bytes=np.inf)


def test_refuses_a_step_of_which_no_list_can_be_made() -> None:
    """2 stages x 200,000 micro-batches are 400,000 runs."""
    with pytest.raises(SearchError, match=r"400000 times .* take at most 131072 micro-batches"):
        balance(table([1.0] * 3), Shape(2, 1, "1f1b", 200_000), memory_bytes=np.inf)


def test_refuses_what_the_schedule_cannot_have() -> None:
    with pytest.raises(PlanError, match="takes 2 stages on 2 pipeline ranks, but the plan has 4"):
        balance(table([1.0] * 8), Shape(2, 2, "1f1b", 4), memory_bytes=np.inf)

"""What every pipeline rank computes, in order, under every schedule: building blocks that repeat.

A building block says when a rank runs the forwards and backwards of one micro-batch; those of micro-batch i come i
periods later. The block is repeated for all micro-batches, and a rank runs what it holds in the order of these times,
each as soon as it can (Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv:2405.15362).
The times are those of a run that works, so the order never waits for ever, and no rank holds more than in that run.

`in_rounds` counts the periods in forwards, and yields the schedules of stages in rounds; `in_a_v` yields those of
the paper, where rank r has the stages r and 2p - 1 - r. The forwards and backwards of ZBV and DualPipeV are not those
of a block while the pipeline fills and drains; `in_phases` reads them from a table.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class RankPlace(NamedTuple):
    """A pipeline rank, and what all ranks together run.

    Attributes:
        rank, ranks: position of the rank, and number of pipeline ranks.
        chunks: number of stages of each rank.
        micro_batches: number of micro-batches in a step.
    """

    rank: int
    ranks: int
    chunks: int
    micro_batches: int

    @property
    def to_last(self) -> int:
        """Number of ranks behind this one."""
        return self.ranks - 1 - self.rank


Computation = tuple[str, int, int]  # kind (F, B, I or W), chunk of the rank, micro-batch
Phase = tuple[int, str]  # number of repetitions, and computations such as "Fa Bb"


def in_rounds(
    place: RankPlace, *, ahead: int, round_size: int | None = None, behind: int | None = None, last_first: bool = False
) -> Iterator[Computation]:
    """Forwards and backwards in turn, where the stages lie in rounds.

    A rank runs so many micro-batches through its first chunk, then through the second, and so on, and their backwards
    from the last chunk to the first one.

    Args:
        place: the rank.
        ahead: number of further forwards between the n-th forward and the n-th backward.
        round_size: number of micro-batches that a chunk runs before the next one; None for all.
        behind: number of further first halves of a backward between its first and second half; None for whole ones.
        last_first: whether the backwards of a chunk begin with the last micro-batch.

    >>> " ".join(f"{kind}{i}" for kind, _, i in in_rounds(RankPlace(0, 2, 1, 3), ahead=1))
    'F0 F1 B0 F2 B1 B2'
    """
    size, every = round_size or place.micro_batches, range(place.micro_batches)
    chunks = range(place.chunks)
    there = sorted(itertools.product(chunks, every), key=lambda run: (run[1] // size, *run))
    back = sorted(
        itertools.product(chunks, every), key=lambda run: (run[1] // size, -run[0], -run[1] if last_first else run[1])
    )
    first = "B" if behind is None else "I"
    timed = [(n, 0, "F", *run) for n, run in enumerate(there)]
    timed += [(n + ahead, 1, first, *run) for n, run in enumerate(back)]
    if behind is not None:
        timed += [(n + ahead + behind, 2, "W", *run) for n, run in enumerate(back)]
    return ((kind, chunk, i) for _, _, kind, chunk, i in sorted(timed))


_PERIOD = 6  # a forward, and both halves of a backward, of two chunks, each of which takes one unit of time


def v_half(place: RankPlace) -> tuple[int, int, int, int]:
    """When a rank runs the forwards of both chunks, and the backwards of the second and first one: "V-Half".

    Returns units of time of one forward. A micro-batch goes to the next rank in 2 units on its way there, and in 1
    on its way back, so that it is away for half as long as under a V schedule with the memory of 1F1B.
    """
    ranks, rank, gap = place.ranks, place.rank, 3 * (place.ranks % 2 == 0)
    return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + gap + 2 * rank - 1, 6 * ranks + gap - rank - 2


def v_min(place: RankPlace) -> tuple[int, int, int, int]:
    """The same as `v_half` for "V-Min": a micro-batch never waits, so that it is away for the shortest time."""
    ranks, rank, gap = place.ranks, place.rank, 2 * (place.ranks % 3 == 0)
    return rank, 2 * ranks - rank - 1, 2 * ranks + gap + rank, 4 * ranks + gap - rank - 1


def in_a_v(place: RankPlace, block: Sequence[int]) -> Iterator[Computation]:
    """A block of two chunks, repeated every 6 units; second halves of backwards fill the units that it leaves free.

    Args:
        place: the rank.
        block: unit of time of the first chunk's forward, the second one's, its backward, and the first one's.
    """
    runs = (("F", 0), ("F", 1), ("I", 1), ("I", 0))
    timed = {
        begin + i * _PERIOD: (kind, chunk, i)
        for begin, (kind, chunk) in zip(block, runs, strict=True)
        for i in range(place.micro_batches)
    }
    assert len(timed) == len(runs) * place.micro_batches, f"the block {block} runs two computations at once"
    free = 0
    for begin in sorted(timed):
        kind, chunk, i = timed[begin]
        if kind == "I":
            free = next(unit for unit in itertools.count(max(free, begin) + 1) if unit not in timed)
            timed[free] = ("W", chunk, i)
    return (timed[unit] for unit in sorted(timed))


def zbv(place: RankPlace) -> tuple[Phase, ...]:
    """The phases of ZBV (arXiv:2401.10241, section 6), for at least 2p - 1 micro-batches."""
    to_last, rank, more = place.to_last, place.rank, place.micro_batches - 2 * place.ranks + 1
    return (
        (2 * to_last + 1, "Fa"),
        (rank, "Fb Fa"),
        (to_last + 1, "Fb Ib Wb"),
        (more + rank, "Fa Ia Wa Fb Ib Wb"),
        (to_last, "Ia Wa Fb Ib Wb"),
        (rank, "Ia Ib"),
        (to_last + 1, "Ia Wa"),
        (rank, "Wb"),
        (rank, "Wa"),
    )


def dual_pipe_v(place: RankPlace) -> tuple[Phase, ...]:
    """The phases of DualPipeV (github.com/deepseek-ai/DualPipe), for at least 2p micro-batches."""
    to_last, own, more = place.to_last, place.rank + 1, place.micro_batches - 2 * place.ranks
    return (
        (2 * to_last, "Fa"),
        (own, "Fa Fb"),
        (to_last, "Ib W Fb"),
        (more + own, "Fa Bb Fb Ba"),
        (to_last, "Bb Fb Ba"),
        (own // 2, "Bb Ba"),
        (own % 2, "Bb Ia"),
        (own // 2, "Ib Ia"),
        (to_last, "W Ia"),
        (own, "W"),
    )


def in_phases(phases: Iterable[Phase], micro_batches: int) -> Iterator[Computation]:
    """What phases say, each chunk's micro-batches in order; those that there are not are left out.

    Args:
        phases: the phases. "Fa" is a forward of the first chunk, "Ib" the first half of a backward of the second one,
            "Wb" the oldest second half of that chunk, and "W" that of both.
        micro_batches: number of micro-batches in a step.
    """
    counts: dict[str, Iterator[int]] = {name: itertools.count() for name in ("Fa", "Fb", "back a", "back b")}
    waiting: deque[tuple[int, int]] = deque()
    for word in itertools.chain.from_iterable(words.split() * count for count, words in phases):
        kind, chunk = word[0], "ab".find(word[1:])
        if kind == "W":
            oldest = next(run for run in waiting if len(word) == 1 or run[0] == chunk)
            waiting.remove(oldest)
            run = oldest
        else:
            run = chunk, next(counts[word if kind == "F" else f"back {word[1]}"])
        if kind == "I":
            waiting.append(run)
        if run[1] < micro_batches:
            yield kind, *run

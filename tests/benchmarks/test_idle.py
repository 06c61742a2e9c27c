"""The share of idle time that benchmarks/versions/idle.py reads off the actions of ranks."""

from __future__ import annotations

import pytest

from benchmarks.versions.idle import Busy, Case, idle_shares, simulated_share


def test_a_full_pipeline_is_read_from_the_first_backward_to_the_last_forward_of_rank_0() -> None:
    # From 2 to 8 s rank 0 is busy for 5 of 6 s, and rank 1 for 4: its forward is cut off at 8.
    first = [Busy("F", 0, 1), Busy("B", 2, 4), Busy("F", 5, 8), Busy("B", 9, 11)]
    second = [Busy("F", 1, 2), Busy("B", 2, 3), Busy("B", 3, 4), Busy("F", 6, 9)]
    shares = idle_shares([[first], [second]], Case("pipedream", 1))
    assert shares == pytest.approx([1 / 6, 2 / 6])


def test_with_a_flush_whole_steps_count() -> None:
    # Two steps of 10 s, in which rank 0 is busy for 3 + 3 and rank 1 for 6 + 3; the last step ends the time.
    steps = [[[Busy("F", t, t + 3)] for t in (0, 10, 20)], [[Busy("B", 4, 10)], [Busy("B", 17, 20)], []]]
    assert idle_shares(steps, Case("1f1b", 4)) == pytest.approx([14 / 20, 11 / 20])


def test_simulated_a_flush_leaves_ranks_idle_and_no_flush_does_not() -> None:
    shares = {case: simulated_share(case, 4) for case in Case.all_of(4)}
    # (p - 1) / (m + p - 1) with p = 4 and m = 1 or 4 micro-batches between flushes.
    assert [shares[case] for case in shares if case.flushes] == pytest.approx([3 / 4, 3 / 7])
    assert [shares[case] for case in shares if not case.flushes] == [0.0] * 3

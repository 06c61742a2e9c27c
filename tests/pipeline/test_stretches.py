"""Figures over stretches of blocks, against the same figures computed stretch by stretch."""

import numpy as np
import pytest

from autopar.pipeline.stretches import Turn, has, largest, ratio, sums

N = 5
FIGURES = np.array([3.0, 0.0, 7.0, 1.0, 4.0])
STRETCHES = [(i, j) for i in range(N + 1) for j in range(i, N + 1)]


@pytest.mark.parametrize(("i", "j"), STRETCHES)
def test_a_stretch_has_the_figures_of_its_blocks(i: int, j: int) -> None:
    blocks = range(i, j)
    assert sums(FIGURES)[i, j] == sum(FIGURES[k] for k in blocks)
    assert sums(-FIGURES)[i, j] == -sum(FIGURES[k] for k in blocks)
    assert largest(FIGURES)[i, j] == max((FIGURES[k] for k in blocks), default=0)
    for units in ((0,), (4,), (1, 3), (0, 2, 4)):
        assert has(units, N)[i, j] == any(k in blocks for k in units)


@pytest.mark.parametrize(("i", "j"), STRETCHES)
def test_the_turn_parts_a_stretch_into_recomputed_blocks_and_others(i: int, j: int) -> None:
    turns = [2, 2, 4, 5, 5, 5]  # of the longest stretch from each block
    turn, at = Turn.of(turns), min(j, turns[i])
    assert turn.first(FIGURES)[i, j] == FIGURES[i:at].sum()
    assert turn.then(FIGURES)[i, j] == FIGURES[at:j].sum()
    assert turn.sums(FIGURES)[i, j] == FIGURES[i:j].sum()
    alone = Turn.among(turns, np.array([i]), np.array([j]))
    assert (*alone.first(FIGURES), *alone.then(FIGURES)) == (turn.first(FIGURES)[i, j], turn.then(FIGURES)[i, j])


def test_a_ratio_to_nothing_is_nothing() -> None:
    found = ratio(np.array([1.0, 2.0, 0.0]), np.array([4.0, 0.0, 0.0]))
    assert found.tolist() == [0.25, 0, 0]

"""Memory saved for backward, of all stages at once, against the same counted stage by stage."""

import numpy as np
import pytest

from autopar.pipeline.saved_bytes import SavedBytes, SavedMemory
from autopar.pipeline.stretches import Turn

N = 5
STAGES = [(i, j) for i in range(N + 1) for j in range(i, N + 1)]
LATEST = [2, 2, 4, 5, 5, 5]  # the block at which recomputation ends, by the first of a stage
MEMORIES = [
    SavedMemory(1.0, (0,), (0,), ()),
    SavedMemory(2.0, (4,), (), ()),
    SavedMemory(4.0, (1, 3), (2,), ()),
    SavedMemory(8.0, (0,), (1,), ((0, 1),)),
    SavedMemory(16.0, (2, 3), (), ((1, 4),)),
    SavedMemory(32.0, (), (), ((0, 2), (3, 4))),
]


def held(each: SavedMemory, i: int, j: int) -> bool:
    """Whether the stage has a block that holds the memory, or receives or sends it."""
    turn = min(j, LATEST[i])
    has = any(i <= k < turn for k in each.entering) or any(turn <= k < j for k in each.kept)
    return has or any(made < edge <= last for made, last in each.spans for edge in (i, j) if i < j)


@pytest.mark.parametrize(("i", "j"), STAGES)
def test_a_stage_saves_what_its_blocks_hold_and_what_crosses_its_ends(i: int, j: int) -> None:
    saved = SavedBytes(MEMORIES, np.zeros(N), np.ones(N, dtype=bool), keeps_part=False)
    expected = sum(each.bytes for each in MEMORIES if held(each, i, j))
    assert saved.saved(Turn.of(LATEST))[i, j] == expected
    assert saved.saved(Turn.among(LATEST, np.array([[i]]), np.array([j]))) == expected


def test_a_recomputed_block_is_there_for_a_moment_beyond_what_later_ones_have_freed() -> None:
    made = [SavedMemory(8.0, (0,), (), ()), SavedMemory(2.0, (1,), (), ())]
    saved = SavedBytes(made, np.array([1.0, 3.0]), np.ones(2, dtype=bool), keeps_part=False)
    assert saved.transient(Turn.of([1, 2, 2]))[0, 2] == 1 + 8 - 2
    assert saved.transient(Turn.of([0, 1, 2]))[0, 2] == 3

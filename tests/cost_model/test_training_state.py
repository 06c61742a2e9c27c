"""Bytes of optimizer states, by hand: whole, in blocks with scales, and factored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_model.items import FULL, MIXED, MIXED_FLOAT32_GRADIENTS, TrainingState
from autopar.cost_model.optimizers import OPTIMIZERS
from autopar.cost_model.sizes import Sizes
from autopar.errors import AutoparError
from autopar.ir import Mesh, R, S, Tensor

MESH = Mesh.parse("dp=2")
MATRIX = Tensor("w", ((128,), (64,)), (("out",), ("in",)), 4, True)  # 8,192 elements
VECTOR = Tensor("b", ((4096,),), (("out",),), 4, True)
ODD = Tensor("o", ((4100,), (1,)), (("out",), ("in",)), 4, True)  # which 256 does not divide


def held(text: str, tensor: Tensor, state=R, usual: TrainingState = FULL) -> float:
    return TrainingState.parse(text, usual).optimizer_bytes(tensor, (state,), Sizes(MESH))


@pytest.mark.parametrize(
    "name, matrix, vector",
    [
        ("adamw", 2 * 4 * 8192, 2 * 4 * 4096),
        ("adamwbf16", 2 * 2 * 8192, 2 * 2 * 4096),
        ("adamw8bit", 2 * (8192 + 32 * 4 + 256 * 4), 2 * (4096 + 16 * 4 + 256 * 4)),
        ("adamw4bit", 2 * (4096 + 64 * 4 + 16 * 4), 2 * (2048 + 32 * 4 + 16 * 4)),
        ("adamwfp8", 2 * (8192 + 32 * 4), 2 * (4096 + 16 * 4)),
        ("adafactor", (128 + 64) * 4, 4096 * 4),
        ("muon", 4 * 8192, 2 * 4 * 4096),
        ("sgd-momentum", 4 * 8192, 4 * 4096),
        ("sgd", 0, 0),
    ],
)
def test_states_of_a_whole_parameter(name: str, matrix: int, vector: int) -> None:
    assert held(name, MATRIX) == matrix
    assert held(name, VECTOR) == vector


def test_blocks_are_those_of_a_ranks_own_part() -> None:
    """4,096 of 8,192 elements are kept in blocks; 2,048 of 4,096, and what 256 does not divide, are not."""
    assert held("adamw8bit", MATRIX, S(0)) == 2 * (4096 + 16 * 4 + 256 * 4)
    assert held("adamw8bit", VECTOR, S(0)) == 2 * 4 * 2048
    assert held("adamw8bit", ODD) == 2 * 4 * 4100
    assert held("adamwbf16", ODD) == 2 * 2 * 4100


def test_factors_are_whole_on_every_rank() -> None:
    assert held("adafactor", MATRIX, S(0)) == held("adafactor", MATRIX)
    assert held("adafactor", VECTOR, S(0)) == 2048 * 4


def test_masters_give_states_their_format() -> None:
    """Of a bfloat16 parameter: 4 bytes of master, and 8 of moments; in pure bfloat16 4 of moments."""
    half = replace(VECTOR, itemsize_bytes=2)
    assert held("", half, usual=MIXED) == 12 * 4096
    assert held("gradients=2 masters=0", half, usual=MIXED_FLOAT32_GRADIENTS) == 4 * 4096
    assert held("adamw8bit", half, usual=MIXED) == 4 * 4096 + held("adamw8bit", VECTOR)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_reads_its_own_text(name: str) -> None:
    state = TrainingState.parse(f"{name} gradients=2 masters=4")
    assert TrainingState.parse(str(state)) == state
    assert TrainingState.of(None) == TrainingState.of("adamw") == FULL


def test_unknown_words_are_refused() -> None:
    with pytest.raises(AutoparError, match=r"no optimizer 'lion' .* choose among adamw,"):
        TrainingState.parse("lion")
    with pytest.raises(AutoparError, match="Cannot read 'masters=3'"):
        TrainingState.parse("adamw8bit masters=3")

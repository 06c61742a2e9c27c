"""The state O(i): its text, its range, and the steps that lead to and from it."""

from __future__ import annotations

import pytest

from autopar.errors import LayoutError
from autopar.ir import Mesh, O, P, R, S, State, V, format_layout, has_owner, parse_layout, steps
from autopar.ir.conversion import Transition

MESH = Mesh.parse("dp=2,tp=4")


@pytest.mark.parametrize("layout", [(O(0), R), (O(1), S(0)), (R, O(3)), (O(1), O(2))])
def test_text_is_read_back(layout) -> None:
    assert parse_layout(format_layout(layout, MESH), MESH) == layout
    assert has_owner(layout) and not has_owner((R, S(0)))


def test_the_text_names_the_rank() -> None:
    assert format_layout((O(1), S(0)), MESH) == "O(1)@dp S(0)@tp"
    assert State.parse("O(12)") == O(12) != O(1)


def test_an_owner_out_of_range_is_refused_with_the_numbers() -> None:
    with pytest.raises(LayoutError, match=r"rank 4 of the axis tp, which has 4 ranks.*O\(0\) to O\(3\)"):
        parse_layout("O(4)@tp", MESH)
    with pytest.raises(LayoutError, match=r"'O\(x\)'"):
        parse_layout("O(x)@tp", MESH)


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        (O(1), V, "broadcast", "reduce"),
        (O(1), R, "broadcast", "keep"),
        (R, O(1), "keep", "broadcast"),
        (P, O(1), "reduce", "broadcast"),
        (O(1), S(0), "scatter", "gather"),
        (S(0), O(1), "gather", "scatter"),
        (O(1), P, "fill", "keep"),
        (V, O(1), "keep", "fill"),
        (O(1), O(0), "send", "send"),
    ],
    ids=str,
)
def test_conversions_by_name(source, target, forward, backward) -> None:
    (step,) = steps((source,), (target,))
    assert step.transition == Transition(forward, backward)


def test_what_is_sent_is_cut_first_and_gathered_last() -> None:
    """Each line of dp then moves a part of the parameter."""
    names = [step.transition.forward for step in steps((O(0), S(0)), (V, V))]
    assert names == ["broadcast", "all_gather"]
    names = [step.transition.forward for step in steps((O(0), R), (V, S(0)))]
    assert names == ["shard", "broadcast"]

"""Saved lines: what they say, which slices are free, and what is refused."""

from dataclasses import replace

import pytest

from autopar.errors import MeshError, PlanError
from autopar.ir import WHOLE, Mesh, P, Plan, R, S, V
from autopar.ir.saved import SavedLayout, can_slice, parse_saved, words_of_saved

MESH = Mesh.parse("dp=2,tp=4")
LINES = {
    "layers.*.input": SavedLayout((R, S(1))),
    "layers.3.input#2": SavedLayout((S(0), S(2, 1))),
    "layers.4.input": SavedLayout((R, S(1)), "host"),
    "layers.5.input": SavedLayout((R, R), "host"),
}
PLAN = Plan(MESH, "model", "auto", 1, {}, {}, {}, recompute="full", saved=LINES)


def test_a_plan_with_saved_lines_is_read_back():
    text = str(PLAN)
    assert "\nsaved layers.*.input: S(1)@tp\nsaved layers.3.input#2: S(0)@dp S(2.1)@tp\n" in text
    assert "\nsaved layers.4.input: S(1)@tp host\nsaved layers.5.input: R host\n" in text
    assert Plan.parse(text) == PLAN
    assert PLAN.to_json()["saved"]["layers.3.input#2"] == "S(0)@dp S(2.1)@tp"
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert "saved" not in replace(PLAN, saved={}).to_json()


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ("V@tp", PlanError, ": V@tp slices nothing; write a dim and an axis, such as S(1)@tp"),
        ("R", PlanError, ": R slices nothing"),
        ("V@tp host", PlanError, ": V@tp host slices nothing"),
        ("S(1)@tp nvme", PlanError, "but only parameters can be kept there; write S(1)@tp host"),
        ("S(1)@pp", MeshError, "pp"),
        (3, PlanError, "must be such as S(1)@tp, not 3"),
    ],
)
def test_a_line_names_a_dim_and_an_axis(value, error, says):
    with pytest.raises(error) as caught:
        parse_saved({"layers.*.input": value}, MESH)
    assert says in str(caught.value)


def test_a_line_twice_is_refused_with_its_number():
    with pytest.raises(PlanError, match="Line 8 of the plan gives saved layers"):
        Plan.parse(
            str(replace(PLAN, saved={"layers.*.input": SavedLayout((R, S(1)))})) + "saved layers.*.input: S(0)@tp\n"
        )


def test_an_axis_that_splits_the_tensor_already_is_left_alone():
    line = SavedLayout((S(0), S(1)))
    assert line.of((V, R)) == (S(0), S(1))
    assert line.of((S(2), V)) == (S(2), S(1))
    assert line.of((P, S(2))) == (P, S(2))


@pytest.mark.parametrize(
    ("dims", "layout", "slice_layout", "can"),
    [
        (((8,), (6,)), (R, R), (R, S(0)), True),
        (((8,), (6,)), (R, R), (R, S(1)), False),  # 4 ranks do not divide 6
        (((8,), (6,)), (R, R), (R, S(2)), False),  # two dims
        (((8,), (6, 4)), (R, R), (R, S(1, 1)), True),
        (((8,), (6, 4)), (R, R), (R, S(1, 2)), False),  # two factors
        (((8,), (6,)), (R, R), (S(1, WHOLE), R), True),
        (((8,), (6,)), (S(0), R), (S(0), S(0)), True),  # the later axis cuts the part of the earlier one
        (((8,), (6,)), (R, S(0)), (S(0), S(0)), False),  # parts would interleave
        (((), (6,)), (R, R), (S(0), R), False),  # a dim of size 1
    ],
)
def test_a_slice_is_taken_without_asking_other_ranks(dims, layout, slice_layout, can):
    assert can_slice(dims, layout, slice_layout, MESH) == can


def test_words_name_at_most_three_tensors():
    lines = {f"layers.{i}.input": SavedLayout((R, S(1))) for i in range(5)}
    words = words_of_saved(lines, MESH)
    assert words.startswith("layers.0.input, layers.1.input, layers.2.input and 2 more kept in")
    assert words_of_saved({}, MESH) == ""


def test_words_say_what_leaves_the_device():
    def words(**lines):
        return words_of_saved(lines, MESH)

    sliced, moved = SavedLayout((R, S(1))), SavedLayout((R, R), "host")
    assert words(a=moved) == "a kept in the host's memory until backward"
    assert words(a=sliced, b=moved) == "a, b kept in slices along tp in the host's memory (some) until backward"

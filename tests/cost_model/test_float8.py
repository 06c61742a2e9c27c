"""Prices of products whose operands are rounded, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.cost_model import Sizes
from autopar.cost_model.compute import OpPrice
from autopar.ir import Choice, Leaf, Mesh, Op, R, Tensor, Work
from tests.cost_model.test_price import MACHINE

ROWS, INNER, COLUMNS = 512, 128, 256
FLOPS = 2 * ROWS * INNER * COLUMNS
FAST_MEMORY = dataclasses.replace(MACHINE, peak_flops=((1, 2e12), (2, 1e12)), memory_bytes_per_second=1e30)
FAST_PRODUCTS = dataclasses.replace(MACHINE, peak_flops=((1, 2e30), (2, 1e30)))


def priced(hardware, trained: tuple[bool, bool], narrow: int | None = 1) -> OpPrice:
    def tensor(name: str, rows: int, columns: int, needs_grad: bool = True) -> Tensor:
        return Tensor(name, ((rows,), (columns,)), ((), ()), 2, needs_grad=needs_grad)

    tensors = {
        "x": tensor("x", ROWS, INNER, trained[0]),
        "w": tensor("w", COLUMNS, INNER, trained[1]),
        "y": tensor("y", ROWS, COLUMNS),
    }
    work = Work(2, (Leaf("b", "b", ROWS),), (Leaf("j", "j", COLUMNS),), (Leaf("k", "k", INNER),))
    whole = Choice("-", (R, R), (R,))
    op = Op(
        "y", "autopar.float8_linear", ("x", "w"), ("y",), (whole,), FLOPS, work=(work,), product_itemsize_bytes=narrow
    )
    return OpPrice.of(op, ("-",), tensors, Sizes(Mesh.of({"a": 1})), hardware)


def test_arithmetic_takes_the_peak_of_the_narrow_format():
    assert priced(FAST_MEMORY, (True, True)).forward.seconds == pytest.approx(FLOPS / 2e12)
    assert priced(FAST_MEMORY, (True, True), None).forward.seconds == pytest.approx(FLOPS / 1e12)


@pytest.mark.parametrize(
    ("trained", "expected"),
    [((True, True), FLOPS / 2e12 + FLOPS / 1e12), ((True, False), FLOPS / 2e12), ((False, True), FLOPS / 1e12)],
)
def test_backward_rounds_for_the_gradient_of_the_input_alone(trained, expected):
    backward = priced(FAST_MEMORY, trained).backward
    assert backward.passes * backward.seconds == pytest.approx(expected)


def test_the_gradient_of_the_input_rounds_that_of_the_result_and_the_weight():
    rounded = ROWS * COLUMNS + COLUMNS * INNER  # written and read in one byte each
    plain = 2 * (ROWS * INNER + COLUMNS * INNER + ROWS * COLUMNS)
    assert priced(FAST_PRODUCTS, (True, False)).backward.traffic_bytes == plain + 2 * rounded
    assert priced(FAST_PRODUCTS, (False, True)).backward.traffic_bytes == plain


def test_rounding_reads_the_operands_once_more_in_one_byte():
    operands = ROWS * INNER + COLUMNS * INNER
    moved = 2 * operands + operands + operands + 2 * ROWS * COLUMNS  # read, written, read, result
    forward = priced(FAST_PRODUCTS, (True, True)).forward
    assert forward.traffic_bytes == moved
    assert forward.seconds == pytest.approx(moved / 1e10)

"""Shapes of batches, without ranks: how many micro-batches fit, and which whole a part is of."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch import dtensor
from autopar.errors import StepError
from autopar.ir import Pipeline
from autopar.pipeline.schedules import takes, unbounded
from autopar.runtime.execute.inputs import (
    Arguments,
    fitting_micro_batches,
    micro_batch,
    rows_of_micro_batches,
    shapes_of_parts,
)


@pytest.mark.parametrize(
    ("usual", "rows", "found", "why"),
    [
        (4, 16, 4, "of 4 rows"),
        (4, 6, 4, "of 2, 2, 1 and 1 rows"),
        (4, 7, 4, "of 2, 2, 2 and 1 rows"),
        (4, 3, 3, "of 1 row, as a fourth would have none"),
        (1, 7, 1, "one stays one"),
        (4, 0, 4, "a batch without rows is cut into none"),
    ],
)
def test_micro_batches_of_another_batch(usual: int, rows: int, found: int, why: str) -> None:
    assert fitting_micro_batches([(rows, 4), ()], usual, lambda _: True) == found, why


def test_tensors_that_are_cut_in_proportion_have_a_say_in_micro_batches() -> None:
    # Of 2 rows in common 6 and 4 rows are 3 and 2 each: 3 micro-batches would need 2 of 6 and 4 / 3 of 4.
    assert fitting_micro_batches([(6, 4), (4,)], 3, lambda _: True) == 2
    assert fitting_micro_batches([(6, 4), (3,)], 3, lambda _: True) == 3


def test_schedules_have_a_say_in_micro_batches() -> None:
    one = Pipeline(2, "1f1b", ("cut",))
    taken = lambda count: takes(one, count)  # noqa: E731
    assert [takes(one, n) for n in (0, 1, 2)] == [False, False, True]
    assert fitting_micro_batches([(1, 4)], 4, taken) == 1
    assert takes(unbounded(one), 1)
    assert fitting_micro_batches([(3, 4)], 4, taken) == 3


def batch(*lengths: int) -> Arguments:
    return Arguments.of(tuple(torch.arange(length) for length in lengths), {})


def test_micro_batches_differ_by_at_most_one_row_and_are_the_batch_in_order() -> None:
    given = batch(30, 60)
    assert rows_of_micro_batches(given, 4) == (8, 8, 7, 7)
    parts = [micro_batch(given, 4, number) for number in range(4)]
    assert [[len(x) for x in part] for part in parts] == [[8, 16], [8, 16], [7, 14], [7, 14]]
    assert [torch.cat(column).tolist() for column in zip(*parts, strict=True)] == [[*range(30)], [*range(60)]]


@pytest.mark.parametrize(
    ("lengths", "count", "words"),
    [
        ((3,), 4, "has 3 rows, of which 4 micro-batches cannot each have one. Use at most micro_batches=3"),
        ((30, 20), 4, "have 20 and 30 rows, which 4 micro-batches of different sizes do not cut in proportion"),
    ],
)
def test_what_cannot_be_cut_is_refused(lengths: tuple[int, ...], count: int, words: str) -> None:
    with pytest.raises(StepError, match=words):
        micro_batch(batch(*lengths), count)


def test_a_part_is_scaled_as_its_input_was_cut() -> None:
    x = torch.zeros
    first = Arguments.of((x(4, 8), x(8, 8)), {"mask": x(4)})
    known = dict(zip(first.paths, [(2, 1), (1, 1), (2,)], strict=True))
    given = Arguments.of((x(3, 5), x(6, 5)), {"mask": x(3), "more": x(3, 7), "other": x(9)})
    assert shapes_of_parts(given, known) == ((6, 5), (6, 5), (6,), (6, 7), (9,))
    assert shapes_of_parts(given, {}) == given.shapes


def test_a_dtensor_stays_what_it_is_and_is_no_part() -> None:
    x = torch.zeros
    mesh = DeviceMesh("meta", torch.arange(1), _init_backend=False, _rank=0)
    given = Arguments.of((x(3, 5), dtensor(x(3, 7), mesh, [Replicate()], (3, 7))), {})
    assert [type(each) for each in given.tensors] == [torch.Tensor, DTensor]
    assert shapes_of_parts(given, {"[0][0]": (2, 1)}) == ((6, 5), (3, 7))


def test_a_digest_sees_values_alone() -> None:
    batch = {"x": torch.arange(4), "flags": torch.tensor([True, False]), "y": torch.ones((), dtype=torch.bfloat16)}
    one, same = (Arguments.of((), {k: v.clone() for k, v in batch.items()}) for _ in range(2))
    assert one.digest == same.digest
    assert one.digest != Arguments.of((), batch | {"x": torch.tensor([0, 1, 3, 2])}).digest
    assert Arguments.of((torch.empty(2, device="meta"),), {}).digest == ""

"""Shapes of batches, without ranks: how many micro-batches fit, and which whole a part is of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch import dtensor
from autopar.ir import Mesh, Pipeline, S
from autopar.pipeline.schedules import takes, unbounded
from autopar.program.program import TensorSpec
from autopar.runtime.execute.inputs import Arguments, fitting_micro_batches, shapes_of_parts

WORLD: Any = SimpleNamespace(mesh=Mesh.of({"dp": 2}))


def program(rows: int) -> Any:
    """One that takes micro-batches of so many rows, split over both ranks."""
    spec = TensorSpec("x", ((rows,), (4,)), (rows, 4), torch.float32, (S(0),))
    return SimpleNamespace(inputs=(spec,))


@pytest.mark.parametrize(
    ("usual", "rows", "found", "why"),
    [
        (4, 16, 4, "it divides, and 4 rows are 2 on each rank"),
        (4, 8, 4, "of 2 rows"),
        (4, 6, 3, "of 2 rows; 4 does not divide, 2 and 6 leave an odd number of rows"),
        (4, 12, 3, "of 4 rows, 2 on each rank as before; with 4 they are 3"),
        (4, 7, 7, "of 1 row; one of 7 rows would be more than there were"),
        (1, 7, 1, "one stays one"),
    ],
)
def test_micro_batches_of_another_batch(usual: int, rows: int, found: int, why: str) -> None:
    first = program(rows=4)
    assert fitting_micro_batches([(rows, 4), ()], first, usual, WORLD, lambda _: True) == found, why


def test_a_batch_as_large_as_an_uneven_micro_batch_stays_whole() -> None:
    # Of 7 rows two ranks had 4 and 3, and of these 7 they have as many.
    assert fitting_micro_batches([(7, 4)], program(7), 2, WORLD, lambda _: True) == 1


def test_schedules_have_a_say_in_micro_batches() -> None:
    one = Pipeline(2, "1f1b", ("cut",))
    taken = lambda count: takes(one, count)  # noqa: E731
    assert [takes(one, n) for n in (0, 1, 2)] == [False, False, True]
    # Of 2 rows, two micro-batches of one row cannot be shared by two ranks, and one is not taken.
    assert fitting_micro_batches([(2, 4)], program(4), 4, WORLD, taken) == 1
    assert takes(unbounded(one), 1)
    assert fitting_micro_batches([(3, 4)], program(4), 4, WORLD, taken) == 3


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

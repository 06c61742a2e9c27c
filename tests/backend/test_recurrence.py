"""Which sets of sizes of a graph are planned for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.backend.graphs import key_of
from autopar.backend.recurrence import CALLS_PER_PLAN, PLANNED_AT_ONCE, Recurrence


def planned(sizes: Sequence[Any]) -> list[Any]:
    """The sizes of a run that are planned for, in order; what has a plan is not asked for again."""
    recurrence, found = Recurrence(), list[Any]()
    for size in sizes:
        if size not in found and recurrence.pays(size):
            found.append(size)
    return found


def test_a_few_sizes_are_planned_when_they_come() -> None:
    assert planned([8, 4, 8, 2, 4, 6]) == [8, 4, 2, 6]


def test_sizes_that_never_recur_are_not_planned_for_ever() -> None:
    assert planned(list(range(5000))) == list(range(PLANNED_AT_ONCE))


def test_batches_of_one_data_set_have_one_plan() -> None:
    data = torch.zeros(83, 4)
    batches = [data[i : i + 8] for i in range(0, 83, 8)]
    assert planned([key_of([x]) for x in batches]) == [key_of([batches[0]]), key_of([batches[-1]])]


def views_of(x: Tensor) -> tuple[Tensor, ...]:
    return x[1:], x.sum()


def first_of_storage(x: Tensor) -> tuple[Tensor, ...]:
    return (x.as_strided((2,), (1,), 0) * 2,)


def joined(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return y[1:], x + y


@pytest.mark.parametrize("function", [views_of, first_of_storage, joined])
def test_views_of_one_storage_give_their_own_elements(function: Callable[..., Any]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(function, backend="autopar")
    data = torch.arange(40.0)
    count = function.__code__.co_argcount
    for start in (0, 8, 24, 16):
        parts = [data[start + 5 * i * i : start + 5 * i * i + 4] for i in range(count)]
        for found, expected in zip(compiled(*parts), function(*parts), strict=True):
            assert torch.equal(found, expected)
    parts = [data[start : start + 4] for start in (20, 0)][:count]
    for found, expected in zip(compiled(*parts), function(*parts), strict=True):
        assert torch.equal(found, expected)


def test_a_later_size_is_planned_when_it_has_recurred() -> None:
    first = list(range(PLANNED_AT_ONCE))
    calls = CALLS_PER_PLAN * PLANNED_AT_ONCE
    assert planned([*first, *[99] * (calls - 1)]) == first
    assert planned([*first, *[99] * calls]) == [*first, 99]


def test_thirty_lengths_are_all_planned_within_an_epoch() -> None:
    """Each recurs about 333 times in 10 000 steps, and the 30th plan takes 4 * 29 = 116 calls."""
    draw = random.Random(0)
    assert len(planned([draw.randrange(30) for _ in range(10_000)])) == 30


def test_plans_grow_as_the_root_of_the_calls() -> None:
    """Plan p takes 4 p calls of one size, so that n calls pay for p plans with 2 p^2 < n, and the first four."""
    draw = random.Random(1)
    sizes = [round(draw.gauss(500, 40)) for _ in range(20_000)]
    assert len(planned(sizes)) < 100 + PLANNED_AT_ONCE

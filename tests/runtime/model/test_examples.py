"""Batches of the shapes that a caller lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.errors import StepError
from autopar.runtime.execute.inputs import Arguments
from autopar.runtime.model.examples import at_shape

WORDS = {"input_ids": torch.ones(4, 8, dtype=torch.long), "labels": torch.ones(4, 8), "kinds": torch.ones(4)}


@pytest.mark.parametrize(
    ("wanted", "shapes"),
    [
        ((6, 16), [(6, 16), (6,), (6, 16)]),
        ({"labels": (4, 9)}, [(4, 8), (4,), (4, 9)]),
        ([(2, 3), (2,), (2, 4)], [(2, 3), (2,), (2, 4)]),
    ],
)
def test_an_entry_is_a_shape_or_names_with_shapes_or_all_shapes(wanted: Any, shapes: Any) -> None:
    found = at_shape(Arguments.of((), WORDS), wanted)
    assert list(found.shapes) == shapes  # by name: input_ids, kinds, labels
    assert all(x.is_meta for x in found.tensors)
    assert found.tensors[0].dtype == torch.long


@pytest.mark.parametrize("wanted", [16, (6, 16, 2), {"words": (6, 16)}, {"kinds": (6, 1)}, [(6, 16)]])
def test_another_entry_is_refused(wanted: Any) -> None:
    with pytest.raises(StepError, match="An entry of shapes is the shape of the first tensor"):
        at_shape(Arguments.of((), WORDS), wanted)

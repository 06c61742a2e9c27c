"""Micro-batches that take turns in a searched plan: what hides, the memory of several at a time, and errors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import SearchError
from autopar.explanation.explanation import Explanation
from autopar.explanation.launch import settings
from autopar.units import format_bytes
from tests.support.llama import Llama


@functools.cache
def explained(**options: Any) -> Explanation:
    return _of(**options)


def _of(*, length: int = 1024, **options: Any) -> Explanation:
    """The plan of a small Llama on four H100, of two micro-batches."""
    with torch.device("meta"):
        model = Llama(vocab=512, width=1024, inner=4096, heads=8, kv_heads=4, layers=2)
        tokens = torch.zeros(4, length, dtype=torch.int64)
    asked = {"mesh": {"tp": 4}, "recipe": "tp+sp", "micro_batches": 2, **options}
    return autopar.explain(model, (tokens, tokens), cluster="h100x4", **asked)


def test_a_step_hides_what_the_machine_can() -> None:
    """Of the activations that travel, the part `hides` of an H100, and no more than there is to compute."""
    alone, together = explained(), explained(overlap_batches=2)
    moved = alone.step_seconds - together.step_seconds
    assert moved > 0
    sent = (
        sum(float(i.count * i.seconds) for i in alone.step.items if i.carries == "activation")
        * alone.plan.micro_batches
    )
    assert moved <= alone.step.hardware.hides * sent * (1 + 1e-9)
    assert together.plan.overlap_batches == 2
    assert "2 micro-batches run at the same time" in str(together.plan)


def test_what_hides_already_leaves_no_negative_time_to_hide_in() -> None:
    """Short products, in pieces, hide more messages than there are left beside gathers of parameters."""
    asked = {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "zero3", "tp": "tp+sp"}, "length": 64}
    alone, together = (_of(decompose="tp", **asked, overlap_batches=n) for n in (1, 2))
    assert together.step_seconds <= alone.step_seconds


def test_the_notes_give_the_memory_of_two_at_a_time() -> None:
    """Those on the price of one at a time are left out."""
    together = explained(overlap_batches=2)
    found = [note for note in together.plan.notes if "a rank" in note]
    assert len(found) == 1 and f", and {format_bytes(together.memory_bytes)} a rank" in found[0]


def test_two_at_a_time_keep_the_activations_of_two() -> None:
    alone, together = explained(), explained(overlap_batches=2)
    saved = [e.memory.part("saved activations").value for e in (alone, together)]
    assert saved[1] == pytest.approx(2 * saved[0])


def test_a_bound_that_one_at_a_time_keeps_and_two_do_not() -> None:
    alone = explained()
    bound = int(alone.memory_bytes * 1.02)
    assert explained(memory_bytes=bound).fits
    with pytest.raises(SearchError, match=r"2 micro-batches at a time take .* one at a time"):
        explained(memory_bytes=bound, overlap_batches=2)


def test_a_bound_that_one_at_a_time_keeps_by_recomputation_alone() -> None:
    alone = explained()
    bound = int(alone.memory_bytes * 0.97)
    assert explained(memory_bytes=bound).plan.recompute != "none"
    with pytest.raises(SearchError, match=r"recomputed blocks, which cannot be combined: .* leave out overlap_batches"):
        explained(memory_bytes=bound, overlap_batches=2)


def test_the_launch_names_it() -> None:
    assert settings(explained(overlap_batches=2))["overlap_batches"] == 2
    assert "overlap_batches" not in settings(explained())

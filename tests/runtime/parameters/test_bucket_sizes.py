"""Buckets have the size that the plan names: neither less for a small model nor a size of the runtime's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar import _torch
from autopar.runtime.parameters.parameters import batches
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import mean_square

SUM = (("all_reduce", 0),)


@pytest.mark.parametrize(("bucket_bytes", "sizes"), [(1, [1, 1, 1, 1]), (800, [2, 2]), (1600, [4]), (10**9, [4])])
def test_a_bucket_is_filled_up_to_its_size(bucket_bytes: int, sizes: list[int]) -> None:
    """Four tensors of 400 bytes."""
    tensors = [torch.empty(100, device="meta")] * 4
    assert [len(each) for each in batches(range(4), [SUM] * 4, tensors, bucket_bytes)] == sizes


def weights() -> nn.Module:
    """Four weights of 16,384 bytes."""
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def reductions(asked: dict[str, Any], planned: int | None = None) -> int:
    """Number of all-reduces of a step under plain data parallelism, with what was asked for, or with a given plan."""
    batch = torch.randn(4, 64), torch.randn(4, 64)
    how = {"example_inputs": batch, "loss_fn": mean_square}
    made = autopar.compile(weights(), mesh={"dp": 2}, recipe="ddp", **how, **asked)
    if planned is not None:
        made = autopar.compile(weights(), plan=replace(made.plan, bucket_bytes=planned), **how)
    with mock.patch.object(_torch, "start_all_reduce", side_effect=_torch.start_all_reduce) as started:
        made.step(*batch)
    return int(started.call_count)


@pytest.mark.multiprocess
def test_the_runtime_uses_the_size_that_is_asked_for_or_that_a_plan_has(two_ranks: Ranks) -> None:
    one, all_four = two_ranks.run(reductions, {"bucket_bytes": 1}), two_ranks.run(reductions, {"bucket_bytes": 2**20})
    assert [a - b for a, b in zip(one, all_four, strict=True)] == [3, 3]
    assert two_ranks.run(reductions, {}, 2 * 64 * 64 * 4) == [count + 1 for count in all_four]

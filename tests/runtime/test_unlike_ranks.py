"""A rank that differs: every rank ends with one sentence, which names the rank and the difference."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar import _torch
from autopar.errors import AutoparError
from autopar.runtime.ranks.processes import refuse_unlike
from tests.runtime.gloo_ranks import Ranks


def differing(how: str) -> str:
    """What a rank is told where rank 1 has another model, version or setting."""
    differs = dist.get_rank() == 1
    width = 5 if differs and how == "width" else 4
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU() if differs and how == "op" else nn.Tanh())
    model.append(nn.Linear(width, 4))
    if differs and how == "frozen":
        model[0].weight.requires_grad_(False)
    if differs and how == "format":
        model.double()
    torch.manual_seed(dist.get_rank() if how == "seed" else 0)
    if differs and how == "environment":
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    if differs and how == "settings":
        torch.set_float32_matmul_precision("medium")
    x = torch.ones(4, 4, dtype=model[0].weight.dtype)
    try:
        compiled = autopar.compile(
            model,
            loss_fn=nn.functional.mse_loss,
            mesh={"dp": 2},
            example_inputs=(x, x),
            recipe="zero3" if differs and how == "options" else "ddp",
        )
        return str(float(compiled.step(x, x)) >= 0)
    except (AutoparError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.pop("NVIDIA_TF32_OVERRIDE", None)
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "width",
            "differs from rank 0 in its model: it has parameter 0.weight of shape [5, 4] and float32, "
            "and rank 0 has parameter 0.weight of shape [4, 4] and float32",
        ),
        ("op", "in its model: it has op relu, and rank 0 has op tanh"),
        (
            "format",
            "in its model: it has input input of shape [4, 4] and float64, and rank 0 has input input of shape "
            "[4, 4] and float32",
        ),
        (
            "frozen",
            "in its model: it has parameter 0.weight without a gradient, and rank 0 has nothing more",
        ),
        (
            "environment",
            "in its environment: it has NVIDIA_TF32_OVERRIDE=0, and rank 0 has NVIDIA_TF32_OVERRIDE=",
        ),
        ("options", "in its options: it has --recipe zero3, and rank 0 has --recipe ddp"),
        (
            "settings",
            "in its settings of torch: it has matmul precision medium, and rank 0 has matmul precision highest",
        ),
    ],
)
def test_one_rank_that_differs_is_named_on_all(two_ranks: Ranks, how: str, says: str) -> None:
    first, second = two_ranks.run(differing, how)
    assert first == second and first.startswith("MeshError: Rank 1 differs from rank 0")
    assert says in first


def test_ranks_of_other_seeds_train_alike(two_ranks: Ranks) -> None:
    assert two_ranks.run(differing, "seed") == ["True", "True"]


def captured_slowly() -> float | None:
    """The limit of a collective after ranks were compared, of which one came later than that."""
    group = dist.group.WORLD
    assert group is not None
    before = _torch.group_seconds(group)
    assert before is not None
    _torch.set_group_timeout(group, 0.4)
    try:
        time.sleep(1.0 * dist.get_rank())
        refuse_unlike({"model": "alike"}, list)
        return _torch.group_seconds(group)
    finally:
        _torch.set_group_timeout(group, before)


def test_a_rank_that_captures_slowly_is_waited_for(two_ranks: Ranks) -> None:
    """`timeout_seconds` is for collectives of a step; a rank may capture the model for longer than that."""
    assert two_ranks.run(captured_slowly) == [0.4, 0.4]

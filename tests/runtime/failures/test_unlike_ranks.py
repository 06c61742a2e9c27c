"""A rank that differs: every rank ends with one sentence, which names the rank and the difference."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import autopar
from autopar import _torch
from autopar.errors import AutoparError
from autopar.options import options_of
from autopar.planning import likeness
from autopar.runtime.execute.settings import RunOptions
from autopar.runtime.ranks.processes import refuse_unlike
from autopar.search.request.options import PlanOptions
from tests.runtime.gloo_ranks import Ranks


class Counting(nn.Module):
    """A model whose Python depends on values of tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def ones_of(module: nn.Module) -> None:
    """An `init_fn`."""


def trained(model: nn.Module, **options: Any) -> str:
    """What a rank is told at its first step, from `compile` on."""
    x = torch.ones(4, 4, dtype=next(model.parameters()).dtype)
    try:
        compiled = autopar.compile(
            model,
            **{
                "loss_fn": nn.functional.mse_loss,
                "mesh": {"dp": dist.get_world_size()},
                "example_inputs": (x, x),
                **options,
            },
        )
        return str(float(compiled.step(x, x)) >= 0)
    except (AutoparError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def differing(how: str, other: int = 1) -> str:
    """What a rank is told where another one has another model, version or setting."""
    differs = dist.get_rank() == other
    width = 5 if differs and how == "width" else 4
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU() if differs and how == "op" else nn.Tanh())
    model.append(nn.Linear(width, 4))
    if differs and how == "capture":
        model.append(Counting())
    if differs and how == "frozen":
        model[0].weight.requires_grad_(False)
    if differs and how == "format":
        model.double()
    torch.manual_seed(dist.get_rank() if how == "seed" else 0)
    if differs and how == "environment":
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    if differs and how == "settings":
        torch.set_float32_matmul_precision("medium")
    code = ["f" * 64, "torch 9.9"] if differs and how == "versions" else ["e" * 64, "torch 2"]
    code[0] = "d" * 64 if differs and how == "code" else code[0]
    try:
        with mock.patch.object(likeness, "code_version", lambda: code):
            return trained(model, recipe="ddp")
    finally:
        os.environ.pop("NVIDIA_TF32_OVERRIDE", None)
        torch.set_float32_matmul_precision("highest")


DIFFERENCES = {
    "width": "differs from rank 0 in its model: it has parameter 0.weight of shape [5, 4] and float32, "
    "and rank 0 has parameter 0.weight of shape [4, 4] and float32",
    "op": "in its model: it has op relu, and rank 0 has op tanh",
    "format": "in its model: it has input input of shape [4, 4] and float64, and rank 0 has input input of shape "
    "[4, 4] and float32",
    "frozen": "in its model: it has parameter 0.weight without a gradient, and rank 0 has nothing more",
    "capture": "in its model: it has no graph of it (CaptureError: ",
    "environment": "in its environment: it has NVIDIA_TF32_OVERRIDE=0, and rank 0 has NVIDIA_TF32_OVERRIDE=",
    "settings": "in its settings of torch: it has matmul precision medium, and rank 0 has matmul precision highest",
    "versions": "in its versions: it has torch 9.9, and rank 0 has torch 2",
    "code": "in its code of autopar: it has dddddddddddd, and rank 0 has eeeeeeeeeeee",
}


@pytest.mark.parametrize("how", DIFFERENCES)
def test_one_rank_that_differs_is_named_on_all(two_ranks: Ranks, how: str) -> None:
    first, second = two_ranks.run(differing, how)
    assert first == second and first.startswith("MeshError: Rank 1 differs from rank 0")
    assert DIFFERENCES[how] in first


@pytest.mark.slow
@pytest.mark.parametrize("how", DIFFERENCES)
def test_one_of_four_ranks_that_differs_is_named_on_all(four_ranks: Ranks, how: str) -> None:
    first, *others = four_ranks.run(differing, how, 2)
    assert others == [first] * 3 and first.startswith("MeshError: Rank 2 differs from rank 0")
    assert DIFFERENCES[how] in first


def test_ranks_of_other_seeds_train_alike(two_ranks: Ranks) -> None:
    assert two_ranks.run(differing, "seed") == ["True", "True"]


# Another value of every option than its default, and how it is said.
OTHERS: dict[str, tuple[Any, str]] = {
    "mesh": ({"tp": 2}, "--mesh tp=2"),
    "micro_batches": (2, "--micro-batches 2"),
    "schedule": ("gpipe", "it has MeshError: schedule='gpipe'"),
    "chunks": (1, "it has MeshError: chunks=1"),
    "recompute": ("full", "--recompute full"),
    "stages": (1, "--stages 1"),
    "recipe": ("zero3", "--recipe zero3"),
    "pins": ({"0.weight": "R"}, "--pin 0.weight=R"),
    "inside_node": ("tp", "--keep-inside-node tp"),
    "decompose": ("dp", "--decompose dp"),
    "overlap_batches": (2, "it has AutoparError: overlap_batches=2"),
    "offload": (True, "--offload"),
    "without": ("offload", "--no offload"),
    "headroom": (0.5, "--headroom 0.5"),
    "precision": ("bf16", "--precision"),
    "skew": (1.5, "--skew 1.5"),
    "training_state": ("sgd", "--training-state"),
    "init_fn": (ones_of, "init_fn=ones_of"),
    "weights": ("weights.safetensors", "weights=4 tensors"),
    "seed": (1, "seed=1"),
    "batch": ("local", "batch=local"),
    "outputs": ("local", "outputs=local"),
    "skip_nonfinite": (True, "skip_nonfinite=True"),
    "drift": ("mend", "drift=mend"),
    "loss_scale": (8.0, "loss_scale=8.0"),
    "bucket_bytes": (1000, "--bucket-bytes 1000"),
    "executor": ("aot_eager", "executor=aot_eager"),
    "example_inputs": (None, "nothing else, and rank 0 has example_inputs"),
    "plan": ("plan.json", "plan of digest"),
    "recipe ": ("zero9", "RecipeError: There is no recipe 'zero9'"),
}


def with_each_option(values: Mapping[str, Any]) -> list[str]:
    """What a rank is told where rank 1 has another value of an option, for each option."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    is_other = dist.get_rank() == 1
    return [trained(model, **{name.strip(): value} if is_other else {}) for name, value in values.items()]


def test_an_option_that_one_rank_has_is_named_on_all(two_ranks: Ranks, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(4, 4)
    files = {"weights": str(tmp_path / "weights.safetensors"), "plan": str(tmp_path / "plan.json")}
    save_file(model.state_dict(), files["weights"])
    autopar.explain(model, (x, x), mesh={"dp": 2}, loss_fn=nn.functional.mse_loss).plan.save(files["plan"])
    first, second = two_ranks.run(with_each_option, {name: value for name, (value, _) in OTHERS.items()} | files)
    assert first == second
    for said, (_, difference) in zip(first, OTHERS.values(), strict=True):
        assert said.startswith("MeshError: Rank 1 differs from rank 0 in its options: it has "), said
        assert difference in said


def test_every_option_is_compared_or_may_differ() -> None:
    alike = {name for name, each in options_of(PlanOptions, RunOptions).items() if not each.may_differ}
    assert alike <= OTHERS.keys()


def captured_slowly() -> float | None:
    """The limit of a collective after ranks were compared, of which one came later than that."""
    group = dist.group.WORLD
    assert group is not None
    before = _torch.group_seconds(group)
    assert before is not None
    _torch.set_group_timeout(group, 0.4)
    try:
        time.sleep(1.0 * dist.get_rank())
        refuse_unlike({"model": ["alike"]})
        return _torch.group_seconds(group)
    finally:
        _torch.set_group_timeout(group, before)


def test_a_rank_that_captures_slowly_is_waited_for(two_ranks: Ranks) -> None:
    """`timeout_seconds` is for collectives of a step; a rank may capture the model for longer than that."""
    assert two_ranks.run(captured_slowly) == [0.4, 0.4]

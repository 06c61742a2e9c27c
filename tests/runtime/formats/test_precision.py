"""A mixed-precision policy on real ranks: the loss and every gradient are those of one device that casts.

One device is `torch.func.functional_call(model, {name: p.to(dtype)})`, the parameters being leaves in the
format that they are stored in.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import MixedPrecision, _torch
from autopar.planning.planning import prepare_step
from autopar.proof.random_plan import random_plan
from autopar.proof.verdict import nan_last
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.runtime.models import make, mean_square
from tests.support.staged import captured_once
from tests.support.tolerances import TOLERANCE_HALF

pytestmark = pytest.mark.multiprocess

FLOAT32 = MixedPrecision("float32")
BFLOAT16 = MixedPrecision("bfloat16")
STORED = {"float32": torch.float64, "bfloat16": torch.float32}
# One device and many differ in the order of sums, and in how many parts of a sum are rounded: float32 to 24
# bits, by 6e-8, bfloat16 to 8 bits, by 4e-3. A wrong plan is wrong by far more.
BOUNDS = {"float32": 1e-5, "bfloat16": TOLERANCE_HALF}

Gradients = dict[str, Tensor]


def reference(name: str, stored: torch.dtype, policy: MixedPrecision, parts: int) -> Gradients:
    """The loss and the gradients of one device."""
    model, batch, loss_fn = make(name, stored)
    dtype = getattr(torch, policy.param_dtype)
    losses = []
    for x, target in zip(*(part.chunk(parts) for part in batch), strict=True):
        cast = {key: p.to(dtype) for key, p in model.named_parameters()}
        given = x.to(dtype) if x.is_floating_point() else x
        result = torch.func.functional_call(model, cast, (given,))
        loss = loss_fn(like(result, target), target) / parts  # type: ignore[operator]
        loss.backward()
        losses.append(loss.detach())
    return {"loss": torch.stack(losses).sum(), **gradients(model)}


def like(result: Tensor, target: Tensor) -> Tensor:
    """A result in the dtype of its target: torch 2.11 has no backward of a mean squared error of two dtypes."""
    return result.to(target.dtype) if target.is_floating_point() else result


def gradients(model: nn.Module) -> Gradients:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None and gradient.dtype == parameter.dtype, name
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = whole.clone()
    return found


def distance(found: Gradients, expected: Gradients) -> float:
    """The largest difference, relative to the largest entry of what differs.

    A gradient that is zero but for rounding (a key's bias) is compared with a hundredth of the largest.
    """
    largest = max(value.abs().max().item() for value in expected.values())
    gaps = [
        (found[name].double() - value.double()).abs().max().item() / max(value.abs().max().item(), largest / 100)
        for name, value in expected.items()
        if name in found
    ]
    return max(gaps, key=nan_last)


def distances(cases: list[dict[str, Any]]) -> list[float]:
    """The distance of a step from one device, for each case."""
    return [measure(**case) for case in cases]


@captured_once()
def measure(policy: MixedPrecision, *, model: str = "gpt", micro_batches: int = 2, **kwargs: Any) -> float:
    stored = STORED[policy.param_dtype]
    subject, batch, loss_fn = make(model, stored)
    made = autopar.compile(
        subject,
        loss_fn=loss_fn,
        micro_batches=micro_batches,
        precision=policy,
        **kwargs,  # type: ignore[arg-type]
    )
    loss = made.step(*batch)
    assert all(p.dtype is stored for p in made.parameters())
    expected = reference(model, stored, policy, micro_batches)
    return distance({"loss": loss, **gradients(made)}, expected)


DP = {"dp": 2}
TWO: list[dict[str, Any]] = [
    {"policy": FLOAT32, "mesh": DP, "recipe": "ddp", "model": "mlp"},
    {"policy": BFLOAT16, "mesh": DP, "recipe": "zero1", "model": "mlp"},
    {"policy": FLOAT32, "mesh": DP, "recipe": "zero2", "model": "tied"},
    {"policy": FLOAT32, "mesh": DP, "recipe": "zero3", "model": "tied"},
    {"policy": BFLOAT16, "mesh": DP, "recipe": "zero3", "recompute": "full"},
    {"policy": FLOAT32, "mesh": DP, "recipe": "tp+sp"},
    {"policy": BFLOAT16, "mesh": {"pp": 2}, "schedule": "gpipe", "model": "tied"},
    {"policy": FLOAT32, "mesh": {"pp": 2}, "schedule": "zb", "chunks": 1, "model": "tied"},
]


def test_every_recipe_is_one_device_that_casts(two_ranks: Ranks) -> None:
    for found in two_ranks.run(distances, TWO):
        for case, error in zip(TWO, found, strict=True):
            assert error < BOUNDS[case["policy"].param_dtype], case


def test_two_axes(four_ranks: Ranks) -> None:
    cases = [{"policy": FLOAT32, "mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "zero3", "tp": "tp"}, "model": "mlp"}]
    assert all(error < 1e-5 for found in four_ranks.run(distances, cases) for error in found)


# --- what travels


@contextmanager
def counted() -> Iterator[Counter[tuple[str, torch.dtype]]]:
    """Inside it, elements that this rank gives to collectives, by op and element type."""
    counts: Counter[tuple[str, torch.dtype]] = Counter()

    def counting(name: str, given: int) -> Any:
        real = getattr(_torch, f"start_{name}")

        def start(*args: Any) -> Any:
            counts[name, args[given].dtype] += args[given].numel()
            return real(*args)

        return mock.patch.object(_torch, f"start_{name}", start)

    with counting("all_reduce", 0), counting("all_gather", 1), counting("reduce_scatter", 1):
        yield counts


@captured_once()
def travelled(recipe: str, policy: MixedPrecision, micro_batches: int) -> dict[tuple[str, torch.dtype], int]:
    model, batch, loss_fn = make("mlp", torch.float32)
    made = autopar.compile(
        model,
        loss_fn=loss_fn,
        mesh=DP,
        recipe=recipe,
        precision=policy,
        micro_batches=micro_batches,  # type: ignore[arg-type]
    )
    with counted() as counts:
        made.step(*batch)
    return dict(counts)


def test_gathers_carry_bfloat16_and_reductions_float32(two_ranks: Ranks) -> None:
    """The MLP has 8 * 32 + 32 + 32 * 8 + 8 = 552 elements, of which each of two ranks stores 276."""
    bf16, fp32, policy = torch.bfloat16, torch.float32, MixedPrecision("bf16", "fp32")
    run = two_ranks.run
    assert equal_on_all(run(travelled, "ddp", policy, 2)) == {("all_reduce", fp32): 552 + 1}  # the loss
    assert equal_on_all(run(travelled, "zero1", policy, 2)) == {
        ("all_gather", bf16): 276,
        ("reduce_scatter", fp32): 552,
        ("all_reduce", fp32): 1,
    }
    assert equal_on_all(run(travelled, "zero2", policy, 2))["reduce_scatter", fp32] == 2 * 552
    zero3 = equal_on_all(run(travelled, "zero3", policy, 1))
    assert zero3["all_gather", bf16] >= 276  # and once more what backward needs
    assert zero3["reduce_scatter", fp32] == 552
    assert not [key for key in zero3 if key[0] != "all_gather" and key[1] is bf16]
    reduced = equal_on_all(run(travelled, "zero1", MixedPrecision("bf16", "bf16"), 1))
    assert reduced["reduce_scatter", bf16] == 552


# --- plans of any kind, forwards, autocast, checkpoints


def random_plans(seeds: int) -> list[float]:
    model, batch, loss_fn = make("tied")
    prepared = prepare_step(model, batch, loss_fn=loss_fn, precision=FLOAT32)  # type: ignore[arg-type]
    graph, mesh = prepared.analysis.graph, autopar.Mesh.of(DP)
    fingerprint = prepared.captured.fingerprint
    plans = [random_plan(graph, mesh, seed=seed, fingerprint=fingerprint) for seed in range(seeds)]
    return [measure(FLOAT32, model="tied", micro_batches=1, plan=plan) for plan in plans]


def test_random_plans(two_ranks: Ranks) -> None:
    assert all(error < 1e-5 for found in two_ranks.run(random_plans, 3) for error in found)


def forwards(recipe: str) -> list[float]:
    """A forward whose loss is made outside, with and without autograd."""
    model, (x, target), loss_fn = make("mlp")
    made = autopar.compile(model, mesh=DP, recipe=recipe, precision=FLOAT32, outputs="dtensor")
    result = made(x).full_tensor()
    loss = loss_fn(like(result, target), target)  # type: ignore[operator]
    loss.backward()
    expected = reference("mlp", torch.float64, FLOAT32, 1)
    with torch.no_grad():
        again = made(x).full_tensor()
    assert result.dtype == again.dtype == torch.float32
    found = {"loss": loss_fn(again, target), **gradients(made)}  # type: ignore[operator]
    return [distance(found, expected)]


@pytest.mark.parametrize("recipe", ["zero1", "zero3"])
def test_a_forward_alone(two_ranks: Ranks, recipe: str) -> None:
    assert all(found[0] < 1e-5 for found in two_ranks.run(forwards, recipe))


class Cast(nn.Module):
    """Regions with autocast and without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.second(first).relu()
        with torch.autocast("cpu", enabled=False):
            return self.third(x.float()), first


def first_error(results: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return mean_square(results[0], target)


def autocast(recipe: str) -> list[float]:
    """Steps inside and outside of autocast, in turns, against one device."""
    errors = []
    torch.manual_seed(0)
    model, x, target = Cast(), torch.randn(8, 8), torch.randn(8, 8)
    alone = copy.deepcopy(model)
    made = autopar.compile(model, loss_fn=first_error, mesh=DP, recipe=recipe)
    for is_cast in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            loss = made.step(x, target)
            expected = first_error(alone(x), target)
            with torch.no_grad():
                last, first = made(x)
        assert first.dtype is (torch.bfloat16 if is_cast else torch.float32)
        assert (last != last.bfloat16()).any(), "the last region was computed without autocast"
        expected.backward()
        errors.append(distance({"loss": loss, **gradients(made)}, {"loss": expected.detach(), **gradients(alone)}))
        made.zero_grad()
        alone.zero_grad()
    return errors


@pytest.mark.parametrize("recipe", ["ddp", "zero3", "tp"])
def test_autocast_is_part_of_a_program(two_ranks: Ranks, recipe: str) -> None:
    for errors in two_ranks.run(autocast, recipe):
        assert max(errors, key=nan_last) < TOLERANCE_HALF, errors


def resumed(folder: str) -> list[float]:
    """Losses of three steps: with a policy, then without, then with one again, from checkpoints."""
    losses: list[float] = []
    for number, (policy, recipe) in enumerate([(FLOAT32, "zero1"), (None, "zero3"), (MixedPrecision("bf16"), "ddp")]):
        model, batch, loss_fn = make("mlp", torch.float64)
        made = autopar.compile(
            model,
            loss_fn=loss_fn,
            mesh=DP,
            recipe=recipe,
            precision=policy,
            example_inputs=batch,  # type: ignore[arg-type]
        )
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        if number:
            load_checkpoint(f"{folder}/{number - 1}", made, optimizer)
        losses.append(made.step(*batch).item())
        optimizer.step()
        save_checkpoint(f"{folder}/{number}", made, optimizer, step=number)
        assert all(p.dtype is torch.float64 for p in made.parameters())
    return losses


def test_a_checkpoint_loads_under_any_policy(two_ranks: Ranks, tmp_path: Path) -> None:
    losses = equal_on_all(two_ranks.run(resumed, str(tmp_path)))
    model, (x, target), loss_fn = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for found, error in zip(losses, (1e-5, 1e-5, TOLERANCE_HALF), strict=True):
        optimizer.zero_grad()
        loss = loss_fn(model(x), target)  # type: ignore[operator]
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(loss.item(), rel=error)

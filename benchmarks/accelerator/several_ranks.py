"""Part 4: every recipe, every schedule and plans drawn at random, exact on this device's kernels.

With several accelerators every rank has one, over the backend of the device. With one, two ranks share it over
Gloo, staged through the host (staged.py); on a processor they do the same (joining.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import inf
from typing import Any

import torch

from autopar import _torch
from autopar.ir import SCHEDULES
from benchmarks.accelerator.figures import Figure, Sentence
from benchmarks.accelerator.joining import join_staged, staged_or_devices
from benchmarks.accelerator.parts import Context, Found
from benchmarks.parity.recipes import ONE_AXIS
from tests.runtime.gloo_ranks import RankFailed, Ranks
from tests.runtime.training import compiled, difference, randomly, single

RANKS = 2
TOLERANCE = 1e-9  # in float64, for sums in another order; as in tests/runtime/plans/test_random_plans.py
MODELS = ("mlp", "tied", "normed", "gpt")
MICRO_BATCHES = 4


def run(context: Context) -> Iterator[Found]:
    """Trains small models by plans on two ranks, and by none in one process."""
    joined = staged_or_devices(context, RANKS)
    yield Sentence(_proof(joined is join_staged, context.device))
    ranks = Ranks(RANKS, joined, context.processes)
    try:
        yield from every_plan(context, ranks)
    finally:
        ranks.stop()


def every_plan(context: Context, ranks: Ranks) -> Iterator[Found]:
    """Every recipe, every schedule and random plans on these ranks."""
    yield from _recipes(context, ranks)
    yield from _schedules(context, ranks)
    yield from _random_plans(context, ranks)


def _proof(is_shared: bool, device: torch.device) -> str:
    if not is_shared:
        return f"{RANKS} ranks over {_torch.backend_of(device)}, each with its own device."
    return (
        f"{RANKS} ranks share one device ({device.type}) over Gloo, staged through the host. That proves plans and "
        "kernels; the device's own collectives are asked by part `collectives`."
    )


@cache
def _alone(name: str, micro_batches: int, device: str) -> dict[str, Any]:
    """The training of one process without autopar."""
    return single(name, micro_batches=micro_batches, device=device)


def worst(parts: Sequence[dict[str, Any]], expected: dict[str, Any]) -> float:
    """The largest difference of any rank; with stages each rank has the entries of its own stages."""
    whole: dict[str, Any] = {}
    for part in parts:
        whole |= part
    return max(difference({key: (whole | part)[key] for key in expected}, expected) for part in parts)


def _recipes(context: Context, ranks: Ranks) -> Iterator[Found]:
    for recipe in context.subjects(ONE_AXIS):
        yield trained(f"recipe {recipe}", context, ranks, {"x": RANKS}, recipe, 1)


def _schedules(context: Context, ranks: Ranks) -> Iterator[Found]:
    for schedule in context.subjects(tuple(SCHEDULES)):
        name = f"schedule {schedule}"
        yield trained(name, context, ranks, {"pp": RANKS}, schedule, MICRO_BATCHES)


def trained(name: str, context: Context, ranks: Ranks, mesh: dict[str, int], recipe: str, micro_batches: int) -> Figure:
    """How far the small GPT is from that of one process."""
    device = context.device.type

    def error() -> float:
        parts = ranks.run(_compiled, "gpt", mesh, recipe, micro_batches, device, str(context.folder))
        return worst(parts, _alone("gpt", micro_batches, device))

    return _figure(name, error)


def _compiled(
    name: str, mesh: dict[str, int], recipe: str, micro_batches: int, device: str, folder: str
) -> dict[str, Any]:
    """A rank's task."""
    files = {"nvme": folder} if "nvme" in recipe else {}
    return compiled(name, mesh, recipe, micro_batches, device=device, **files)


def _random_plans(context: Context, ranks: Ranks) -> Iterator[Found]:
    count = context.size(1, 4)
    for axis in ("a", "pp"):
        for name in context.subjects(MODELS[: context.size(3, 4)]):
            error = partial(_worst_of_random_plans, name, {axis: RANKS}, count, context, ranks)
            yield _figure(f"{count} random plans of {name} over {axis}={RANKS}", error)


def _worst_of_random_plans(name: str, mesh: dict[str, int], count: int, context: Context, ranks: Ranks) -> float:
    device, errors = context.device.type, []
    for seed in range(count):
        found = ranks.run(randomly, name, mesh, seed, device)
        errors.append(worst([part for part, _ in found], _alone(name, found[0][1], device)))
    return max(errors)


def _figure(name: str, error: Callable[[], float]) -> Figure:
    """A figure for plans that may fail: the next ones are still asked, on new ranks."""
    words = f"{name}, losses and weights"
    try:
        return Figure(words, error(), "error", limit=TOLERANCE)
    except RankFailed as failure:
        return Figure(words, inf, "error", limit=TOLERANCE, note=str(failure)[-400:])

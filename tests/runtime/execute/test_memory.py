"""The bytes that a rank holds between steps and for gradients, as ZeRO's paper counts them.

P is the number of parameters, in float32 with AdamW, N the number of ranks; gradients are counted where
they live longest, between two micro-batches.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import mean_square
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

WIDTH, LAYERS = 256, 6


def live_bytes() -> int:
    """Bytes of all storages that tensors of this process hold."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and not x.is_meta]
    gradients = [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    found: dict[int, int] = {}
    for tensor in tensors + gradients:  # a gradient that Python never saw is not an object of its own yet
        try:
            storage = tensor.untyped_storage()
            if storage.device.type != "meta":
                found[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # a wrapper such as DTensor has none of its own
            continue
    return sum(found.values())


@captured_once()
def model_bytes(recipe: str, precision: str | None = None) -> float:
    """Bytes held over the bytes of the parameters: the larger figure of when a step's second micro-batch
    begins and when its last gradient has arrived.
    """
    # What an earlier task left is passed over: to walk through it takes most of the time.
    gc.collect()
    gc.freeze()
    before = live_bytes()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    batch = (torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    made = autopar.compile(
        model,
        loss_fn=mean_square,
        mesh={"dp": 4},
        recipe=recipe,
        micro_batches=2,
        bucket_bytes=100_000,
        precision=precision,
    )
    optimizer = torch.optim.AdamW(made.parameters())
    made.step(*batch)
    optimizer.step()
    optimizer.zero_grad()
    seen = []
    (ready,) = made._kept.ready[True]
    runner = ready.bound._runner
    run, finish = runner.run, runner._reducer.finish

    def measured(inputs: list[Tensor], micro_batch: int) -> list[Tensor]:
        seen.append(live_bytes() - before)
        return run(inputs, micro_batch)

    def finished() -> None:
        finish()
        seen.append(live_bytes() - before)

    runner.run = measured  # type: ignore[method-assign]
    runner._reducer.finish = finished  # type: ignore[method-assign]
    made.step(*batch)
    _, _, begun, ended = seen
    return max(begun, ended) / parameter_bytes


@pytest.mark.parametrize(
    ("recipe", "multiple"),
    [
        ("ddp", 16 / 4),  # 4 + 4 + 8 bytes of each parameter, of which it takes 4 itself
        ("zero1", (8 + 8 / 4) / 4),
        pytest.param("zero2", (4 + 12 / 4) / 4, marks=pytest.mark.slow),
        ("zero3", (16 / 4) / 4),
    ],
)
def test_memory(four_ranks: Ranks, recipe: str, multiple: float) -> None:
    for found in four_ranks.run(model_bytes, recipe):
        assert found == pytest.approx(multiple, rel=0.05)


@pytest.mark.parametrize(
    ("recipe", "multiple"),
    [
        ("ddp", (4 + 2 + 4 + 8) / 4),  # parameter, cast copy, `.grad`, moments
        ("zero1", (2 + 2 + (4 + 8) / 4) / 4),  # bfloat16: the gathered copy and the sum of gradients
        pytest.param("zero2", (2 + (4 + 4 + 8) / 4) / 4, marks=pytest.mark.slow),
        ("zero3", (4 + 2 + 4 + 8) / 4 / 4),
        # 2 bytes on the device, and 16 on the host over the ranks; here both are the processor's memory
        ("zero-offload", (2 + (4 + 4 + 8) / 4) / 4),
        pytest.param("zero3-offload", (2 + 4 + 4 + 8) / 4 / 4, marks=pytest.mark.slow),
    ],
)
def test_memory_where_gradients_are_reduced_in_bfloat16(four_ranks: Ranks, recipe: str, multiple: float) -> None:
    """The figures that `autopar.cost_model.memory` prices: `.grad` is in the format of the parameter."""
    for found in four_ranks.run(model_bytes, recipe, "bf16 reduce=bf16"):
        assert found == pytest.approx(multiple, rel=0.05)


@captured_once()
def device_peak_bytes(recipe: str, layers: int) -> int:
    """The most bytes outside the host's tier whenever a step has gathered parameters, or begins to reduce gradients.

    A rank computes a single row, so that activations are small beside the 262 kB of a weight.
    """
    gc.collect()
    gc.freeze()
    before = live_bytes()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    batch = (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    made = autopar.compile(model, loss_fn=mean_square, mesh={"dp": 4}, recipe=recipe, bucket_bytes=100_000)
    made.step(*batch)
    made.zero_grad()
    (ready,) = made._kept.ready[True]
    gathers, tiers = ready.bound._runner.graphs[0].gathers, ready.bound._runner.world.tiers
    seen: list[int] = []

    def look() -> None:
        time.sleep(0.01)  # for Gloo's threads to let go of what has arrived
        seen.append(live_bytes() - before - tiers.live_bytes["host"])

    def watched(method: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: object) -> None:
            look()
            method(*arguments)
            look()

        return run

    for name in ("opened", "start_previous", "submit"):
        setattr(gathers, name, watched(getattr(gathers, name)))
    made.step(*batch)
    return max(seen)


@pytest.mark.parametrize(("recipe", "grows"), [("zero-infinity", False), ("zero3-offload", True)])
def test_with_residents_on_the_host_the_device_does_not_grow_with_depth(
    four_ranks: Ranks, recipe: str, grows: bool
) -> None:
    """It holds the window of groups that are gathered, and reduced: a few layers of any number.

    All ranks hold as much; a thread of Gloo that is late to let go adds to the figure of its own rank.
    """
    few, many = (min(four_ranks.run(device_peak_bytes, recipe, layers)) for layers in (4, 8))
    assert (many > 1.1 * few) if grows else (many == pytest.approx(few, rel=0.05))


def kept_between() -> tuple[int, int]:
    """How many parameters zero3 gathers in a forward, and how many of them are alive before backward."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    batch = (torch.randn(8, 64), torch.randn(8, 64))
    made = autopar.compile(model, loss_fn=mean_square, mesh={"dp": 4}, recipe="zero3", bucket_bytes=1)
    made.step(*batch)
    (ready,) = made._kept.ready[True]
    runner = ready.bound._runner
    gathers, begin = runner.graphs[0].gathers, runner._reducer.begin
    counts = []

    def counting(*, last: bool) -> None:
        time.sleep(0.2)  # for Gloo's thread to let go of the last collective
        references = [reference for reference, _, _ in gathers._saved.values()]
        counts.append((len(references), sum(not r.expired() for r in references)))
        begin(last=last)

    runner._reducer.begin = counting  # type: ignore[method-assign]
    made.step(*batch)
    return counts[0]


def test_zero3_keeps_nothing_gathered_for_backward(four_ranks: Ranks) -> None:
    assert four_ranks.run(kept_between) == [(2 * LAYERS, 0)] * 4

"""float16 with a scaled loss: against torch's GradScaler, with overflows on one rank, and through stages."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import LossScaling, MixedPrecision, _torch
from autopar.errors import AutoparError
from tests.runtime.gloo_ranks import Ranks
from tests.support.staged import captured_once
from tests.support.tables import often

STEPS, BAD = 5, 2
FIRST = LossScaling(initial=2.0**12, growth_steps=2)


def square(result: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(result.float(), target)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 8))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Batches of 8 rows; the last row of one of them has a loss whose scaled gradient overflows float16."""
    found = [tuple(torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(i))) for i in range(STEPS)]
    found[BAD][1][-1] = 3e4
    return found  # type: ignore[return-value]


def by_torch() -> tuple[list[float], list[float], list[Tensor]]:
    """Losses, scales after each step, and the parameters, of one process with torch's own scaler."""
    model, found, scales = small(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    scaler = torch.amp.GradScaler("cpu", FIRST.initial, FIRST.growth, FIRST.backoff, FIRST.growth_steps)
    for x, y in batches():
        halves = {name: p.half() for name, p in model.named_parameters()}
        loss = square(torch.func.functional_call(model, halves, (x.half(),)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(loss.item())
        scales.append(scaler.get_scale())
    return found, scales, [p.detach() for p in model.parameters()]


@captured_once()
def by_autopar(recipe: Any, mesh: dict[str, int]) -> tuple[list[float], list[float], int, Any]:
    made = autopar.compile(
        small(),
        loss_fn=square,
        mesh=mesh,
        recipe=recipe,
        precision="fp16",
        loss_scale=FIRST,
        micro_batches=mesh.get("pp", 1),
        example_inputs=batches()[0],
    )
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, eps=1e-6)
    found, scales = [], []
    for batch in batches():
        found.append(made.step(*batch).item())
        scales.append(made.loss_scale)
        trained = [p.grad for p in made.parameters() if p.grad is not None]
        own = [_torch.local_tensor(g) for g in trained if not _torch.is_elsewhere(g)]
        assert not any(x.isinf().any() for x in own)
        optimizer.step()
        optimizer.zero_grad()
    state = {name: getattr(x, "full_tensor", lambda x=x: x)().clone() for name, x in made.state_dict().shards().items()}
    return found, scales, made.skipped_steps, state


def largest_difference(state: dict[str, Tensor]) -> float:
    """Of parameters from those of torch's scaler, relative to the largest entry of each."""
    names = [name for name, _ in small().named_parameters()]
    pairs = [(state[n], p) for n, p in zip(names, by_torch()[2], strict=True) if n in state]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def test_one_process_scales_as_torch_does() -> None:
    losses, scales, _ = by_torch()
    found, found_scales, skipped, state = by_autopar("auto", {"dp": 1})
    assert scales == found_scales == [4096, 8192, 4096, 4096, 8192] and skipped == 1
    assert found == pytest.approx(losses, rel=2e-3)
    assert largest_difference(state) < 4e-3


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("recipe", "mesh"),
    often([("zero3", {"dp": 2}), ("1f1b", {"pp": 2}), ("zb", {"pp": 2})], [("zero3", {"dp": 2}), ("zb", {"pp": 2})]),
)
def test_ranks_skip_and_scale_alike(two_ranks: Ranks, recipe: str, mesh: dict[str, int]) -> None:
    """The bad row is on one rank alone; of the stages the last sees it first."""
    losses, scales, _ = by_torch()
    for found, found_scales, skipped, state in two_ranks.run(by_autopar, recipe, mesh):
        assert found_scales == scales and skipped == 1
        assert found == pytest.approx(losses, rel=2e-3)
        assert largest_difference(state) < 4e-3


class Tiny(nn.Module):
    """A gradient of 1e-9, which is zero in float16 unless the loss is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).float().sum() * 1e-9


def gradient(loss_scale: LossScaling | float | None) -> Tensor:
    made = autopar.compile(Tiny(), precision="fp16", loss_scale=loss_scale)
    made.step(torch.ones(4))
    assert made.weight.grad is not None
    return made.weight.grad


def test_small_gradients_are_kept() -> None:
    assert torch.equal(gradient(1.0), torch.zeros(4))
    for scale in (None, 2.0**14, LossScaling(initial=2.0**15)):
        assert torch.allclose(gradient(scale), torch.full((4,), 1e-9), rtol=1e-2)


def test_gradients_of_earlier_steps_stay_unscaled() -> None:
    """Two steps before the optimizer's add up, also where the scale has changed between them."""
    made = autopar.compile(Tiny(), precision="fp16", loss_scale=LossScaling(growth_steps=1))
    for count in (1, 2):
        made.step(torch.ones(4))
        assert made.loss_scale == 2.0 ** (16 + count)
        assert made.weight.grad is not None
        assert torch.allclose(made.weight.grad, torch.full((4,), count * 1e-9), rtol=1e-2)


def test_formats_without_need_are_not_scaled() -> None:
    made = autopar.compile(nn.Linear(8, 8), loss_fn=square, precision="bf16")
    made.step(*batches()[0])
    assert made.loss_scale == 1
    assert LossScaling.of(None, MixedPrecision("bf16", reduce_dtype="fp16")) == LossScaling()
    assert LossScaling.of(None, None) is None


def test_a_checkpoint_holds_the_scale(tmp_path: Path) -> None:
    saved, loaded, constant = (
        autopar.compile(copy.deepcopy(Tiny()), precision="fp16", loss_scale=scale, example_inputs=(torch.ones(4),))
        for scale in (LossScaling(initial=2.0**10, growth_steps=2), None, 8.0)
    )
    for _ in range(3):
        saved.step(torch.ones(4))
    autopar.checkpoint.save_checkpoint(tmp_path / "last", saved)
    for other in (loaded, constant):
        autopar.checkpoint.load_checkpoint(tmp_path / "last", other)
    assert loaded._runs.scaler.state() == {"scale": 2.0**11, "good_steps": 1}
    assert constant.loss_scale == 8


@pytest.mark.filterwarnings("ignore:The loss of step 1")
def test_a_scale_below_one_is_said_once() -> None:
    """No scale helps gradients that are NaN."""
    made = autopar.compile(small(), loss_fn=square, precision="fp16", loss_scale=LossScaling(initial=2.0))
    x, y = torch.full((8, 8), math.nan), torch.zeros(8, 8)
    made.step(x, y)
    with pytest.warns(UserWarning, match=r"fell below 1, to 0\.5, after 2 skipped.*find_nan") as said:
        made.step(x, y)
        made.step(x, y)
    assert len(said) == 1


def test_a_forward_says_that_it_is_not_scaled() -> None:
    made = autopar.compile(Tiny(), precision="fp16")
    with pytest.warns(UserWarning, match="its backward is not scaled"):
        made(torch.ones(4)).backward()
    with torch.no_grad():
        made.step(torch.ones(4))
    assert made.loss_scale == 2.0**16 and made.skipped_steps == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("dynamic", "is not a scale; give a number"),
        (True, "is not a scale"),
        (0, "initial=0.0, which must be above 0"),
        (math.inf, "initial=inf"),
    ],
)
def test_what_is_no_scale_is_refused(given: Any, words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        autopar.compile(Tiny(), precision="fp16", loss_scale=given)


@pytest.mark.parametrize("values", [{"growth": 0.5}, {"backoff": 0}, {"backoff": 2}, {"growth_steps": 0}])
def test_a_scaling_out_of_range_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(AutoparError, match=f"{next(iter(values))}="):
        LossScaling(**values)


# --- torch's scaler


class Deep(nn.Module):
    """Of its gradients one on the first layer alone overflows where the batch does, and the loss is finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def trained_with_a_scaler(model: nn.Module, run: Any, optimizer: torch.optim.Optimizer) -> Any:
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    bad = x.clone()
    bad[0, 0] = torch.inf
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for batch in (x, bad, x):
        scaler.scale(run(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()}
    return scaler.get_scale(), {n: p.detach().clone() for n, p in state.items()}


@captured_once()
def with_torchs_scaler(early: bool) -> Any:
    """Stages under `torch.amp.GradScaler`, with an optimizer made before or after them."""
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    made = autopar.compile(model, mesh={"pp": 2})
    if not early:
        made.prepare(torch.randn(4, 4, dtype=torch.float64))
        optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    return trained_with_a_scaler(made, made, optimizer)


@pytest.mark.multiprocess
def test_all_stages_skip_a_step_that_overflows_on_one(two_ranks: Ranks) -> None:
    plain = Deep()
    scale, expected = trained_with_a_scaler(plain, plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    for early in (False, True):
        for found, state in two_ranks.run(with_torchs_scaler, early):
            assert found == scale == 8.0 and state.keys() == expected.keys()
            assert max((x - expected[n]).abs().max().item() for n, x in state.items()) < 1e-12

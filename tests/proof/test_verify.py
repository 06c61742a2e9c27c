"""What verify compares beside loss and gradients: updated buffers; and how closely."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar._torch import RandomLastBits
from autopar.program.program import Program
from autopar.proof import lockstep
from autopar.proof.comparison import comparable, largest_difference, largest_entry
from autopar.proof.streams import MicroBatchStreams
from autopar.proof.verdict import TOLERANCE_FLOAT64, nan_last
from autopar.proof.verify import words_if_long
from tests.runtime.models import MLP, Normed, make, mean_square
from tests.support.tables import often

DP = {"dp": 2}


def proof(model: nn.Module, batch: tuple[Tensor, ...]) -> autopar.VerifyReport:
    return autopar.verify(model, batch, mesh=DP, recipe="ddp", loss_fn=mean_square)


class Chosen(nn.Module):
    """Weighs the largest of its scores, which are compared with that very number."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        largest = scores == scores.detach().amax(-1, keepdim=True)
        return scores.masked_fill(~largest, -torch.inf).softmax(-1) * scores


def test_a_perturbed_run_without_a_number_does_not_count() -> None:
    torch.manual_seed(0)
    model, (x, target) = Chosen(), torch.randn(2, 4, 8)
    with RandomLastBits(0):
        assert model(x).isnan().any()
    report = proof(model, (x, target))
    assert report.passed, report


@functools.lru_cache
def thirds(dtype: torch.dtype) -> Tensor:
    return torch.arange(8, dtype=dtype) / 3


class Caching(nn.Module):
    """Reads a table that a function keeps from run to run, but for traces, as models of transformers do."""

    def __init__(self, *, also_traced: bool) -> None:
        super().__init__()
        self.linear, self.also_traced = nn.Linear(8, 8), also_traced

    def forward(self, x: Tensor) -> Tensor:
        plain = torch.compiler.is_compiling() and not self.also_traced
        return self.linear(x) * (thirds.__wrapped__ if plain else thirds)(torch.float32)


@pytest.mark.parametrize("also_traced", [False, True])
def test_cached_tensors_of_lower_precision_are_no_reference(also_traced: bool) -> None:
    thirds.cache_clear()
    thirds(torch.float32)
    torch.manual_seed(0)
    report = proof(Caching(also_traced=also_traced), tuple(torch.randn(2, 4, 8)))
    assert report.passed, report
    assert thirds(torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("axis", "recipe"),
    often([("dp", "local:2"), ("dp", "async-server:1"), ("pp", "pipedream")], [("dp", "local:2"), ("pp", "pipedream")]),
)
def test_a_proof_of_delays_leaves_no_tensor_of_its_own_cached(axis: str, recipe: str) -> None:
    thirds.cache_clear()
    model = nn.Sequential(*(Caching(also_traced=True) for _ in range(2)))
    report = autopar.verify(
        model,
        torch.randn(8, 8),
        mesh={axis: 2},
        recipe=recipe,
        loss_fn=torch.mean,
        micro_batches=4 if axis == "pp" else 1,
    )
    assert report.passed and thirds(torch.float32).dtype == torch.float32


# --- limits of types, which code makes constants of


class Guarded(nn.Module):
    """Divides by what the smallest step of its type keeps from zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().sum(-1, keepdim=True) + torch.finfo(x.dtype).eps)


class Gumbels(nn.Module):
    """Adds draws of a distribution of torch whose range depends on the type."""

    def forward(self, x: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=x.dtype)
        return (x + torch.distributions.Gumbel(zero, zero + 1).sample(x.shape)).softmax(-1)


class RootOfStep(torch.autograd.Function):
    """Multiplies; asks for the limits in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (1 + torch.finfo(x.dtype).eps ** 0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + torch.finfo(gradient.dtype).eps ** 0.5)


class Multiplied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return RootOfStep.apply(x)


@pytest.mark.parametrize("last", [Guarded(), Gumbels(), Multiplied()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("dtype", often([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_limits_of_the_models_own_type_are_those_of_the_reference(last: nn.Module, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = tuple(torch.randn(2, 4, 8, dtype=dtype))
    report = proof(nn.Sequential(nn.Linear(8, 8), last).to(dtype), batch)
    assert report.passed, report


# --- buffers


def test_updated_buffers_are_compared() -> None:
    model, batch, _ = make("normed")
    before = {name: x.clone() for name, x in model.named_buffers()}
    report = proof(model, batch)
    assert report.passed, report
    assert report.buffers == 6
    assert report.buffer_error < TOLERANCE_FLOAT64
    assert "buffers " in str(report)
    assert all(torch.equal(x, before[name]) for name, x in model.named_buffers())


@pytest.mark.parametrize("rank", often([0, 1], [1]))
def test_a_wrong_buffer_on_one_rank_fails(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    run = lockstep.run

    def wrong(
        program: Program, arguments: Sequence[lockstep.Ranks], streams: MicroBatchStreams
    ) -> list[lockstep.Ranks]:
        outputs = run(program, arguments, streams)
        position = next(i for i, name in program.mutated.items() if name == "first.running_mean")
        outputs[position][rank] = outputs[position][rank] + 0.01
        return outputs

    monkeypatch.setattr(lockstep, "run", wrong)
    model, batch, _ = make("normed")
    report = proof(model, batch)
    assert not report.passed
    assert report.buffer_error > 1e-3
    assert {v.kind for v in report.failures} == {"buffer"}


class Counting(nn.Module):
    """Counts its steps in a buffer, in a way that no trace sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.steps += 1
        return self.inner(x)


def test_an_update_that_is_not_captured_fails() -> None:
    report = proof(Counting().double(), make("mlp")[1])
    assert not report.passed
    assert (report.buffer_error, report.worst_buffer) == (1.0, "steps")
    assert "1.0e+00 of 1 updated, at steps" in str(report)


def test_a_mean_of_mere_rounding_is_no_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    report = proof(model, (torch.randn(16, 8), torch.randn(16, 8)))
    assert report.passed, report


@pytest.mark.parametrize("model", [MLP(), Normed().eval()], ids=["none", "not updated"])
def test_without_updated_buffers_there_is_no_word_of_them(model: nn.Module) -> None:
    report = proof(model.double(), make("mlp")[1])
    assert report.passed
    assert (report.buffer_error, report.buffers) == (0.0, 0)
    assert "buffers" not in str(report)


def test_a_nan_in_the_buffer_error_fails() -> None:
    model, batch, _ = make("normed")
    report = proof(model, batch)
    worst = next(v for v in report.verdicts if v.kind == "buffer")
    wrong = dataclasses.replace(worst, error=float("nan"))
    assert not dataclasses.replace(report, verdicts=(*report.verdicts, wrong)).passed


class Root(nn.Linear):
    """Takes the root of a column that is below zero for some rows."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return torch.cat([h[:, :1].sqrt(), h[:, 1:]], 1)


def test_what_is_nan_on_one_device_is_to_be_nan_in_the_plan_and_is_said() -> None:
    torch.manual_seed(0)
    model, batch = Root(8, 8).double(), (torch.randn(16, 8).double(), torch.randn(16, 8).double())
    report = proof(model, batch)
    assert report.passed, report
    assert "one device gives NaN for the loss and 2 more; of entries that are NaN on both sides nothing" in str(report)
    fine = proof(nn.Linear(8, 8).double(), batch)
    assert fine.passed and "NaN" not in str(fine)


def test_nan_in_other_entries_is_an_error() -> None:
    one = torch.tensor([1.0, torch.nan, 3.0, torch.inf])
    for other, error in (
        (one.clone(), 0.0),
        (one * 1.5, 1.5),
        (torch.tensor([torch.nan, torch.nan, 3.0, torch.inf]), torch.inf),
        (torch.tensor([1.0, 2.0, 3.0, torch.inf]), torch.inf),
        (torch.tensor([1.0, torch.nan, 3.0, -torch.inf]), torch.inf),
    ):
        assert nan_last(largest_difference([other], one)) == error
    assert largest_entry(one) == 3.0


# --- precision


class Autocast(nn.Module):
    """Computes in bfloat16 with parameters in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x)
        return y.float()


@pytest.mark.parametrize("recipe", often(["ddp", "zero3", "tp"], ["tp"]))
def test_autocast_is_held_to_the_precision_of_bfloat16(recipe: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    report = autopar.verify(Autocast(), (x, y), mesh=DP, recipe=recipe, loss_fn=mean_square)
    assert report.arithmetic == "bfloat16"
    assert report.passed, report


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, "float32"), (torch.float64, "float64")])
def test_a_model_is_compared_in_its_own_arithmetic(dtype: torch.dtype, expected: str) -> None:
    model, batch, _ = make("mlp", dtype)
    report = proof(model, batch)
    assert report.arithmetic == expected and report.passed, report


# --- gradients of nothing but rounding, and state of a run before


class Cancelling(nn.Module):
    """A bias that batch norm takes away again: its gradient is the rounding of terms that cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def test_a_gradient_of_mere_rounding_is_no_error() -> None:
    torch.manual_seed(0)
    batch = tuple(torch.randn(64, 8, dtype=torch.float64) for _ in range(2))
    report = proof(Cancelling().double(), batch)
    assert report.passed, report


@pytest.mark.parametrize("dtype", often([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_rounding_of_a_bias_before_batch_norm_is_told_from_error(dtype: torch.dtype) -> None:
    """The true gradient is zero, and in low precision every digit of the computed one is rounding."""
    torch.manual_seed(0)
    batch = tuple(torch.randn(64, 8, dtype=dtype) for _ in range(2))
    report = proof(Cancelling().to(dtype), batch)
    assert report.passed, report
    (bias,) = (v for v in report.verdicts if v.name == "first.bias" and v.arithmetic != "float64")
    assert bias.error > 0.01 * bias.own > 0


class Attending(nn.Module):
    """Attention: the softmax takes a bias of the keys away again."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("recipe", often(["ddp", "tp", "zero3"], ["ddp"]))
def test_rounding_of_the_bias_of_keys_is_told_from_error(recipe: str) -> None:
    torch.manual_seed(0)
    batch = tuple(torch.randn(4, 8, 16) for _ in range(2))
    report = autopar.verify(Attending(), batch, mesh=DP, recipe=recipe, loss_fn=mean_square)
    assert report.passed, report


# --- state between steps


class Annealed(nn.Module):
    """The loss has a weight that a script changes between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = MLP(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.inner(x)


class SelfCounting(nn.Module):
    """A Python counter that forward reads and increments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = MLP(), 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self.inner(x) * max(self.calls, 1)


def test_a_weight_that_a_script_changes_between_steps_shows() -> None:
    batch = make("mlp")[1]
    model = Annealed().double()

    def halve(model: nn.Module) -> None:
        model.weight = 0.5

    assert proof(model, batch).passed
    report = autopar.verify(model, batch, mesh=DP, recipe="ddp", loss_fn=mean_square, between=halve)
    assert not report.passed and {v.step for v in report.failures} == {2}
    assert "The first step is correct and a later one is not" in str(report)
    assert model.weight == 1.0


def test_new_weights_between_steps_reach_the_plan() -> None:
    def shrink(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    report = autopar.verify(
        MLP(), tuple(x.float() for x in make("mlp")[1]), mesh=DP, recipe="zero3", loss_fn=mean_square, between=shrink
    )
    assert report.passed and report.steps == 2, report


def test_state_that_forward_changes_unseen_shows_in_the_second_step() -> None:
    report = proof(SelfCounting().double(), make("mlp")[1])
    assert {v.step for v in report.failures} == {2}


def test_a_model_without_state_runs_one_step() -> None:
    assert proof(MLP().double(), make("mlp")[1]).steps == 1


def test_a_small_gradient_must_still_be_right() -> None:
    """One of 1e-12 of the largest that is twice what it should be is an error of 7e-8, not of rounding."""
    gradient = torch.tensor([1e-12], dtype=torch.float64)
    error = gradient.abs().max().item() / comparable(gradient, 1.0)
    assert error > 50 * TOLERANCE_FLOAT64
    assert comparable(torch.tensor([0.5]), 1.0) == 0.5


def test_a_loss_that_no_parameter_moves_is_told() -> None:
    report = proof(
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=0, elementwise_affine=False)).double(),
        (torch.randn(8, 8).double(), torch.zeros(8, 8).double()),
    )
    assert report.all_rounding
    wrong = tuple(dataclasses.replace(v, error=1.0) for v in report.verdicts)
    failed = dataclasses.replace(report, verdicts=wrong)
    assert "No gradient is larger than the rounding of the loss" in str(failed)
    assert not proof(*make("mlp")[:2]).all_rounding


def test_state_that_a_run_left_with_its_graph_is_no_obstacle() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.before: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            if not torch.compiler.is_compiling():
                self.before = [y]
            return y

    torch.manual_seed(0)
    model, batch = Remembering().double(), tuple(torch.randn(8, 8).double() for _ in range(2))
    model(batch[0])
    report = proof(model, batch)
    assert report.passed, report
    assert model.before[0].grad_fn is not None  # the user's model is as it was


class Chunked(nn.Module):
    """Overlapping chunks by `as_strided` of a transposed tensor, as in Longformer's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.transpose(0, 1)).transpose(0, 1)  # (batch, time, 8), in memory (time, batch, 8)
        batch, steps, width = y.stride()
        chunks = y.as_strided((y.shape[0], 3, 4, 8), (batch, 2 * steps, steps, width))
        return (chunks * torch.arange(4.0).view(4, 1)).sum((1, 2))


def test_memory_read_by_strides_is_that_of_the_trace() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 8, 8).double(), torch.randn(4, 8).double())
    report = proof(Chunked().double(), batch)
    assert report.passed, report


class Spectrum(nn.Module):
    """istft looks whether the window is zero anywhere, which an example without values cannot say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 32)
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(self.linear(x), 8, 4, window=self.window, return_complex=True)
        return torch.istft(spectrum, 8, 4, window=self.window).square().mean()


class Recurrent(nn.Module):
    """An LSTM that drops between its layers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 4, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)[0].square().mean()
        return result


@pytest.mark.parametrize(
    ("model", "batch"), [(Spectrum(), torch.ones(4, 8)), (Recurrent().eval(), torch.ones(3, 4, 4))]
)
def test_what_looks_random_or_unreadable_is_proved(model: nn.Module, batch: Tensor) -> None:
    report = autopar.verify(model.double(), (batch.double(),), mesh=DP, plan="random")
    assert report.passed and report.arithmetic == "float64", report


class Regularised(nn.Linear):
    def loss(self, y, target):
        return nn.functional.mse_loss(y, target) + self.weight.square().sum()


def test_a_loss_that_is_a_method_of_the_model_is_that_of_the_copy() -> None:
    model = Regularised(4, 4).double()
    batch = (torch.randn(4, 4).double(), torch.randn(4, 4).double())
    report = autopar.verify(model, batch, loss_fn=model.loss, mesh={"dp": 2}, recipe="ddp")
    assert report.passed, report


def test_an_axis_along_which_nothing_is_split_is_told() -> None:
    model, batch, _ = make("mlp")
    report = autopar.verify(model, batch, mesh=DP, loss_fn=mean_square)
    assert report.passed
    assert "splits nothing along dp" in str(report)
    assert "splits nothing" not in str(proof(model, batch))


def test_a_proof_of_too_many_runs_is_refused_at_once() -> None:
    model, x = nn.Linear(4, 4), torch.ones(8, 4)
    says = r"4 x 999983 times, but at most 2048 runs are allowed.* at most 1 ranks, or at most 512 micro-batches"
    with pytest.raises(autopar.AutoparError, match=says):
        autopar.verify(model, x, mesh={"dp": 4}, loss_fn=torch.mean, micro_batches=999_983)


def test_a_long_proof_says_so_before_it_begins(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 parameters at 3 + 2 x 2 ms take 70 s; and in a minute 60 / 0.007 = 8,571 are done."""
    says = r"about 70.* s or more, since the model has 10000 parameters and runs 2 times.* at most 8571 parameters"
    assert re.search(says, words_if_long(10_000, 2))
    model, batch, _ = make("mlp")
    proof(model, batch)
    assert "The proof may take" not in caplog.text
    monkeypatch.setitem(words_if_long.__globals__, "LONG_SECONDS", 0.0)
    proof(model, batch)
    assert "The proof may take about" in caplog.text

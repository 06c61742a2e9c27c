"""Gradients that are rounding alone, in float64: a right plan passes by their rounding, and a wrong one fails."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

import autopar
from autopar.proof.comparison import doubtful, float64_verdicts, judged_by_rounding
from autopar.proof.single_device import Results

SMALL = 1e-4  # the smaller the inputs, the larger the addends of the bias's gradient beside that of the weight


class BeforeNorm(nn.Module):
    """A bias that the batch norm after it takes away: its true gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3)
        self.norm = nn.BatchNorm1d(8, affine=False, eps=1e-16)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return (self.norm(self.conv(x)) * weights).sum()


def test_the_bias_before_a_batch_norm_passes() -> None:
    torch.manual_seed(0)
    model = BeforeNorm().double()
    x, weights = SMALL * torch.randn(8, 4, 64).double(), torch.randn(8, 8, 62).double()
    report = autopar.verify(model, (x, weights), mesh={"dp": 2}, recipe="zero3")
    (bias,) = (v for v in report.verdicts if v.name == "conv.bias")
    assert report.passed
    assert bias.own > 0 and bias.error > 1e-9 * bias.scale  # it misses the bound that knows no addends
    assert bias.bound < 100 * bias.own


def results(bias: float) -> Results:
    """Results whose weight has the gradient 1."""
    gradients = {"weight": torch.ones(1), "bias": torch.tensor([bias])}
    return Results(torch.zeros(()), gradients, {}, ())


def test_an_error_beyond_the_rounding_of_its_addends_fails() -> None:
    truth, samples = results(0.0), [results(2e-12), results(-1e-12)]
    for error, passes in ((1e-11, True), (1e-10, False)):
        errors = {("gradient", "weight"): 0.0, ("gradient", "bias"): error}
        verdicts = float64_verdicts(errors, truth, 1)
        assert [v.name for v in doubtful(verdicts, truth)] == ["bias"] * (error > verdicts[1].bound)
        weight, bias = judged_by_rounding(verdicts, samples, truth)
        assert weight.passed and bias.passed == passes


def test_a_gradient_of_the_size_of_others_has_no_such_excuse() -> None:
    truth, samples = results(1.0), [results(1.0 + 1e-6)]
    errors = {("gradient", "weight"): 0.0, ("gradient", "bias"): 1e-7}
    verdicts = float64_verdicts(errors, truth, 1)
    assert doubtful(verdicts, truth) == []
    assert judged_by_rounding(verdicts, samples, truth) == [verdicts[0], replace(verdicts[1])]
    assert not verdicts[1].passed

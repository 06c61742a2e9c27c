"""Checkpointed calls that run once, with the gradients of torch's own."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from autopar import _torch


def results(x, weight, how):
    found = checkpoint(lambda x: (x * weight, [x * 2]), x, use_reentrant=how)
    return [y.requires_grad for y in (found[0], found[1][0])]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("how", [False, True])
def test_results_of_a_checkpointed_call_have_the_gradients_that_they_have_without(how, taken):
    x, weight = torch.ones(2, requires_grad=taken), torch.ones(2, requires_grad=True)
    expected = results(x, weight, how)
    with _torch.plain_checkpoints():
        assert results(x, weight, how) == expected
    with torch.no_grad(), _torch.plain_checkpoints():
        assert results(x, weight, how) == [False, False]


def test_an_error_of_a_checkpointed_call_goes_through():
    with _torch.plain_checkpoints(), pytest.raises(ZeroDivisionError):
        checkpoint(lambda x: x / (1 // 0), torch.ones(2), use_reentrant=False)


@pytest.mark.parametrize("how", [False, True])
def test_a_checkpointed_call_is_seen_in_forward_and_backward(how):
    seen = []

    def run(x):
        seen.append(_torch.is_checkpointed())
        return x.sin()

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=how).sum().backward()
    assert seen == [True, True] and not _torch.is_checkpointed()


def test_work_of_our_own_is_not_counted_by_a_checkpoint():
    weight, times = torch.ones(2, requires_grad=True), []

    def run(x):
        if not times:
            with _torch.saving_nothing():
                (x.sin() * weight).exp().sum().backward()
        times.append(1)
        return (x * weight).sin()

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert len(times) == 2

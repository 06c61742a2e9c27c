"""The training loop of the examples, in one process, and what it complains of."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from gpt import GPT, GPTConfig
from text import batches
from train_gpt import (
    complaints,
    draw_losses,
    losses_in_one_process,
    mean_of_last,
    single_process_step,
    train,
    worst_difference,
)

SMALL = GPTConfig(seq_len=8, layers=1, heads=2, width=16)
TEXT = b"the same words again and again, " * 8


def test_loss_falls_and_every_step_is_watched() -> None:
    model = GPT(SMALL)
    data = batches(TEXT, batch_size=4, seq_len=8, seed=0)
    seen: list[int] = []
    losses, _ = train(
        model,
        single_process_step(model),
        data,
        steps=30,
        planned=30,
        lr=1e-2,
        watch=lambda number, loss: seen.append(number),
    )

    assert seen == list(range(1, 31))
    assert losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert losses[-1] < losses[0] - 1


def test_the_first_losses_do_not_depend_on_how_many_steps_follow() -> None:
    def losses(steps: int) -> list[float]:
        data = batches(TEXT, batch_size=4, seq_len=8, seed=0)
        return losses_in_one_process(GPT(SMALL), data, steps=steps, planned=6, lr=1e-2)

    assert losses(3) == losses(6)[:3]


def test_batches_left_over_stay_unread() -> None:
    tokens = torch.zeros(1, 8, dtype=torch.long)
    data = itertools.repeat((tokens, tokens), 5)

    assert len(losses_in_one_process(GPT(SMALL), data, steps=2, planned=2, lr=1e-3)) == 2
    assert len(list(data)) == 3


def test_worst_difference_is_relative() -> None:
    assert worst_difference([2.0, 4.0, 9.0], [2.0, 5.0]) == pytest.approx(0.2)
    assert math.isnan(worst_difference([2.0, math.nan], [2.0, 5.0]))


def test_mean_of_last() -> None:
    assert mean_of_last([9.0, 1.0, 2.0], count=2) == 1.5
    assert mean_of_last([3.0]) == 3.0


@pytest.mark.parametrize(
    ("losses", "sentences"),
    [
        ([2.0, 2.0], []),
        ([2.0, 2.9], []),  # the mean, 2.45, is more than 0.5 below 3
        ([2.0, 3.2], ["did not fall"]),
        ([2.1, 1.9], ["differ from one process"]),
        ([math.nan, math.nan], ["differ from one process", "did not fall"]),
    ],
)
def test_complaints(losses: list[float], sentences: list[str]) -> None:
    found = complaints(losses, [2.0], entropy_nats=3.0)

    assert len(found) == len(sentences)
    assert all(part in sentence for part, sentence in zip(sentences, found, strict=True))


def test_a_run_of_few_steps_need_not_have_learned() -> None:
    assert not complaints([2.0, 3.2], [2.0], entropy_nats=3.0, enough_steps=3)
    assert complaints([2.1, 3.2], [2.0], entropy_nats=3.0, enough_steps=3)  # but equal one process


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    draw_losses([3.0, 2.0, 1.5], 2.5, tmp_path / "loss.png")

    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

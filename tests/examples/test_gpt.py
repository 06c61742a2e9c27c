"""The GPT of the examples: its sizes, its causality, its first loss."""

from __future__ import annotations

import math

import pytest
import torch
from gpt import GPT, GPTConfig, example, loss_fn

SMALL = GPTConfig(seq_len=8, layers=2, heads=2, width=16)


def test_shapes_and_number_of_parameters() -> None:
    model = GPT(SMALL)
    # One block: 4 projections of 16 x 16 + 16, MLP of 16 x 64 + 64 and 64 x 16 + 16, 2 norms of 32.
    block = 4 * 272 + 1088 + 1040 + 2 * 32
    # Around the blocks: embeddings of 256 and 8 rows, a norm, and a head without bias.
    around = 256 * 16 + 8 * 16 + 32 + 256 * 16

    assert sum(p.numel() for p in model.parameters()) == 2 * block + around
    assert model(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5, 256)


def test_a_later_byte_leaves_earlier_logits() -> None:
    model = GPT(SMALL)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 200
    before, after = model(tokens), model(changed)

    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=0, atol=0)
    assert not torch.allclose(after[:, 5], before[:, 5])
    assert not torch.allclose(after[:, 7], before[:, 7])


def test_a_new_model_guesses_evenly() -> None:
    tokens = torch.randint(256, (4, 8), generator=torch.Generator().manual_seed(0))

    assert loss_fn(GPT(SMALL)(tokens), tokens).item() == pytest.approx(math.log(256), rel=0.02)


def test_loss_is_the_mean_over_all_bytes() -> None:
    # The right byte has a logit of ln 255 against 255 zeros: probability 1/2, loss ln 2. A row of
    # equal logits has loss ln 256 = 8 ln 2. The mean of both is 4.5 ln 2.
    logits = torch.zeros(1, 2, 256)
    logits[0, 0, 7] = math.log(255)

    assert loss_fn(logits, torch.tensor([[7, 9]])).item() == pytest.approx(4.5 * math.log(2))


def test_initial_weights_follow_the_seed() -> None:
    first, again, other = (GPT(SMALL, seed=seed).head.weight for seed in (1, 1, 2))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="3 heads do not divide a width of 16"):
        GPTConfig(heads=3, width=16)


def test_example_has_no_weights() -> None:
    model, (tokens, targets), loss = example()

    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert loss(model(tokens), targets).shape == ()

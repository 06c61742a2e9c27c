"""What autopar needs of torch's flex_attention: its functions under other code, its definition, and its block masks."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from autopar import _torch


def causal(b, h, q, k):
    return q >= k


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


QKV = rand(2, 4, 16, 8), rand(2, 2, 16, 8), rand(2, 2, 16, 8)


def scores(query, key, value):
    """Causal attention written out, and the log-sum-exp of its scores."""
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    seen = torch.ones(16, 16, dtype=torch.bool).tril()
    found = (query @ key.mT / 8**0.5).masked_fill(~seen, float("-inf"))
    return found.softmax(-1) @ value, found.logsumexp(-1)


def test_other_code_runs_under_names_that_were_bound_before():
    attend, make = flex.flex_attention, flex.create_block_mask
    with _torch.flex_attention_by(lambda *args, **kwargs: (args, kwargs), lambda *args: args):
        assert attend(1, block_mask=2) == ((1,), {"block_mask": 2})
        assert make(causal, 1) == (causal, 1)
    assert make(causal, 1, 1, 16, 16, "cpu").shape == (1, 1, 16, 16)
    assert "_autopar_attend" not in vars(flex)


def test_the_definition_has_a_backward_on_a_processor():
    own = [x.clone().requires_grad_() for x in QKV]
    mask = flex.create_block_mask(causal, None, None, 16, 16, "cpu")
    with _torch.flex_attention_by_definition():
        result, logsumexp = flex.flex_attention(*own, block_mask=mask, enable_gqa=True, return_lse=True)
    wanted = [x.clone().requires_grad_() for x in QKV]
    for got, want in zip((result, logsumexp), scores(*wanted), strict=True):
        torch.testing.assert_close(got, want)
    result.sum().backward()
    scores(*wanted)[0].sum().backward()
    for got, want in zip(own, wanted, strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex.flex_attention(*own, block_mask=mask, enable_gqa=True)


def test_blocks_agree_with_their_function():
    mask = flex.create_block_mask(causal, None, None, 64, 64, "cpu", 16)
    assert _torch.blocks_agree(mask)
    assert not _torch.blocks_agree(
        _torch.block_mask(causal, mask.kv_indices, torch.zeros_like(mask.kv_num_blocks), (64, 64), (16, 16))
    )


def test_lookups_by_scalars_read_no_values():
    table, at = torch.arange(12).reshape(3, 4), torch.tensor(2)
    with _torch.fake_mode() as mode, _torch.LookupsByTensors():
        fake, index = mode.from_tensor(table), mode.from_tensor(at)
        assert fake[index, index].shape == ()
        assert fake[0, index].shape == ()
        assert fake[index].shape == (4,)
    with _torch.LookupsByTensors():
        assert table[at, 1] == table[2, 1]
        assert table[at].equal(table[2])

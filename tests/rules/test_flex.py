"""flex_attention with masks of documents, causal, of a window, of a prefix, over batch, heads, groups and queries."""

import pytest
import torch
import torch.nn.functional as F
from proof import Alone, labels_of, prove
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

import autopar
from autopar.capture.export import capture_step
from autopar.errors import CaptureError
from autopar.ir import Mesh
from autopar.ops.attention_block import AttentionBlock

KIND = "autopar.flex_attention"
BATCH, HEADS, ROWS, WIDTH = 2, 4, 16, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 3 + [2] * 8, [0] * 12 + [1] * 4])
PREFIXES = torch.tensor([3, 7])


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def qkv(kv_heads=HEADS):
    return tuple(rand(BATCH, heads, ROWS, WIDTH) for heads in (HEADS, kv_heads, kv_heads))


MASKS = {
    "documents": lambda x: lambda b, h, q, k: (x[b, q] == x[b, k]) & (q >= k),
    "causal": lambda x: lambda b, h, q, k: q >= k,
    "window": lambda x: lambda b, h, q, k: (q >= k) & (q - k < 5),
    "prefix": lambda x: lambda b, h, q, k: (k < x[b]) | (q >= k),
}
TENSORS = {"documents": (DOCUMENTS,), "prefix": (PREFIXES,)}


def attending(name):
    """Attention with a mask; outside of a capture by its definition, because torch has no backward on a processor."""

    def attend(query, key, value, tensor=None):
        grouped, seen = query.shape[1] != key.shape[1], MASKS[name](tensor)
        if torch.compiler.is_exporting():
            mask = create_block_mask(seen, BATCH, None, ROWS, ROWS, "cpu")
            return flex_attention(query, key, value, block_mask=mask, enable_gqa=grouped)
        dense = create_mask(seen, BATCH, None, ROWS, ROWS, "cpu")
        return F.scaled_dot_product_attention(query, key, value, dense, enable_gqa=grouped)

    return attend


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    tensors = *qkv(), *TENSORS.get(name, ())
    assert labels_of(attending(name), *tensors, kind=KIND) == {"-", "b", "g", "q"}
    assert prove(attending(name), *tensors, kind=KIND) == 5  # and the same everywhere


def test_ranks_without_rows():
    tensors = *qkv(), DOCUMENTS
    assert prove(attending("documents"), *tensors, kind=KIND, mesh=Mesh.of({"a": 3}), rows=BATCH) == 1


def test_scores_that_are_no_whole_number_of_operations():
    def attend(query, key, value):
        mask = create_block_mask(MASKS["window"](None), None, None, 15, 15, "cpu")
        return flex_attention(query, key, value, block_mask=mask)

    assert labels_of(attend, *(rand(7, HEADS, 15, WIDTH) for _ in range(3)), kind=KIND) == {"-", "b", "g", "q"}


def test_grouped_heads():
    tensors = *qkv(kv_heads=2), DOCUMENTS
    assert labels_of(attending("documents"), *tensors, kind=KIND) == {"-", "b", "g", "r", "q"}
    assert prove(attending("documents"), *tensors, kind=KIND) == 6


def slopes(lead):
    def attend(query, key, value, slope):
        def score(s, b, h, q, k):
            return s + slope[h] * (k - q)

        if torch.compiler.is_exporting():
            return flex_attention(query, key, value, score, enable_gqa=lead)
        places = torch.arange(ROWS)
        bias = slope[:, None, None] * (places - places[:, None])
        return F.scaled_dot_product_attention(query, key, value, bias, enable_gqa=lead)

    return attend


def test_a_score_function_with_a_trained_tensor():
    """It is split with the heads; where heads of queries are counted, those of a group stay together."""
    for kv_heads, count in ((HEADS, 4), (2, 4)):
        tensors = *qkv(kv_heads), rand(HEADS)
        assert labels_of(slopes(kv_heads < HEADS), *tensors, kind=KIND) == {"-", "b", "g", "q"}
        assert prove(slopes(kv_heads < HEADS), *tensors, kind=KIND) == count + 1


def refused(attend, *tensors):
    with pytest.raises(CaptureError) as error:
        capture_step(Alone(attend, tensors), (), {}, None)
    return str(error.value)


def test_what_a_plan_cannot_say_is_refused():
    def of_blocks(query, key, value):
        mask = create_block_mask(MASKS["causal"](None), None, None, ROWS, ROWS, "cpu")
        return flex_attention(query, key, value, block_mask=mask) * mask.kv_num_blocks.sum()

    assert "reads the blocks of a block mask" in refused(of_blocks, *qkv())
    window = BlockMask.from_kv_blocks(torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 2).int(), BLOCK_SIZE=(16, 8))

    def of_other_blocks(query, key, value):
        return flex_attention(query, key, value, block_mask=window)

    assert "say different things" in refused(of_other_blocks, *qkv())

    def of_draws(query, key, value):
        return flex_attention(query, key, value, lambda s, b, h, q, k: s * torch.rand_like(s))

    assert "draws random numbers" in refused(of_draws, *qkv())


def test_documents_by_their_lengths():
    """varlen_attn, with its definition in the place of the kernel of an accelerator."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    starts = torch.tensor([0, 5, 12, 16], dtype=torch.int32)
    documents = torch.tensor([0] * 5 + [1] * 7 + [2] * 4)

    seen = (documents[:, None] == documents).tril()

    def heads_first(*tensors):
        return (x.transpose(0, 1).unsqueeze(0) for x in tensors)

    def rows_first(*tensors):
        return tuple(x.squeeze(0).transpose(0, 1).contiguous() for x in tensors)

    def attend(query, key, value, starts=None):
        result = F.scaled_dot_product_attention(*heads_first(query, key, value), seen, enable_gqa=True)
        return rows_first(result)[0]

    def block(*tensors):
        return AttentionBlock(*heads_first(*tensors), seen, ROWS, tensors[0].shape[-1] ** -0.5)

    def forward(query, key, value, *_):
        result, sums = block(query, key, value).attend()
        return rows_first(result)[0], sums[0].float(), torch.zeros(2, dtype=torch.uint64)

    def backward(gradient, query, key, value, *_):
        own = block(query, key, value)
        return rows_first(*own.attend_backward(*own.attend(), *heads_first(gradient)))

    def by_lengths(*tensors):
        if not torch.compiler.is_exporting():
            return attend(*tensors)
        q, k, v, starts = tensors
        return varlen.varlen_attn(q, k, v, starts, starts, 7, 7, window_size=(-1, 0), enable_gqa=True)

    varlen._varlen_attn.register_kernel("cpu", forward)
    varlen._varlen_attn_backward.register_kernel("cpu", backward)
    tensors = rand(ROWS, 4, 8), rand(ROWS, 2, 8), rand(ROWS, 2, 8), starts
    assert labels_of(by_lengths, *tensors, kind="torch_attn._varlen_attn") == {"-", "g"}
    assert prove(by_lengths, *tensors, kind="torch_attn._varlen_attn") == 3


def test_a_nested_batch_is_refused_and_its_values_are_taken():
    rows = [torch.randn(3, 4), torch.randn(5, 4)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    model = torch.nn.Linear(4, 4)
    for given in (nested,), (nested.values(),), (nested.to_padded_tensor(0.0),):
        compiled = autopar.compile(model, loss_fn=lambda y: y.square().sum())
        if given[0].is_nested:
            with pytest.raises(CaptureError, match=r"nested tensor.*x.values.*x.offsets.*to_padded"):
                compiled.step(*given)
        else:
            assert compiled.step(*given).isfinite()

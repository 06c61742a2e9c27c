"""A mixture of experts as one op: what it can be split along, proved against the whole layer."""

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (it defines transformers::grouped_mm_fallback)
from proof import labels_of, prove
from test_kept import Between
from torch import nn

from autopar.planning.planning import prepare_step
from benchmarks.accuracy.saved_activations import priced_bytes, program_kept_bytes

ROWS, SLOTS, EXPERTS, WIDTH, INNER = 8, 2, 4, 6, 10
EXPERTS_KIND = "autopar.analysis.experts"
product = torch.ops.transformers.grouped_mm_fallback


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def ids():
    """Two different experts for every row, and none for expert 3."""
    first = torch.randint(0, 2, (ROWS, 1), generator=torch.Generator().manual_seed(1))
    return torch.cat([first, torch.full((ROWS, 1), 2)], 1)


def routed(chosen, body):
    """Rows in the order of their experts -> body -> rows as they came."""
    flat = chosen.reshape(-1)
    ordered, order = torch.sort(flat)
    ends = torch.cumsum(torch.histc(ordered.double(), EXPERTS, 0, EXPERTS - 1), 0, dtype=torch.int32)
    y = body(ordered, order, ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return y[back]


def gated(x, chosen, up, down, share):
    def body(ordered, order, ends):
        gate, value = product(x[order // SLOTS], up.transpose(1, 2), ends).chunk(2, -1)
        y = product(nn.functional.silu(gate) * value, down.transpose(1, 2), ends)
        return y * share.reshape(-1)[order].unsqueeze(-1)

    return routed(chosen, body).view(ROWS, SLOTS, WIDTH).sum(1)


def biased(x, chosen, up, up_bias, down, down_bias):
    """Experts as gpt_oss has them: interleaved gates, biases, and no share of the router."""

    def body(ordered, order, ends):
        y = product(x[order // SLOTS], up, ends) + up_bias[ordered]
        y = y[..., ::2] * torch.sigmoid(y[..., 1::2])
        return product(y, down, ends) + down_bias[ordered]

    return routed(chosen, body)


def one_slot(x, chosen, weight):
    return routed(chosen, lambda ordered, order, ends: product(x[order], weight, ends).tanh())


GATED = (draw(ROWS, WIDTH), ids(), draw(EXPERTS, 2 * INNER, WIDTH), draw(EXPERTS, WIDTH, INNER), draw(ROWS, SLOTS))
BIASED = (
    draw(ROWS, WIDTH),
    ids(),
    draw(EXPERTS, WIDTH, 2 * INNER),
    draw(EXPERTS, 2 * INNER),
    draw(EXPERTS, INNER, WIDTH),
    draw(EXPERTS, WIDTH),
)
ONE = (draw(ROWS, WIDTH), ids()[:, 0], draw(EXPERTS, WIDTH, INNER))


def test_masks_of_dropout_keep_rows_where_they_are():
    def dropped(x, chosen, weight):
        return routed(chosen, lambda ordered, order, ends: nn.functional.dropout(product(x[order], weight, ends), 0.5))

    assert labels_of(dropped, *ONE, kind=EXPERTS_KIND) == {"-", "t", "e", "d1"}


LAYERS = [
    # t: rows, k: slots, e: experts, then the inner width (columns, then rows) and that of the result
    pytest.param(gated, GATED, {"-", "t", "k", "e", "t>e", "d2", "d3"}, id="gated"),
    pytest.param(biased, BIASED, {"-", "t", "k", "e", "t>e", "d1", "d3"}, id="biased"),
    pytest.param(one_slot, ONE, {"-", "t", "e", "t>e", "d1"}, id="one slot"),
]


@pytest.mark.parametrize(("layer", "tensors", "labels"), LAYERS)
def test_every_choice_gives_what_the_whole_layer_gives(layer, tensors, labels):
    assert labels_of(layer, *tensors, kind=EXPERTS_KIND) == labels
    assert prove(layer, *tensors, kind=EXPERTS_KIND) >= len(labels)


FROZEN = frozenset(), frozenset({2}), frozenset({0})


@pytest.mark.parametrize(
    ("frozen", "layer", "tensors", "labels"),
    [
        pytest.param(frozen, *layer.values, id=f"{layer.id}-{i}", marks=[] if i == j else pytest.mark.slow)
        for i, frozen in enumerate(FROZEN)
        for j, layer in enumerate(LAYERS)
    ],
)
def test_kept_bytes_are_those_of_autograd(frozen, layer, tensors, labels):
    model = Between(layer, tensors, frozen)
    prepared = prepare_step(model, ())
    assert priced_bytes(prepared) == program_kept_bytes(prepared, model, ())


def counts(x):
    """An auxiliary loss counts how many rows each expert got."""
    return x.sum() * torch.histc(x.detach().abs(), 4, 0, 4)


def test_counts_of_parts_add_up():
    assert prove(counts, draw(8, 6), kind="aten.histc") >= 3
    assert labels_of(counts, draw(8, 6), kind="aten.histc") == {"-", "d0", "d1"}


def test_one_of_every_step_is_split_like_two_halves():
    def interleaved(x):
        return x[:, ::2] * x[:, 1::2]

    assert labels_of(interleaved, draw(4, 12), kind="aten.slice") == {"-", "d0", "s", "+0"}
    assert prove(interleaved, draw(4, 12), kind="aten.slice") >= 6


ENDS = torch.tensor([2, 2, 5, 8], dtype=torch.int32)


def test_rows_and_groups_of_a_product_alone_stay_whole():
    """The ends count rows from the first of all."""

    def multiply(x, weight):
        return product(x, weight, ENDS)

    tensors, kind = (draw(8, 4), draw(4, 4, 6)), "transformers.grouped_mm_fallback"
    assert labels_of(multiply, *tensors, kind=kind) == {"-", "k", "j", "+0", "+1"}
    assert prove(multiply, *tensors, kind=kind) >= 5


@pytest.mark.parametrize(
    ("shapes", "labels"),
    [
        (((8, 16), (4, 16, 16)), {"k", "j"}),
        (((8, 16), (4, 16, 8)), {"k"}),  # ATen wants rows of 16 bytes at least: 8 numbers
        (((16, 8), (8, 16)), {"k", "j"}),
        (((4, 8, 16), (16, 8)), {"i", "k"}),
        (((4, 8, 16), (4, 16, 16)), {"e", "i", "k", "j"}),
    ],
)
def test_forms_of_grouped_mm(shapes, labels):
    """Rows by matrices, and the three forms of its backward and of equal groups, in their one dtype."""
    tensors = tuple(draw(*shape).bfloat16() for shape in shapes)
    ends = None if len(shapes[0]) == len(shapes[1]) == 3 else ENDS

    def multiply(x, y):
        return nn.functional.grouped_mm(x, y, offs=ends)

    found = labels_of(multiply, *tensors, kind="aten._grouped_mm")
    assert found == {"-", "+0", "+1", *labels}

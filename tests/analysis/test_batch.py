"""Which dim of the inputs is the batch, where it is not the first, and rows that are made of a batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.analysis.factors import analyze
from autopar.capture.export import capture_step
from autopar.errors import PlanError, SearchError
from autopar.ir import S
from autopar.passes import clean_up
from autopar.planning.planning import make_plan
from autopar.proof.subject import Subject
from autopar.search.request.request import Request
from tests.search.toy import TOY


def loss(y):
    return (y[0] if isinstance(y, tuple) else y).pow(2).mean()


def dims(model, *inputs):
    """Names of the factors of every dim of the first input, and the roles of all factors."""
    captured = capture_step(model, inputs, {}, loss)
    clean_up(captured.module)
    graph = analyze(captured).graph
    first = graph.tensors[next(iter(graph.inputs.values()))]
    return ["+".join(names) for names in first.factors], {k: f.roles for k, f in graph.factors.items()}


def planned(model, *inputs, axis="dp", recipe="ddp", micro_batches=None):
    """The plan for two ranks, which gives the loss and gradients of one."""
    subject = Subject.of(model.double(), inputs, loss_fn=loss)
    plan = make_plan(subject.prepared, Request(TOY, mesh={axis: 2}, recipe=recipe, micro_batches=micro_batches))
    report = subject.compare(plan)
    assert report.passed, report
    return plan


class Attends(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **how)

    def forward(self, x):
        return self.attention(x, x, x)  # with weights: products and a softmax, not the fused op


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x):
        state = x.new_zeros(x.shape[1], 8)
        for step in x:
            state = self.cell(step, state)
        return state


class Filters(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(8, 8, 3)

    def forward(self, x):
        return self.filters(x.permute(1, 2, 0))


@pytest.mark.parametrize(
    "model",
    [nn.LSTM(8, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.0), Attends(), Cells(), Filters()],
    ids=lambda model: type(model).__name__,
)
def test_the_batch_is_the_dim_that_the_ops_take_for_it(model):
    names, roles = dims(model, torch.zeros(6, 4, 8))
    assert names[:2] == ["seq", "batch"]
    assert (roles["seq"], roles["batch"]) == ({"input"}, {"batch"})


class Frames(nn.Module):
    """Attention among the places of a frame, then among frames: (batch, frames, places, width)."""

    def forward(self, x):
        x = F.scaled_dot_product_attention(x, x, x)
        x = x.transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x)


class Contrast(nn.Module):
    """All samples meet at every step, and steps do not."""

    def __init__(self):
        super().__init__()
        self.steps = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        z, _ = self.steps(x)
        return torch.einsum("btd,ctd->tbc", z, z).log_softmax(-1)


class Clips(nn.Module):
    """Frames of (batch x frames, places, width): dim 0 is the batch and more."""

    def forward(self, x):
        x = x.view(-1, 3, *x.shape[1:]).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x)


class Typed(nn.Module):
    """Positions that are a buffer, expanded over the batch, as token types of BERT are."""

    def __init__(self):
        super().__init__()
        self.words, self.types, self.attends = (nn.Embedding(9, 8), nn.Embedding(2, 8), Attends(batch_first=True))
        self.register_buffer("kinds", torch.zeros(1, 6, dtype=torch.int64))

    def forward(self, ids):
        return self.attends(self.words(ids) + self.types(self.kinds.expand(ids.shape[0], -1)))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Contrast(), torch.zeros(4, 6, 8)),
        (nn.Sequential(nn.Linear(8, 8), Frames()), torch.zeros(4, 6, 3, 8)),
        (nn.Sequential(nn.Linear(8, 8), Clips()), torch.zeros(12, 4, 8)),
        (Typed(), torch.zeros(4, 6, dtype=torch.int64)),
    ],
    ids=["contrast", "frames", "clips", "typed"],
)
def test_the_first_dim_is_the_batch_where_ops_do_not_agree_on_another(model, x):
    names, roles = dims(model, x)
    of_batch = [name for name in names[0].split("+") if "batch" in roles[name]]
    assert of_batch == names[0].split("+") and not any("batch" in roles[name] for name in names[1:])


@pytest.mark.parametrize(("model", "recipe"), [(nn.LSTM(8, 8), "ddp"), (Attends(), "zero3")], ids=["lstm", "attention"])
def test_data_parallel_training_with_the_batch_second(model, recipe):
    plan = planned(model, torch.randn(6, 4, 8).double(), recipe=recipe)
    assert [*plan.inputs.values()] == [(S(1),)]


class Joined(nn.Module):
    """An encoder of rows that are joined, or repeated."""

    def __init__(self, join):
        super().__init__()
        self.join, self.encoder = join, nn.Linear(8, 4)

    def forward(self, a, b):
        return self.encoder(self.join(a, b)).cos()


@pytest.mark.parametrize(
    ("rows", "join", "label"),
    [
        (4, lambda a, b: torch.cat([a, b]), "b0.1"),
        (4, lambda a, b: a.repeat(2, 1) * b.repeat(2, 1), "b0.1"),
        (6, lambda a, b: torch.cat([a, b]), "b0"),
    ],
    ids=["cat of views", "repeat", "cat of other sizes"],
)
def test_rows_made_of_batches_are_split_as_the_batch(rows, join, label):
    inputs = [torch.randn(n, 8).double() for n in (4, rows)]
    assert planned(Joined(join), *inputs).ops["linear"] == (label,)


class Cached(nn.Module):
    """Attention to keys and values of earlier steps beside its own: (batch, 2 heads, steps, 4)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, past):
        q, k, v = (y.view(4, 3, 2, 4).transpose(1, 2) for y in self.qkv(x).split(8, -1))
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 3, 8))


def test_the_heads_of_a_cache_are_heads_of_the_model():
    past = tuple(torch.randn(4, 2, 5, 4).double() for _ in "kv")
    plan = planned(Cached(), torch.randn(4, 3, 8).double(), past, axis="tp", recipe="tp")
    assert plan.ops["scaled_dot_product_attention"] == ("b0",)
    assert plan.ops["linear_1"] == ("k.0",)  # rows of the heads; the width of x stays whole
    assert [layout[0].kind for layout in plan.inputs.values()] == ["R", "S", "S"]


class Hand(nn.Module):
    """Steps by hand, where no op tells the batch (dim 1) from the steps."""

    def __init__(self):
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x):
        state = x.new_zeros(x.shape[1], 8)
        for each in x:
            state = self.step(each + state).tanh()
        return state


def test_without_a_batch_to_split_the_error_says_what_one_is():
    with pytest.raises(SearchError) as error:
        planned(Hand(), torch.zeros(6, 4, 8).double())
    message = str(error.value)
    assert "ddp splits nothing of this model: it asks for 'batch split, " in message
    assert "Here the batch is dim 0 of x (size 6). It is dim 0 of an input, unless all ops" in message
    assert "batch_first=True" in message and "or take the recipe 'auto'" in message


def test_micro_batches_are_cut_from_a_batch_alone():
    with pytest.raises(PlanError, match=r"shape \[6, 4, 8\] is dim 1: take one"):
        planned(nn.LSTM(8, 8), torch.zeros(6, 4, 8).double(), micro_batches=2)
    subject = Subject.of(nn.LSTM(8, 8), (torch.zeros(6, 4, 8),), loss_fn=loss)
    assert make_plan(subject.prepared, Request(TOY, ranks=2)).micro_batches == 1

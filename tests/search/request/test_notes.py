"""What is said of a plan: sizes that an axis does not divide."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model import find_hardware
from autopar.ir.note import kind_of
from autopar.planning.planning import Prepared, make_plan, prepare_step
from autopar.proof.subject import Subject
from autopar.search.request.request import Request
from tests.support.odd.odd_widths import VOCABULARY, OddWidths, batch, loss_of
from tests.support.tables import often


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Speaker(nn.Module):
    """A language model whose head is the table of its words."""

    def __init__(self, vocabulary: int, heads: int) -> None:
        super().__init__()
        width = 8 * heads
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Attention(width, heads) for _ in range(2)))
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        y = self.mlp(self.layers(self.words(tokens))) @ self.words.weight.T
        return F.cross_entropy(y.flatten(0, 1), targets.flatten())


def speaker(vocabulary: int, heads: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(vocabulary, (4, 8))
    return Speaker(vocabulary, heads).double(), (tokens, tokens.roll(1, 1))


@functools.cache
def spoken(vocabulary: int, heads: int) -> Prepared:
    return prepare_step(*speaker(vocabulary, heads))


def said(vocabulary: int, heads: int, recipe: str, ranks: int = 8) -> list[str]:
    prepared = spoken(vocabulary, heads)
    plan = make_plan(prepared, Request(find_hardware("h100"), mesh={"tp": ranks}, recipe=recipe))
    return [note for note in plan.notes if kind_of(note) == "undivided"]


@pytest.mark.parametrize(
    ("recipe", "instead", "of_heads"),
    [
        ("auto", "not split", "not split"),
        ("tp", "split by dim 1 of words.weight instead", "split by dim 1 of words.weight instead"),
        pytest.param(
            "tp+sp",
            "split by dim 1 of words.weight instead",
            "split by dim 0 of layers.*.query.weight instead",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_no_axis_cuts_for_all_ranks_is_said_with_what_would(recipe: str, instead: str, of_heads: str) -> None:
    words, heads = said(49, 3, recipe)  # torch.chunk makes 7 parts of 49
    assert words == (
        f"A vocabulary of 49 cannot be split over tp=8, so it is {instead}; pad it to 56, with "
        "resize_token_embeddings(56)."
    )
    assert heads == f"3 attention heads cannot be split over tp=8, so attention is {of_heads}; 8 would be split."


def test_what_is_cut_or_not_wanted_is_not_said() -> None:
    assert said(56, 8, "auto") == said(97, 3, "auto", 2) == said(49, 3, "zero3") == []
    assert len(said(56, 3, "tp")) == len(said(49, 8, "tp")) == 1


@pytest.mark.parametrize("recipe", often(["tp", "tp+sp"], ["tp+sp"]))
def test_widths_that_ranks_do_not_divide_are_split_and_nothing_is_wrong(recipe: str) -> None:
    subject = Subject.of(OddWidths().double(), batch(6), loss_fn=loss_of)
    graph = subject.prepared.analysis.graph
    plan = make_plan(subject.prepared, Request(find_hardware("h100"), mesh={"tp": 3}, recipe=recipe))
    assert VOCABULARY in {op.choice(*plan.ops[op.name]).size for op in graph.ops}
    report = subject.compare(plan)
    assert report.passed, report


def test_how_long_ranks_wait_for_the_most_heads_is_said() -> None:
    notes = make_plan(spoken(98, 25), Request(find_hardware("h100"), mesh={"tp": 2}, recipe="tp")).notes
    (note,) = (note for note in notes if kind_of(note) == "uneven")
    assert note == (
        "of dim 0 of layers.*.query.weight, 25, ranks have 13 or 12, and wait for those with the most in 3.8 % of the "
        "time of its ops"
    )


class Grouped(nn.Module):
    """Attention of 8 queries with 4 keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.query(x), self.key(x), self.value(x)))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


def test_two_axes_are_named_where_they_split_grouped_queries() -> None:
    prepared = prepare_step(Grouped(), (torch.randn(2, 4, 32),))
    found = {}
    for parts in (4, 8):
        request = Request(find_hardware("h100"), mesh={"tp": parts}, recipe="tp")
        notes = make_plan(prepared, request).notes
        found[parts] = [note for note in notes if "attention heads" in note]
    assert found[4] == []
    (note,) = found[8]
    assert note.endswith("; 8 would be split, or two axes of 4 and 2 ranks in place of tp.")


def test_every_axis_has_what_it_gains_and_what_it_costs() -> None:
    prepared = spoken(98, 4)
    request = Request(find_hardware("h100"), mesh={"dp": 2, "tp": 2}, recipe={"dp": "zero1", "tp": "tp"})
    notes = make_plan(prepared, request).notes
    (dp,) = (note for note in notes if note.startswith("dp=2 divides"))
    (tp,) = (note for note in notes if note.startswith("tp=2 divides"))
    assert re.fullmatch(r"dp=2 divides 100 % of the arithmetic by 2, and communicates for \d.\d+ ms a step", dp)
    seconds = [float(note.split(" for ")[1].split(" ms")[0]) for note in (dp, tp)]
    assert all(seconds) and kind_of(dp) == "price"
    alone = make_plan(prepared, Request(find_hardware("h100"), mesh={"tp": 2}))
    assert "tp=2 divides nothing: no faster plan was found that uses it, under recipe auto" in alone.notes


class Patches(nn.Module):
    """An image in patches of 5 x 5: no op splits the rows of a patch."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 8, 5, 5), nn.Linear(8, 4)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        y = self.head(self.patch(image).flatten(2).mean(2))
        return F.cross_entropy(y, target)


def test_nothing_is_said_of_a_size_that_no_op_splits() -> None:
    batch = torch.rand(8, 3, 10, 10), torch.zeros(8, dtype=torch.long)
    request = Request(find_hardware("h100"), mesh={"dp": 2})
    plan = make_plan(prepare_step(Patches(), batch), request)
    assert plan.ops["conv2d"] == ("-",) and "undivided" not in map(kind_of, plan.notes)

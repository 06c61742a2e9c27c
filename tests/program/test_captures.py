"""Captures at many sizes: one with open sizes gives what the model gives, or is not taken."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.export import capture_step
from autopar.program.captures import Captures, SizedCaptures, _digest


class Reader(nn.Module):
    """Attention with a mask, a table of positions, and a loss that divides by the number of tokens."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(16, 8), nn.Embedding(64, 8)
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens, mask=None):
        rows, length = tokens.shape
        x = self.words(tokens) + self.places.weight[:length]
        q, k, v = (m(x).view(rows, -1, 2, 4).transpose(1, 2) for m in self.maps)
        later = torch.arange(length)[None] > torch.arange(length)[:, None]
        scores = (q @ k.transpose(-1, -2) / math.sqrt(4)).masked_fill(later, -1e9)
        x = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return (x if mask is None else x * mask[..., None]).square().sum() / tokens.numel()


class Scaled(nn.Module):
    """Numbers of Python that are computed of a size, halves of a dim, and new tensors of its size."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x):
        left, right = self.map(x).chunk(2, -1)
        scaled = left * x.shape[1] ** -0.5 + right / (2 * x.shape[1] + 1)
        return (torch.cat([scaled[:, 1:], torch.zeros_like(scaled[:, :1])], 1) + scaled).mean()


class Convolved(nn.Module):
    """Images, whose height and width are open."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.conv(x[:, :, None, 0].expand_as(x))), 2).mean()


class Odd(nn.Module):
    """A model whose Python asks for the size."""

    def __init__(self, how):
        super().__init__()
        self.map, self.how, self.seen = nn.Linear(4, 4), how, 0

    def forward(self, x):
        length = x.shape[1]
        if self.how == "branches" and length > 5:
            x = x[:, :5]
        if self.how == "unrolls":
            x = sum(x[:, i] for i in range(length))
        if self.how == "writes":
            self.seen = length
        return self.map(x).sum()


def tokens(*shape):
    return torch.zeros(shape, dtype=torch.long)


def captured(captures, model, args, kwargs=None):
    """What `captures` give for these inputs."""
    kwargs = kwargs or {}
    shapes = tuple(tuple(x.shape) for x in (*args, *kwargs.values()))

    def capture(open_dims):
        return capture_step(model, args, kwargs, None, open_dims=open_dims)

    return captures.captured(shapes, capture)


INPUTS = {
    "attention": (Reader, lambda rows, n: ((tokens(rows, n),), {})),
    "with a mask": (Reader, lambda rows, n: ((tokens(rows, n),), {"mask": torch.ones(rows, n)})),
    "numbers": (Scaled, lambda rows, n: ((torch.ones(rows, n, 4),), {})),
    "images": (Convolved, lambda rows, n: ((torch.ones(rows, 3, n, 2 * n),), {})),
}


@pytest.mark.parametrize("name", INPUTS)
def test_what_is_given_for_a_size_is_what_a_capture_gives(name):
    made, inputs = INPUTS[name]
    model, captures = made(), SizedCaptures()
    for rows, length in [(4, 6), (4, 8), (4, 16), (4, 10)]:
        found = captured(captures, model, *inputs(rows, length))
        alone = captured(SizedCaptures(), model, *inputs(rows, length))
        assert _digest(found) == _digest(alone)
        assert found.module.graph.python_code("self").src == alone.module.graph.python_code("self").src
    assert captures.count == 2 and not captures.why_closed
    captured(captures, model, *inputs(2, 12))
    assert captures.count == 3, "another dim is open from now on"
    captured(captures, model, *inputs(6, 6))
    assert captures.count == 3


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("branches", "the model takes another branch for a size under 6"),
        ("unrolls", "the model fixes a size to 6, but another is given"),
        ("writes", "sets model.seen"),
    ],
)
def test_where_python_asks_for_a_size_each_is_captured_by_itself(how, why):
    model, captures = Odd(how), SizedCaptures()
    for count, length in enumerate([4, 6, 8, 9]):
        found = captured(captures, model, (torch.ones(2, length, 4),))
        alone = captured(SizedCaptures(), model, (torch.ones(2, length, 4),))
        assert _digest(found) == _digest(alone)
        assert captures.count == count + 1 + (count > 0), "one attempt, then one capture a size"
    assert why in captures.why_closed


def test_sizes_of_0_and_1_are_captured_by_themselves():
    model, captures = Scaled(), SizedCaptures()
    for length in (6, 1, 8, 10, 12):
        captured(captures, model, (torch.ones(2, length, 4),))
    assert captures.count == 3 and not captures.why_closed
    captured(captures, model, (torch.ones(1, 8, 4),))
    assert captures.count == 4


def test_parts_of_a_batch_are_apart_from_the_batch():
    model, captures = Scaled(), Captures()
    for length in (6, 8, 10):
        for parts in (1, 2):
            x = torch.ones(4 // parts, length, 4)
            captures.captured(
                parts,
                (tuple(x.shape),),
                lambda open_dims, x=x: capture_step(model, (x,), {}, None, open_dims=open_dims),
            )
    assert captures.count == 4
    assert captures.why_closed == ""

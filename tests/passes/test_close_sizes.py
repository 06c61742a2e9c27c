"""A graph with open sizes becomes that of one batch."""

import operator

import pytest
import torch
from torch import nn

from autopar._torch import OtherSizes
from autopar.capture.export import capture_forward
from autopar.passes import clean_up, close_sizes


class Flat(nn.Module):
    def forward(self, x):
        return x[:, :, None].reshape(x.shape[0], 2 * x.shape[1] * 3), x.shape[1] + 1


def opened(model, x, dims):
    captured = capture_forward(model, (x,), {}, open_dims=dims)
    clean_up(captured.module)
    return captured


def text(module):
    return str(module.graph).strip()


def test_every_size_is_a_number():
    captured = opened(Flat(), torch.ones(4, 5, 6), [(0, 1)])
    (name,) = captured.inputs
    closed = close_sizes(captured.module, [name], [(3, 7, 6)])
    assert text(closed) == (
        "graph():\n"
        "    %batch_0 : [num_users=1] = placeholder[target=batch_0]\n"
        "    %unsqueeze : [num_users=1] = call_function[target=torch.ops.aten.unsqueeze.default]"
        "(args = (%batch_0, 2), kwargs = {})\n"
        "    %reshape : [num_users=1] = call_function[target=torch.ops.aten.reshape.default]"
        "(args = (%unsqueeze, [3, 42]), kwargs = {})\n"
        "    return (reshape, 8)"
    )
    assert [tuple(n.meta["val"].shape) for n in list(closed.graph.nodes)[:3]] == [(3, 7, 6), (3, 7, 1, 6), (3, 42)]
    assert "operator.mul" in text(captured.module), "the open graph stays as it is"


class Rows(nn.Module):
    def forward(self, x):
        return x.reshape(-1, x.shape[2])


def test_a_size_that_is_left_to_the_reshape_is_a_number_too():
    captured = opened(Rows(), torch.ones(4, 5, 6), [(0, 1)])
    assert "[-1, 6]" in text(captured.module)
    closed = close_sizes(captured.module, list(captured.inputs), [(3, 7, 6)])
    assert "[21, 6]" in text(closed)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 7, 5), "the model fixes a size to 6, but another is given"),
        ((1, 7, 6), "a size under 2"),
        ((3, 7), "an input has 2 dims, but had 3 at capture"),
    ],
)
def test_other_sizes_are_refused(shape, words):
    captured = opened(Flat(), torch.ones(4, 5, 6), [(0, 1)])
    with pytest.raises(OtherSizes, match=words):
        close_sizes(captured.module, list(captured.inputs), [shape])


def test_a_target_with_sizes_of_its_own_is_refused():
    captured = opened(Flat(), torch.ones(4, 5, 6), [(0, 1)])
    call = next(n for n in captured.module.graph.nodes if n.name == "reshape")
    call.target = operator.methodcaller("reshape")
    with pytest.raises(OtherSizes, match="reshape has a graph of its own"):
        close_sizes(captured.module, list(captured.inputs), [(3, 7, 6)])

"""Ops of convolution nets over batch, channels and groups, and statistics of a batch that is split."""

import pytest
import torch
import torch.nn.functional as F
from proof import labels_of, prove
from torch import fx

from autopar.rules import spec


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


SPACE = {1: (4,), 2: (4, 2), 3: (2, 2, 4)}


@pytest.mark.parametrize("space", SPACE)
def test_batch_statistics(space):
    def norm(x, weight, bias, mean):
        mean, variance = mean.detach().clone(), mean.detach().exp()
        y = F.batch_norm(x * x, mean, variance, weight, bias, training=True, momentum=0.3)
        return y, mean, variance

    kind = "aten._native_batch_norm_legit_functional"
    tensors = rand(4, 6, *SPACE[space]), rand(6), rand(6), rand(6)
    assert labels_of(norm, *tensors, kind=kind) >= {"-", "d0", "d1", "d2"}
    assert prove(norm, *tensors, kind=kind) >= 4


def test_instance_norm_with_given_statistics_is_split_over_everything():
    def norm(x, weight, bias, mean):
        mean = mean.detach()
        return F.instance_norm(x, mean, mean.exp(), weight, bias, use_input_stats=False)

    tensors, kind = (rand(4, 6, 2), rand(6), rand(6), rand(6)), "aten.instance_norm"
    assert labels_of(norm, *tensors, kind=kind) >= {"-", "d0", "d1", "d2"}
    assert prove(norm, *tensors, kind=kind) >= 4


def test_batch_statistics_that_nobody_keeps():
    kind = "aten._native_batch_norm_legit"
    for affine in (True, False):

        def norm(x, weight, bias, affine=affine):
            return F.batch_norm(x * x, None, None, *((weight, bias) if affine else ()), training=True)

        assert prove(norm, rand(4, 6, 4), rand(6), rand(6), kind=kind) >= 4


def test_an_input_without_a_batch_counts_as_a_batch_of_one():
    graph, weight = fx.Graph(), torch.empty(6, 4, 3, device="meta")
    sizes = []
    for shape in ((4, 8), (1, 4, 8)):
        x, w = (graph.placeholder(name) for name in ("x", "w"))
        x.meta["val"], w.meta["val"] = torch.empty(shape, device="meta"), weight
        node = graph.call_function(torch.ops.aten.conv1d.default, (x, w))
        node.meta["val"] = F.conv1d(x.meta["val"], weight)
        sizes.append(spec(node)[0].sizes)
    assert sizes[0] == sizes[1] == {"o": 6, "i": 4, "x0": 8, "k0": 3, "y0": 6}

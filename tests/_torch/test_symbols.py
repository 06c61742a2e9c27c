"""Sizes that torch.export leaves open have values, and conditions that these have to meet."""

import pytest
import torch
from torch import nn

from autopar._torch import OtherSizes, SizeValues, depends_on_values, keeping_sizes_open

AUTO = torch.export.Dim.AUTO


class Joined(nn.Module):
    """Adds two tensors, so that their sizes have to be the same, and asks whether the size is above 3."""

    def forward(self, x, y):
        return torch.cat([x, y + x], 1) if x.shape[1] > 3 else x


def exported():
    shapes = {"x": {0: AUTO, 1: AUTO}, "y": {0: AUTO, 1: AUTO}}
    example = (torch.ones(2, 5), torch.ones(2, 5))
    found = torch.export.export(Joined(), example, dynamic_shapes=shapes, strict=False)
    return found.run_decompositions({}).graph


def test_numbers_and_examples_have_the_values():
    graph = exported()
    inputs = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    values = SizeValues(inputs, [(4, 7), (4, 7)])
    (joined,) = (n.meta["val"] for n in graph.nodes if "cat" in n.name)
    assert [values.number(size) for size in joined.shape] == [4, 14]
    assert values.number(3) == 3
    example = values.example(joined)
    assert (tuple(example.shape), example.stride()) == ((4, 14), (14, 1))
    plain = torch.ones(2)
    assert (example.fake_mode, example.device) == (joined.fake_mode, joined.device)
    assert (example + example).shape == example.shape, "ops take it"
    assert not example.requires_grad
    trained = torch.empty_like(joined).requires_grad_()
    assert values.example(trained).requires_grad
    assert values.example(plain) is plain
    assert values.examples((joined, 2))[0].shape == example.shape


@pytest.mark.parametrize("shapes", [[(4, 7), (4, 6)], [(4, 3), (4, 3)], [(1, 7), (1, 7)]])
def test_conditions_are_checked(shapes):
    inputs = [n.meta["val"] for n in exported().find_nodes(op="placeholder")]
    with pytest.raises(OtherSizes):
        SizeValues(inputs, shapes)


def test_a_size_of_values_is_told_from_an_open_one():
    graph = exported()
    (size, *_) = (n.meta["val"].shape[1] for n in graph.find_nodes(op="placeholder"))
    assert not depends_on_values(size) and not depends_on_values(2)

    class Read(nn.Module):
        def forward(self, x):
            return x[x > 0]

    found = torch.export.export(Read(), (torch.ones(3),), strict=False)
    made = [n.meta["val"] for n in found.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert any(depends_on_values(x.shape[0]) for x in made)


def test_a_product_of_examples_keeps_their_sizes_open():
    graph = exported()
    x = next(iter(graph.find_nodes(op="placeholder"))).meta["val"]
    four, before = x[None, None], dict(x.fake_mode.shape_env.replacements)
    with keeping_sizes_open([four]):
        made = torch.ops.aten.matmul.default(four, four.transpose(-1, -2))
    assert str(made.shape[-1]) == str(x.shape[0])
    assert x.fake_mode.shape_env.replacements == before

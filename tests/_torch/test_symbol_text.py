"""Open sizes as text: what is read has the values, ranges and conditions that were written."""

import json

import pytest
import torch
from torch import nn

from autopar import _torch
from autopar._torch.symbols import SizeValues


class Model(nn.Module):
    def forward(self, x, y):
        rows = x.shape[0]
        if rows % 4 == 0 and rows <= 64:
            return (x + y[:rows]).reshape(2, -1), x.new_zeros(rows // 4 + 1)
        return x, y


def traced():
    dims = {"x": {0: torch.export.Dim.AUTO}, "y": {0: torch.export.Dim.AUTO}}
    args = (torch.ones(8, 4), torch.ones(12, 4))
    graph = torch.export.export(Model(), args, strict=False, dynamic_shapes=dims).graph
    nodes = list(graph.nodes)
    return [n.meta["val"] for n in nodes if "val" in n.meta]


def read_again(values):
    env = values[0].fake_mode.shape_env
    sizes = _torch.ReadSizes(json.loads(json.dumps(_torch.write_sizes(env))))
    examples = [
        _torch.example_tensor(
            sizes.mode,
            [sizes.size(_torch.write_size(s)) for s in x.shape],
            [sizes.size(_torch.write_size(s)) for s in x.stride()],
            x.dtype,
            x.device,
        )
        for x in values
        if isinstance(x, torch.Tensor)
    ]
    sizes.settle()
    return examples


def test_examples_have_the_same_sizes():
    values = traced()
    found = read_again(values)
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    assert [str(x.shape) for x in found] == [str(x.shape) for x in tensors]
    assert [str(x.stride()) for x in found] == [str(x.stride()) for x in tensors]
    again = _torch.write_sizes(found[0].fake_mode.shape_env)
    assert again == _torch.write_sizes(values[0].fake_mode.shape_env)
    assert again["conditions"]


@pytest.mark.parametrize("rows", [(8, 8), (64, 64), (16, 80)])
def test_sizes_that_meet_the_conditions_are_taken(rows):
    values = traced()
    shapes = [(n, 4) for n in rows]
    expected = SizeValues(values[:2], shapes).examples(values[2:])
    found = SizeValues(read_again(values)[:2], shapes).examples(values[2:])
    assert [getattr(x, "shape", x) for x in found] == [getattr(x, "shape", x) for x in expected]


@pytest.mark.parametrize("rows", [(6, 8), (68, 80), (1, 8), (8, 4)])
def test_sizes_that_do_not_are_refused_alike(rows):
    values, said = traced(), []
    for inputs in (values[:2], read_again(values)[:2]):
        with pytest.raises(_torch.OtherSizes) as caught:
            SizeValues(inputs, [(n, 4) for n in rows])
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_an_expression_of_an_unknown_kind_has_no_text():
    env = traced()[0].fake_mode.shape_env
    symbol = next(iter(env.var_to_range))
    size = env.create_symintnode(symbol, hint=8)
    assert _torch.write_size(size) == str(symbol) and _torch.write_size(3) == 3
    with pytest.raises(ValueError, match="has no text"):
        _torch.write_size(torch.sym_int(size**0.5))

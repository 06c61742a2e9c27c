"""Calls of a block become one call of a submodule: text in, text out."""

import operator

import pytest
import torch
from torch import fx, nn

from autopar.passes import fold_blocks

aten = torch.ops.aten


def text(graph):
    """The calls of a graph and its output, one a line."""
    lines = []
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
        if node.op in ("call_function", "call_module"):
            lines.append(f"{node.name} = {name}{node.args}".replace(",)", ")"))
        elif node.op == "output":
            lines.append(f"return {node.args[0]}")
    return lines


class Program:
    """A graph of `parameters` and then `inputs`, built call by call."""

    def __init__(self, parameters, inputs):
        self.graph, self.parameters = fx.Graph(), len(parameters)
        self.leaves = [self.graph.placeholder(name) for name in (*parameters, *inputs)]

    def call(self, name, target, *args, block):
        node = self.graph.create_node("call_function", target, args, name=name)
        if block is not None:
            node.meta["block"] = block
        return node

    def folded(self, results, blocks, received=0):
        """The graph with these blocks folded, and theirs."""
        self.graph.output(tuple(results))
        graphs = {}

        def make(block):
            graphs[len(graphs)] = text(block.graph)
            return block

        self.module = fx.GraphModule(nn.Module(), self.graph)
        self.result = fold_blocks(self.module, blocks, make, parameters=self.parameters, received=received)
        return text(self.result.graph), list(graphs.values())


def test_the_calls_of_a_block_become_one():
    program = Program(["w"], ["x"])
    w, x = program.leaves
    a = program.call("a", aten.mul.Tensor, x, w, block=0)
    b = program.call("b", aten.sin.default, a, block=1)
    c = program.call("c", aten.mul.Tensor, b, w, block=1)
    d = program.call("d", aten.add.Tensor, c, b, block=2)
    outer, (inner,) = program.folded([d], {1})
    assert inner == ["b = sin(a)", "c = mul.Tensor(b, w)", "return (b, c)"]
    assert outer == [
        "a = mul.Tensor(x, w)",
        "block_1 = block_1(a, w)",
        "getitem = getitem(block_1, 0)",
        "getitem_1 = getitem(block_1, 1)",
        "d = add.Tensor(getitem_1, getitem)",
        "return (d,)",
    ]
    w, x = torch.randn(3), torch.randn(3)
    assert torch.equal(program.result(w, x)[0], (x * w).sin() * w + (x * w).sin())


def test_what_several_blocks_use_and_no_parameter_makes_is_made_once_outside():
    program = Program(["w"], ["x"])
    w, x = program.leaves
    size = program.call("size", aten.neg.default, x, block=0)
    mask = program.call("mask", aten.sign.default, size, block=0)
    own = program.call("own", aten.cos.default, mask, block=1)
    a = program.call("a", aten.mul.Tensor, w, mask, block=0)
    b = program.call("b", aten.add.Tensor, a, own, block=1)
    c = program.call("c", aten.mul.Tensor, b, mask, block=1)
    outer, inner = program.folded([c], {0, 1})
    assert inner == [
        ["a = mul.Tensor(w, mask)", "return (a,)"],
        ["own = cos(mask)", "b = add.Tensor(a, own)", "c = mul.Tensor(b, mask)", "return (c,)"],
    ]
    assert outer[:3] == ["size = neg(x)", "mask = sign(size)", "block_0 = block_0(w, mask)"]


def test_results_of_one_call_that_several_blocks_use_stay_with_the_call():
    program = Program(["w"], ["x"])
    w, x = program.leaves
    rows = program.call("rows", aten.split.Tensor, x, 2, block=0)
    first = program.call("first", operator.getitem, rows, 0, block=0)
    second = program.call("second", operator.getitem, rows, 1, block=0)
    a = program.call("a", aten.mul.Tensor, w, first, block=1)
    b = program.call("b", aten.mul.Tensor, w, second, block=2)
    outer, inner = program.folded([a, b], {1, 2})
    assert inner == [["a = mul.Tensor(w, first)", "return (a,)"], ["b = mul.Tensor(w, second)", "return (b,)"]]
    assert outer[:3] == ["rows = split.Tensor(x, 2)", "first = getitem(rows, 0)", "second = getitem(rows, 1)"]


def test_what_is_drawn_stays_in_its_block():
    program = Program(["w"], ["x"])
    w, x = program.leaves
    noise = program.call("noise", aten.rand_like.default, x, block=1)
    a = program.call("a", aten.mul.Tensor, w, noise, block=1)
    b = program.call("b", aten.mul.Tensor, a, noise, block=2)
    _, inner = program.folded([b], {1})
    assert inner == [["noise = rand_like(x)", "a = mul.Tensor(w, noise)", "return (noise, a)"]]


def test_what_a_stage_has_received_is_not_free_of_parameters():
    program = Program(["w"], ["x", "received"])
    w, _, received = program.leaves
    twice = program.call("twice", aten.neg.default, received, block=1)
    a = program.call("a", aten.mul.Tensor, w, twice, block=1)
    b = program.call("b", aten.mul.Tensor, a, twice, block=2)
    _, inner = program.folded([b], {1, 2}, received=1)
    assert inner[0] == ["twice = neg(received)", "a = mul.Tensor(w, twice)", "return (twice, a)"]


def test_a_call_that_a_pass_has_put_in_belongs_to_the_first_block_that_uses_it():
    program = Program(["w"], ["x"])
    w, x = program.leaves
    gathered = program.call("gathered", aten.abs.default, w, block=None)
    a = program.call("a", aten.mul.Tensor, gathered, x, block=1)
    b = program.call("b", aten.mul.Tensor, gathered, a, block=2)
    _, inner = program.folded([b], {1, 2})
    assert inner == [
        ["gathered = abs(w)", "a = mul.Tensor(gathered, x)", "return (gathered, a)"],
        ["b = mul.Tensor(gathered, a)", "return (b,)"],
    ]


@pytest.mark.parametrize("blocks", [{}, {7}])
def test_without_blocks_to_fold_a_graph_stays_as_it_is(blocks):
    program = Program(["w"], ["x"])
    w, x = program.leaves
    a = program.call("a", aten.mul.Tensor, w, x, block=None)
    program.call("dead", aten.rand_like.default, x, block=None)
    outer, inner = program.folded([a, x], blocks)
    assert outer == text(program.graph) and not inner

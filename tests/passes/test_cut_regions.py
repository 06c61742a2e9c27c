"""Runs of plain ops become calls of submodules: text in, text out."""

import operator

import pytest
import torch
from torch import fx, nn

from autopar.ops.nodes import draws
from autopar.passes import cut_regions
from tests.passes.test_fold_blocks import text

aten = torch.ops.aten


class Gather(nn.Module):
    """What a compiler must not see."""

    def forward(self, x):
        return (x * 2,)


class Program:
    """A graph of `x` and `w`, built call by call."""

    def __init__(self):
        self.graph = fx.Graph()
        self.x, self.w = self.graph.placeholder("x"), self.graph.placeholder("w")
        self.module = nn.Module()
        self.module.add_module("gather", Gather())

    def call(self, name, target, *args, block=0, recomputed=False):
        kind = "call_module" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, name=name)
        node.meta |= {"block": block, "recomputed": recomputed}
        return node

    def layers(self, count, recomputed=()):
        """So many equal blocks of two calls, one after the other."""
        x = self.x
        for block in range(count):
            marks = {"block": block, "recomputed": block in recomputed}
            a = self.call(f"a{block}", aten.mul.Tensor, x, self.w, **marks)
            x = self.call(f"b{block}", aten.tanh.default, a, **marks)
        return x

    def cut(self, *results, joined_ops=0):
        """The graph with its regions cut out, and theirs."""
        self.graph.output(tuple(results))
        self.before = fx.GraphModule(self.module, self.graph)
        regions = []

        def make(region):
            regions.append(text(region.graph))
            return region

        module = fx.GraphModule(self.module, self.graph)
        self.after = cut_regions(module, make, joined_ops=joined_ops)
        return text(self.after.graph), regions

    def agrees(self):
        """Whether the graph computes what it did, from the same state of the generator."""
        values = torch.randn(4), torch.randn(4)
        found = []
        for module in (self.before, self.after):
            torch.manual_seed(0)
            found.append(module(*values))
        return all(map(torch.equal, *found))


def test_a_python_object_ends_a_region():
    program = Program()
    a = program.call("a", aten.sin.default, program.x)
    b = program.call("b", aten.cos.default, a)
    gathered = program.call("gathered", "gather", program.w)
    g = program.call("g", torch.ops.aten.add.Tensor, b, a)
    full = program.graph.call_function(operator.getitem, (gathered, 0))
    c = program.call("c", aten.mul.Tensor, g, full)
    outer, regions = program.cut(c)
    assert regions == [
        ["x1 = sin(x0)", "x2 = cos(x1)", "return (x1, x2)"],
        ["x3 = add.Tensor(x0, x1)", "x4 = mul.Tensor(x3, x2)", "return (x4,)"],
    ]
    assert program.agrees(), outer


def test_blocks_that_do_the_same_are_regions_of_the_same_code():
    program = Program()
    outer, regions = program.cut(program.layers(3))
    assert regions == [["x2 = mul.Tensor(x0, x1)", "x3 = tanh(x2)", "return (x3,)"]] * 3
    assert [line for line in outer if "getitem(" not in line] == [
        "region_0 = region_0(x, w)",
        "region_1 = region_1(getitem, w)",
        "region_2 = region_2(getitem_1, w)",
        "return (getitem_2,)",
    ]
    assert program.agrees()


def sizes(regions):
    """Number of calls of each region."""
    return [len(lines) - 1 for lines in regions]


@pytest.mark.parametrize(("joined_ops", "expected"), [(3, [2] * 5), (4, [4, 4, 2]), (9, [8, 2]), (10, [10])])
def test_whole_blocks_share_a_region_up_to_a_number_of_ops(joined_ops, expected):
    program = Program()
    outer, regions = program.cut(program.layers(5), joined_ops=joined_ops)
    assert sizes(regions) == expected
    assert program.agrees(), outer


def test_regions_of_as_many_equal_blocks_have_equal_code():
    _, regions = (program := Program()).cut(program.layers(6), joined_ops=4)
    assert regions == [regions[0]] * 3


def test_blocks_that_backward_recomputes_share_no_region():
    program = Program()
    outer, regions = program.cut(program.layers(6, recomputed={2, 3}), joined_ops=100)
    assert sizes(regions) == [4, 2, 2, 4]
    assert program.agrees(), outer


def test_a_python_object_ends_a_region_of_several_blocks():
    program = Program()
    x = program.layers(2)
    gathered = program.call("gathered", "gather", program.w, block=2)
    full = program.graph.call_function(operator.getitem, (gathered, 0))
    y = program.call("y", aten.mul.Tensor, x, full, block=2)
    outer, regions = program.cut(program.call("z", aten.cos.default, y, block=3), joined_ops=100)
    assert sizes(regions) == [4, 2]
    assert program.agrees(), outer


def test_draws_stay_outside_in_their_order():
    program = Program()
    a = program.call("a", aten.sin.default, program.x)
    key = program.call("key", aten.randint.default, 9, [4])
    b = program.call("b", aten.mul.Tensor, a, key)
    noise = program.call("noise", aten.rand_like.default, b)  # cannot move up
    c = program.call("c", aten.add.Tensor, b, noise)
    d = program.call("d", aten.cos.default, c)
    outer, regions = program.cut(d)
    assert next(line.partition(" = ")[0] for line in outer) == "key"
    assert len(regions) == 2 and not any("rand" in line for lines in regions for line in lines)
    drawn = [n for n in program.after.graph.nodes if draws(n)]
    assert [n.name for n in drawn] == ["key", "noise"]
    assert program.agrees()


def test_a_single_op_is_left_as_it_is():
    program = Program()
    outer, regions = program.cut(program.call("a", aten.sin.default, program.x))
    assert (outer, regions) == (["a = sin(x)", "return (a,)"], [])

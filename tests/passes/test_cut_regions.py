"""Runs of plain ops become calls of submodules: text in, text out."""

import operator

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

    def call(self, name, target, *args, block=0):
        kind = "call_module" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, name=name)
        node.meta["block"] = block
        return node

    def cut(self, *results):
        """The graph with its regions cut out, and theirs."""
        self.graph.output(tuple(results))
        self.before = fx.GraphModule(self.module, self.graph)
        regions = []

        def make(region):
            regions.append(text(region.graph))
            return region

        self.after = cut_regions(fx.GraphModule(self.module, self.graph), make)
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
    x = program.x
    for block in range(3):
        a = program.call(f"a{block}", aten.mul.Tensor, x, program.w, block=block)
        x = program.call(f"b{block}", aten.tanh.default, a, block=block)
    outer, regions = program.cut(x)
    assert regions == [["x2 = mul.Tensor(x0, x1)", "x3 = tanh(x2)", "return (x3,)"]] * 3
    assert [line for line in outer if "getitem(" not in line] == [
        "region_0 = region_0(x, w)",
        "region_1 = region_1(getitem, w)",
        "region_2 = region_2(getitem_1, w)",
        "return (getitem_2,)",
    ]
    assert program.agrees()


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

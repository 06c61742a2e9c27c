"""Shortcuts through torch.export and torch.fx give the graphs that torch gives, and leave torch as it was."""

import contextlib
import inspect
import re

import pytest
import torch
from torch import nn
from torch._export import utils as export_utils
from torch._subclasses import fake_impls
from torch.nn import functional as F

from autopar import _torch

KEPT_WHOLE = (
    torch.ops.aten.linear.default,
    torch.ops.aten.layer_norm.default,
    torch.ops.aten.scaled_dot_product_attention.default,
)


class Mixed(nn.Module):
    """Ops that stay whole, ops that are decomposed, a buffer that changes, and a region without gradient."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.BatchNorm1d(8)])
        self.map = nn.Linear(8, 8)

    def forward(self, x):
        x = self.norms[1](self.norms[0](x))
        heads = self.map(x).view(-1, 2, 2, 2)
        with torch.no_grad():
            scale = heads.std()
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).reshape_as(x)
        return F.gelu(F.dropout(y, 0.1) / scale).sum()


def decomposed() -> list[object]:
    """Every node of an exported graph with its operands, and with the shape and strides of its result."""
    torch.manual_seed(0)
    exported = torch.export.export(Mixed(), (torch.randn(4, 8),), strict=False)
    graph = exported.run_decompositions({}).graph
    examples = [torch.utils._pytree.tree_leaves(n.meta.get("val")) for n in graph.nodes]
    laid_out = [[(x.shape, x.stride(), x.dtype) for x in given if x is not None] for given in examples]
    return [(n.format_node(), found) for n, found in zip(graph.nodes, laid_out, strict=True)]


def tables() -> list[object]:
    """The Python kernels of the ops that stay whole, and the ops that have a rule for fake tensors."""
    return [*(dict(op.py_kernels) for op in KEPT_WHOLE), set(fake_impls.op_implementations_dict)]


@pytest.mark.parametrize(
    "shortcut", [_torch.quick_decompositions, _torch.code_when_called, _torch.quick_notes, _torch.quick_examples]
)
def test_a_decomposed_graph_is_the_one_that_torch_makes(shortcut):
    expected, before = decomposed(), tables()
    for _ in range(3):
        with shortcut():
            assert decomposed() == expected
        assert tables() == before
    text = str(expected)
    assert all(f"torch.ops.{op}" in text for op in KEPT_WHOLE)


def test_a_kernel_that_was_registered_since_is_used_and_stays():
    op, key = torch.ops.aten.layer_norm.default, torch._C.DispatchKey.AutogradXLA
    with _torch.quick_decompositions():
        decomposed()
    op.py_impl(key)(len)
    try:
        with _torch.quick_decompositions():
            decomposed()
        assert op.py_kernels[key] is len
    finally:
        del op.py_kernels[key]
        op._dispatch_cache.clear()


def test_torch_is_as_it_was_after_an_error():
    expected = decomposed()
    shortcuts = (_torch.quick_decompositions(), _torch.code_when_called())
    with contextlib.suppress(ZeroDivisionError), shortcuts[0], shortcuts[1]:
        raise ZeroDivisionError
    assert decomposed() == expected
    assert torch.fx.symbolic_trace(nn.Linear(1, 1)).code


def test_code_is_written_when_it_is_wanted_and_is_that_of_the_last_graph():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    before = module.code
    with _torch.code_when_called():
        (called,) = module.graph.find_nodes(op="call_function", target=torch.relu)
        called.target = torch.neg
        module.recompile()
        assert module.code == before
    assert torch.equal(module(torch.tensor([2.0])), torch.tensor([-2.0]))
    assert "torch.neg" in module.code


def test_the_signature_of_a_forward_is_that_of_its_code():
    with _torch.code_when_called():
        module = torch.fx.symbolic_trace(nn.Bilinear(2, 2, 2))
        assert list(inspect.signature(module.forward).parameters) == ["input1", "input2"]


def test_the_operators_that_stay_whole_are_those_of_torch():
    expected = export_utils._collect_all_valid_cia_ops()
    with _torch.quick_decompositions():
        export_utils._collect_all_valid_cia_ops_for_aten_namespace.cache_clear()
        assert export_utils._collect_all_valid_cia_ops() == expected
    assert len(expected) > 500
    assert set(KEPT_WHOLE) <= expected


def histories() -> list[object]:
    """The nodes that every node of a decomposed graph comes from, and the sizes that values decide."""
    examples = (torch.tensor([1.0, 0.0, 2.0]),)
    exported = torch.export.export(Chosen(), examples, strict=False).run_decompositions({})
    known = [(n.meta.get("from_node"), n.meta.get("unbacked_bindings")) for n in exported.graph.nodes]
    return [re.sub(r"graph_id=\d+", "", str(each)) for each in known]


class Chosen(nn.Module):
    """A result whose size depends on values."""

    def forward(self, x):
        return x[x.nonzero()[:, 0]].exp(), F.gelu(x)


def test_quick_notes_are_those_of_torch():
    expected, copier = histories(), torch.fx.traceback.copy
    with _torch.quick_notes():
        assert histories() == expected
    assert torch.fx.traceback.copy is copier
    assert sum("CallMethodKey" in each for each in expected) > 0
    assert sum("Interpreter" in each for each in expected) > 3


class Products(torch.nn.Module):
    """Products of tensors of one to four dims, and examples in the order of images."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 6, bias=False)
        self.convolution = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)

    def forward(self, x, image):
        vector = x[0, 0]
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        image = self.convolution(image.contiguous(memory_format=torch.channels_last))
        return self.linear(x), x @ vector, vector @ x.mT, heads @ heads.mT, x @ x.mT[:1], image * 2


def examples(**given: object) -> list[object]:
    """The examples of an exported graph and of the functional one."""
    inputs = torch.randn(4, 3, 8), torch.randn(2, 3, 8, 8)
    exported = torch.export.export(Products(), inputs, strict=False, **given)
    graphs = exported.graph, exported.run_decompositions({}).graph
    values = [n.meta.get("val") for graph in graphs for n in graph.nodes]
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    return [(str(x.shape), str(x.stride()), x.dtype, x.requires_grad) for x in tensors]


@pytest.mark.parametrize("sizes", [{}, {"dynamic_shapes": ({0: torch.export.Dim("rows", min=3)}, None)}])
def test_quick_examples_are_those_of_torch(sizes):
    expected, kernels = examples(**sizes), dict(torch.ops.aten.matmul.default.py_kernels)
    with _torch.quick_examples():
        assert examples(**sizes) == expected
    assert torch.ops.aten.matmul.default.py_kernels == kernels

"""Collectives next to products become calls that send piece by piece: text in, text out."""

import pytest
import torch
from torch import fx, nn

from autopar.ops.marks import kept
from autopar.passes import decompose_products
from tests.passes.test_running import text

aten, autopar_ops = torch.ops.aten, torch.ops.autopar


def gather_products(*args):
    """Stands for the function of `autopar.ops.decomposed`."""


def product_scatter(*args):
    """Stands for the function of `autopar.ops.decomposed`."""


@pytest.fixture
def graph():
    return fx.Graph()


def rows(graph, name, x, backward, dim=1, ndim=3, axis="tp"):
    """A collective of a tensor of `ndim` dims along one of them."""
    op = getattr(autopar_ops, name).default
    node = graph.call_function(op, (x, [dim], 2, axis, backward))
    node.meta["ndim"] = ndim
    return node


def gathered(graph, x, **options):
    return rows(graph, "all_gather", x, "reduce_scatter", **options)


def scattered(graph, x, **options):
    return rows(graph, "reduce_scatter", x, "all_gather", **options)


def linear(graph, x, *others):
    return graph.call_function(aten.linear.default, (x, *others))


def lines(graph, *results, groups=("tp",), **options):
    """The text of the graph with these results, after the pass."""
    graph.output(results)
    module = fx.GraphModule(nn.Module(), graph)
    decompose_products(module, gather_products, product_scatter, groups=groups, **options)
    module.graph.lint()
    return text(module.graph)


def test_products_of_gathered_rows_share_one_call(graph):
    x, v, w, b = (graph.placeholder(name) for name in "xvwb")
    rows_of_all = gathered(graph, x)
    first = graph.call_function(aten.relu.default, (linear(graph, rows_of_all, v),))
    assert lines(graph, first, linear(graph, rows_of_all, w, b)) == [
        "gather_products = gather_products(x, (v, w), (None, b), 1, 2, 'tp', False)",
        "getitem = getitem(gather_products, 0)",
        "getitem_1 = getitem(gather_products, 1)",
        "relu_default = aten.relu(getitem,)",
        "return (relu_default, getitem_1)",
    ]


def test_a_scattered_product_is_one_call(graph):
    x, w, b = (graph.placeholder(name) for name in "xwb")
    assert lines(graph, scattered(graph, linear(graph, x, w, b), dim=0)) == [
        "product_scatter = product_scatter(x, w, b, 0, 2, 'tp')",
        "return (product_scatter,)",
    ]


def test_what_makes_a_later_weight_goes_before_the_call(graph):
    x, v, w = (graph.placeholder(name) for name in "xvw")
    rows_of_all = gathered(graph, x)
    first = linear(graph, rows_of_all, v)
    cast = graph.call_function(aten.neg.default, (w,))
    assert lines(graph, first, linear(graph, rows_of_all, cast))[:2] == [
        "neg_default = aten.neg(w,)",
        "gather_products = gather_products(x, (v, neg_default), (None, None), 1, 2, 'tp', False)",
    ]


def unchanged(graph, *results, **options):
    """Whether the pass leaves a graph with these results as it is."""
    before = [node.name for node in graph.nodes if node.op == "call_function"]
    return [line.split(" = ")[0] for line in lines(graph, *results, **options)[:-1]] == before


def test_others_that_read_the_rows_keep_the_gather(graph):
    x, w = graph.placeholder("x"), graph.placeholder("w")
    rows_of_all = gathered(graph, x)
    assert unchanged(graph, linear(graph, rows_of_all, w), rows_of_all)


def test_others_that_read_the_product_keep_the_scatter(graph):
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = linear(graph, x, w)
    assert unchanged(graph, scattered(graph, product), product)


def test_features_are_gathered_for_panels_and_columns_are_scattered(graph):
    x, v, w = (graph.placeholder(name) for name in "xvw")
    panels = linear(graph, gathered(graph, x, dim=2), v)
    assert lines(graph, scattered(graph, linear(graph, panels, w), dim=2)) == [
        "gather_products = gather_products(x, (v,), (None,), 2, 2, 'tp', False)",
        "getitem = getitem(gather_products, 0)",
        "product_scatter = product_scatter(getitem, w, None, 2, 2, 'tp')",
        "return (product_scatter,)",
    ]


def marked(graph, x, w, name):
    return linear(graph, graph.call_function(kept, (x, name)), w)


@pytest.mark.parametrize(("name", "again"), [("slice", True), ("", False)])
def test_a_slice_that_is_the_operand_of_the_gather_is_kept_in_its_place(graph, name, again):
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = marked(graph, gathered(graph, x, dim=2), w, name)
    assert lines(graph, product, restored={"slice": ((2,), "tp")}) == [
        f"gather_products = gather_products(x, (w,), (None,), 2, 2, 'tp', {again})",
        "getitem = getitem(gather_products, 0)",
        "return (getitem,)",
    ]


@pytest.mark.parametrize("restored", [{}, {"slice": ((1,), "tp")}, {"slice": ((2,), "dp")}])
def test_a_slice_of_another_layout_keeps_the_gather(graph, restored):
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = marked(graph, gathered(graph, x, dim=2), w, "slice")
    assert unchanged(graph, product, restored=restored)


@pytest.mark.parametrize("options", [{"dim": 0, "ndim": 1}, {"axis": "dp"}])
def test_vectors_and_other_axes_are_left_alone(graph, options):
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = linear(graph, gathered(graph, x, **options), w)
    assert unchanged(graph, scattered(graph, product, **options))


def test_rows_that_multiply_themselves_are_left_alone(graph):
    rows_of_all = gathered(graph, graph.placeholder("x"), dim=0, ndim=2)
    assert unchanged(graph, linear(graph, rows_of_all, rows_of_all))


def test_a_weight_that_depends_on_the_first_product_keeps_the_gather(graph):
    x, w = graph.placeholder("x"), graph.placeholder("w")
    rows_of_all = gathered(graph, x)
    first = linear(graph, rows_of_all, w)
    assert unchanged(graph, linear(graph, rows_of_all, first))


def test_a_weight_that_depends_on_a_later_product_keeps_the_gather(graph):
    x, v, w = (graph.placeholder(name) for name in "xvw")
    all_rows = gathered(graph, x)
    first, second = linear(graph, all_rows, v), linear(graph, all_rows, w)
    made = graph.call_function(aten.relu.default, (second,))
    third = linear(graph, all_rows, made)
    found = lines(graph, first, second, third)
    assert any("all_gather" in line for line in found)


def test_recomputed_rows_of_a_kept_product_keep_the_gather(graph):
    x, w = graph.placeholder("x"), graph.placeholder("w")
    rows_of_all = gathered(graph, x)
    rows_of_all.meta["recomputed"] = True
    assert unchanged(graph, linear(graph, rows_of_all, w))

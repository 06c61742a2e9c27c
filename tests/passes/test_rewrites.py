"""Clean-up passes one by one: text in, text out, and the same values.

A graph is written one call a line, `name = op.overload(arguments)`, with ops of ATen; its first letters are
its arguments. A pass must print what stands here, and compute what the graph computed before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.ops.verifier import verify_graph
from autopar.passes.cleanup.densify_gradients import densify_gradients
from autopar.passes.cleanup.drop_empty_operands import drop_empty_operands
from autopar.passes.cleanup.expand_copies import expand_copies
from autopar.passes.cleanup.name_nodes import name_nodes
from autopar.passes.cleanup.open_random_attention import open_random_attention
from autopar.passes.cleanup.read_types import read_types
from autopar.passes.cleanup.refresh_examples import refresh_examples
from autopar.passes.cleanup.remove_assertions import remove_assertions
from autopar.passes.cleanup.remove_clones import remove_clones
from autopar.passes.cleanup.reshape_views import reshape_views
from autopar.passes.cleanup.single_batch_norm import single_batch_norm
from autopar.passes.cleanup.unreduce_losses import unreduce_losses

aten = torch.ops.aten


def parsed(text: str, arguments: dict[str, Tensor]) -> fx.GraphModule:
    """The graph that a text describes, with an example of every value."""
    graph, known = fx.Graph(), {}
    for name, value in arguments.items():
        known[name] = graph.placeholder(name)
        known[name].meta["val"] = value
    *calls, last = (line.strip() for line in text.strip().splitlines())
    for line in calls:
        name, _, call = line.partition(" = ")
        target, _, rest = call.partition("(")
        args, kwargs = eval(f"packed({rest}", {"packed": _packed, "torch": torch}, known)
        op = operator.getitem if target == "getitem" else operator.attrgetter(target)(aten)
        node = graph.create_node("call_function", op, args, kwargs, name=name)
        given = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
        node.meta["val"] = op(*given[0], **given[1])
        known[name] = node
    graph.output((known[last.removeprefix("return ")],))
    return fx.GraphModule(nn.Module(), graph)


def _packed(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def printed(module: fx.GraphModule) -> list[str]:
    """The inverse of `parsed`, line by line."""
    lines = []
    for node in module.graph.nodes:
        if node.op == "call_function":
            target = str(getattr(node.target, "__name__", node.target)).removeprefix("aten.")
            words = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
            lines.append(f"{node.name} = {target}({', '.join(words)})")
        elif node.op == "output":
            lines.append(f"return {node.args[0][0]}")
    return lines


def rewritten(rewrite: Callable[[fx.GraphModule], None], text: str, **arguments: Tensor) -> list[str]:
    """What a pass makes of a graph, which computes what it computed before."""
    module = parsed(text, arguments)
    torch.manual_seed(0)
    (expected,) = module(*arguments.values())
    rewrite(module)
    verify_graph(module, after=rewrite.__name__)
    torch.manual_seed(0)
    (found,) = module(*arguments.values())
    torch.testing.assert_close(found, expected)
    return printed(module)


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


X = torch.arange(24.0).reshape(4, 6)


def test_assertions_go() -> None:
    found = rewritten(
        remove_assertions,
        """
        a = sin.default(x)
        b = _assert_tensor_metadata.default(a, [4, 6], None, torch.float32)
        return a
        """,
        x=X,
    )
    assert found == ["a = sin.default(x)", "return a"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (X[0], "expand_default = expand.default(y, [4, 6])"),
        (X.double(), "_to_copy_default = _to_copy.default(y, dtype=torch.float32)"),
    ],
    ids=["shape", "format"],
)
def test_a_copy_over_all_of_a_tensor_is_its_source(source: Tensor, expected: str) -> None:
    text = """
        a = copy.default(x, y)
        return a
    """
    name = expected.split(" = ")[0]
    assert rewritten(expand_copies, text, x=X, y=source) == [expected, f"return {name}"]


def test_a_copy_of_the_same_kind_is_the_source_itself() -> None:
    text = """
        a = copy.default(x, y)
        b = sin.default(a)
        return b
    """
    assert rewritten(expand_copies, text, x=X, y=X + 1) == ["b = sin.default(y)", "return b"]


def test_lookups_ask_for_dense_gradients() -> None:
    found = rewritten(
        densify_gradients,
        """
        a = embedding.default(w, i, -1, False, True)
        b = gather.default(w, 0, i, sparse_grad=True)
        c = add.Tensor(a, b)
        return a
        """,
        w=X,
        i=torch.tensor([[0, 1, 2, 3, 0, 1]]),
    )
    assert found == lines(
        """
        a = embedding.default(w, i, -1, False, False)
        b = gather.default(w, 0, i, sparse_grad=False)
        c = add.Tensor(a, b)
        return a
        """
    )


def test_calls_are_named_for_their_ops_in_order() -> None:
    found = rewritten(
        name_nodes,
        """
        odd = sin.default(x)
        other = sin.default(odd)
        third = add.Tensor(other, odd, alpha=2)
        return third
        """,
        x=X,
    )
    assert found == lines(
        """
        sin = sin.default(x)
        sin_1 = sin.default(sin)
        add = add.Tensor(sin_1, sin, alpha=2)
        return add
        """
    )


def test_a_tensor_that_gives_its_type_is_not_read() -> None:
    text = """
        a = sin.default(y)
        b = type_as.default(x, a)
        return b
    """
    assert rewritten(read_types, text, x=X, y=X.double()) == lines(
        """
        a = sin.default(y)
        b = _to_copy.default(x, dtype=torch.float64)
        return b
        """
    )
    assert rewritten(read_types, text, x=X, y=X) == ["a = sin.default(y)", "return x"]


def test_an_empty_tensor_reads_no_other() -> None:
    found = rewritten(
        read_types,
        """
        a = new_empty.default(x, [2, 3])
        b = zeros_like.default(a)
        return b
        """,
        x=X,
    )
    assert found == lines(
        """
        a = empty.memory_format([2, 3], dtype=torch.float32, device=cpu)
        b = zeros_like.default(a)
        return b
        """
    )


def test_views_become_reshapes() -> None:
    found = rewritten(
        reshape_views,
        """
        a = view.default(x, [6, 4])
        b = _unsafe_view.default(a, [24])
        return b
        """,
        x=X,
    )
    assert found == ["a = reshape.default(x, [6, 4])", "b = reshape.default(a, [24])", "return b"]


def test_sizes_of_a_reshape_are_written_out() -> None:
    """A capture has -1 or the size, as the strides of the device are."""
    found = rewritten(reshape_views, "a = reshape.default(x, [-1, 4])\nreturn a", x=X)
    assert found == ["a = reshape.default(x, [6, 4])", "return a"]


def test_operands_of_shape_0_are_left_out_of_a_cat() -> None:
    """One that gives the result its dtype stays."""
    found = rewritten(
        drop_empty_operands,
        """
        a = cat.default([e, x], -2)
        b = cat.default([e, a, x], 0)
        c = cat.default([d, b], 0)
        return c
        """,
        x=X,
        e=torch.tensor([]),
        d=torch.tensor([], dtype=torch.float64),
    )
    assert found == ["a = clone.default(x)", "b = cat.default([a, x], 0)", "c = cat.default([d, b], 0)", "return c"]


def test_copies_that_only_ops_read_go() -> None:
    found = rewritten(
        remove_clones,
        """
        a = sin.default(x)
        b = clone.default(a)
        c = alias.default(b)
        d = cos.default(c)
        return d
        """,
        x=X,
    )
    assert found == ["a = sin.default(x)", "d = cos.default(a)", "return d"]


def test_copies_of_what_the_graph_is_given_stay() -> None:
    """Its owner may change it between forward and backward, as with a running mean; so may a result's."""
    text = """
        a = transpose.int(x, 0, 1)
        b = clone.default(a)
        c = cos.default(b)
        d = clone.default(c)
        return d
    """
    assert rewritten(remove_clones, text, x=X) == lines(text)


def test_batch_norm_with_given_statistics_has_one_result() -> None:
    found = rewritten(
        single_batch_norm,
        """
        a = _native_batch_norm_legit_no_training.default(x, w, b, m, v, 0.1, 1e-05)
        c = getitem(a, 0)
        return c
        """,
        x=X,
        w=X[0],
        b=X[1],
        m=X[2],
        v=X[3],
    )
    assert found == [
        "batch_norm_default = batch_norm.default(x, w, b, m, v, False, 0.1, 1e-05, False)",
        "return batch_norm_default",
    ]


@pytest.mark.parametrize(("reduction", "name"), [(1, "mean"), (2, "sum")])
def test_a_loss_is_its_terms_and_their_reduction(reduction: int, name: str) -> None:
    found = rewritten(
        unreduce_losses,
        f"""
        a = mse_loss.default(x, y, {reduction})
        return a
        """,
        x=X,
        y=X + 1,
    )
    assert found == [
        "mse_loss_default = mse_loss.default(x, y, 0)",
        f"{name}_default = {name}.default(mse_loss_default)",
        f"return {name}_default",
    ]


def test_a_loss_without_reduction_stays() -> None:
    text = """
        a = mse_loss.default(x, y, 0)
        return a
    """
    assert rewritten(unreduce_losses, text, x=X, y=X + 1) == lines(text)


def test_only_what_has_another_shape_is_expanded() -> None:
    found = rewritten(
        unreduce_losses,
        """
        a = broadcast_tensors.default([x, y])
        b = getitem(a, 0)
        c = getitem(a, 1)
        d = add.Tensor(b, c)
        return d
        """,
        x=X,
        y=X[0],
    )
    assert found == lines(
        """
        expand_default = expand.default(y, [4, 6])
        d = add.Tensor(x, expand_default)
        return d
        """
    )


def test_attention_with_dropout_is_opened() -> None:
    """So little is dropped here that nothing is, and the values stay."""
    q = torch.randn(2, 1, 3, 4)
    found = rewritten(
        open_random_attention,
        """
        a = scaled_dot_product_attention.default(q, k, v, None, 1e-12)
        return a
        """,
        q=q,
        k=q + 1,
        v=q - 1,
    )
    assert found == lines(
        """
        transpose_int = transpose.int(k, -2, -1)
        matmul_default = matmul.default(q, transpose_int)
        mul_tensor = mul.Tensor(matmul_default, 0.5)
        _safe_softmax_default = _safe_softmax.default(mul_tensor, -1)
        native_dropout_default = native_dropout.default(_safe_softmax_default, 1e-12, True)
        getitem = getitem(native_dropout_default, 0)
        matmul_default_1 = matmul.default(getitem, v)
        return matmul_default_1
        """
    )


def test_attention_without_dropout_stays_one_op() -> None:
    text = """
        a = scaled_dot_product_attention.default(q, k, v)
        return a
    """
    q = torch.randn(2, 1, 3, 4)
    assert rewritten(open_random_attention, text, q=q, k=q, v=q) == lines(text)


def test_examples_have_the_strides_of_the_cleaned_graph() -> None:
    """A copy that was taken out leaves its user's example contiguous; run again, it is not."""
    module = parsed(
        """
        a = transpose.int(x, 0, 1)
        b = clone.default(a, memory_format=torch.contiguous_format)
        c = sin.default(b)
        return c
        """,
        {"x": X},
    )
    copy, result = (next(n for n in module.graph.nodes if n.name == name) for name in "bc")
    assert result.meta["val"].stride() == (4, 1)
    copy.replace_all_uses_with(copy.args[0])
    module.graph.erase_node(copy)
    refresh_examples(module)
    assert result.meta["val"].stride() == (1, 6)

"""Rewrites ops on memory as ops on elements, before a graph is made functional.

Making a graph functional turns a write to a view into a new value of the viewed tensor. Where this gives another value
or a wrong derivative, the op is rewritten or refused:

    fill_diagonal_(x, v)      ->  masked_fill_(x, row == column, v)
    as_strided(x, ...)        ->  index_select of x's elements, see [Note: as_strided]
    a write through as_strided, or through an unfold that leaves gaps  ->  CaptureError

PyTorch's derivative of as_strided_scatter covers only the written elements; the rest of x gets no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopar import _torch
from autopar._torch import pytree
from autopar.capture.remedies import traced_line, uncaptured
from autopar.ops.nodes import bound_arguments, reached, written_operands

aten = torch.ops.aten


def functionalize_strided_ops(module: fx.GraphModule) -> None:
    """Rewrites an exported graph, and the graphs in it, in place.

    Raises CaptureError for writes that would be lost.
    """
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    for part in parts:
        _mask_diagonals(part)
        _refuse_lost_writes(part)
    for part in parts:
        _index_strided(part)
        part.recompile()


def refuse_strides(module: fx.GraphModule) -> None:
    """Refuses ops of a functional graph that read or write memory by strides."""
    for node in module.graph.nodes:
        if node.target in _STRIDED and node.args[0].target is not aten.arange.default:
            raise uncaptured(
                traced_line(node),
                f"{node.target} depends on the layout in memory, but the memory of a rank's part has another layout",
                "Write it with slices, unfold, diagonal or torch.where",
            )


_READS = (aten.as_strided.default, aten.as_strided_copy.default)
_STRIDED = (*_READS, aten.as_strided_scatter.default)


# --- diagonals


def _mask_diagonals(module: fx.GraphModule) -> None:
    """fill_diagonal_(x, v) -> masked_fill_(x, row == column, v). A plan can split a mask, but not a diagonal."""
    call = module.graph.call_function
    for node in module.graph.find_nodes(op="call_function", target=aten.fill_diagonal_.default):
        given = bound_arguments(node)
        x, value = given["self"], given["self"].meta["val"]
        made: dict[str, Any] = {"device": value.device}
        with module.graph.inserting_before(node):
            first, *others = (
                call(aten.reshape.default, (call(aten.arange.default, (size,), made), [-1, *after]))
                for i, size in enumerate(value.shape)
                for after in [[1] * (value.ndim - 1 - i)]
            )
            if given["wrap"] and value.ndim == 2:  # in a tall matrix the diagonal starts again below
                first = call(aten.remainder.Scalar, (first, value.shape[1] + 1))
            mask = call(aten.eq.Tensor, (first, others[0]))
            for other in others[1:]:
                same = call(aten.eq.Tensor, (first, other))
                mask = call(aten.logical_and.default, (mask, same))
            filled = call(aten.masked_fill_.Scalar, (x, mask, given["fill_value"]))
        filled.meta = dict(node.meta)
        node.replace_all_uses_with(filled)
        module.graph.erase_node(node)


# --- strides


def _index_strided(module: fx.GraphModule) -> None:
    """[Note: as_strided] It reads memory, and a rank's part, or a gathered whole, lies in memory in another way than
    what was traced. So: as_strided(x, size, stride) -> elements of x in the order of memory, selected by an index.
    """
    for node in list(module.graph.nodes):
        if node.target not in _READS:
            continue
        x, size, stride, start = bound_arguments(node).values()
        value = x.meta["val"]
        first = 0 if start is None else start - value.storage_offset()
        last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        order = sorted(range(value.ndim), key=lambda i: (-value.stride(i), i))
        if not value.permute(order).is_contiguous() or first < 0 or last >= value.numel():
            raise uncaptured(
                traced_line(node),
                "as_strided reads memory outside of its argument",
                "Call it on a contiguous tensor, or use unfold",
            )
        with module.graph.inserting_before(node):
            call = module.graph.call_function
            positions = call(aten.arange.default, (value.numel(),), {"device": value.device})
            index = call(aten.as_strided.default, (positions, size, stride, first))
            inner = call(aten.reshape.default, (call(aten.permute.default, (x, order)), [-1]))
            flat = call(aten.reshape.default, (index, [-1]))
            chosen = call(aten.index_select.default, (inner, 0, flat))
            result = call(aten.reshape.default, (chosen, size))
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)


# --- writes to views


def _refuse_lost_writes(module: fx.GraphModule) -> None:
    place = {node: i for i, node in enumerate(module.graph.nodes)}
    written = {node: storages for node in place if (storages := _written(node))}
    for view in filter(_is_strided_view, place):
        views = _views(view)
        last_read = max((place[user] for v in views for user in v.users), default=0)
        for write, storages in written.items():
            through = not views.isdisjoint(write.all_input_nodes)
            # An index copies elements, and does not see later writes to the tensor.
            unseen = view.target is not aten.unfold.default and place[write] < last_read
            if place[write] > place[view] and storages & _storages(view) and (through or unseen):
                raise uncaptured(
                    traced_line(write),
                    f"{write.target} writes to memory of which {view.target} at {traced_line(view)} is a view, but in "
                    "a graph the view does not see the write",
                    "Write to slices or to a diagonal of the tensor itself, or choose with torch.where",
                )


def _is_strided_view(node: fx.Node) -> bool:
    """Whether a node is a view to which functionalization writes wrongly."""
    if node.target is aten.unfold.default:  # right where its windows tile the tensor
        given = bound_arguments(node)
        length = given["self"].meta["val"].shape[given["dimension"]]
        return bool(given["size"] != given["step"] or length % given["step"])
    return node.target is aten.as_strided.default


def _views(node: fx.Node) -> set[fx.Node]:
    """A node and all its views."""
    return reached([node], lambda seen: (user for user in seen.users if _storages(user) & _storages(node)))


def _written(node: fx.Node) -> set[int]:
    """The storages to which a call, or a graph that it runs, writes."""
    bodies = (_body(argument) for argument in node.all_input_nodes)
    inner = (n for body in bodies if body is not None for n in body.graph.nodes)
    return set[int]().union(*map(_written, inner), *map(_storages, written_operands(node)))


def _body(node: fx.Node) -> fx.GraphModule | None:
    """The graph that an argument stands for."""
    found = getattr(node.graph.owning_module, str(node.target), None)
    return found if node.op == "get_attr" and isinstance(found, fx.GraphModule) else None


def _storages(node: fx.Node) -> set[int]:
    """The addresses of the storages of a node's example values."""
    tensors = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    return {_torch.storage_reference(x).cdata for x in tensors if _torch.has_storage(x)}

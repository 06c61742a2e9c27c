"""results of a no_grad region -> detach(results), because decomposition inlines the region."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from autopar.capture.guards.refusals import BACKEND_RUNS_IT
from autopar.capture.remedies import traced_line
from autopar.errors import CaptureError
from autopar.ops.nodes import is_operator, schema, written_operands

aten = torch.ops.aten


def keep_no_grad(module: fx.GraphModule) -> None:
    """[Note: no_grad regions] Decomposition inlines `with torch.no_grad():` and forgets it, so that
    parameters inside would get gradients that eager gives not. Every floating result of such a
    region is detached before, but one that came in and goes out as it is: `x.to(x.dtype)` is x, and keeps
    its gradient. Export itself forgets a no_grad region inside an autocast one; there the proof
    (autopar.verify) tells.

    A tensor that a region writes in place (`self.count.add_(1)`) goes out as it came in, too, so that later writes
    reach it and not a copy. What the region writes into it is computed of detached tensors.

    Raises CaptureError where a region writes into a tensor that requires a gradient: eager gives it the gradient of the
    value before.
    """
    trained: set[fx.Node] = set()  # what takes gradients: parameters, and what is computed of them
    for node in list(module.graph.nodes):
        if not _is_region(node):
            if _takes_gradient(node, trained):
                trained.add(node)
            continue
        _detach_writes(module, node, trained)
        for user in list(node.users):
            value, given = user.meta.get("val"), _given_back(module, node, user)
            if given is not None:
                user.replace_all_uses_with(given)
            elif _is_floating(value):
                outside, last = list(user.users), user
                # A copy: what is added in place to a detached view would be detached with it.
                for op in (aten.detach.default, aten.clone.default):
                    with module.graph.inserting_after(last):
                        last = module.graph.call_function(op, (last,))
                    last.meta = dict(user.meta)
                user.replace_all_uses_with(last, outside.__contains__)
    module.recompile()


def _is_region(node: fx.Node) -> bool:
    return "wrap_with_set_grad_enabled" in str(node.target) and node.args[0] is False


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _takes_gradient(node: fx.Node, trained: set[fx.Node]) -> bool:
    """Whether the value of a node outside of no_grad regions requires a gradient, given the nodes before it that do."""
    value = node.meta.get("val")
    if node.op == "placeholder":
        return isinstance(value, Tensor) and value.requires_grad
    if node.target is aten.detach.default or (isinstance(value, Tensor) and not _is_floating(value)):
        return False
    return any(each in trained for each in node.all_input_nodes)


def _detach_writes(module: fx.GraphModule, region: fx.Node, trained: set[fx.Node]) -> None:
    """Detaches what a region reads, if it writes into a tensor that it is given."""
    body = getattr(module, str(region.args[1].target))  # type: ignore[union-attr]
    inside = body.graph.find_nodes(op="placeholder")
    # What is written, and the op that writes it last.
    written = {_memory_of(x): node for node in body.graph.nodes for x in written_operands(node)}
    if not written.keys() & {*inside}:
        return
    for position, each in enumerate(inside, start=2):
        given = region.args[position]
        if not isinstance(given, fx.Node) or given not in trained:
            continue
        if each in written and given.op == "placeholder":
            continue  # a parameter, which is refused by its name later
        if each in written:
            raise CaptureError(
                f"{traced_line(written[each])} writes under torch.no_grad into a tensor that requires a gradient. "
                f"Compute a new tensor from its detach() instead. {BACKEND_RUNS_IT}"
            )
        with module.graph.inserting_before(region):
            detached = module.graph.call_function(aten.detach.default, (given,))
        detached.meta = dict(given.meta)
        region.update_arg(position, detached)


def _memory_of(node: fx.Node) -> fx.Node:
    """The tensor whose memory a node's result is, through views of it and writes into it."""
    while is_operator(node):
        returns = schema(node).returns
        if not returns or returns[0].alias_info is None or not node.all_input_nodes:
            break
        node = next(written_operands(node), node.all_input_nodes[0])
    return node


def _given_back(module: fx.GraphModule, region: fx.Node, result: fx.Node) -> fx.Node | None:
    """The argument of a region that one of its results is, None for what the region makes."""
    body = getattr(module, str(region.args[1].target))  # type: ignore[union-attr]
    results, inside = body.graph.output_node().args[0], body.graph.find_nodes(op="placeholder")
    made = results[result.args[1]] if result.target is operator.getitem else results
    while isinstance(made, fx.Node) and (_is_no_copy(made) or any(True for _ in written_operands(made))):
        made = next(written_operands(made), None) or made.args[0]
    return region.args[2 + inside.index(made)] if made in inside else None


def _is_no_copy(node: fx.Node) -> bool:
    """Whether an op gives back its very argument, as `x.to(x.dtype)` and `x.contiguous()` do."""
    if getattr(node.target, "overloadpacket", None) not in (aten.to, aten.contiguous):
        return False
    after, before = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    kinds = [(x.dtype, x.device, x.stride()) for x in (after, before)]
    return kinds[0] == kinds[1] and True not in node.args[1:] and not node.kwargs.get("copy")

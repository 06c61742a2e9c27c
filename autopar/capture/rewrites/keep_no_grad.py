"""results of a no_grad region -> detach(results), because decomposition inlines the region."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

aten = torch.ops.aten


def keep_no_grad(module: fx.GraphModule) -> None:
    """[Note: no_grad regions] Decomposition inlines `with torch.no_grad():` and forgets it, so that
    parameters inside would get gradients that eager gives not. Every floating result of such a
    region is detached before, but one that came in and goes out as it is: `x.to(x.dtype)` is x, and keeps
    its gradient. Export itself forgets a no_grad region inside an autocast one; there the proof
    (autopar.verify) tells.
    """
    for node in list(module.graph.nodes):
        if "wrap_with_set_grad_enabled" not in str(node.target) or node.args[0] is not False:
            continue
        for user in list(node.users):
            value, given = user.meta.get("val"), _given_back(module, node, user)
            if given is not None:
                user.replace_all_uses_with(given)
            elif isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                outside, last = list(user.users), user
                # A copy: what is added in place to a detached view would be detached with it.
                for op in (aten.detach.default, aten.clone.default):
                    with module.graph.inserting_after(last):
                        last = module.graph.call_function(op, (last,))
                    last.meta = dict(user.meta)
                user.replace_all_uses_with(last, outside.__contains__)
    module.recompile()


def _given_back(module: fx.GraphModule, region: fx.Node, result: fx.Node) -> fx.Node | None:
    """The argument of a region that one of its results is, None for what the region makes."""
    body = getattr(module, str(region.args[1].target))  # type: ignore[union-attr]
    results, inside = body.graph.output_node().args[0], body.graph.find_nodes(op="placeholder")
    made = results[result.args[1]] if result.target is operator.getitem else results
    while isinstance(made, fx.Node) and _is_no_copy(made):
        made = made.args[0]
    return region.args[2 + inside.index(made)] if made in inside else None


def _is_no_copy(node: fx.Node) -> bool:
    """Whether an op gives back its very argument, as `x.to(x.dtype)` and `x.contiguous()` do."""
    if getattr(node.target, "overloadpacket", None) not in (aten.to, aten.contiguous):
        return False
    after, before = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    kinds = [(x.dtype, x.device, x.stride()) for x in (after, before)]
    return kinds[0] == kinds[1] and True not in node.args[1:] and not node.kwargs.get("copy")

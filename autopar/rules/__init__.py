"""Rules: what every op family lets you split, one row (or one small function) per family.

`spec(node)` finds the rule of a node. An op without a rule runs whole on every rank, and reports say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import fx

from autopar._torch import OpOverload
from autopar.rules import (
    attention,
    blocks,
    contract,
    elementwise,
    flex,
    grouped,
    index,
    linalg,
    linear_loss,
    loss,
    nn,
    random,
    recurrent,
    reduce,
    shape,
    views,
)
from autopar.rules.functions import CustomFunction
from autopar.rules.kept import kept
from autopar.rules.kept.rows import NOT_DIFFERENTIABLE as NOT_DIFFERENTIABLE
from autopar.rules.probed import is_probed, probed
from autopar.rules.registered import registered_rule
from autopar.rules.spec import Call, Letters, RuleDoesNotApply, Spec, plain

Rule = Callable[[Call], Spec]

RULES: Mapping[str, Rule] = {
    **elementwise.RULES,
    **contract.RULES,
    **reduce.RULES,
    **shape.RULES,
    **views.RULES,
    **blocks.RULES,
    **index.RULES,
    **nn.RULES,
    **attention.RULES,
    **flex.RULES,
    **linalg.RULES,
    **recurrent.RULES,
    **loss.RULES,
    **linear_loss.RULES,
    **random.RULES,
    **grouped.RULES,
}


def operator_name(node: fx.Node) -> str:
    """Name of the operator that a node calls: `aten.linear` for the overload `aten.linear.default`."""
    return str(getattr(node.target, "overloadpacket", node.target))


def find_rule(node: fx.Node) -> Rule | None:
    """The rule of the op that a node calls; None if it has none."""
    target, name = node.target, operator_name(node)
    if rule := registered_rule(name) or RULES.get(name):
        return rule
    if not isinstance(target, OpOverload):
        return getattr(target, "rule", None)  # a call that a pass has put in brings its own
    # A random op without a rule of its own would draw the same numbers for every part.
    draws = torch.Tag.nondeterministic_seeded in target.tags
    return elementwise.elementwise if torch.Tag.pointwise in target.tags and not draws else None


def spec(node: fx.Node, wanted: Iterable[int] | None = None) -> tuple[Spec, bool]:
    """The spec of a node, and whether a rule gave it.

    Every dim stays whole if there is no rule, if the rule does not apply to this call, and on empty tensors. The
    tensors kept for backward depend on which operands' gradients are `wanted`; by default all are.
    """
    call = Call(node, wanted)
    found, has_rule = _ruled(call)
    if isinstance(node.target, CustomFunction):
        return node.target.finished(call, found, has_rule), has_rule
    if not isinstance(node.target, OpOverload):
        return found, has_rule
    keeps = kept(operator_name(node), call, found) if found.stated_kept is None else found.stated_kept
    return replace(found, kept=keeps), has_rule


def _ruled(call: Call) -> tuple[Spec, bool]:
    node = call.node
    rule = find_rule(node) or (probed if is_probed(node) else None)
    # An op may have results that it does not use, such as the largest of a bag that is summed.
    empty = any(t.numel() == 0 for t in call.operands) or not any(t.numel() for t in call.results)
    if rule is not None and not empty:
        try:
            found = rule(call)
            if _fits(found, call):
                return found, True
        except RuleDoesNotApply:
            pass
        except IndexError:  # torch lets a tensor without dims be asked for its dim 0
            if call.operands[0].ndim:
                raise
    return replicated(call), False


def _fits(found: Spec, call: Call) -> bool:
    """Whether the sizes of the letters of every tensor multiply to its shape; for a call that its rule does not foresee
    they may not.

    A letter without a size fits nothing. There is one if an operand has more dims than a point-wise result.
    """
    lettered = [*found.operands, *found.results]
    return all(
        len(letters) == tensor.ndim
        and all(
            math.prod(found.sizes.get(x, 0) for x in dim) == size or not (dim or tensor.numel())
            for dim, size in zip(letters, tensor.shape, strict=True)
        )
        for letters, tensor in zip(lettered, [*call.operands, *call.results], strict=False)
    )


def replicated(call: Call) -> Spec:
    """The spec of an op of which no dim can be split."""
    sizes: dict[str, int] = {}

    def letters(tensor: torch.Tensor, tag: str) -> Letters:
        names, own = plain(tensor.shape, tag)
        sizes.update(own)
        return names

    operands = tuple(letters(t, f"x{i}_") for i, t in enumerate(call.operands))
    results = tuple(letters(t, f"y{i}_") for i, t in enumerate(call.results))
    flops = sum(t.numel() for t in call.results)
    return Spec(operands, results, sizes, whole=frozenset(sizes), flops=flops)

"""A mixture-of-experts layer as one op: rows go to their experts and come back in their order.

A captured token-choice layer sorts its rows by expert, multiplies groups of them with the experts' weights
(`grouped_mm`), and puts them back:

    order = sort(ids); y = grouped(x[order // k]); return y[inverse of order]

Sorting runs along the tokens. So op by op the layer could not be split along them, although no row depends on
another. As one op it can be: each rank sorts the rows that it has. In the notation of the rules, with the weights of a
gated layer,

    t d, (t k), e d (2 f), e f d -> (t k) d | sum e f

Where experts are split, every rank computes the rows of its own experts, and returns zeros for the others. No table
holds this rule: `autopar.analysis.expert_rule` derives it from the rules of the ops between the two permutations.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autopar.analysis.expert_rule import BodyRule, call_target
from autopar.analysis.expert_run import ExpertBody, LayerRun
from autopar.analysis.skew import EXPERTS
from autopar.rules.spec import Call, Spec


class Experts(ExpertBody):
    """A mixture-of-experts layer as one function, the target of a `call_function` node.

    `experts(*rows, ids, *weights)` sorts the rows by expert, runs the layer, and returns one row for every
    entry of `ids`, in the order of `ids`.
    """

    __name__ = "experts"

    def __str__(self) -> str:
        return EXPERTS

    def __call__(self, *operands: Tensor) -> Tensor:
        """The whole op, as it stands in the captured graph."""
        run = LayerRun(self, operands, _apply, self.count, self.slots)
        found: Tensor = run.result(call_target)
        return found

    def rule(self, call: Call) -> Spec:
        """The letters of operands and result, and the tensors that the body saves for backward."""
        return BodyRule(self, call).spec()


def _apply(target: Any, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)

"""Ops of `torch.library` that nobody gave a rule: a probe finds out whether they can be split by rows.

The op runs on random tensors of the captured shapes, whole and with its rows in parts, at three orders of magnitude,
and results and gradients are compared. If they are equal, the op is split by rows. That is a guess: an op may do
otherwise for other numbers. So plans name the op as one, and `autopar verify` compares it on the batch that it is
given.

A row is an index of dim 0 of the first operand. Which other operands have rows is tried: all that have as many, then
all of at least as many dims, then the first alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from autopar._torch import TorchDispatchMode
from autopar.ir import S, V
from autopar.ops.nodes import draws
from autopar.rules.notation import spec_of
from autopar.rules.proofs import Splitting, can_be_tried, comparison, forked_randomness, key_of, tolerance_of
from autopar.rules.registered import RULES, Registered
from autopar.rules.spec import Call, RuleDoesNotApply, Spec

GUESS = "rows are independent on random tensors"
_MAGNITUDES = (1.0, 1e-3, 1e3)
_TORCHS = ("aten", "prims", "autopar", "c10d", "_c10d_functional", "profiler", "inductor")


def is_probed(node: fx.Node) -> bool:
    """Whether an op is one that a probe may run: of somebody else's library, and not random."""
    return getattr(node.target, "namespace", "aten") not in _TORCHS and not draws(node)


def probed(call: Call) -> Spec:
    """The rule that a probe finds for a call. Raises RuleDoesNotApply where rows depend on each other."""
    findings = RULES.setdefault(_name(call), Registered("")).findings
    if (key := key_of(call)) not in findings:
        with forked_randomness(call):
            found = (row for row in _rows(call) if _holds(row, call))
            findings[key] = next(found, "") if can_be_tried(call) else ""
    if not findings[key]:
        raise RuleDoesNotApply("rows depend on each other, or the op is too large to try")
    return replace(spec_of(findings[key], call), flops=sum(y.numel() for y in call.results), guess=GUESS)


def _name(call: Call) -> str:
    return str(getattr(call.node.target, "overloadpacket", call.node.target))


def _rows(call: Call) -> Iterator[str]:
    """Rows in which dim 0 of some operands, and of all results, is one letter, and everything else stays whole."""
    if not call.operands:
        return
    x = call.operands[0]
    many = x.shape[0] if x.ndim else 1
    if many == 1 or any(not y.ndim or y.shape[0] != many for y in call.results):
        return
    alike = [bool(other.ndim) and other.shape[0] == many for other in call.operands]
    as_deep = [is_alike and other.ndim >= x.ndim for is_alike, other in zip(alike, call.operands, strict=True)]
    alone = [i == 0 for i in range(len(call.operands))]
    for chosen in dict.fromkeys(map(tuple, (alike, as_deep, alone))):
        operands = [_letters(f"x{i}_", o, has) for i, (o, has) in enumerate(zip(call.operands, chosen, strict=True))]
        results = [_letters(f"y{i}_", y, True) for i, y in enumerate(call.results)]
        yield f"{', '.join(operands)} -> {', '.join(results)}"


def _letters(tag: str, x: Tensor, has_rows: bool) -> str:
    whole = [f"{tag}{d}x!" for d in range(x.ndim)]
    return " ".join(["rows", *whole[1:]] if has_rows else whole)


def _holds(row: str, call: Call) -> bool:
    """Whether results and gradients on parts of the rows are those on all rows."""
    spec = spec_of(row, call)
    many = call.operands[0].shape[0]
    counts = {next((n for n in range(2, math.isqrt(many) + 1) if many % n == 0), many), *((many,) if many <= 8 else ())}
    operands = tuple(S(0) if ("rows",) in letters else V for letters in spec.operands)
    splittings = [Splitting("", operands, (S(0),) * len(call.results), n) for n in sorted(counts)]
    try:
        with _WithoutMessages():
            return all(
                comparison(call, splitting, magnitude) <= tolerance_of(call)
                for splitting in splittings
                for magnitude in _MAGNITUDES
            )
    except Exception:  # the op does not run on parts, or here
        return False


class _WithoutMessages(TorchDispatchMode):
    """Fails an op that communicates, since no other rank answers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func} communicates")
        return func(*args, **(kwargs or {}))

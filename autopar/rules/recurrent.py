"""Recurrent layers and their cells: lstm, gru, rnn. The batch can be split; time and features cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.rules.notation import spec_of
from autopar.rules.spec import Call, Letters, RuleDoesNotApply, Spec


def recurrent(call: Call) -> Spec:
    """`t n i, (l n h)*, weights -> t n o, (l n h)*`, with the batch before time if `batch_first`."""
    x = call.operands[0]
    if "batch_sizes" in call.arguments or x.ndim != 3:
        raise RuleDoesNotApply("a packed sequence, or no batch")
    if call["dropout"] and call["train"] and call["num_layers"] > 1:
        raise RuleDoesNotApply("every part would drop the same between layers")
    batch = 0 if call["batch_first"] else 1
    sizes: dict[str, int] = {}

    def letters(tensor: torch.Tensor, tag: str, batch: int | None) -> Letters:
        names = [f"{tag}_{d}" if d != batch else "n" for d in range(tensor.ndim)]
        sizes.update({n: s for n, s in zip(names, tensor.shape, strict=True) if s > 1})
        return tuple((n,) if s > 1 else () for n, s in zip(names, tensor.shape, strict=True))

    states = len(call.results) - 1  # the hidden state, and the cells of an lstm
    where = [batch, *[1] * states]
    results = [letters(y, f"y{i}", at) for i, (y, at) in enumerate(zip(call.results, where, strict=True))]
    at_operands: list[int | None] = [*where, *[None] * (len(call.operands) - len(where))]
    operands = [letters(y, f"x{i}", at) for i, (y, at) in enumerate(zip(call.operands, at_operands, strict=True))]
    matrices = sum(y.numel() for y in call.operands[len(where) :] if y.ndim == 2)
    return Spec(
        tuple(operands),
        tuple(results),
        sizes,
        whole=frozenset(sizes) - {"n"},
        batch=frozenset(sizes) & {"n"},
        flops=2 * x.shape[0] * x.shape[1] * matrices,
    )


def cell(call: Call) -> Spec:
    """One step: `n i, n h, g i, g h, g, g -> n h`, where g is the rows of all gates; an lstm has cells as well as h."""
    states = ", ".join(["n h!"] * len(call.results))
    spec = spec_of(f"n i!, {states}, g! i!, g! h!, g!, g! -> {states}", call)
    x, weights = call.operands[0], call.operands[1 + len(call.results) :][:2]
    batch = frozenset(spec.sizes) & {"n"}
    return replace(spec, batch=batch, flops=2 * x.shape[0] * sum(w.numel() for w in weights))


_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")

RULES: dict[str, Callable[[Call], Spec]] = {
    **{f"aten.{kind}": recurrent for kind in _KINDS},
    **{f"aten.{kind}_cell": cell for kind in _KINDS},
}

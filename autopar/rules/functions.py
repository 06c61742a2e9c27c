"""Applications of `torch.autograd.Function`: one op each, whose forward and backward are the user's own code.

A function runs whole on every rank, with two exceptions: the user has registered a row that says how to split it
(`autopar.register_rule(Function, row)`), or a trace of its forward and backward shows that it is point-wise
(`FunctionTrial.free`).

[Note: backwards that are not linear] A backward may clip or round its gradient. Its results for partial gradients then
do not add up to its result for their sum. So operands of a function are never in V unless a row says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autopar._torch import has_values, pytree
from autopar.errors import AutoparError
from autopar.rules.elementwise import elementwise
from autopar.rules.notation import result_shapes
from autopar.rules.spec import Call, Hidden, Kept, Letters, RuleDoesNotApply, Spec


@dataclass(frozen=True)
class FunctionArguments:
    """The arguments of one call of `torch.autograd.Function.apply`, without its tensors.

    Attributes:
        leaves: pytree leaves of `(args, kwargs)`, with None in place of every tensor.
        spec: pytree structure of `(args, kwargs)`.
        positions: indices of the tensors among the leaves.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec = field(repr=False)
    positions: tuple[int, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[FunctionArguments, list[Tensor]]:
        """The arguments, and the tensors that were among them."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        positions = tuple(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
        others = tuple(None if isinstance(x, Tensor) else x for x in leaves)
        return cls(others, spec, positions), [leaves[i] for i in positions]

    def filled(self, operands: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with these tensors."""
        leaves = list(self.leaves)
        for position, x in zip(self.positions, operands, strict=True):
            leaves[position] = x
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True)
class FunctionTrial:
    """The findings of a run of an application on tensors without values.

    Attributes:
        results: shape and dtype of every tensor result, as tensors without values.
        leaves: leaves of the result; None where a tensor stood.
        spec: structure of the result.
        positions: positions of the tensors among the leaves of the result.
        ungraded: positions of the operands that backward gives no gradient.
        undifferentiable: positions of the results that require no gradient.
        saved_operands, saved_results: positions of the operands and results that `ctx` keeps for backward.
        saved: shape and dtype of the other tensors that `ctx` keeps.
        flops: floating-point operations of matrix products and convolutions in the forward.
        draws: whether the forward draws random numbers.
        free: dims, counted from the last, along which a trace shows the function to be point-wise.
        row: rule of a function that runs only on tensors with values, which says the shapes of its results; "" for
            every other.
    """

    results: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    positions: tuple[int, ...]
    ungraded: frozenset[int]
    undifferentiable: frozenset[int]
    saved_operands: tuple[int, ...]
    saved_results: tuple[int, ...]
    saved: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    flops: int
    draws: bool
    free: frozenset[int]
    row: str = ""


class CustomFunction:
    """The target of a call in a captured graph: one application of an autograd.Function to its tensor operands.

    Args:
        function: the user's class.
        arguments: arguments of the application that are not tensors.
        trial: findings of a run on tensors without values.
        autocast: device type -> dtype of every autocast that is on where the model applies it.
    """

    def __init__(
        self,
        function: type[torch.autograd.Function],
        arguments: FunctionArguments,
        trial: FunctionTrial,
        autocast: Mapping[str, torch.dtype],
    ) -> None:
        self.__name__ = function.__name__
        self.function, self.arguments, self.trial = function, arguments, trial
        self.autocast = dict(autocast)

    def __str__(self) -> str:
        return function_name(self.function)

    def __repr__(self) -> str:
        return f"{self}{self.arguments.leaves}"

    @property
    def draws(self) -> bool:
        """Whether the forward takes random numbers from the default generator."""
        return self.trial.draws

    def __call__(self, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The tensor results of the user's own forward; their backward is the user's own code, too.

        Raises AutoparError if a result that is a number differs from its value at the capture.
        """
        if self.trial.row and not all(map(has_values, operands)):
            return self._without_values(operands)
        args, kwargs = self.arguments.filled(operands)
        with contextlib.ExitStack() as stack:
            for device, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            found = self.function.apply(*args, **kwargs)
        leaves = pytree.tree_leaves(found)
        results = tuple(x for x in leaves if isinstance(x, Tensor))
        others = tuple(None if isinstance(x, Tensor) else x for x in leaves)
        if others != self.trial.leaves:
            raise AutoparError(
                f"The torch.autograd.Function {self} returned {others} in addition to its tensors, but "
                f"{self.trial.leaves} when the model was captured; return such values from the model in another way."
            )
        return results[0] if len(results) == 1 else results

    def _without_values(self, operands: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Tensors of the shapes that the function's row gives results of these operands."""
        shapes = result_shapes(self.trial.row, operands, self.trial.results)
        made = zip(shapes, self.trial.results, strict=True)
        results = tuple(operands[0].new_empty(shape, dtype=x.dtype) for shape, x in made)
        return results[0] if len(results) == 1 else results

    def rule(self, call: Call) -> Spec:
        """The rule of a function that is point-wise along the dims in `FunctionTrial.free`."""
        if not self.trial.free:
            raise RuleDoesNotApply("no row, and not point-wise")
        spec = elementwise(call)
        free = {f"d{dim}" for dim in self.trial.free}
        return replace(spec, whole=frozenset(spec.sizes) - free)

    def finished(self, call: Call, spec: Spec, has_rule: bool) -> Spec:
        """The spec of a call, with the tensors that `ctx` keeps and, where no rule gives them, with its FLOPs."""
        kept = spec.stated_kept or Kept()
        if call.wanted and spec.stated_kept is None:
            trial = self.trial
            hidden = (_hidden(f"saved{i}", shape, dtype, call, spec) for i, (shape, dtype) in enumerate(trial.saved))
            kept = Kept(trial.saved_operands, trial.saved_results, tuple(hidden))
        flops = spec.flops if has_rule else max(spec.flops, self.trial.flops)
        return replace(spec, kept=kept, flops=flops, linear_backward=False)


def function_name(function: type[torch.autograd.Function]) -> str:
    """Name of a function in rules and plans."""
    return f"{function.__module__}.{function.__qualname__}"


def _hidden(name: str, shape: tuple[int, ...], dtype: torch.dtype, call: Call, spec: Spec) -> Hidden:
    """A tensor that `ctx` keeps. It is split as an operand or result of the same shape; without one it stays whole."""
    known = (*zip(call.results, spec.results, strict=True), *zip(call.operands, spec.operands, strict=True))
    letters: Letters | None = next((own for x, own in known if tuple(x.shape) == shape), None)
    if letters is not None:
        return Hidden(name, letters, dtype)
    return Hidden(name, (), dtype, torch.Size(shape).numel())

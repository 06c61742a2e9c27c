"""Captures applications of `torch.autograd.Function` as calls that keep their own backward.

While export traces, every `apply` is intercepted: the function runs once on tensors without values, forward and
backward, and one call of `torch.ops.autopar.custom_function` is traced in its place. After the trace each such call
gets an `autopar.rules.functions.CustomFunction` as its target, which runs the user's code.

The run without values finds the results, the tensors that `ctx` keeps, and the gradients that backward returns. It also
finds functions that cannot be kept, see `_Watch`. A backward that reads values fails in this run, and is assumed to
return every gradient.

A kernel may need the memory of its operands, which tensors without values do not have. If its row is known
(`autopar.register_rule`), it runs on random numbers instead, on the device of the model.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar import _torch
from autopar._torch import TorchDispatchMode, pytree
from autopar.capture.guards.profiling import profiled_by
from autopar.capture.pointwise import free_dims
from autopar.capture.remedies import uncaptured
from autopar.errors import CaptureError, first_line
from autopar.ops import functions as ops
from autopar.ops.nodes import draws_numbers
from autopar.rules.functions import CustomFunction, FunctionArguments, FunctionTrial, function_name
from autopar.rules.proofs import examples
from autopar.rules.registered import stated_row

aten = torch.ops.aten
Function = type[torch.autograd.Function]
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@contextlib.contextmanager
def keeping_functions(model: nn.Module) -> Iterator[Callable[[fx.GraphModule], None]]:
    """Context that intercepts applications of autograd.Functions; yields the object that puts them into the graph.

    Raises CaptureError, where a function is applied, for one that cannot be kept.
    """
    taken = _Applications(model)
    with _torch.applying_functions_by(taken.take):
        yield taken.put


class _Applications:
    """The applications that a trace has met, in their order."""

    def __init__(self, model: nn.Module) -> None:
        own = (*model.named_parameters(), *model.named_buffers())
        self._own = {_torch.storage_reference(x).cdata: name for name, x in own}
        self._kept: list[CustomFunction] = []
        self._tried: dict[str, FunctionTrial] = {}
        self._is_trying = False

    def take(self, apply: _torch.Apply, function: Function, args: Any, kwargs: Any) -> Any:
        """The tensors that stand in the trace for the results of an application."""
        arguments, operands = FunctionArguments.of(args, kwargs)
        if self._is_trying or not operands or function.__module__.startswith(("torch.", "autopar.")):
            return apply(function, *args, **kwargs)
        where = _Place(function, _torch.user_line() or "")
        if _torch.in_functorch_transform():
            raise where.refused(
                "is applied inside a transform of torch.func, which takes its derivative while the graph is made",
                "Apply it outside of the transform",
            )
        trial = self._trial(apply, where, arguments, operands)
        self._kept.append(CustomFunction(function, arguments, trial, _autocast()))
        traced = ops.call(operands, trial.results, str(self._kept[-1]), len(self._kept) - 1)
        leaves, remaining = list(trial.leaves), iter(traced)
        for position in trial.positions:
            leaves[position] = next(remaining)
        return pytree.tree_unflatten(leaves, trial.spec)

    def _trial(
        self, apply: _torch.Apply, where: _Place, arguments: FunctionArguments, operands: Sequence[Tensor]
    ) -> FunctionTrial:
        """The findings of a run without values; applications that are alike share one run."""
        kinds = [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in operands]
        code = getattr(where.function, "traced_code", id(where.function))
        key = f"{code} {arguments!r} {kinds} {_autocast()}"
        if key not in self._tried:
            with _torch.replaced(self, _is_trying=True), _torch.outside_of_traces():
                self._tried[key] = self._findings(apply, where, arguments, operands)
        return self._tried[key]

    def _findings(
        self, apply: _torch.Apply, where: _Place, arguments: FunctionArguments, operands: Sequence[Tensor]
    ) -> FunctionTrial:
        """The findings of a run without values or, of a kernel with a row that needs them, with random ones."""
        try:
            with _torch.fake_mode() as mode:
                watch = _Watch(mode, self._own, where)
                return _TrialRun(apply, arguments, operands, watch).trial()
        except Exception as error:
            row = stated_row(function_name(where.function))
            reads = not isinstance(error, CaptureError) or isinstance(error.__cause__, _torch.VALUES_READ)
            if not row or not reads:
                raise
            try:
                watch = _Watch(object(), self._own, where)
                return _TrialRun(apply, arguments, operands, watch, row=row).trial()
            except CaptureError:
                raise
            except Exception:  # the kernel does not run here either
                raise error from None

    def put(self, module: fx.GraphModule) -> None:
        """Gives every application in a graph the user's code as its target."""
        for node, number in list(ops.applications(module.graph)):
            _put(node, self._kept[number])
        module.graph.eliminate_dead_code()
        module.recompile()


@dataclass(frozen=True)
class _Place:
    """A function, and the line of the model that applies it."""

    function: Function
    line: str

    def refused(self, reason: str, remedy: str) -> CaptureError:
        """An error that says why the function cannot be kept."""
        code = getattr(self.function.forward, "__code__", None)
        at = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        name = function_name(self.function)
        return uncaptured(self.line, f"the torch.autograd.Function {name}{at} {reason}", remedy)


def _autocast() -> dict[str, torch.dtype]:
    kinds = (kind for kind in _torch.autocast_kinds() if torch.is_autocast_enabled(kind))
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds}


# --- the run without values


class _Watch(TorchDispatchMode):
    """Refuses effects of a function's code that a call of the graph cannot have."""

    def __init__(self, mode: Any, own: dict[int, str], where: _Place) -> None:
        super().__init__()
        self._mode, self._own, self.where = mode, own, where
        self.draws = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and getattr(x, "fake_mode", None) is not self._mode:
                self._check(x)
        if "c10d" in func.namespace:
            raise self.where.refused(
                f"communicates ({func})", "Remove the collective: autopar inserts the collectives that the plan needs"
            )
        self.draws |= draws_numbers(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, x: Tensor) -> None:
        """Refuses parameters that are read as attributes, because they may be shards when the function runs."""
        traced = type(x) not in (Tensor, nn.Parameter)
        name = "" if traced else self._own.get(_torch.storage_reference(x).cdata, "")
        if traced or name:
            what = f"the parameter or buffer {name.removeprefix('model.')}" if name else "a tensor of the model"
            raise self.where.refused(
                f"computes with {what}, of shape {list(x.shape)}, which is not one of its arguments",
                "Pass that tensor to apply",
            )


@dataclass
class _TrialRun:
    """One run of an application on tensors without values, or on random ones where the function's `row` is given."""

    apply: _torch.Apply
    arguments: FunctionArguments
    given: Sequence[Tensor]
    watch: _Watch
    row: str = ""

    @property
    def where(self) -> _Place:
        return self.watch.where

    def trial(self) -> FunctionTrial:
        operands = self._operands()
        found, flops = self._forward(operands)
        leaves, spec = pytree.tree_flatten(found)
        self._check_results(leaves, operands)
        results = [x for x in leaves if isinstance(x, Tensor)]
        draws, ungraded, is_known = self.watch.draws, *self._backward(operands, results)
        saved_operands, saved_results, saved = _kept(results, operands)
        free = frozenset[int]()
        if is_known and not draws and not self.row:
            with profiled_by(None):
                free = free_dims(self._applied, operands, results)
        return FunctionTrial(
            tuple(_leaf(x, "meta" if self.row else x.device).detach() for x in results),
            tuple(None if isinstance(x, Tensor) else x for x in leaves),
            spec,
            tuple(i for i, x in enumerate(leaves) if isinstance(x, Tensor)),
            ungraded,
            frozenset(i for i, x in enumerate(results) if not x.requires_grad),
            saved_operands,
            saved_results,
            saved,
            flops,
            draws,
            free,
            self.row,
        )

    def _operands(self) -> list[Tensor]:
        if not self.row:
            return [_leaf(x) for x in self.given]
        return [x.requires_grad_(_leaf(x).requires_grad) for x in examples(self.given)]

    def _applied(self, *operands: Tensor) -> list[Tensor]:
        args, kwargs = self.arguments.filled(operands)
        found = self.apply(self.where.function, *args, **kwargs)
        return [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]

    def _forward(self, operands: Sequence[Tensor]) -> tuple[Any, int]:
        args, kwargs = self.arguments.filled(operands)
        counter = FlopCounterMode(display=False)
        try:
            with counter, self.watch:
                found = self.apply(self.where.function, *args, **kwargs)
        except CaptureError:
            raise
        except _torch.VALUES_READ as error:
            raise self.where.refused(
                f"reads the values of a tensor in its forward ({first_line(error)})",
                "Keep such numbers tensors (torch.where instead of `if`, no .item())",
            ) from error
        return found, counter.get_total_flops()

    def _check_results(self, leaves: Sequence[Any], operands: Sequence[Tensor]) -> None:
        if any(x._version for x in operands):
            raise self.where.refused(
                "changes one of its arguments in place", "Return a new tensor, and drop ctx.mark_dirty"
            )
        other = [x for x in leaves if not isinstance(x, (Tensor, *_PLAIN))]
        if other or not any(isinstance(x, Tensor) for x in leaves):
            what = type(other[0]).__name__ if other else "no tensor"
            raise self.where.refused(f"returns {what}", "Return tensors")

    def _backward(self, operands: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[frozenset[int], bool]:
        """Positions of the operands without a gradient, and whether backward ran to say so."""
        wanted = [i for i, x in enumerate(operands) if x.requires_grad]
        ends = [x for x in results if x.requires_grad]
        others = frozenset(range(len(operands))) - {*wanted}
        if not ends or not wanted:
            return frozenset(range(len(operands))), True
        self.watch.draws = False
        gradients = [torch.empty_like(x) for x in ends]
        try:
            with self.watch:
                found = torch.autograd.grad(
                    ends, [operands[i] for i in wanted], gradients, retain_graph=True, allow_unused=True
                )
        except CaptureError:
            raise
        except Exception:  # it reads values, or fails as it will when it runs
            return others, False
        if self.watch.draws:
            raise self.where.refused(
                "draws random numbers in its backward, which would differ between ranks", "Draw them in forward"
            )
        return others | {i for i, x in zip(wanted, found, strict=True) if x is None}, True


def _leaf(x: Tensor, device: torch.device | str | None = None) -> Tensor:
    differentiable = x.is_floating_point() or x.is_complex()
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device)
    return made.requires_grad_(differentiable)


def _kept(
    results: Sequence[Tensor], operands: Sequence[Tensor]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[tuple[int, ...], torch.dtype], ...]]:
    """The tensors saved in the `ctx` of an application: positions of operands and of results, and other tensors."""
    context = next((x.grad_fn for x in results if x.grad_fn is not None), None)
    found: list[Tensor] = [x for x in getattr(context, "saved_tensors", ()) if x is not None]
    found += [x for x in pytree.tree_leaves(vars(context)) if isinstance(x, Tensor)] if context else []
    kept = {_torch.storage_key(x): x for x in found}
    saved_operands = tuple(i for i, x in enumerate(operands) if kept.pop(_torch.storage_key(x), None) is not None)
    saved_results = tuple(i for i, x in enumerate(results) if kept.pop(_torch.storage_key(x), None) is not None)
    return saved_operands, saved_results, tuple((tuple(x.shape), x.dtype) for x in kept.values())


# --- the graph


def _put(node: fx.Node, target: CustomFunction) -> None:
    """custom_function([x, w], ...) -> Function(x, detach(w)): one call, whose result is a tensor if it is alone.

    Operands without a gradient, and results that take none, are detached, so that a plan knows of it.
    """
    operands: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    with node.graph.inserting_before(node):
        given = [_detached(x) if i in target.trial.ungraded else x for i, x in enumerate(operands)]
    node.target, node.args = target, tuple(given)
    values = tuple(node.meta["val"])
    node.meta["val"] = values[0] if len(values) == 1 else values
    for user in list(node.users):
        assert user.target is operator.getitem, user.format_node()
        if len(values) == 1:
            user.replace_all_uses_with(node)
        elif user.args[1] in target.trial.undifferentiable:
            readers = list(user.users)
            with node.graph.inserting_after(user):
                cut = _detached(user)
            for reader in readers:
                reader.replace_input_with(user, cut)


def _detached(x: fx.Node) -> fx.Node:
    """A detach of `x`; `x` itself if it requires no gradient."""
    value = x.meta["val"]
    if not (value.is_floating_point() or value.is_complex()):
        return x
    new = x.graph.call_function(aten.detach.default, (x,))
    new.meta = {**x.meta, "val": value.detach()}
    return new

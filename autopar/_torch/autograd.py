"""Private parts of autograd that autopar needs: nodes, hooks and dispatch keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, Node

from autopar._torch.contexts import replaced

Apply = Callable[..., Any]
Function = type[torch.autograd.Function]
_flag = attrgetter("requires_grad")


def below_autograd() -> AbstractContextManager[None]:
    """Context in which custom ops are dispatched to their kernels instead of their autograd formulas."""
    return torch._C._AutoDispatchBelowAutograd()


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def handed_on(x: Tensor) -> Tensor:
    """A contiguous tensor with the same values, which no autograd node saves and which is not a view.

    So the caller can detach it in place when its graph is no longer needed.
    """
    return _Handed.apply(x.contiguous()) if x.requires_grad else x.contiguous()


@torch.no_grad()
def run_node(node: Node, gradients: Sequence[Tensor | None]) -> list[tuple[GradientEdge, Tensor]]:
    """Runs one node of an autograd graph, and none of the nodes that follow it in backward.

    Args:
        gradients: gradient of each result of the node; None for a result that has none.

    Returns:
        Every outgoing edge of the node with the gradient that flows along it, in the shape and dtype
        that the node at the other end expects.
    """
    if callable(node):
        found = node(*gradients)
        found = found if isinstance(found, tuple) else (found,)
        given = list(zip(node.next_functions, found, strict=True))
    else:  # an autograd.Function: has no edge for an argument that is not a tensor
        found = node.apply(*_materialized(node, gradients))  # type: ignore[attr-defined]
        found = found if isinstance(found, tuple) else (found,)
        wanted = itertools.compress(found, node.needs_input_grad)  # type: ignore[attr-defined]
        given = list(zip((f for f in node.next_functions if f[0] is not None), wanted, strict=True))
    return [
        (GradientEdge(following, number), as_input(following, number, gradient))
        for (following, number), gradient in given
        if following is not None and gradient is not None
    ]


def _materialized(node: Node, gradients: Sequence[Tensor | None]) -> Iterator[Tensor]:
    for gradient, like in zip(gradients, node._input_metadata, strict=True):
        if gradient is None:
            gradient = torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)
        yield gradient


def as_input(node: Node, number: int, gradient: Tensor) -> Tensor:
    """A gradient in the shape and dtype that a node expects for the input with this number."""
    like = node._input_metadata[number]
    return gradient.sum_to_size(tuple(like.shape)).to(like.dtype)


def backward_hooks_of(x: Tensor | nn.Module) -> list[Callable[..., Any]]:
    """The backward hooks that are registered on a parameter or a module."""
    if isinstance(x, nn.Module):
        tables: tuple[Any, ...] = (x._backward_pre_hooks, x._backward_hooks)
    else:
        tables = (x._backward_hooks, getattr(x, "_post_accumulate_grad_hooks", None))
    return [hook for table in tables for hook in (table or {}).values()]


def is_saved_by_autograd(x: Tensor) -> bool:
    """Whether a leaf is a tensor that a graph of autograd has saved, or is held elsewhere in C++."""
    # Two are the object, and the node that accumulates its gradient.
    return x.is_leaf and x._use_count() > 2  # type: ignore[attr-defined]


def call_before_accumulation(x: Tensor, call: Callable[[], None]) -> None:
    """Calls a function as soon as a gradient arrives at a leaf through a graph that is there already."""
    if x.is_leaf and x.requires_grad and x._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(x).node.register_prehook(lambda _: call())


def has_backward_hooks(x: Tensor | nn.Module) -> bool:
    """Whether a parameter or a module has backward hooks."""
    return bool(backward_hooks_of(x))


def gradient_flags(tensors: Iterable[Tensor]) -> list[bool]:
    """`requires_grad` of many tensors.

    torch looks for a `__torch_function__` at every read of a DTensor's attribute, which takes twice the read itself.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_flag, tensors))


class GradientFlags:
    """A snapshot of `requires_grad` of many tensors, from which one can tell later whether any is another by now.

    The flags are read in C++, by Dynamo's guards of tensors. Those compare dtypes, devices, numbers of dims and modes
    of torch as well, so that a check of theirs that fails says nothing: the flags are then read one by one. Without
    grad mode they take every tensor for frozen, so that they are not asked.

    Args:
        tensors: the tensors, which are kept alive. Those given twice are read once: a check of Dynamo's with the same
            tensor in two places always fails.
    """

    _MOST_RENEWALS = 3  # a check that keeps failing, say in changing modes, is not made anew for ever

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tuple({id(x): x for x in tensors}.values())
        self._flags = gradient_flags(self._tensors)
        self._renewals = 0
        self._check: Callable[..., bool] = _fails

    def hold(self) -> bool:
        """Whether every tensor has the flag that it had."""
        if torch.is_grad_enabled() and self._check(*self._tensors):
            return True
        if gradient_flags(self._tensors) != self._flags:
            return False
        if torch.is_grad_enabled() and self._renewals < self._MOST_RENEWALS:
            self._renewals += 1
            self._check = self._as_now()
        return True

    def changed(self) -> list[Tensor]:
        """The tensors whose flag is another by now."""
        return [x for x, flag in zip(self._tensors, self._flags, strict=True) if x.requires_grad != flag]

    def _as_now(self) -> Callable[..., bool]:
        open_dims = [[None] * x.ndim for x in self._tensors]
        return _guards(self._tensors, open_dims, open_dims)


def alike_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that tells in C++ whether as many tensors have the same properties as these.

    The function compares shapes, strides, dtypes, devices, Python's types, and in grad mode the flags `requires_grad`.
    It also returns False in another mode of torch, and if one tensor is given twice.

    >>> check = alike_check([torch.ones(2), torch.ones(3, 4)])
    >>> check(torch.zeros(2), torch.zeros(3, 4)), check(torch.zeros(2), torch.zeros(4, 3).t())
    (True, False)
    """
    return _guards(tensors, [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors])


def _guards(tensors: Sequence[Tensor], sizes: Sequence[Any], strides: Sequence[Any]) -> Callable[..., bool]:
    """Dynamo's check of tensors; a size or stride of None may be any."""
    from torch._C._dynamo import guards

    if not tensors:
        return _fails
    known: Any = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}  # declared as flat
    return guards.TensorGuards(*tensors, **known).check


def _fails(*tensors: Tensor) -> bool:
    return False


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The innermost pair of saved-tensor hooks that is active, or a pair that changes nothing."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks or (lambda x: x, lambda x: x)


@contextmanager
def applying_functions_by(take: Callable[[Apply, Function, Any, Any], Any]) -> Iterator[None]:
    """Context in which every application of an autograd.Function goes through `take(apply, function, args, kwargs)`.

    This also catches `apply` methods that were looked up before the context began (`rounded = Round.apply`). What
    `take` puts in the place of a result is for a trace: ask it for no derivative.

    Args:
        take: function that replaces the application. Its first argument is torch's own `apply`, which it calls as
            `apply(function, *args, **kwargs)`.
    """
    functions: Any = torch.autograd.function
    transformed = functions.custom_function_call

    def apply_transformed(function: Function, *args: Any, **kwargs: Any) -> Any:
        return take(transformed, function, args, kwargs)

    # A user may hold a reference to Function.apply already. Up to torch 2.13 it is Python code that looks up another
    # `apply` at each call, which can be replaced. From 2.14 on, the first thing it looks up is the function's forward.
    is_python = hasattr(vars(torch.autograd.Function).get("apply"), "__func__")
    with (
        replaced(functions, custom_function_call=apply_transformed),
        _inner_apply_by(take) if is_python else _forwards_by(take),
    ):
        yield


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The `apply` of torch, behind what its Python has before it."""
    base: Any = torch.autograd.function._SingleLevelFunction
    return super(base, function).apply(*args, **kwargs)


def _inner_apply_by(take: Callable[[Apply, Function, Any, Any], Any]) -> AbstractContextManager[None]:
    """Context in which the `apply` that `Function.apply` of torch up to 2.13 looks for is `take`."""
    base: Any = torch.autograd.function._SingleLevelFunction
    own = classmethod(lambda function, *args, **kwargs: take(_apply, function, args, kwargs))
    return replaced(base, apply=own)


def _forwards_by(take: Callable[[Apply, Function, Any, Any], Any]) -> AbstractContextManager[None]:
    """Context in which `take` is called where an autograd.Function is about to run its forward."""
    expected: list[Any] = []  # Functions whose own forward runs next, the next one last

    def found(function: Any, name: str) -> Any:
        value = type.__getattribute__(function, name)
        if name == "forward":
            return _ForwardInPlace(function, value, take, expected)
        return _BackwardInPlace(value) if name == "backward" else value

    kind: Any = torch.autograd.function.FunctionMeta
    return replaced(kind, __getattribute__=found)


class _ForwardInPlace:
    """The forward of an autograd.Function, which gives way to `take`; its attributes are those of the forward."""

    def __init__(self, function: Any, forward: Any, take: Any, expected: list[Any]) -> None:
        self._function, self._forward = function, forward
        self._take, self._expected = take, expected

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._expected and self._expected[-1] is self._function:
            self._expected.pop()
            return self._forward(*args, **kwargs)
        # A forward without a `setup_context` of its own has the context as its first argument.
        has_setup = self._function.setup_context is not torch.autograd.Function.setup_context
        given, is_own = args[0 if has_setup else 1 :], False

        def apply(function: Any, *others: Any, **named: Any) -> Any:
            nonlocal is_own
            if function is self._function and [*map(id, others)] == [*map(id, given)]:
                is_own = True  # torch is about to apply it to them
                with _untraced_grad_mode(False):
                    return self._forward(*args, **named)
            self._expected.append(function)
            return _apply(function, *others, **named)

        with _untraced_grad_mode(True):
            result = self._take(apply, self._function, given, kwargs)
        if not has_setup and not is_own:
            leaves = torch.utils._pytree.tree_leaves(result)
            results = [x for x in leaves if isinstance(x, Tensor)]
            args[0].mark_non_differentiable(*[x for x in results if not x.requires_grad])
            args[0].in_its_place = [x.grad_fn for x in results if x.requires_grad]
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)


class _BackwardInPlace:
    """The backward of an autograd.Function; where a forward gave way, it is that of the result's own nodes."""

    def __init__(self, backward: Any) -> None:
        self._backward = backward

    def __call__(self, context: Any, *gradients: Any) -> Any:
        for node in getattr(context, "in_its_place", ()):
            run_node(node, gradients)
        return self._backward(context, *gradients)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backward, name)


@contextmanager
def _untraced_grad_mode(is_on: bool) -> Iterator[None]:
    """Context in which autograd is on or off, whose changes of the mode are in no trace."""
    before = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(is_on)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(before)


@contextmanager
def outside_of_traces() -> Iterator[None]:
    """Context inside a trace in which ops run as they do outside it: nothing is recorded, and autograd is on."""
    from torch.utils._python_dispatch import _disable_current_modes

    # An active TorchFunctionMode would record the change of the grad mode in the graph.
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.enable_grad():
        yield


def outside_functorch_transforms() -> AbstractContextManager[Any]:
    """A context without the transforms that the caller runs in, for tensors that are no arguments of them.

    A collective has no rule for vmap, and its gradient is that of the step, not of a transform inside.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def in_functorch_transform() -> bool:
    """Whether the caller runs inside vmap, grad or another transform of torch.func."""
    return torch._C._are_functorch_transforms_active()


def traced_ops(function: Callable[..., Any], examples: Sequence[Tensor]) -> fx.Graph:
    """The graph of ATen ops that a function runs on fake tensors, including the ops of derivatives that it computes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*examples).graph


@contextmanager
def noting_forward() -> Iterator[None]:
    """Context in which every autograd node records the traceback of its forward, for `forward_of_running_node`."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield


def forward_of_running_node() -> list[str] | None:
    """Lines of the forward's traceback for the autograd node that runs now; None where no node runs.

    The list is empty for a node that was made outside of `noting_forward`.
    """
    node: Any = torch._C._current_autograd_node()
    return None if node is None else list(node.metadata.get("traceback_", ()))


@contextmanager
def ending_transforms() -> Iterator[None]:
    """Ends the transforms (vmap, grad) that code inside has begun and not ended when it fails.

    A graph of Dynamo begins and ends them by calls of their own, and code that runs after it would run inside of them.
    """
    functorch: Any = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    except BaseException:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        raise

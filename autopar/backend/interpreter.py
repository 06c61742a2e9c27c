"""Runs a graph of Dynamo, on fake tensors or on proxies of export, and knows the user's line of every call."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar import _torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n(.*)')


def version_of(x: Any) -> int:
    # A tensor made in inference mode has no version; export refuses a graph that changes it.
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


class DynamoInterpreter(fx.Interpreter):
    """Runs a graph of dynamo on proxies or fake tensors; `held` is called on tensors of its own."""

    def __init__(self, module: fx.GraphModule, held: Callable[[Tensor], Tensor]) -> None:
        super().__init__(module)
        self._held = held
        self.extra_traceback = False  # the errors of this class are already written for users
        self.function = ""  # name of the autograd.Function that the running call applies
        self.place = ""  # line of the failed call, to be added to an error
        self.changes: dict[int, str] = {}  # storage -> line of the call that last wrote to it

    def run_node(self, n: fx.Node) -> Any:
        self.function = _applied_function(n)
        taken = [x for x in map(self.env.get, n.all_input_nodes) if isinstance(x, Tensor)]
        before = [version_of(x) for x in taken]
        try:
            result = super().run_node(n)
        except Exception:
            self.place = place_of_node(n)
            raise
        for x, version in zip(taken, before, strict=True):
            if version_of(x) != version:
                self.changes[_torch.storage_key(x)] = place_of_node(n)
        return result

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._held(value) if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = _STANDINS.get(name_of_target(target))
        return run(self, *args, **kwargs) if run else super().call_function(target, args, kwargs)

    def run_block(self, body: fx.GraphModule, *operands: Any, **how: Any) -> Any:
        """Runs a checkpointed block as plain ops; the plan decides what is saved for backward, and not `how`."""
        return DynamoInterpreter(body, self._held).run(*operands)

    def apply_function(self, forward: fx.GraphModule, backward: fx.GraphModule, *operands: Any, **facts: Any) -> Any:
        """Applies the user's autograd.Function, rebuilt from the graphs of its forward and backward."""
        found = function_of(forward, backward, self.function, facts["non_differentiable_idx"])
        return found.apply(*operands)

    def parameter(self, x: Tensor) -> Tensor:
        """Returns the stand-in of a sharded parameter, which already has the whole shape."""
        return x

    def enter_autocast(self, device: str, dtype: torch.dtype | None, on: bool, *_: Any) -> Any:
        """Enters `torch.autocast`, which export supports, in place of the private call in Dynamo's graph."""
        context = torch.autocast(device, dtype=dtype, enabled=on)
        context.__enter__()
        return context

    def exit_autocast(self, context: torch.autocast) -> None:
        """The end of `enter_autocast`."""
        context.__exit__(None, None, None)


_STANDINS: Mapping[str, Callable[..., Any]] = {
    "tag_activation_checkpoint": DynamoInterpreter.run_block,
    "autograd_function_apply": DynamoInterpreter.apply_function,
    "whole_parameter": DynamoInterpreter.parameter,
    "_enter_autocast": DynamoInterpreter.enter_autocast,
    "_exit_autocast": DynamoInterpreter.exit_autocast,
}


def place_of_node(node: fx.Node) -> str:
    """The innermost line of the user's code that a call of a dynamo graph comes from."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line, function, code = frames[-1]
    return f"\n  where:  {file}:{line} in {function}: {code.strip()}"


def place_of(module: fx.GraphModule) -> str:
    """The line of the user's code that the first call of a graph comes from, as a line to add to an error."""
    return next((place for node in module.graph.nodes if (place := place_of_node(node))), "")


def _applied_function(node: fx.Node) -> str:
    """`Straight` for a call from the line `y = Straight.apply(x)`, as dynamo does not keep the class."""
    return "".join(re.findall(r"(\w+)\.apply\(", place_of_node(node))[:1]) or "Function"


def name_of_target(target: Any) -> str:
    return getattr(target, "__name__", "")


def function_of(
    forward: fx.GraphModule, backward: fx.GraphModule, name: str, non_differentiable: Collection[int]
) -> type[torch.autograd.Function]:
    """Makes an autograd.Function from the two graphs of dynamo's operator `autograd_function_apply`.

    That operator runs once, and keeps what it saves outside `ctx`. This class may run for any number of micro-batches
    before their backwards.

    Args:
        forward: takes the operands, and returns the results and what is saved.
        backward: takes the gradients of the results and what was saved.
        name: name of the class.
        non_differentiable: positions of the results that require no gradient.
    """

    def run_forward(ctx: Any, *operands: Any) -> tuple[Any, ...]:
        results, saved = _run(forward, *operands)
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in saved))
        ctx.others = [None if isinstance(x, Tensor) else x for x in saved]
        ctx.mark_non_differentiable(*(results[i] for i in non_differentiable))
        return tuple(results)

    def run_backward(ctx: Any, *gradients: Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        return _run(backward, *gradients, *(other if x is None else x for x, other in pairs))

    members = {
        "forward": staticmethod(run_forward),
        "backward": staticmethod(run_backward),
        "__module__": "dynamo",
        "traced_code": forward.code + backward.code,  # equal where functions do the same
    }
    return type(name, (torch.autograd.Function,), members)


def _run(graph: fx.GraphModule, *arguments: Any) -> Any:
    """Runs a graph, which may leave autograd on or off."""
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return fx.Interpreter(graph).run(*arguments)

"""Finds effects of a forward that a trace would forget, while the forward runs.

Export records ops on tensors. It does not record that a buffer was replaced by assignment, or that a region ran in
inference mode, or that a function changes what is saved for backward or a gradient. Without these checks the captured
graph would silently train something else.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from autopar._torch import replaced
from autopar.capture.guards.refusals import BACKEND_RUNS_IT
from autopar.capture.guards.user_code import is_users, place_of

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")  # of tensors
_NODE_HOOKS = {"register_hook", "register_prehook"}


def _called_by_user(frame: FrameType | None) -> bool:
    """Whether user code entered a mode: the nearest frame, decorators left out, is outside torch."""
    while frame is not None and frame.f_code.co_filename.endswith("_contextlib.py"):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(os.path.dirname(torch.__file__))


@contextlib.contextmanager
def watching(model: nn.Module) -> Iterator[list[str]]:
    """Context that collects the effects of a forward which export does not record.

    The yielded list gets a sentence for each buffer that is assigned a new tensor, for each
    `torch.inference_mode` and each `saved_tensors_hooks` that is entered, and for each hook on a gradient.
    """
    seen: list[str] = []
    with _noting_hooks(seen), _noting_modes(model, seen):
        yield seen


@contextlib.contextmanager
def _noting_modes(model: nn.Module, seen: list[str]) -> Iterator[None]:
    modules = set(model.modules())  # and not those that export makes for itself
    set_attribute = nn.Module.__setattr__
    enter, save = torch.inference_mode.__enter__, saved_tensors_hooks.__enter__

    def assign(module: nn.Module, name: str, value: Any) -> None:
        # To assign a buffer what it already holds changes nothing.
        changed = isinstance(value, Tensor) and value is not module._buffers.get(name)
        if changed and module in modules and name in module._buffers:
            seen.append(
                f"the buffer `{name}` of {type(module).__name__} is assigned in forward, which a graph "
                f"forgets; update it in place: self.{name}.copy_(...). {BACKEND_RUNS_IT}"
            )
        set_attribute(module, name, value)

    def enter_inference(mode: Any) -> None:
        if _called_by_user(sys._getframe(1)):
            seen.append("torch.inference_mode() cannot be captured; use torch.no_grad().")
        enter(mode)

    def enter_hooks(hooks: saved_tensors_hooks) -> None:
        # Those of torch, such as save_on_cpu, give back what they have taken.
        own = type(hooks) is saved_tensors_hooks or not type(hooks).__module__.startswith("torch.")
        if own and _called_by_user(sys._getframe(1)):
            line = place_of(sys._getframe(1))
            seen.append(
                f"the forward changes what is saved for backward, by saved_tensors_hooks in {line}, which a graph "
                f"forgets; leave it out and ask for recompute=... or precision=... . {BACKEND_RUNS_IT}"
            )
        save(hooks)

    with (
        replaced(nn.Module, __setattr__=assign),
        replaced(torch.inference_mode, __enter__=enter_inference),
        replaced(saved_tensors_hooks, __enter__=enter_hooks),
    ):
        yield


def _noting_hooks(seen: list[str]) -> contextlib.AbstractContextManager[None]:
    """Notes hooks that the forward registers on gradients, on tensors or on autograd's nodes."""

    def note(frame: FrameType) -> None:
        seen.append(
            f"the forward registers a hook on a gradient in {place_of(frame)}, which a graph forgets; compute it in "
            f"the backward of a torch.autograd.Function instead. {BACKEND_RUNS_IT}"
        )

    def noting(register: Any) -> Any:
        def noted(x: Tensor, hook: Any) -> Any:
            frame = sys._getframe(1)
            by_torch = frame.f_code.co_filename.endswith(os.path.join("autograd", "graph.py"))
            if by_torch or _called_by_user(frame):  # torch's own is register_multi_grad_hook
                note(frame)
            return register(x, hook)

        return noted

    def read_node(x: Tensor) -> Any:
        frame = sys._getframe(1)
        if is_users(frame.f_code.co_filename) and _NODE_HOOKS & {*frame.f_code.co_names}:
            note(frame)
        return node_of.__get__(x)

    registers = {name: noting(getattr(Tensor, name)) for name in _HOOKS}
    node_of: Any = Tensor.grad_fn
    return replaced(Tensor, grad_fn=property(read_node), **registers)


class OutsideLeaves(TorchFunctionMode):
    """Collects the operands of ops that require a gradient and are not parameters of `model`.

    Export makes constants of them, and forgets that they require a gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = set(map(id, model.parameters()))
        self.found: dict[int, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for given in (*args, *(kwargs or {}).values()):
            for x in given if isinstance(given, list | tuple) else (given,):
                taken = type(x) in (Tensor, nn.Parameter) and x.is_leaf and x.requires_grad
                if taken and id(x) not in self._own:
                    self.found[id(x)] = x
        return function(*args, **(kwargs or {}))

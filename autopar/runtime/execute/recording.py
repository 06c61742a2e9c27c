"""Recording: which call of a block made the memory of every tensor, while the block runs.

Every call of a block is a `RecordedCall`. It reports its begin and its results to the block's current
`CallRecording`. A run without a recording calls the ops alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from autopar import _torch
from autopar.ops.nodes import draws

# A call, and the position among its results or among what it saves of its own.
Place = tuple[str, int]


class CurrentRecording:
    """The recording that the calls of a block report to."""

    def __init__(self) -> None:
        self.run: CallRecording | None = None

    def recording(self, run: CallRecording) -> contextlib.AbstractContextManager[None]:
        """Context in which every call of an op goes through `run`."""
        return _torch.replaced(self, run=run)


class RecordedCall(nn.Module):
    """A call that reports its begin and its results."""

    def __init__(self, node: fx.Node, root: nn.Module, current: CurrentRecording) -> None:
        super().__init__()
        self.name, self.draws = node.name, draws(node)
        self._call: Any = root.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        self._current = current

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = self._current.run
        if run is None:
            return self._call(*args, **kwargs)
        run.begin(self)
        result = self._call(*args, **kwargs)
        run.end(self, result)
        return result


class CallRecording:
    """One run of a block's calls, with the call that computed the memory of every tensor.

    Attributes:
        at: the call that runs now.
        own: number of tensors that it has saved internally so far, before its result is known.
    """

    def __init__(self) -> None:
        self.at, self.own = "", 0
        # Storage -> a reference that keeps its address from being used again, and where it was made.
        self._homes: dict[int, tuple[Any, Place | None]] = {}

    def begin(self, step: RecordedCall) -> None:
        self.at, self.own = step.name, 0

    def end(self, step: RecordedCall, result: Any) -> None:
        for i, x in enumerate(tensors_of(result)):
            self.note(x, (step.name, i))

    def note(self, x: Tensor, place: Place | None) -> None:
        """Registers the call that computed a tensor, unless the tensor's storage is registered already."""
        reference = _torch.storage_reference(x)
        self._homes.setdefault(reference.cdata, (reference, place))

    def home(self, x: Tensor) -> tuple[bool, Place | None]:
        """Whether the memory of a tensor is known, and the place that computed it; None for inputs."""
        reference, place = self._homes.get(_torch.storage_key(x), (None, None))
        return reference is not None, place

    def next_own(self) -> Place:
        """The place of the next tensor that the current call saves internally."""
        place = self.at, self.own
        self.own += 1
        return place


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a result: itself, or those in a tuple or list, which may hold further ones."""
    if isinstance(result, (tuple, list)):
        return [x for each in result for x in tensors_of(each)]
    return [result] if isinstance(result, Tensor) else []


def mapped(result: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """A result in which a function has replaced every object of a kind."""
    if isinstance(result, kind):
        return function(result)
    if isinstance(result, (tuple, list)):
        return type(result)(mapped(each, kind, function) for each in result)
    return result

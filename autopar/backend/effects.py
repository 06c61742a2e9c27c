"""The effects of a Dynamo graph on its arguments: in-place changes, and results that are views of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autopar import _torch
from autopar.backend.interpreter import DynamoInterpreter, version_of
from autopar.backend.sharding import whole_parameter
from autopar.errors import CaptureError, first_line


@dataclass(frozen=True)
class ReturnedView:
    """A result that shares memory with an argument.

    Attributes:
        argument: position of that argument.
        shape, stride: geometry of the view, in elements.
        offset: first element of the view, counted from the argument's first.
        is_argument: whether it is the argument itself.
        needs_grad: whether a gradient flows back.
    """

    argument: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_argument: bool
    needs_grad: bool

    def of(self, arguments: Sequence[Any]) -> Tensor:
        """The view of the argument as it is now."""
        base = whole_parameter(arguments[self.argument])
        if self.is_argument:
            return base
        view = base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)
        return view if self.needs_grad else view.detach()


def effects_of(module: fx.GraphModule, arguments: Sequence[Any]) -> tuple[dict[int, str], tuple[Any, ...]]:
    """Position of each argument that is changed in place -> the line that changes it; and `Lifted.results`."""
    with _torch.fake_mode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        before = [version_of(x) for x in fakes]
        held = _Held(mode)
        interpreter = DynamoInterpreter(module, held)
        results = _run_fake(interpreter, fakes)
        held.refuse_changed()
        changed = {
            i: interpreter.changes.get(_torch.storage_key(x), "")
            for i, x in enumerate(fakes)
            if version_of(x) != before[i]
        }
        _refuse_new_gradients(changed, fakes, arguments)
        return changed, tuple(_result(x, fakes) for x in results)


class _Held:
    """Tensors that are attributes of a graph, not arguments: for example the parameters of a compiled optimizer."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._fakes: dict[int, tuple[Tensor, int]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            raise CaptureError("The graph holds a tensor that requires a gradient and is not one of its arguments.")
        if id(x) not in self._fakes:
            fake = self._mode.from_tensor(x)
            self._fakes[id(x)] = (fake, version_of(fake))
        return self._fakes[id(x)][0]

    def refuse_changed(self) -> None:
        if any(version_of(fake) != before for fake, before in self._fakes.values()):
            raise CaptureError("The graph changes a tensor in place that is not one of its arguments.")


def _run_fake(interpreter: DynamoInterpreter, fakes: Sequence[Any]) -> Sequence[Any]:
    try:
        return interpreter.run(*fakes)
    except CaptureError as error:
        raise CaptureError(f"{error}{interpreter.place}") from error
    except Exception as error:  # whatever an op without a fake kernel raises
        text = first_line(error)
        if "_local_scalar_dense" in text:
            text = "it reads a number from a tensor; Dynamo also makes a tensor of a float argument whose value changes"
        reason = f"The graph cannot be run on fake tensors: {text.rstrip('.')}."
        raise CaptureError(reason + interpreter.place) from error


def _result(x: Any, arguments: Sequence[Any]) -> Any:
    if not isinstance(x, Tensor):
        return x
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor) and shares_memory(x, argument):
            if x.dtype != argument.dtype:
                raise CaptureError("A result is a view of an argument with another dtype.")
            shape, stride = tuple(x.shape), tuple(x.stride())
            offset = int(x.storage_offset()) - int(argument.storage_offset())
            return ReturnedView(i, shape, stride, offset, x is argument, x.requires_grad)
    return None


def _refuse_new_gradients(changed: Mapping[int, str], fakes: Sequence[Any], arguments: Sequence[Any]) -> None:
    """Refuses a value with a gradient that is written into an argument without one; the gradient would be lost."""
    for i, place in changed.items():
        if fakes[i].requires_grad and not arguments[i].requires_grad:
            raise CaptureError(
                "The graph writes a value that requires a gradient into a tensor that does not; detach it first."
                + place
            )


def shares_memory(x: Tensor, y: Tensor) -> bool:
    return _torch.storage_key(x) == _torch.storage_key(y)


def refuse_shared(
    changed: Mapping[int, str], tensors: Sequence[int], names: Sequence[str], arguments: Sequence[Any]
) -> None:
    for i, place in changed.items():
        if arguments[i].requires_grad:
            raise CaptureError(
                f"{names[i]} requires a gradient and is changed in place; clone it first, or change it outside of the "
                f"compiled code.{place}"
            )
        shared = [j for j in tensors if j != i and shares_memory(arguments[i], arguments[j])]
        if shared:
            raise CaptureError(
                f"{names[i]} is changed in place and shares its memory with {names[shared[0]]}; "
                f"clone one of them first.{place}"
            )

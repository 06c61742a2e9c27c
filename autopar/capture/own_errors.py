"""Errors of the model itself: a wrong shape or dtype, a misspelt attribute, a failed check in the user's code.

They first occur during tracing, which would report that the model cannot be captured. So the model runs once more
without a trace, on tensors without values. If it fails there because a call of torch failed, this call alone is
repeated on zeros of the same shapes. If that fails too, the model would have failed on a single device, with this same
error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar import _torch
from autopar._torch import pytree
from autopar.capture.remedies import MODEL
from autopar.errors import AutoparError, first_line

_MOST_ELEMENTS = 2**24  # of the zeros on which a call is repeated
_TORCH = Path(torch.__file__).parent
_OURS = (_TORCH, Path(__file__).resolve().parents[1])


def own_error(wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """The error that the model raises on one device, with a note of module and line; None where tracing alone fails.

    Args:
        wrapper: the model, in its attribute `model`, with its loss, in `loss_fn`.
        args, kwargs: arguments of the wrapper.
    """
    calls = _FailedCalls()
    try:
        with _torch.without_values(wrapper, args, kwargs) as (given, named), torch.no_grad(), calls:
            wrapper(*given, **named)
    except AutoparError:
        return None
    except Exception as error:
        found = calls.on_one_device(error)
        if found is not None:
            found.add_note(_place(error, wrapper))
        return found
    return None


class _FailedCalls(TorchFunctionMode):
    """Remembers the calls of torch that failed, also those whose errors the model has caught."""

    def __init__(self) -> None:
        super().__init__()
        self._failed: list[tuple[Exception, Callable[[], object]]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self._failed.append((error, partial(_repeated, func, args, kwargs or {})))
            raise

    def on_one_device(self, error: Exception) -> Exception | None:
        """The error that the model would raise on a single device; None if it would raise none."""
        behind = list(_causes(error))
        call = next((call for failed, call in self._failed if failed in behind), None)
        if call is None:
            return _raised_by_model(error)
        try:
            call()
        except Exception as again:
            return again if any(failed is error for failed, _ in self._failed) else error
        return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and the errors during whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _repeated(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Repeats a call on zeros, unless they would take much memory."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if sum(x.numel() for x in tensors) <= _MOST_ELEMENTS:
        args, kwargs = pytree.tree_map_only(Tensor, _zeros, (args, kwargs))
        with torch.no_grad():
            function(*args, **kwargs)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def _raised_by_model(error: Exception) -> Exception | None:
    """The error if a line of the model, or a check of torch's modules, raised it; None if the code around them did."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    by_torch = any(Path(innermost).is_relative_to(folder) for folder in _OURS)
    is_check = Path(innermost).is_relative_to(_TORCH / "nn")
    return error if is_check or not by_torch else None


def _place(error: BaseException, wrapper: nn.Module) -> str:
    """The line of the model's code and the innermost module that ran."""
    where = _torch.user_line(error) or _in_loss(error, wrapper) or "a line that no frame names"
    lines = [f"where:  {where}"]
    names = {module: name.removeprefix(MODEL) for name, module in wrapper.named_modules()}
    running = [(m, args) for m, args in _running(error) if names.get(m, "") not in ("", MODEL[:-1])]
    if running:
        module, args = running[-1]
        given = ", ".join(
            f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            for x in pytree.tree_leaves(args)
            if isinstance(x, Tensor)
        )
        kind = first_line(repr(module))
        lines.append(f"module: {names[module]}, {kind}{f', which is given {given}' if given else ''}")
    return "\n".join([*lines, "The model fails in the same way on one device; autopar does not cause this error."])


def _in_loss(error: BaseException, wrapper: nn.Module) -> str | None:
    """Words for a loss function that raised an error with no line of the user's, such as torch's own losses."""
    loss_fn = getattr(wrapper, "loss_fn", None)
    if loss_fn is None or any(module is wrapper.model for module, _ in _running(error)):
        return None
    return f"in the loss function {getattr(loss_fn, '__name__', type(loss_fn).__name__)}"


def _running(error: BaseException) -> Iterator[tuple[nn.Module, tuple[Any, ...]]]:
    """The modules that were called when the error was raised, each with its arguments, outermost first."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is nn.Module._call_impl.__code__:
            yield frame.f_locals["self"], frame.f_locals["args"]

"""Errors of the model itself: a wrong shape or dtype, a misspelt attribute, a check of the user's that fails.

Tracing meets them first, and would report a model that cannot be captured. So the model is run once more without a
trace, on tensors without values. Where it fails there in a call of torch, that call alone is repeated on zeros of the
same shapes: if it fails too, the model would have failed on one device, with this very error.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar import _torch
from autopar._torch import pytree
from autopar.capture.remedies import MODEL
from autopar.errors import AutoparError

_MOST_ELEMENTS = 2**24  # of the zeros on which a call is repeated
_TORCH = Path(torch.__file__).parent
_OURS = (_TORCH, Path(__file__).resolve().parents[1])


def own_error(
    wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """The error that the model raises on one device, with a note of module and line; None where tracing alone fails.

    Args:
        wrapper: the model with its loss, in its attribute `model`.
        args, kwargs: arguments of the wrapper.
    """
    calls = _FailedCall()
    try:
        with _torch.without_values(wrapper, args, kwargs) as (given, named), torch.no_grad(), calls:
            wrapper(*given, **named)
    except AutoparError:
        return None
    except Exception as error:
        found = calls.repeated() if calls.failed is not None else _raised_by_model(error)
        if found is not None:
            found.add_note(_place(error, wrapper))
        return found
    return None


class _FailedCall(TorchFunctionMode):
    """Remembers the call of torch that failed."""

    failed: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.failed = self.failed or (func, args, kwargs or {})
            raise

    def repeated(self) -> Exception | None:
        """The error of the failed call on zeros; None if it does not fail there, or would take much memory."""
        assert self.failed is not None, "a call has failed"
        function, args, kwargs = self.failed
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if sum(x.numel() for x in tensors) > _MOST_ELEMENTS:
            return None
        args, kwargs = pytree.tree_map_only(Tensor, _zeros, (args, kwargs))
        try:
            with torch.no_grad():
                function(*args, **kwargs)
        except Exception as error:
            return error
        return None


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def _raised_by_model(error: Exception) -> Exception | None:
    """An error that a line of the model, or a check of torch's modules, raises; None for one of what runs them."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    by_torch = any(Path(innermost).is_relative_to(folder) for folder in _OURS)
    is_check = Path(innermost).is_relative_to(_TORCH / "nn")
    return error if is_check or not by_torch else None


def _place(error: BaseException, wrapper: nn.Module) -> str:
    """The line of the model's code and the innermost module that ran."""
    lines = [f"where:  {_torch.user_line(error) or 'a line that no frame names'}"]
    names = {module: name.removeprefix(MODEL) for name, module in wrapper.named_modules()}
    running = [(m, args) for m, args in _running(error) if names.get(m, "") not in ("", MODEL[:-1])]
    if running:
        module, args = running[-1]
        given = ", ".join(
            f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            for x in pytree.tree_leaves(args)
            if isinstance(x, Tensor)
        )
        kind = repr(module).splitlines()[0]
        lines.append(
            f"module: {names[module]}, {kind}{f', which is given {given}' if given else ''}"
        )
    return "\n".join([*lines, "The model fails so on one device too; autopar has no part in it."])


def _running(error: BaseException) -> Iterator[tuple[nn.Module, tuple[Any, ...]]]:
    """The modules that were called when the error was raised, each with its arguments, outermost first."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is nn.Module._call_impl.__code__:
            yield frame.f_locals["self"], frame.f_locals["args"]

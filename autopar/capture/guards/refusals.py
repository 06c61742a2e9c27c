"""Errors for Python code that a captured program cannot repeat in each step: its line, and what to do instead."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from autopar._torch import backward_hooks_of
from autopar.capture.guards.guards import Place
from autopar.capture.guards.user_code import line_of
from autopar.errors import CaptureError

BACKEND_RUNS_IT = 'torch.compile(model, backend="autopar") runs it as it is written.'
_MOST_NAMED = 5  # of the hooks on a model's backward


def sets_attribute(name: str, attribute: str, line: str, *, deletes: bool) -> CaptureError:
    """The error for an attribute of a module that forward deletes, or sets to a value that only a run can give.

    Args:
        name: path of the attribute, `model.last`.
        attribute: its own name, `last`.
        line: the line that sets it.
        deletes: whether it is deleted.
    """
    return CaptureError(
        f"The forward {'deletes' if deletes else 'sets'} {name} in {line}, but a captured program does not run that "
        "line in each step. Return the value from the forward, or keep a tensor in a buffer and write into it: "
        f"self.register_buffer({attribute!r}, ...) in __init__, self.{attribute}.copy_(...) here. {BACKEND_RUNS_IT}"
    )


def warn_of_library(does: str, line: str) -> None:
    """Warns of state that an installed library keeps; people cannot change its code.

    Args:
        does: verb and name, `sets model.layers.0.last`.
        line: the line of the library.
    """
    warnings.warn(
        f"A library {does} in {line}, but a captured program does not run that line in each step: what stands "
        "there stays as it was before the capture.",
        stacklevel=2,
    )


def changes(place: Place) -> CaptureError:
    """The error for a container, object, closure or global that forward or loss changes."""
    return CaptureError(
        f"The forward or the loss changes {place.words} (read in {place.line}), but a captured program does not do "
        f"that in each step. Do it outside, after step, or return what it collects from the forward. {BACKEND_RUNS_IT}"
    )


def draws_in_python(line: str, *, is_own: bool) -> CaptureError:
    """The error for random numbers drawn from the generators of Python or numpy.

    Args:
        line: the line that draws.
        is_own: whether it draws from a `random.Random` of the user's own, which torch.compile gets wrong.
    """
    backend = "" if is_own else f" {BACKEND_RUNS_IT}"
    return CaptureError(
        f"The forward or the loss draws from Python's or numpy's random numbers in {line}; a captured program would "
        "repeat the first draw in every step. Draw with torch (torch.rand, torch.bernoulli) and choose with "
        f"torch.where, or draw outside and give the result as an input.{backend}"
    )


def draws_from_own(generator: str, line: str) -> CaptureError:
    """The error for draws from a user's `random.Random` under torch.compile, which would repeat the first draw.

    Args:
        generator: name of the generator in Dynamo.
        line: the line that uses the number; "" if none does.
    """
    where = f" in {line}" if line else ""
    return CaptureError(
        f"The forward or the loss draws from the random.Random {generator}{where}, and torch.compile repeats the first "
        "draw in each step, with any backend. Draw with torch (torch.rand) or with Python's own random.random(), or "
        "outside, and give the result as an input."
    )


def replaces_method(name: str, line: str) -> CaptureError:
    """The error for a method of a class that was replaced after torch.compile had read it.

    Args:
        name: class and method, `Model.forward`.
        line: the line where the new method begins.
    """
    return CaptureError(
        f"{name} was replaced by the function in {line} after torch.compile had read it, but torch.compile keeps using "
        "the old one, with any backend. Call torch.compiler.reset() after the change, or replace the method of the "
        "object (`model.forward = ...`), which torch.compile does notice."
    )


def changes_hooks_of_all() -> CaptureError:
    """The error for hooks of all modules that were registered or removed after torch.compile had read them."""
    return CaptureError(
        "Hooks of all modules (torch.nn.modules.module.register_module_forward_hook and the like) were registered or "
        "removed after torch.compile had read them, but torch.compile keeps using the old ones, with any backend. Call "
        "torch.compiler.reset() after the change, or register hooks on the modules that need them."
    )


def runs_cached(name: str, line: str, read: str) -> CaptureError:
    """The error for a function with a cache that a capture runs again, though Python would not.

    Args:
        name: name of the function.
        line: the line where it begins.
        read: name of a global that has changed; "" if none has.
    """
    what = f"the global {read}" if read else "a value"
    return CaptureError(
        f"{name} in {line} keeps its results (functools.lru_cache) and reads {what}, which has changed. "
        "Python would return the earlier result, but a capture (also that of torch.compile) runs the function again. "
        "Give the value as an argument of the function, call its cache_clear() after the change, or call the function "
        "outside of the compiled code."
    )


def reads_clock(line: str) -> CaptureError:
    """The error for readings of the clock or of the machine's entropy."""
    return CaptureError(
        f"The forward or the loss reads the clock or the machine's noise in {line}, but a captured program does not "
        "run that line in each step. Read it outside, and give what depends on it as an input."
    )


def reads_iterator(value: Any, place: Place) -> CaptureError:
    """The error for an iterator or a random generator, whose next value cannot be read without changing it."""
    return CaptureError(
        f"The forward or the loss reads the {type(value).__name__} {place.words} in {place.line}, whose next value "
        "no captured program can know. Take its value outside, and give it as an input."
    )


def reads_weakly(place: Place) -> CaptureError:
    """The error for a weak reference to an object, which may be gone in a later step."""
    return CaptureError(
        f"The forward or the loss reads the weak reference {place.words} in {place.line}; its object may change or be "
        f"gone later, and a guard on it would keep it alive. Hold the object itself. {BACKEND_RUNS_IT}"
    )


def backward_hooks(model: nn.Module) -> list[str]:
    """The hooks on a model's backward in words: those of parameters, then those of modules.

    Forward hooks are not among them: they are called while the model is captured, what they compute is part
    of the graph, and what they store is refused.
    """
    found = [(f"parameter {name!r}", p) for name, p in model.named_parameters()]
    modules = list(model.named_modules())
    found += [(f"module {name!r}" if name else "the model itself", m) for name, m in modules]
    return [f"{owner} ({line})" for owner, x in found for line in _lines(x)]


def _lines(x: Tensor | nn.Module) -> Iterator[Any]:
    for hook in backward_hooks_of(x):
        yield line_of(hook)


def refuse_hooks(hooks: list[str]) -> None:
    """Raises CaptureError where there are hooks, by owner and line."""
    if not hooks:
        return
    rest = len(hooks) - _MOST_NAMED
    named = ", ".join(hooks[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
    raise CaptureError(
        f"There are backward hooks on {named}. A captured program does not call them: do what they do with the "
        "gradients between `step` and the optimizer's, and remove the hooks. For work that must run inside backward "
        f"write an autograd.Function, or an operation on tensors in forward. {BACKEND_RUNS_IT}"
    )

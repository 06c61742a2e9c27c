"""Capturable forms: functions that compute what a module class does, without control flow that depends on values.

    def experts(module, x, ids, shares): ...            # the forward of MyExperts, as torch.export can take it

    autopar.register_form(MyExperts, experts)

While a model is traced, and only then, the form replaces the `forward` of each module of the class. Parameters,
submodules and hooks remain those of the module. A subclass has no form. A form is registered once for the process, like
the rule of an op (`autopar.register_rule`).

[Note: proof of a form] Before a model is traced, it runs once without forms on the captured inputs. Each module with a
form is then run, itself and as its form, on the arguments of that run: results, and gradients of parameters and inputs,
are compared. Both draw the same random numbers. Dropout is off, because the masks of the two would lie on rows in
different orders. Tensors without values prove nothing, and the log says so: tensors of the meta device, and the fake
tensors on which `autopar.compile` captures. `autopar.verify` has values.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar._torch import DropoutBase, FakeTensor, pytree
from autopar.capture.forms.mixtures import ROWS
from autopar.errors import CaptureError
from autopar.rules.proofs import HALF_TOLERANCE, tolerance
from autopar.rules.trial import distance, weights

log = logging.getLogger("autopar")

Form = Callable[..., Any]
FORMS: dict[str, Form] = dict(ROWS)  # by the qualified name of a class


def register_form(module_class: type[nn.Module], form: Form) -> None:
    """Registers a function that computes the same as modules of a class, and is captured in their place.

    Args:
        module_class: class of the modules; subclasses have no form, because they may compute something else.
        form: function that is called as `form(module, *args, **kwargs)` in place of `module.forward(*args, **kwargs)`
            while the model is traced. It takes parameters from the module, and may call `module_class.forward`.

    Raises:
        CaptureError: if `module_class` is not a class of modules; at capture, if the form and the module give different
            results on the captured inputs.

    >>> import autopar, torch
    >>> class Halves(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x * 0.5 if x.sum().item() > 0 else x / 2
    >>> autopar.register_form(Halves, lambda module, x: x * 0.5)
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise CaptureError(f"A form belongs to a class of torch.nn.Module, not to {module_class!r}; give the class.")
    FORMS[_name(module_class)] = form


@contextlib.contextmanager
def capturable(run: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, ...]]:
    """Context in which proved forms replace the forwards of modules; yields a line for each class of such modules.

    Args:
        run: function that calls the model with the captured inputs `args` and `kwargs`.

    Raises CaptureError for a form that computes something else.
    """
    found = {name: module for name, module in model.named_modules() if _has_form(module)}
    if found:
        has_values = _has_values(model, args, kwargs)
        proved = _prove(lambda: run(*args, **kwargs), model, found) if has_values else []
        lines = tuple(_lines(found, proved))
        for line in lines:
            log.info("%s", line)
    with _forwards({module: _form_of(module) for module in found.values()}):
        yield lines if found else ()


def _name(module_class: type) -> str:
    return f"{module_class.__module__}.{module_class.__qualname__}"


def _form_of(module: nn.Module) -> Form:
    return FORMS[_name(type(module))]


def _has_form(module: nn.Module) -> bool:
    """Whether there is a form for a module's class, and the module has no forward of its own."""
    return _name(type(module)) in FORMS and "forward" not in vars(module)


def _lines(found: Mapping[str, nn.Module], proved: Sequence[nn.Module]) -> Iterator[str]:
    names: dict[tuple[str, bool], list[str]] = {}
    for name, module in found.items():
        key = type(module).__qualname__, module in proved
        names.setdefault(key, []).append(name.removeprefix("model."))
    for (kind, is_proved), where in names.items():
        how = (
            "on the captured inputs"
            if is_proved
            else "not here, where it is not called with values (autopar.verify calls it so)"
        )
        yield (f"{kind} was captured in a form without control flow on values, proved {how}: {', '.join(where)}")


@contextlib.contextmanager
def _forwards(forms: Mapping[nn.Module, Form]) -> Iterator[None]:
    """Context in which functions replace the forwards of modules; hooks of the modules still run."""

    def bound(module: nn.Module, form: Form) -> Form:
        return lambda *args, **kwargs: form(module, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for module, form in forms.items():
            stack.enter_context(_torch.replaced(module, forward=bound(module, form)))
        yield


def _has_values(model: nn.Module, *inputs: Any) -> bool:
    leaves = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    return all(map(_has_value, (*model.parameters(), *model.buffers(), *leaves)))


def _has_value(x: Tensor) -> bool:
    return not x.is_meta and not isinstance(x, (FakeTensor, DTensor))


# --- proof


def _prove(run: Callable[[], Any], model: nn.Module, found: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Runs the model, and every module with a form twice, itself and as its form; returns the compared modules."""
    names = {module: name.removeprefix("model.") for name, module in found.items()}
    compared: list[nn.Module] = []
    running: list[nn.Module] = []

    def both(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not running and not any(x.is_meta for x in values):  # those inside it are compared by themselves
            running.append(module)
            _compare(module, names[module], args, kwargs)
            compared.append(running.pop())
        return type(module).forward(module, *args, **kwargs)

    held = {name: x.detach().clone() for name, x in _state(model)}
    with _torch.forked_random_state(_devices(model)), torch.no_grad(), _forwards(dict.fromkeys(found.values(), both)):
        # The forward changes copies in place (statistics, casts of a parameter).
        _torch.call_with(_Called(model, run), {f"model.{n}": x for n, x in held.items()}, (), {})
    return compared


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


class _Called(nn.Module):
    """A function that calls a module, wrapped as a module so that `call_with` can replace its parameters."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _devices(model: nn.Module) -> list[torch.device]:
    return [parameter.device for parameter in model.parameters()]


def _compare(module: nn.Module, name: str, args: Any, kwargs: Any) -> None:
    """Raises CaptureError unless the form computes what the module does."""
    form = _form_of(module)
    claim = f"The form {getattr(form, '__name__', form)} of {type(module).__qualname__} ({name}) does not hold"
    with _without_dropout(module):
        want = _outcome(type(module).forward, module, args, kwargs)
        try:
            with _torch.as_if_compiling():  # forms may ask, and so do models
                got = _outcome(form, module, args, kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError) as fault:
            raise CaptureError(f"{claim}: it fails ({fault}). Register one that computes the same.") from fault
    if len(want) != len(got):
        raise CaptureError(f"{claim}: it gives {len(got)} tensors, but the module {len(want)}.")
    error = max((distance(g.to(w.dtype), w) for g, w in zip(got, want, strict=True)), default=0.0)
    if not error <= _tolerance(want):
        raise CaptureError(
            f"{claim}: results or gradients differ by {error:.2g} of their largest value on the captured inputs. "
            "Register one that computes the same with autopar.register_form."
        )


def _outcome(run: Form, module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """Results, then gradients of parameters and floating inputs, in the dtypes of these."""
    held = {name: _leaf(x.detach().clone()) for name, x in module.named_parameters()}
    buffers = {f"model.{name}": x.detach().clone() for name, x in module.named_buffers()}
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [_leaf(x) for x in leaves]
    called = _Called(module, lambda *args, **kwargs: run(module, *args, **kwargs))
    with _torch.forked_random_state(_devices(module)), torch.enable_grad():
        # A clone, because a leaf may not be changed in place.
        own, named = pytree.tree_unflatten(pytree.tree_map_only(Tensor, torch.clone, leaves), spec)
        parameters = {f"model.{n}": x for n, x in held.items()}
        result = _torch.call_with(called, parameters | buffers, own, named)
    results = [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor)]
    wanted = [x for x in (*held.values(), *leaves) if isinstance(x, Tensor) and x.requires_grad]
    return [*(y.detach() for y in results), *_gradients(results, wanted)]


def _leaf(x: Any) -> Any:
    return x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x


def _gradients(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[Tensor, ...]:
    ends = [y for y in results if y.requires_grad]
    if not ends:  # no row went to what has parameters
        return tuple(map(torch.zeros_like, wanted))
    if not wanted:
        return ()
    return torch.autograd.grad(ends, wanted, [weights(y) for y in ends], allow_unused=True, materialize_grads=True)


@contextlib.contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for dropout in (m for m in module.modules() if isinstance(m, DropoutBase)):
            stack.enter_context(_torch.replaced(dropout, training=False))
        yield


def _tolerance(tensors: Sequence[Tensor]) -> float:
    if any(torch.is_autocast_enabled(x.device.type) for x in tensors):
        return HALF_TOLERANCE
    return tolerance(x.dtype for x in tensors if x.is_floating_point())

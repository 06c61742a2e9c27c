"""torch.export: traces without values, checks to make before a trace, and the source lines of errors."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import apis, eager_transforms, vmap
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar._torch import pytree
from autopar._torch.contexts import logging_only, replaced

# What a fake tensor answers to an op that has to read values.
DependsOnValues = DataDependentOutputException


# The same of an op with the size of whose result it does.
SizeDependsOnValues = DynamicOutputShapeException


# Both, and the answer to a comparison of such numbers.
VALUES_READ = (DependsOnValues, SizeDependsOnValues, GuardOnDataDependentSymNode)


def call_with(model: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls a model with other tensors in place of its parameters and buffers, tied ones included.

    It is `torch.func.functional_call`, which leaves its tensors in a module that has two names (2.13): it swaps
    them in twice, and takes the first for the module's own.
    """
    every = (model.named_parameters, model.named_buffers)
    own = {name: x for named in every for name, x in named(remove_duplicate=False)}
    given = {id(own[name]): x for name, x in tensors.items()}
    once = {
        f"{prefix}.{name}".lstrip("."): given[id(x)]
        for prefix, module in model.named_modules()
        for name, x in itertools.chain(module._parameters.items(), module._buffers.items())
        if id(x) in given
    }
    return torch.func.functional_call(model, once, args, dict(kwargs), tie_weights=False)


def user_line(error: BaseException | None = None) -> str | None:
    """The innermost line outside torch and autopar, of the traceback of an error or of the code that runs now."""
    frames = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    ours = (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(__file__)),
        os.path.dirname(traceback.__file__),
    )
    outside = [f for f in frames if not f.filename.startswith(ours) and not f.filename.startswith("<")]
    if outside:
        frame = outside[-1]
        return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return None


def fake_mode() -> Any:
    """A context in which ops compute only shapes and dtypes; its `from_tensor` makes a fake tensor from a real one.

    Tensors that share memory, or are views, stay so.
    """

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def without_values(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Context in which ops compute only shapes, and the model has fake parameters and buffers; yields fake arguments.

    A model and arguments that are fakes already keep them.
    """
    leaves = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs))]
    mode = next((x.fake_mode for x in leaves if isinstance(x, FakeTensor)), None) or fake_mode()

    def fake(x: Tensor) -> Tensor:
        return x if isinstance(x, FakeTensor) else mode.from_tensor(x)

    with replaced(mode, allow_non_fake_inputs=True), mode, _holding(model, fake):
        yield pytree.tree_map_only(Tensor, fake, (args, dict(kwargs)))


@contextlib.contextmanager
def stand_ins(model: nn.Module, tensors: Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
    """Context in which all parameters and buffers of `model` are fake tensors; yields fake copies of `tensors`.

    A capture needs plain parameters of global shape on the device where the model will run, even if the parameters are
    on the meta device or DTensors by now. It also leaves weak references to the tensors that it saw, and the user's
    Parameter objects could then not be swapped.
    """
    mode = FakeTensorMode()

    def fake(x: Tensor) -> Tensor:
        with mode:
            return torch.empty(x.shape, dtype=x.dtype, device=device)

    def of_module(x: Tensor) -> Tensor:
        return nn.Parameter(fake(x), x.requires_grad) if isinstance(x, nn.Parameter) else fake(x)

    with _holding(model, of_module):
        yield [fake(x) for x in tensors]


@contextlib.contextmanager
def _holding(model: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context in which a model holds what `make` returns for its parameters and buffers; what is tied stays so."""
    # Not a function with a cache of `functools`: where one was made, captures look for it among all objects.
    made: dict[int, Tensor] = {}

    def once(x: Tensor) -> Tensor:
        if id(x) not in made:
            made[id(x)] = make(x)
        return made[id(x)]

    tables = [table for m in model.modules() for table in (m._parameters, m._buffers)]
    saved = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({k: once(x) for k, x in table.items() if x is not None})  # type: ignore[misc]
        yield
    finally:
        for table, before in zip(tables, saved, strict=True):
            table.update(before)  # type: ignore[arg-type]


def as_if_compiling() -> contextlib.AbstractContextManager[None]:
    """Inside, `torch.compiler.is_compiling()` is true, as it is for code that torch.export traces."""
    return replaced(torch.compiler, _is_compiling_flag=True)


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """Inside, torch's own modules compute without looking at values, which a trace has none of.

    Distributions do not validate their arguments, unless they are told to one by one; the layers of
    `nn.Transformer` apply a mask that they are given, and do not find out whether it is the causal one.
    """
    from torch._dynamo.eval_frame import TorchPatcher
    from torch.distributions import Distribution
    from torch.nn.modules import transformer

    def is_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    patches = TorchPatcher.patch.cache_info().currsize
    validates = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with replaced(transformer, _detect_is_causal_mask=is_causal):
            yield
    finally:
        if TorchPatcher.patch.cache_info().currsize == patches:
            Distribution.set_default_validate_args(validates)
        # else Dynamo, which an op inside has started, has switched it off, once and for all


def validates_distribution(error: BaseException) -> bool:
    """Whether an error was raised where a distribution checks the values of its arguments."""
    from torch.distributions import distribution

    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename == distribution.__file__ for frame in frames)


def is_transformed(error: BaseException) -> bool:
    """Whether an error was raised inside of a transform of torch.func (vmap, grad, jvp)."""
    files = {each.__file__ for each in (apis, eager_transforms, vmap)}
    return any(frame.filename in files for frame in traceback.extract_tb(error.__traceback__))


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Inside, a failing `torch.export.export` only raises: it prints and logs nothing, and leaves no hook behind."""
    from torch.export import _trace
    from torch.nn.modules.module import _global_buffer_registration_hooks as hooks

    def was_asked_for(record: logging.LogRecord) -> bool:  # by TORCH_LOGS
        return record.levelno < logging.WARNING

    names = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    vars(_trace)["print"] = lambda *_, **__: None  # in front of the builtin, for that module alone
    before = set(hooks)
    try:
        with logging_only(names, was_asked_for):
            yield
    finally:
        for new in set(hooks) - before:  # torch 2.11 removes its hook only if nothing fails
            del hooks[new]
        vars(_trace).pop("print", None)

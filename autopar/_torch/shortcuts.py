"""Shortcuts through torch.export and torch.fx: the same graphs in about two thirds of the time.

An export spends as much on tables of all operators of torch, and on Python code that nobody runs, as on a small
model. Both costs are the same for every model, and every process pays them at every capture.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._export import utils as export_utils
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, fake_impls, fake_tensor
from torch.export import exported_program
from torch.fx.experimental import proxy_tensor, symbolic_shapes

from autopar._torch.contexts import replaced

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@contextlib.contextmanager
def code_when_called() -> Iterator[None]:
    """Context in which a graph module generates its Python code at the first read of `forward`, not at every change.

    A module whose code is to be read, or compiled, needs a `recompile` after the context.
    """
    recompile = fx.GraphModule.recompile

    def postpone(module: fx.GraphModule) -> None:
        tree = getattr(module.graph._codegen, "pytree_info", None)
        if tree is not None:
            module._in_spec, module._out_spec = tree.in_spec, tree.out_spec
        # Every graph module has a class of its own.
        type(module).forward = _WhenWanted(recompile)  # type: ignore[assignment]

    with replaced(fx.GraphModule, recompile=postpone):
        yield


@dataclass(frozen=True)
class _WhenWanted:
    """The `forward` of a graph module before its code is written.

    Attributes:
        recompile: the function of torch that writes the code, and puts it in the place of this attribute.
    """

    recompile: Callable[[fx.GraphModule], object]

    def __get__(self, module: fx.GraphModule | None, owner: type) -> Any:
        if module is None:
            return self
        self.recompile(module)
        return module.forward


@contextlib.contextmanager
def quick_decompositions() -> Iterator[None]:
    """Context in which `ExportedProgram.run_decompositions` reuses its tables of operators from an earlier call.

    It marks about a thousand of them, and registers their kernels one by one, at every call. Here the marks of the
    first call are put back, for each operator whose kernels are the same as they were then.
    """
    marked = functools.partial(_marked, exported_program._override_composite_implicit_decomp)
    find_once = functools.cache(export_utils._materialize_cpp_cia_ops)  # not once a namespace
    with (
        replaced(exported_program, _override_composite_implicit_decomp=marked),
        replaced(export_utils, _materialize_cpp_cia_ops=find_once, _is_preservable_cia_op=_stays_whole),
        _listing_parameters_once(),
    ):
        yield


def _stays_whole(op: Any) -> bool:
    """Torch's `_is_preservable_cia_op`, which is asked of every operator, with the quick questions first."""
    return (
        torch._C._dispatch_has_kernel(op.name())
        and export_utils._is_cia_op(op)
        and export_utils._check_valid_to_preserve(op)
    )


@contextlib.contextmanager
def _listing_parameters_once() -> Iterator[None]:
    """Context in which the metadata of parameters is put into a decomposed graph in linear time.

    For every parameter torch makes tables of all parameters and buffers from the signature, four times.
    """
    put = exported_program._populate_param_buffer_metadata_to_new_gm

    def put_by_tables(metadata: Any, module: fx.GraphModule, signature: Any) -> None:
        names = ("inputs_to_parameters", "inputs_to_buffers")
        tables: Any = types.SimpleNamespace(**{name: getattr(signature, name) for name in names})
        put(metadata, module, tables)

    with replaced(exported_program, _populate_param_buffer_metadata_to_new_gm=put_by_tables):
        yield


@contextlib.contextmanager
def quick_notes() -> Iterator[None]:
    """Context in which a trace spends less on its notes of where a node comes from, and of sizes that values decide.

    For each node torch copies the history of the node that it is made from, which nobody changes, with all that this
    history refers to. And it looks through the sizes and strides of each result for numbers that are known only at run
    time, also where there are none to be found.
    """
    find: Any = symbolic_shapes._free_unbacked_symbols_with_path

    def find_if_any(value: Any, path: Any, *args: Any, pending: Any = None, **kwargs: Any) -> Any:
        if type(value) is FakeTensor and not pending:
            return {}
        return find(value, path, *args, pending=pending, **kwargs)

    copier = types.SimpleNamespace(copy=copy.copy, deepcopy=list)
    with replaced(fx.traceback, copy=copier), replaced(symbolic_shapes, _free_unbacked_symbols_with_path=find_if_any):
        yield


@contextlib.contextmanager
def quick_examples() -> Iterator[None]:
    """Context in which a trace spends less on its example tensors.

    For each one torch looks which order of dims its strides follow, twice, though shapes and strides say all. And the
    example of a product of matrices comes from Python that is written for open sizes, also where there are none.
    """
    matmul = torch.ops.aten.matmul.default
    kernels = dict(matmul.py_kernels)
    if _COMPOSITE in kernels:
        _replace_kernels(matmul, {**kernels, _COMPOSITE: _quick_matmul(kernels[_COMPOSITE])})
    try:
        with (
            replaced(proxy_tensor, _extract_tensor_metadata=_no_metadata),
            replaced(fake_tensor, suggest_memory_format=_contiguous),
        ):
            yield
    finally:
        _replace_kernels(matmul, kernels)


def _no_metadata(example: Tensor) -> None:
    """Replaces the function that fills a node's `tensor_meta`, which would only repeat `val`."""


def _contiguous(example: Tensor) -> torch.memory_format:
    return torch.contiguous_format


@functools.cache
def _quick_matmul(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The product of two tensors by torch's kernel for fixed sizes; by `kernel` if a size is open."""

    def matmul(one: Tensor, other: Tensor) -> Tensor:
        if one._has_symbolic_sizes_strides or other._has_symbolic_sizes_strides:
            return kernel(one, other)
        return torch.ops.aten.matmul.default._op_dk(_COMPOSITE, one, other)

    return matmul


@dataclass(frozen=True)
class _Marked:
    """The tables of an operator with and without the mark.

    Attributes:
        rule: what `run_decompositions` calls in place of the decomposition.
        plain: the Python kernels without the mark, by dispatch key.
        kernels: the Python kernels with the mark, by dispatch key.
        on_fakes: the implementation for fake tensors with the mark.
    """

    rule: Callable[..., Any]
    plain: Mapping[Any, Any]
    kernels: Mapping[Any, Any]
    on_fakes: Callable[..., Any]


@functools.cache
def _earlier() -> dict[OpOverload, _Marked]:
    """The operators that this process has marked before."""
    return {}


@contextlib.contextmanager
def _marked(
    override: Callable[..., contextlib.AbstractContextManager[None]], rules: Mapping[OpOverload, Callable[..., Any]]
) -> Iterator[None]:
    """Does what `override(rules)` does, and reuses the tables of earlier calls where these are still valid."""
    earlier, on_fakes = _earlier(), fake_impls.op_implementations_dict
    again = {op: earlier[op] for op, rule in rules.items() if _fits(earlier.get(op), op, rule)}
    others = {op: rule for op, rule in rules.items() if op not in again}
    plain = {op: dict(op.py_kernels) for op in others}
    with override(others):
        for op, rule in others.items():
            earlier[op] = _Marked(rule, plain[op], dict(op.py_kernels), on_fakes[op])
        for op, marked in again.items():
            _replace_kernels(op, marked.kernels)
            on_fakes.setdefault(op, marked.on_fakes)
        try:
            yield
        finally:
            for op, marked in again.items():
                _replace_kernels(op, marked.plain)
                on_fakes.pop(op, None)


def _fits(marked: _Marked | None, op: OpOverload, rule: Callable[..., Any]) -> bool:
    """Whether the operator had the same rule and the same kernels when it was marked before."""
    return marked is not None and marked.rule is rule and marked.plain == op.py_kernels


def _replace_kernels(op: OpOverload, kernels: Mapping[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()

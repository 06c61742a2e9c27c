"""torch.compile: its backends, what AOTAutograd traces, and what Dynamo says of a graph."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar._torch.autograd import handed_on
from autopar._torch.exporting import fake_mode


def is_functional(x: Tensor) -> bool:
    """Whether `x` is a functional tensor of AOTAutograd, whose ops must not change or alias their operands."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(x, FunctionalTensor)


def compile_graph(module: fx.GraphModule, arguments: Sequence[Tensor], backend: str) -> Callable[..., Any]:
    """Compiles a graph by a backend of torch.compile, for arguments like these.

    The grad mode of the caller applies. Saved-tensor hooks of the caller are not called for tensors of the trace.
    """
    from torch._dynamo import lookup_backend

    def unchanged(x: Any) -> Any:
        return x

    examples = _examples(arguments)
    for example, x in zip(examples, arguments, strict=True):
        example.requires_grad_(x.requires_grad)
    with torch.autograd.graph.saved_tensors_hooks(unchanged, unchanged):
        return lookup_backend(backend)(copy.deepcopy(module), examples)


def _examples(arguments: Sequence[Tensor]) -> list[Tensor]:
    with fake_mode():
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in arguments]


@torch.no_grad()
def computes_complex(module: fx.GraphModule, arguments: Sequence[Tensor]) -> bool:
    """Whether a graph computes complex numbers when it is called with arguments such as these."""
    seen: list[Tensor] = []

    class Watching(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found = super().run_node(n)
            seen.extend(x for x in torch.utils._pytree.tree_leaves(found) if isinstance(x, Tensor))
            return found

    Watching(module).run(*_examples(arguments))
    return any(x.is_complex() for x in seen)


def missing_cpp_compiler() -> str:
    """Inductor's message if it does not find a C++ compiler; "" if it finds one."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return ""


def on_second_derivative(results: Sequence[Any], call: Callable[..., None]) -> None:
    """Registers `call` to be called when a second derivative of an AOTAutograd graph is about to be computed.

    Args:
        results: what the compiled graph returned.
    """

    def watched(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if x.grad_fn is None:  # torch 2.11 may make it as if it depended on nothing
            x = handed_on(x.detach().requires_grad_())
        x.grad_fn.register_prehook(call)  # type: ignore[union-attr]
        return x

    def in_backward(gradients: Sequence[Tensor | None], _: Any) -> Any:
        return tuple(map(watched, gradients)) if torch.is_grad_enabled() else None

    nodes = (x.grad_fn for x in results if isinstance(x, Tensor) and x.requires_grad)
    made = (n for n in nodes if n is not None and n.name() == "CompiledFunctionBackward")
    for node in itertools.islice(made, 1):  # the results share it
        node.register_hook(in_backward)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that was given to `torch.compile`; any other module is returned unchanged."""
    return model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model


def dynamo_source(node: fx.Node) -> str:
    """The source of an argument of a dynamo graph, such as `L['self']._modules['up']._parameters['weight']`."""
    source = getattr(node, "_dynamo_source", None)
    return "" if source is None else source.name


def own_generators() -> list[str]:
    """The sources of generators `random.Random` that the frame being compiled has used, such as `L['self'].own`.

    Dynamo compiles the generator's state in: each call of the frame begins with the state of the first call. Since
    torch 2.15 it does so only where the frame sets that state (`seed`, `shuffle`), and makes every draw anew. Python's
    own generator, and one that the frame makes itself, are not among them. Meant for a backend, which Dynamo calls at
    the end of a frame; empty elsewhere.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.misc import RandomVariable
    from torch._guards import TracingContext

    if TracingContext.try_get() is None:
        return []
    effects = InstructionTranslator.current_tx().output.side_effects
    return [
        found.source.name
        for found in effects.id_to_variable.values()
        if isinstance(found, RandomVariable) and found.source is not None and effects.is_modified(found)
    ]


def traced_code() -> frozenset[CodeType]:
    """The code of all functions that Dynamo has traced into the frame being compiled; empty elsewhere."""
    from torch._guards import TracingContext

    return frozenset(TracingContext.get_traced_code() or ())


@dataclass(frozen=True)
class CachedCall:
    """A call of a function with a cache of `functools`, in whose place Dynamo traces the function behind the cache.

    Attributes:
        cached: the function with its cache.
        key: positional arguments, and pairs (name, value) of the others; None unless all are constants.
        results: a tuple of the result; empty unless it is a constant.
    """

    cached: Any
    key: tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]] | None
    results: tuple[Any, ...]


# Compilation of a frame -> the calls that it traced.
_CACHED_CALLS: weakref.WeakKeyDictionary[Any, list[CachedCall]] = weakref.WeakKeyDictionary()


@functools.cache
def watch_cached_calls() -> None:
    """Lets Dynamo note calls of functions with a cache; numbers that such a function reads become constants.

    Dynamo makes a number that has changed once an input of the graph. A cache would not give a result for the new one.
    """
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable

    call_function = WrapperUserFunctionVariable.call_function

    def noting(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not hasattr(self.wrapper_obj, "cache_info"):
            return call_function(self, tx, args, kwargs)
        with torch._dynamo.config.patch(specialize_float=True, specialize_int=True):
            result = call_function(self, tx, args, kwargs).realize()
        given, named = _constants([*self.self_args(), *args]), _constants([*kwargs.values()])
        key = None
        if given is not None and named is not None:
            key = given, tuple(zip(kwargs, named, strict=True))
        call = CachedCall(self.wrapper_obj, key, _constants([result]) or ())
        _CACHED_CALLS.setdefault(tx.output.tracing_context, []).append(call)
        return result

    WrapperUserFunctionVariable.call_function = noting  # type: ignore[method-assign]


def _constants(variables: Sequence[Any]) -> tuple[Any, ...] | None:
    """The values of variables of Dynamo; None unless all are constants that can be keys of a dict."""
    if not all(x.is_python_constant() for x in variables):
        return None
    values = tuple(x.as_python_constant() for x in variables)
    try:
        hash(values)
    except TypeError:
        return None
    return values


def cached_calls() -> list[CachedCall]:
    """The calls of functions with a cache that Dynamo has traced into the frame being compiled; empty elsewhere."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return [] if context is None else _CACHED_CALLS.get(context, [])


def traced_modules(graph: fx.Graph) -> set[type[nn.Module]]:
    """The classes of the modules that a graph was made from, or that the frame being compiled has as locals."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    stacks = (node.meta.get("nn_module_stack") or {} for node in graph.nodes)
    found = {kind for stack in stacks for _, kind in stack.values() if isinstance(kind, type)}
    frame = InstructionTranslator.current_tx().f_locals.values()
    return found | {type(each) for x in frame if isinstance(x, nn.Module) for each in x.modules()}


def trace_recurrent_layers() -> None:
    """Lets Dynamo trace frames with nn.RNN, nn.LSTM and nn.GRU, which else it runs as they are, and says nothing."""
    torch._dynamo.config.allow_rnn = True


def guard_hooks() -> None:
    """Lets Dynamo notice hooks that a module is given, or loses, after the first call; else it calls the first ones."""
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def quiet_fake_failures() -> None:
    """Keeps torch from logging the frames of an op that fails on tensors without values: its error says the same."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    if _is_no_failure not in log.filters:
        log.addFilter(_is_no_failure)


def _is_no_failure(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")

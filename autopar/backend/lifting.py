"""Graphs of torch.compile as modules that `autopar.capture.export` takes.

Dynamo gives a graph of torch calls whose arguments are all that the code touched: parameters, buffers,
inputs, and the numbers that sizes were made of. `lift` runs it once on fake tensors to see what it does to
its arguments, and makes a module of it for one set of shapes:

    an argument that takes a gradient  ->  a parameter if it is one of a module, else an input
    a sharded parameter  ->  a parameter
    a buffer, or an argument that is changed in place  ->  a buffer, whose new value is written back
    any other tensor  ->  an input
    a number  ->  a constant

What the graph returns as a view of an argument is made of that argument again (`ReturnedView`), as users may
change either in place and look at the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import traceback as fx_traceback

from autopar import _torch
from autopar.backend.functions import function_of
from autopar.backend.sharding import whole_parameter
from autopar.errors import CaptureError

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n(.*)')
_STEP = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")


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


@dataclass(frozen=True)
class Lifted:
    """A graph of torch.compile as a module.

    Attributes:
        module: its forward takes the inputs, and returns the results that are no views and no numbers.
        parameters: name -> position of the argument, for those that are not changed in place.
        buffers: name -> position, for buffers of modules and arguments that are changed in place.
        inputs: positions of all other tensors, in the order of the forward.
        differentiable: positions of the inputs that take a gradient.
        results: for each result of the graph: a view, a number, or None for what the module returns.
    """

    module: nn.Module
    parameters: Mapping[str, int]
    buffers: Mapping[str, int]
    inputs: tuple[int, ...]
    differentiable: frozenset[int]
    results: tuple[Any, ...]

    @property
    def place(self) -> str:
        """A line that says where in the user's code a run of the module failed, "" if none has."""
        assert isinstance(self.module, _Forward)
        return self.module.place


def argument_names(module: fx.GraphModule) -> list[str]:
    """Readable names of a graph's arguments: that in the model for parameters and buffers."""
    names: list[str] = []
    for node in module.graph.find_nodes(op="placeholder"):
        path = ".".join(_STEP.findall(_torch.dynamo_source(node)))
        name = path or node.name.removeprefix("l_").rstrip("_")
        names.append(name if name not in names else f"{name}~{len(names)}")
    return names


def _buffers(module: fx.GraphModule) -> list[int]:
    """Positions of the arguments that are buffers of a module."""
    sources = map(_torch.dynamo_source, module.graph.find_nodes(op="placeholder"))
    return [i for i, source in enumerate(sources) if "_buffers['" in source]


def lift(
    module: fx.GraphModule,
    names: Sequence[str],
    arguments: Sequence[Any],
    sharded: frozenset[int] = frozenset(),
) -> Lifted:
    """Makes a module from a graph, for arguments of these shapes.

    The arguments at the positions `sharded` are parameters that `autopar.shard_` has cut.

    Raises CaptureError for an argument that is changed in place and requires a gradient or shares memory
    with another argument.
    """
    _refuse_forgotten(module)
    changed, results = _effects(module, arguments)
    tensors = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    _refuse_shared(changed, tensors, names, arguments)
    takes_gradient = [i for i in tensors if arguments[i].requires_grad and torch.is_grad_enabled()]
    parameters = [
        i
        for i in tensors
        if i in sharded or (isinstance(arguments[i], nn.Parameter) and i not in changed)
    ]
    # All of a module's: what batch_norm does to its statistics leaves no trace on fake tensors.
    state = [i for i in _buffers(module) if i in tensors and i not in takes_gradient]
    buffers = sorted({*changed, *state} - {*parameters})
    own = {*parameters, *buffers}
    inputs = tuple(i for i in tensors if i not in own)
    made = _Forward(module, arguments, inputs, results)
    for i in (*parameters, *buffers):
        trained = i in takes_gradient if i in parameters else None
        made._held[i] = _hold(made, names[i], arguments[i].detach(), trained)
    return Lifted(
        module=made,
        parameters={names[i]: i for i in parameters},
        buffers={names[i]: i for i in buffers},
        inputs=inputs,
        differentiable=frozenset(takes_gradient) - frozenset(parameters),
        results=results,
    )


def _refuse_forgotten(module: fx.GraphModule) -> None:
    """Refuses nestings of grad mode and autocast that a captured graph would lose; see [Note: no_grad regions]."""
    names = [_name(node.target) for node in _all_nodes(module)]
    if "_set_grad_enabled" in names and not torch.is_grad_enabled():
        raise CaptureError("The graph turns autograd on inside torch.no_grad.")
    casts = 0
    for name in names:
        casts += (name == "_enter_autocast") - (name == "_exit_autocast")
        if name == "_set_grad_enabled" and casts:
            raise CaptureError(
                "The graph turns autograd off inside torch.autocast; enter torch.autocast inside torch.no_grad instead."
            )


# --- what a graph does to its arguments


def _effects(
    module: fx.GraphModule, arguments: Sequence[Any]
) -> tuple[dict[int, str], tuple[Any, ...]]:
    """Position of each argument that is changed in place -> the line that changes it; and `Lifted.results`."""
    with _torch.fake_mode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        before = [_version(x) for x in fakes]
        held = _Held(mode)
        interpreter = _Interpreter(module, held)
        results = _run_fake(interpreter, fakes)
        held.refuse_changed()
        changed = {
            i: interpreter.changes.get(_storage(x), "")
            for i, x in enumerate(fakes)
            if _version(x) != before[i]
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
            raise CaptureError(
                "The graph holds a tensor that requires a gradient and is not one of its arguments."
            )
        if id(x) not in self._fakes:
            fake = self._mode.from_tensor(x)
            self._fakes[id(x)] = (fake, _version(fake))
        return self._fakes[id(x)][0]

    def refuse_changed(self) -> None:
        if any(_version(fake) != before for fake, before in self._fakes.values()):
            raise CaptureError(
                "The graph changes a tensor in place that is not one of its arguments."
            )


def _run_fake(interpreter: _Interpreter, fakes: Sequence[Any]) -> Sequence[Any]:
    try:
        return interpreter.run(*fakes)
    except CaptureError as error:
        raise CaptureError(f"{error}{interpreter.place}") from error
    except Exception as error:  # whatever an op without a fake kernel raises
        text = str(error).strip().splitlines() or [type(error).__name__]
        if "_local_scalar_dense" in text[0]:
            text = [
                "it reads a number from a tensor; Dynamo also makes a tensor of a float argument whose value changes"
            ]
        reason = f"The graph cannot be run on fake tensors: {text[0].rstrip('.')}."
        raise CaptureError(reason + interpreter.place) from error


def _version(x: Any) -> int:
    # A tensor made in inference mode has no version; export refuses a graph that changes it.
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def _result(x: Any, arguments: Sequence[Any]) -> Any:
    if not isinstance(x, Tensor):
        return x
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor) and _share(x, argument):
            if x.dtype != argument.dtype:
                raise CaptureError("A result is a view of an argument with another dtype.")
            shape, stride = tuple(x.shape), tuple(x.stride())
            offset = int(x.storage_offset()) - int(argument.storage_offset())
            return ReturnedView(i, shape, stride, offset, x is argument, x.requires_grad)
    return None


def _refuse_new_gradients(
    changed: Mapping[int, str], fakes: Sequence[Any], arguments: Sequence[Any]
) -> None:
    """Refuses a value with a gradient that is written into an argument without one; the gradient would be lost."""
    for i, place in changed.items():
        if fakes[i].requires_grad and not arguments[i].requires_grad:
            raise CaptureError(
                "The graph writes a value that requires a gradient into a tensor that does not; detach it first."
                + place
            )


def _share(x: Tensor, y: Tensor) -> bool:
    return _storage(x) == _storage(y)


def _storage(x: Tensor) -> int:
    return _torch.storage_reference(x).cdata


def _refuse_shared(
    changed: Mapping[int, str],
    tensors: Sequence[int],
    names: Sequence[str],
    arguments: Sequence[Any],
) -> None:
    for i, place in changed.items():
        if arguments[i].requires_grad:
            raise CaptureError(
                f"{names[i]} takes a gradient and is changed in place; clone it first, or change it "
                f"outside of what is compiled.{place}"
            )
        shared = [j for j in tensors if j != i and _share(arguments[i], arguments[j])]
        if shared:
            raise CaptureError(
                f"{names[i]} is changed in place and shares its memory with {names[shared[0]]}; "
                f"clone one of them first.{place}"
            )


# --- the module


class _Interpreter(fx.Interpreter):
    """Runs a graph of dynamo on proxies or fake tensors; `held` is called on tensors of its own."""

    def __init__(self, module: fx.GraphModule, held: Callable[[Tensor], Tensor]) -> None:
        super().__init__(module)
        self._held = held
        self.extra_traceback = False  # the errors of this class are already written for users
        self.function = ""  # name of the autograd.Function that the running call applies
        self.place = ""  # line of the failed call, to be added to an error
        self.changes: dict[int, str] = {}  # storage -> line of the call that last wrote to it

    def run_node(self, n: fx.Node) -> Any:
        self.function = _applied_function(n)
        taken = [x for x in map(self.env.get, n.all_input_nodes) if isinstance(x, Tensor)]
        before = [_version(x) for x in taken]
        try:
            result = super().run_node(n)
        except Exception:
            self.place = _place(n)
            raise
        for x, version in zip(taken, before, strict=True):
            if _version(x) != version:
                self.changes[_storage(x)] = _place(n)
        return result

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._held(value) if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = _STANDINS.get(_name(target))
        return run(self, *args, **kwargs) if run else super().call_function(target, args, kwargs)

    def run_block(self, body: fx.GraphModule, *operands: Any) -> Any:
        """Runs a checkpointed block as plain ops; the plan decides what is saved for backward."""
        return _Interpreter(body, self._held).run(*operands)

    def apply_function(
        self, forward: fx.GraphModule, backward: fx.GraphModule, *operands: Any, **facts: Any
    ) -> Any:
        """Applies the user's autograd.Function, rebuilt from the graphs of its forward and backward."""
        found = function_of(forward, backward, self.function, facts["non_differentiable_idx"])
        return found.apply(*operands)

    def parameter(self, x: Tensor) -> Tensor:
        """Returns the stand-in of a sharded parameter, which already has the whole shape."""
        return x

    def enter_autocast(self, device: str, dtype: torch.dtype | None, on: bool, *_: Any) -> Any:
        """Enters `torch.autocast`, which export supports, in place of the private call in Dynamo's graph."""
        context = torch.autocast(device, dtype=dtype, enabled=on)
        context.__enter__()
        return context

    def exit_autocast(self, context: torch.autocast) -> None:
        """The end of `enter_autocast`."""
        context.__exit__(None, None, None)


_STANDINS: Mapping[str, Callable[..., Any]] = {
    "tag_activation_checkpoint": _Interpreter.run_block,
    "autograd_function_apply": _Interpreter.apply_function,
    "whole_parameter": _Interpreter.parameter,
    "_enter_autocast": _Interpreter.enter_autocast,
    "_exit_autocast": _Interpreter.exit_autocast,
}


def _place(node: fx.Node) -> str:
    """The innermost line of the user's code that a call of a dynamo graph comes from."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line, function, code = frames[-1]
    return f"\n  where:  {file}:{line} in {function}: {code.strip()}"


def place_of(module: fx.GraphModule) -> str:
    """The line of the user's code that the first call of a graph comes from, as a line to add to an error."""
    return next((place for node in module.graph.nodes if (place := _place(node))), "")


def _applied_function(node: fx.Node) -> str:
    """`Straight` for a call from the line `y = Straight.apply(x)`, as dynamo does not keep the class."""
    return "".join(re.findall(r"(\w+)\.apply\(", _place(node))[:1]) or "Function"


def _name(target: Any) -> str:
    return getattr(target, "__name__", "")


class _Forward(nn.Module):
    """A module that runs a graph of Dynamo, with the graph's parameters, buffers and numbers as its attributes."""

    def __init__(
        self,
        graph: fx.GraphModule,
        arguments: Sequence[Any],
        inputs: tuple[int, ...],
        results: tuple[Any, ...],
    ) -> None:
        super().__init__()
        # In a tuple: the graph's constants are not this module's state.
        self._graph = (_Interpreter(graph, lambda x: x),)
        self._numbers = {i: x for i, x in enumerate(arguments) if not isinstance(x, Tensor)}
        self._inputs = inputs
        self._held: dict[int, tuple[nn.Module, str]] = {}
        self._count = len(arguments)
        self._kept = [i for i, result in enumerate(results) if result is None]
        _rename_modules(graph)

    @property
    def place(self) -> str:
        """See `Lifted.place`."""
        return self._graph[0].place

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self._inputs, inputs, strict=True)) | self._numbers
        given |= {i: getattr(owner, name) for i, (owner, name) in self._held.items()}
        with fx_traceback.preserve_node_meta():
            results = self._graph[0].run(*(given[i] for i in range(self._count)))
        return tuple(results[i] for i in self._kept)


def _hold(root: nn.Module, name: str, x: Tensor, trained: bool | None) -> tuple[nn.Module, str]:
    """Makes a tensor a parameter, trained or frozen, or a buffer (None) of that qualified name.

    Returns its owner and last name.
    """
    *path, last = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if trained is not None:
        owner.register_parameter(last, nn.Parameter(x, requires_grad=trained))
    else:
        owner.register_buffer(last, x)
    return owner, last


def _rename_modules(graph: fx.GraphModule) -> None:
    """Renames modules as export does, L['self'].h.0 -> model.h.0; repeated layers are found by these names."""
    for node in _all_nodes(graph):
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                key: ("model" + re.sub(r"^[LG]\['[^']*'\]", "", path), kind)
                for key, (path, kind) in stack.items()
            }


def _all_nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes

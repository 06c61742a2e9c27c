"""Executors, which run the plain ops of a bound graph one by one or compiled.

[Note: compiled regions] A bound graph has ops of ATen and of `torch.ops.autopar`, and between them calls of Python
objects: gathers of parameters (ZeRO-3), recomputed blocks, waits for sums. `autopar.passes.cut_regions` makes a
submodule of every run of ops between such calls, one or several per block of the model, and a backend of torch.compile
compiles it. Eager autograd joins the regions. So everything that relies on autograd (hooks of leaves, saved tensors
that are gathered again, recomputation) works as without a compiler, and gradients are ready, and sent to other ranks,
block by block. Regions with the same code, such as those of equal layers, are compiled once.

[Note: joined blocks] A call of a region, forward and backward, takes the host about 0.4 ms, whatever is in it. So
blocks share a region where nobody waits for the gradients of one: those of a single micro-batch that stay on their rank
as they are, as under a plan that splits nothing. Such gradients are wanted at the end of the backward alone, and a
region that gives its own all at once holds no more than eager autograd does. Where gradients travel, are cast or are
added to those of another micro-batch, early ones make room, and every block is a region. What a region takes to compile
grows with its ops. So one of several blocks has `JOINED_OPS` ops at most, for which the host takes some 15 ms: its
own 0.4 ms are 3 % of that. A deeper model has more regions, which are equal, and compiled once, where their layers are.

The compiled code of a region is the same on every rank, except for names of process groups. So ranks may share caches,
and their collectives keep one order: AOTAutograd sees collectives that move data as `torch.ops._c10d_functional`, whose
order Inductor keeps, and ops that depend on the rank (`shard`, `pad`, `partial`) as one op each. The keys of random ops
are drawn outside the regions, which makes the masks those of the eager executor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn

from autopar import _torch
from autopar.errors import AutoparError, did_you_mean
from autopar.passes.cleanup.call_bindings import call_bindings
from autopar.passes.cut_regions import cut_regions

ExecutorName = Literal["eager", "aot_eager", "inductor"]
JOINED_OPS = 256  # of a region of several blocks, see [Note: joined blocks]


class Executor:
    """Makes bound graphs run; all programs of a model share one executor.

    Args:
        name: "eager" runs op by op; "aot_eager" and "inductor" are backends of torch.compile, with which each region
            is compiled.

    Raises AutoparError for another name.
    """

    def __init__(self, name: ExecutorName = "eager") -> None:
        if name not in get_args(ExecutorName):
            known = ", ".join(map(repr, get_args(ExecutorName)))
            near = did_you_mean(name, get_args(ExecutorName))
            raise AutoparError(f"There is no executor {name!r}{near}; executor is one of {known}.")
        self.name = name
        # By code and kind of arguments; what no region uses any more goes with the last program that had it.
        self._runs: weakref.WeakValueDictionary[Any, _CompiledRegion] = weakref.WeakValueDictionary()

    @property
    def compiles(self) -> bool:
        """Whether the ops of a region share one node of autograd's graph."""
        return self.name != "eager"

    @property
    def compiled(self) -> int:
        """The number of compiled graphs that living programs use."""
        return len(self._runs)

    def ready(self, module: fx.GraphModule, *, joins: bool = False) -> fx.GraphModule:
        """The graph as it runs: op by op, or with every region compiled at its first run.

        Args:
            module: the bound graph.
            joins: whether blocks may share a region, see [Note: joined blocks].
        """
        if self.compiles:
            return cut_regions(module, self._region, joined_ops=JOINED_OPS if joins else 0)
        call_bindings(module)
        return module

    def _region(self, graph: fx.GraphModule) -> nn.Module:
        return Region(graph, self.name, self._runs)


class Region(nn.Module):
    """A graph that is compiled at the first call of each kind of arguments.

    Dynamo, which traces Python, is not used: a region already is a graph, with numbers as shapes.

    Args:
        graph: graph of the region.
        backend: name of a backend of torch.compile.
        shared: compiled code of regions with the same graph, to which this one adds its own.

    Raises AutoparError at a call if Inductor is to compile for the CPU and finds no C++ compiler, and in
    a derivative of a gradient.
    """

    def __init__(self, graph: fx.GraphModule, backend: str, shared: MutableMapping[Any, _CompiledRegion]) -> None:
        super().__init__()
        self._graph, self._backend, self._shared = graph, backend, shared
        self._runs: dict[Any, _CompiledRegion] = {}
        self._latest: _Latest | None = None

    def forward(self, *arguments: Tensor) -> Sequence[Tensor]:
        latest = self._latest
        if latest is None or not latest.takes(arguments):
            latest = self._latest = self._run_for(arguments)
        results = latest.run.call(*arguments)
        _torch.on_second_derivative(results, _refuse_second_derivative)
        return results

    def _run_for(self, arguments: Sequence[Tensor]) -> _Latest:
        """The code for such arguments, compiled now if there is none."""
        devices = sorted({x.device.type for x in arguments})
        modes = _modes(devices)
        kind = (modes, *map(_kind, arguments))
        run = self._runs.get(kind)
        if run is None:
            self._graph.recompile()  # its code is a key, and may not be written yet
            run = self._runs[kind] = self._found((self._graph.code, kind), arguments)
        return _Latest(run, devices, modes, _torch.alike_check(arguments))

    def _found(self, key: Any, arguments: Sequence[Tensor]) -> _CompiledRegion:
        run = self._shared.get(key)
        if run is None:
            backend = self._backend_for(arguments)
            run = self._shared[key] = _CompiledRegion(_torch.compile_graph(self._graph, arguments, backend))
        return run

    def _backend_for(self, arguments: Sequence[Tensor]) -> str:
        # Inductor makes no code for complex numbers, and gives the memory of their sums to others too early.
        if self._backend == "inductor" and _torch.computes_complex(self._graph, arguments):
            return "aot_eager"
        if self._backend == "inductor":
            _check_compiler(arguments)
        return self._backend


@dataclass(frozen=True, eq=False)
class _CompiledRegion:
    """The code that a region was compiled to, for one kind of arguments."""

    call: Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class _Latest:
    """The code that a region ran last, and what it was compiled for.

    Attributes:
        run: the code.
        devices: kinds of devices of the arguments.
        modes: the modes of torch.
        alike: a check in C++ that other arguments are of the same kinds; it may fail where they are.
    """

    run: _CompiledRegion
    devices: Sequence[str]
    modes: tuple[Any, ...]
    alike: Callable[..., bool]

    def takes(self, arguments: Sequence[Tensor]) -> bool:
        """Whether the code is known to be right for these arguments."""
        return self.modes == _modes(self.devices) and self.alike(*arguments)


def _kind(x: Tensor) -> Any:
    """The properties of a tensor that compiled code depends on."""
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


def _modes(devices: Sequence[str]) -> tuple[Any, ...]:
    """The modes on which a trace depends: grad mode, inference mode, and autocast for each kind of device."""
    casts = (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in devices)
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts)


def _check_compiler(arguments: Sequence[Tensor]) -> None:
    on_cpu = any(x.device.type == "cpu" for x in arguments)
    problem = _torch.missing_cpp_compiler() if on_cpu else ""
    if problem:
        raise AutoparError(
            f"The executor 'inductor' needs a C++ compiler for what runs on the CPU. PyTorch says: {problem}. "
            "Install g++ or clang++, name a compiler in the environment variable CXX, or use the executor "
            "'aot_eager' or 'eager'."
        )


def _refuse_second_derivative(*_: Any) -> None:
    raise AutoparError(
        "A derivative is taken of a gradient (a backward with create_graph=True, and another through it), but "
        "compiled regions have none: use executor='eager'."
    )

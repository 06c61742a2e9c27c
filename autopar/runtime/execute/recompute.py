"""Selective recomputation: backward runs some calls of a block a second time, so that their results are not saved.

Each call of a block is either recomputed or not (`meta["recomputed"]`); see [Note: recomputing ops] in
`autopar.pipeline.recomputable`. While a block runs forward, saved-tensor hooks see every tensor that autograd
saves. A tensor in memory that a recomputed call made is replaced by a handle; any other is kept, and so is
what the recomputed calls read. When backward asks for the first handle of a block, the calls that are needed
run again, once, in the order of the forward, and give every handle its tensor.

    forward    x -> n = norm(x) -> h = up(n) -> g = gelu(h) -> down(g)     recomputed: norm, gelu
    kept       x, h, and handles for n, g and the statistics of norm
    backward   n = norm(x), g = gelu(h)

Whole blocks are the case in which every call is recomputed (Chen et al. 2016). A random call draws the same
numbers again: the generator's state before it is kept. Collectives are repeated in the order of the graph,
which is the same on all ranks. New values of buffers are results, which the second run does not make.
Gathered parameters are never recomputed here: what is kept goes through the hooks around the block:
those of `autopar.runtime.parameters.gather` keep a gathered parameter by its shard, and those of
`autopar.runtime.execute.saved` what the plan's saved lines name by this rank's slice.

Saved-tensor hooks see one node of autograd's graph at a time, so backward of a stage that recomputes is not
split in two, as a block would be recomputed for each part: where a zero-bubble schedule has the first half,
all of it runs.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from autopar import _torch
from autopar.ops.nodes import reached
from autopar.runtime.execute.recording import CallRecording, CurrentRecording, RecordedCall, mapped, tensors_of
from autopar.runtime.execute.saved import Hooks
from autopar.runtime.parameters.gather import SavedView


class Recomputed(nn.Module):
    """A block of a program as a module, which recomputes calls in backward.

    Args:
        block: graph of the block; `meta["recomputed"]` of a call says whether backward recomputes it.
    """

    def __init__(self, block: fx.GraphModule) -> None:
        super().__init__()
        self._current = CurrentRecording()
        self._calls = _Calls(block)
        self._steps = {node.name: RecordedCall(node, block, self._current) for node in self._calls.recorded}
        self._graph = self._copy(block.graph.nodes, {})
        self._second: dict[frozenset[str], _SecondRun] = {}

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return self._graph(*inputs)
        run = _FirstRun(self._calls, inputs, self.second_run)
        hooks = torch.autograd.graph.saved_tensors_hooks(run.pack, _unpack)
        with hooks, self._current.recording(run):
            results = self._graph(*inputs)
        run.finish()
        return results

    def second_run(self, needed: frozenset[str]) -> _SecondRun:
        """The graph of all recomputed calls that the results of the `needed` ones require."""
        if needed not in self._second:
            nodes, reads = self._calls.needed(needed)
            copies = {node: f"read_{i}" for i, node in enumerate(reads)}
            self._second[needed] = _SecondRun(
                self._copy(nodes, copies), tuple(node.name for node in reads), self._current
            )
        return self._second[needed]

    def _copy(self, nodes: Sequence[fx.Node] | Any, given: Mapping[fx.Node, str]) -> fx.GraphModule:
        """A graph of these nodes, in which every call reports to the current recording."""
        graph, root = fx.Graph(), nn.Module()
        copies = {node: graph.placeholder(name) for node, name in given.items()}
        for node in nodes:
            if node.name in self._steps:
                root.add_module(node.name, self._steps[node.name])
                args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = graph.call_module(node.name, args, kwargs)
                copies[node].meta = dict(node.meta)  # its line and module, for errors
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        if given or not any(node.op == "output" for node in graph.nodes):
            graph.output(())
        return fx.GraphModule(root, graph)


class _Calls:
    """The calls of a block, and the results that they read of each other.

    Attributes:
        recorded: all calls except those that select one of several results.
        inputs: names of the placeholders, in order.
        given: name of an input, or of a call that is not recomputed -> its results that recomputed calls read, as
            (position among several results or None, name).
    """

    def __init__(self, block: fx.GraphModule) -> None:
        self._recomputed: dict[fx.Node, bool] = {}
        for node in block.graph.nodes:
            picks = node.target is operator.getitem
            marked = node.op != "placeholder" and node.meta.get("recomputed", False)
            self._recomputed[node] = self._recomputed[node.args[0]] if picks else marked
        calls = [n for n in block.graph.nodes if n.op in ("call_function", "call_module")]
        self.recorded = [n for n in calls if n.target is not operator.getitem]
        self.order = {node: i for i, node in enumerate(block.graph.nodes)}
        self.names = {node.name: node for node in self.recorded}
        self.inputs = [node.name for node in block.graph.find_nodes(op="placeholder")]
        self.given = self._given(calls)

    def _given(self, calls: Sequence[fx.Node]) -> dict[str, list[tuple[int | None, str]]]:
        read = {x for n in calls if self._recomputed[n] for x in n.all_input_nodes if not self._recomputed[x]}
        given: dict[str, list[tuple[int | None, str]]] = {}
        for node in sorted(read, key=self.order.__getitem__):
            if node.target is operator.getitem:
                given.setdefault(node.args[0].name, []).append((node.args[1], node.name))  # type: ignore[union-attr,arg-type]
            else:
                given.setdefault(node.name, []).append((None, node.name))
        return given

    def is_recomputed(self, name: str) -> bool:
        """Whether backward recomputes a call."""
        return self._recomputed[self.names[name]]

    def needed(self, names: frozenset[str]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The recomputed calls that the named ones need, in order, and the other nodes that these read."""
        roots = [self.names[name] for name in names]
        found = reached(roots, lambda node: filter(self._recomputed.__getitem__, node.all_input_nodes))
        reads = {x for node in found for x in node.all_input_nodes if x not in found}
        return sorted(found, key=self.order.__getitem__), sorted(reads, key=self.order.__getitem__)


# --- what is going on


class _FirstRun(CallRecording):
    """The forward run of a block, which lives as long as backward may ask for its handles."""

    def __init__(self, calls: _Calls, inputs: Sequence[Any], second_run: Callable[..., _SecondRun]) -> None:
        super().__init__()
        self._calls, self._second_run = calls, second_run
        self._outer = _torch.saved_tensor_hooks()
        self._context = RunContext.now(inputs)
        self._handles: list[weakref.ref[_Dropped]] = []
        self._values: dict[str, Any] = {}
        self._states: dict[str, Any] = {}
        for name, value in zip(calls.inputs, inputs, strict=True):
            for x in tensors_of(value):
                self.note(x, None)
            self._give(name, value)

    def _give(self, name: str, result: Any) -> None:
        """Keeps the results of a call that recomputed calls may read."""
        for position, read in self._calls.given.get(name, ()):
            value = result if position is None else result[position]
            self._values[read] = mapped(value, Tensor, _Read.of)

    def begin(self, step: RecordedCall) -> None:
        super().begin(step)
        if step.draws and self._calls.is_recomputed(step.name):
            self._states[step.name] = self._context.generators()

    def end(self, step: RecordedCall, result: Any) -> None:
        super().end(step, result)
        self._give(step.name, result)

    def pack(self, x: Tensor) -> Any:
        """The object that autograd saves in place of a tensor."""
        is_known, place = self.home(x)
        name = self.at if not is_known else place[0] if place else ""
        if not name or not self._calls.is_recomputed(name):
            return _Kept.of(x, self._outer)
        handle = _Dropped(self, (*place, 1) if place else (*self.next_own(), 0), SavedView.of(x))
        self._handles.append(weakref.ref(handle))
        return handle

    def finish(self) -> None:
        """After the run: keeps only the values that recomputation will read."""
        self._homes = {}
        waiting = self._waiting()
        reads = self._second_run(self._needed(waiting)).reads if waiting else ()
        self._values = {
            name: mapped(value, _Read, lambda x: x.kept(self._outer))
            for name, value in self._values.items()
            if name in reads
        }

    def _waiting(self) -> list[_Dropped]:
        handles = [handle for reference in self._handles if (handle := reference())]
        self._handles = [weakref.ref(handle) for handle in handles]
        return [handle for handle in handles if handle.value is None]

    @staticmethod
    def _needed(handles: Sequence[_Dropped]) -> frozenset[str]:
        return frozenset(handle.place[0] for handle in handles)

    def recompute(self) -> None:
        """Recomputes the tensors of all waiting handles."""
        waiting = self._waiting()
        second = self._second_run(self._needed(waiting))
        values = [mapped(self._values[name], _KeptRead, _KeptRead.get) for name in second.reads]
        run = _Repeat(self._states, {handle.place for handle in waiting})
        with self._context.entered():
            second(values, run)
        for handle in waiting:
            handle.value = handle.view.on(run.found[handle.place])


class _Repeat(CallRecording):
    """The second run of a block's calls, in backward.

    Attributes:
        found: tensors by place; the third number is 1 for a result, 0 for a tensor that a call saves internally.
    """

    def __init__(self, states: Mapping[str, Any], wanted: set[tuple[str, int, int]]) -> None:
        super().__init__()
        self._states, self._wanted = states, wanted
        self.found: dict[tuple[str, int, int], Tensor] = {}

    def begin(self, step: RecordedCall) -> None:
        super().begin(step)
        if step.name in self._states:
            set_generators(self._states[step.name])

    def end(self, step: RecordedCall, result: Any) -> None:
        super().end(step, result)
        for i, x in enumerate(tensors_of(result)):
            if (step.name, i, 1) in self._wanted:
                self.found[step.name, i, 1] = x.detach()

    def pack(self, x: Tensor) -> None:
        """Notes the tensors that a call saves internally; the backward of this run never runs."""
        if not self.home(x)[0]:
            place = (*self.next_own(), 0)
            if place in self._wanted:
                self.found[place] = x.detach()


@dataclass(frozen=True)
class _SecondRun:
    """The graph of recomputed calls, and the names of the values that it reads."""

    graph: fx.GraphModule
    reads: tuple[str, ...]
    current: CurrentRecording

    def __call__(self, values: Sequence[Any], run: _Repeat) -> None:
        for x in tensors_of(values):
            run.note(x, None)
        hooks = torch.autograd.graph.saved_tensors_hooks(run.pack, _never)
        with torch.enable_grad(), hooks, self.current.recording(run):
            self.graph(*values)


def _never(_: Any) -> Tensor:
    raise AssertionError("the backward of a second run")


# --- the objects that autograd saves


class _Dropped:
    """Stands for a saved tensor until it is recomputed; backward takes it once.

    Attributes:
        place: `(call, position, kind)`; the position is among the call's results for kind 1, and among the tensors
            that it saves internally for kind 0.
    """

    def __init__(self, run: _FirstRun, place: tuple[str, int, int], view: SavedView) -> None:
        self.run, self.place, self.view = run, place, view
        self.value: Tensor | None = None

    def get(self) -> Tensor:
        if self.value is None:
            self.run.recompute()
        value, self.value = self.value, None
        assert value is not None, f"{self.place} was not recomputed"
        return value


@dataclass(frozen=True)
class _Kept:
    """A saved tensor that is kept, packed by the hooks around the block.

    Autograd checks the versions of tensors that it saves itself; for tensors that hooks keep it checks nothing.

    Attributes:
        unpack: the hook that gives the tensor back.
        packed: result of the packing hook.
        version: number of times that the tensor had been changed in place.
    """

    unpack: Callable[[Any], Tensor]
    packed: Any
    version: int

    @classmethod
    def of(cls, x: Tensor, hooks: Hooks) -> _Kept:
        return cls(hooks[1], hooks[0](x), x._version)

    def get(self) -> Tensor:
        """The tensor. Raises RuntimeError, as autograd does, if it was changed in place since."""
        if isinstance(self.packed, Tensor) and self.packed._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {list(self.packed.shape)} is at version {self.packed._version}; "
                f"expected version {self.version} instead. Change a clone of it."
            )
        return self.unpack(self.packed)


@dataclass(frozen=True)
class _Read:
    """A tensor that recomputed calls may read, and whether they give it a gradient."""

    value: Tensor
    needs_grad: bool

    @classmethod
    def of(cls, x: Tensor) -> _Read:
        return cls(x.detach(), x.requires_grad)

    def kept(self, hooks: Hooks) -> _KeptRead:
        return _KeptRead(_Kept.of(self.value, hooks), self.needs_grad)


@dataclass(frozen=True)
class _KeptRead:
    """The same, kept until backward."""

    kept: _Kept
    needs_grad: bool

    def get(self) -> Tensor:
        return self.kept.get().detach().requires_grad_(self.needs_grad)


@torch.compiler.disable  # [Note: backward inside forward]
def _unpack(saved: _Dropped | _Kept) -> Tensor:
    return saved.get()


@dataclass(frozen=True)
class RunContext:
    """The state that determines a call's result together with its operands: autocast and random generators.

    Attributes:
        autocasts: kind of device -> whether autocast is on, and its number format.
        tensors: some tensors, for their devices.
    """

    autocasts: Mapping[str, tuple[bool, torch.dtype]]
    devices: tuple[torch.device, ...]

    @classmethod
    def now(cls, inputs: Sequence[Any]) -> RunContext:
        devices = tuple(dict.fromkeys(x.device for each in inputs for x in tensors_of(each)))
        kinds = sorted({"cpu", *(device.type for device in devices)})
        return cls({k: (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds}, devices)

    def generators(self) -> Any:
        """The states of the generators that a call may draw from."""
        probes = [torch.empty(0, device=device) for device in self.devices]
        return torch.get_rng_state(), *get_device_states(*probes)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context with the autocast and random states of the first run; the random states are restored at its end."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_torch.forked_random_state(self.devices))
            for device, (is_on, dtype) in self.autocasts.items():
                stack.enter_context(torch.autocast(device, dtype, is_on))
            yield


def set_generators(state: Any) -> None:
    cpu, devices, states = state
    torch.set_rng_state(cpu)
    set_device_states(devices, states)

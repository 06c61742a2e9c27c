"""`torch.compile(model, backend="autopar", options={"mesh": {"dp": 2, "tp": 2}, "recipe": "auto"})`.

An ordinary single-device script, started by torchrun, runs split over the ranks and sees nothing of it:
every rank gives the whole batch, holds plain whole parameters, and receives the whole result; gradients are
whole and equal on every rank. What is split is the work, and with it the activations kept for backward.

Each graph that dynamo finds is lifted to a module, captured, and planned with all parameters replicated, so
that the plans of several graphs agree about them. Only collectives that are their own derivatives stand
between the ops (`autopar.runtime.collectives`), and the graph runs eagerly: autograd does the rest.

[Note: when graphs are planned] Dynamo compiles a frame when it first runs, so that nothing is lost by
planning at the first call of each set of shapes, on real arguments: sizes that dynamo left open are numbers
by then. Every rank runs the same script, and so meets the same graphs in the same order.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from autopar.api import agreed, check_world, join_process_group, make_world, world_size
from autopar.capture import Captured, capture_forward
from autopar.cost_model import Hardware, find_hardware
from autopar.errors import AutoparError, CaptureError, MeshError
from autopar.factors import Analysis, _Analyzer, output_nodes
from autopar.ir import PIPELINE_AXIS, Graph, Mesh, ParameterPlan, Plan, R
from autopar.lifting import Lifted, View, argument_names, lift
from autopar.passes import bind_groups, clean_up, partition, verify_graph
from autopar.passes.retarget import draws, is_collective
from autopar.planning import Prepared, make_plan
from autopar.program import check_plan
from autopar.runtime.world import World
from autopar.search import RecipeLike
from autopar.search.recipes import format_recipe, resolve

log = logging.getLogger("autopar")
Run = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., options=...)` may hold.

    Attributes:
        mesh: axis name -> number of ranks; by default one axis `dp` of all ranks.
        recipe: constraints on the split, as in `autopar.compile`; those that shard parameters at rest
            do not apply, as parameters stay whole.
        hardware: what is priced, by name or path; by default a guess from the device.
    """

    mesh: Mesh | Mapping[str, int] | None = None
    recipe: RecipeLike = "auto"
    hardware: Hardware | str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Options:
        """Raises AutoparError for an option there is none of."""
        unknown = [name for name in options if name not in cls.__dataclass_fields__]
        if unknown:
            raise AutoparError(
                f"The backend autopar has no option {unknown[0]!r}; it takes "
                f"{', '.join(cls.__dataclass_fields__)}."
            )
        return cls(**options)

    def axes(self) -> Mesh:
        """The mesh. Raises MeshError unless it has as many ranks as run, and RecipeError."""
        mesh = Mesh((("dp", world_size()),)) if self.mesh is None else Mesh.of(self.mesh)
        if PIPELINE_AXIS in mesh.names:
            raise MeshError(
                f"The mesh {mesh} has the axis {PIPELINE_AXIS!r}, and pipeline stages need the whole "
                "step: use autopar.compile and its `step`, or split over other axes."
            )
        check_world(mesh)
        resolve(self.recipe, mesh)
        return mesh


def autopar(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., list[Any]]:
    """The backend: what torch.compile calls with each graph; see `Options` for what can be asked.

    Raises AutoparError for an unknown option and for parameters that are DTensors, MeshError if the world
    does not match the mesh, RecipeError for an unknown recipe.
    """
    if mode is not None:
        raise AutoparError(f"The backend autopar has no mode {mode!r}; leave mode out.")
    chosen = Options.of(options or {})
    names = argument_names(module)
    _refuse_sharded(names, example_inputs)
    device = _device(example_inputs)
    join_process_group(device)
    return _SplitGraph(module, names, chosen, _world(chosen.axes(), device))


def _refuse_sharded(names: Sequence[str], arguments: Sequence[Any]) -> None:
    for name, x in zip(names, arguments, strict=True):
        if isinstance(x, DTensor):
            raise AutoparError(
                f"{name} is a DTensor of placements {x.placements}, and the backend takes plain tensors: "
                "it splits the work and leaves parameters whole. Use autopar.compile for sharded ones."
            )


def _device(arguments: Sequence[Any]) -> torch.device:
    """Where the graph computes: on the accelerator if any argument is there."""
    found = [x.device for x in arguments if isinstance(x, Tensor)]
    return next((device for device in found if device.type != "cpu"), torch.device("cpu"))


_WORLDS: WeakKeyDictionary[Any, dict[tuple[Mesh, str], World]] = WeakKeyDictionary()


def _world(mesh: Mesh, device: torch.device) -> World:
    """The process groups of a mesh, made once for all graphs; they end with the default group."""
    if not dist.is_initialized():
        return World(mesh, device)
    known = _WORLDS.setdefault(dist.group.WORLD, {})
    key = (mesh, device.type)
    if key not in known:
        known[key] = make_world(mesh, device, None)
    return known[key]


# --- one graph of dynamo


class _SplitGraph:
    """What dynamo calls in place of a graph: plans at the first call of each set of shapes."""

    def __init__(
        self, module: fx.GraphModule, names: Sequence[str], options: Options, world: World
    ) -> None:
        self._module, self._names = module, names
        self._options, self._world = options, world
        self._runs: dict[Any, Run] = {}

    def __call__(self, *arguments: Any) -> list[Any]:
        key = tuple(map(_kind, arguments))
        if key not in self._runs:
            _check_alike(self._world, self._names, arguments)
            self._runs[key] = self._made(arguments)
        return self._runs[key](arguments)

    def _made(self, arguments: Sequence[Any]) -> Run:
        start = time.perf_counter()
        try:
            lifted = lift(self._module, self._names, arguments)
            inputs = tuple(arguments[i] for i in lifted.inputs)
            prepared = _prepare(lifted, inputs)
            plan = _plan(prepared, self._world, self._options)
            local = _local_graph(prepared, plan)
        except AutoparError as error:
            self._tell_whole(error)
            return _Whole(self._module, self._world)
        self._tell(prepared.analysis.graph, plan, local, time.perf_counter() - start)
        return _Split(lifted, prepared.captured, local, self._world)

    def _tell(self, graph: Graph, plan: Plan, local: fx.GraphModule, seconds: float) -> None:
        if self._world.rank == 0:
            log.info("%s; planned in %.1f s", _summary(graph, plan, local), seconds)
            log.debug("%s\n%s", plan, local.code)

    def _tell_whole(self, error: AutoparError) -> None:
        if self._world.rank == 0:
            calls = [n.name for n in self._module.graph.nodes if n.op.startswith("call")]
            place = f"{calls[0]} ... {calls[-1]}" if calls else "nothing"
            log.warning(
                "A graph of %d calls (%s) runs whole on every rank: %s", len(calls), place, error
            )


def _kind(x: Any) -> Any:
    """What a plan depends on: all of a number, and of a tensor what its graph does."""
    if not isinstance(x, Tensor):
        return x
    return tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad


def _check_alike(world: World, names: Sequence[str], arguments: Sequence[Any]) -> None:
    """Raises AutoparError unless all ranks gave the same numbers, but for rounding."""
    tensors = [(n, x) for n, x in zip(names, arguments, strict=True) if isinstance(x, Tensor)]
    if world.mesh.size == 1 or not tensors:
        return
    own = torch.stack([_fingerprint(x).to(world.device) for _, x in tensors])
    first = own.clone()
    world.broadcast(first)
    differs = ((own - first).abs() > 1e-3).any(1).nonzero()
    wrong = torch.tensor(int(differs[0]) if len(differs) else len(tensors), device=world.device)
    dist.all_reduce(wrong, dist.ReduceOp.MIN)
    if int(wrong) < len(tensors):
        raise AutoparError(
            f"{tensors[int(wrong)][0]} is not the same on all {world.mesh.size} ranks, and each has to "
            "give the whole batch and the same parameters, as one device would have them: call "
            "torch.manual_seed with one number on all ranks before the model is made and data are drawn, "
            "and use no DistributedSampler."
        )


@torch.no_grad()
def _fingerprint(x: Tensor) -> Tensor:
    """The logarithm of a tensor's norm and its direction along a fixed vector, of a million entries at most."""
    values = torch.view_as_real(x) if x.is_complex() else x
    flat = values.detach().reshape(-1)
    flat = flat[:: 1 + flat.numel() // 2**20].double().nan_to_num(posinf=1e3, neginf=-1e3)
    weights = torch.cos(torch.arange(flat.numel(), device=x.device, dtype=torch.float64))
    norm = flat.norm() + 1e-30
    return torch.stack([norm.log(), flat.dot(weights) / norm])


# --- capture and plan


class _WithDifferentiable(_Analyzer):
    """An analysis in which inputs, too, may take a gradient: activations of the graph before."""

    def __init__(self, captured: Captured, differentiable: frozenset[str]) -> None:
        super().__init__(captured)
        self._differentiable = differentiable

    def _add_leaf(self, node: fx.Node) -> None:
        super()._add_leaf(node)
        if node.name in self._differentiable:
            self.needs_grad.add(node.name)


def _prepare(lifted: Lifted, inputs: tuple[Tensor, ...]) -> Prepared:
    if not any(result is None for result in lifted.results) and not lifted.buffers:
        raise CaptureError("It computes nothing but views of its arguments.")
    captured = capture_forward(lifted.module, inputs, {})
    clean_up(captured.module)
    by_position = dict(zip(captured.inputs, lifted.inputs, strict=True))
    differentiable = frozenset(n for n, i in by_position.items() if i in lifted.differentiable)
    analysis: Analysis = _WithDifferentiable(captured, differentiable).run()
    return Prepared(captured, analysis)


def _plan(prepared: Prepared, world: World, options: Options) -> Plan:
    """A plan, the same on all ranks, with everything whole at the edges of the graph.

    A recipe that the graph leaves no room for, as a fragment between two graph breaks or an uneven batch
    may, gives way to "auto": first on one axis, then on all.
    """
    whole = (R,) * len(world.mesh.axes)
    graph = prepared.analysis.graph
    hardware = _hardware(options, world)

    def search(recipe: RecipeLike) -> Plan:
        return make_plan(
            prepared, world.mesh, hardware=hardware, recipe=recipe,
            fixed_storage={name: ParameterPlan(whole, whole) for name in graph.parameters},
        )  # fmt: skip

    def search_any() -> Plan:
        for recipe in _relaxed(options.recipe, world.mesh):
            try:
                return search(recipe)
            except AutoparError as error:
                log.info("recipe %s gives way for a graph: %s", format_recipe(recipe), error)
        return search("auto")

    plan = agreed(search_any)
    return replace(plan, inputs=dict.fromkeys(plan.inputs, whole))


def _relaxed(recipe: RecipeLike, mesh: Mesh) -> Iterator[RecipeLike]:
    """A recipe, then with one axis after the other left to the search."""
    yield recipe
    rows = {axis: row.name for axis, row in zip(mesh.names, resolve(recipe, mesh), strict=True)}
    if len(rows) > 1:
        for axis in rows:
            yield {**rows, axis: "auto"}


def _local_graph(prepared: Prepared, plan: Plan) -> fx.GraphModule:
    """The graph of one rank, which returns new values of buffers and then the results, all whole."""
    captured = prepared.captured
    check_plan(captured, prepared.analysis, plan)
    everything = range(len(output_nodes(captured.module)))
    # What is new state leaves a partitioned graph whole, and here everything does.
    whole = replace(captured, mutated=dict.fromkeys(everything, "state"))
    local, _ = partition(whole, prepared.analysis, plan)
    verify_graph(local, after="partition")
    return local


def _hardware(options: Options, world: World) -> Hardware:
    if isinstance(options.hardware, Hardware):
        return options.hardware
    guess = "cpu-gloo" if world.device.type == "cpu" else "h100"
    return find_hardware(options.hardware or guess)


# --- running


class _Whole:
    """A graph as dynamo gave it, on every rank alike."""

    def __init__(self, module: fx.GraphModule, world: World) -> None:
        self._module, self._world = module, world

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        with _same_seed(self._world):
            return list(self._module(*arguments))


class _Split:
    """A local graph on this rank, called with the arguments of the dynamo graph.

    Args:
        lifted: what the arguments are.
        captured: names the placeholders of the local graph.
    """

    def __init__(
        self, lifted: Lifted, captured: Captured, local: fx.GraphModule, world: World
    ) -> None:
        self._lifted, self._graph = lifted, local
        self._constants = list(captured.constants.values())
        self._order = [
            *(lifted.parameters[name] for name in captured.parameters.values()),
            *(lifted.buffers[name] for name in captured.buffers.values()),
        ]
        self._changed = [lifted.buffers[name] for _, name in sorted(captured.mutated.items())]
        bind_groups(self._graph, world.group_names)
        verify_graph(self._graph, after="binding to process groups")
        is_random = any(draws(node) for node in self._graph.graph.nodes)
        self._seed = (lambda: _same_seed(world)) if is_random else contextlib.nullcontext
        kind = world.device.type
        self._casts = (
            torch.autocast(kind, enabled=False)  # the graph has its casts
            if torch.is_autocast_enabled(kind)
            else contextlib.nullcontext()
        )

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        changed = {*self._changed}
        # What will be changed is given as a copy: backward may need what it was.
        held = [arguments[i].clone() if i in changed else arguments[i] for i in self._order]
        inputs = [arguments[i] for i in self._lifted.inputs]
        with self._seed(), self._casts:
            results = list(self._graph(*held, *self._constants, *inputs))
        with torch.no_grad():
            for i, value in zip(self._changed, results, strict=False):
                arguments[i].copy_(value)
        return self._results(results[len(self._changed) :], arguments)

    def _results(self, made: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        fresh = iter(made)
        return [
            next(fresh) if r is None else r.of(arguments) if isinstance(r, View) else r
            for r in self._lifted.results
        ]


@contextlib.contextmanager
def _same_seed(world: World) -> Iterator[None]:
    """[Note: keys of random ops] in autopar/rules/random.py: all ranks draw in step.

    The seed of a call is a number from the first rank's default generator, so that torch.manual_seed and
    torch.set_rng_state there mean what they do on one device. A call that draws nothing leaves it alone.
    """
    devices = [] if world.device.type == "cpu" else [world.device]
    with torch.random.fork_rng(devices, device_type=world.device.type):
        torch.manual_seed(world.agree(_number()))
        before = _states(world.device)
        yield
        drawn = _states(world.device) != before
    if drawn:
        _number()


def _number() -> int:
    """The next number of the default generator."""
    return int(torch.randint(2**62, ()))


def _states(device: torch.device) -> list[list[int]]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device.type).get_rng_state(device))
    return [state.tolist() for state in states]


# --- what is told


def _summary(graph: Graph, plan: Plan, local: fx.GraphModule) -> str:
    """`graph of 31 ops on dp=2,tp=2: dp splits batch in 30; tp splits ...; 4 all_reduce, 2 shard`."""
    splits = [
        f"{axis} splits {_what_splits(graph, plan, i)}" for i, axis in enumerate(plan.mesh.names)
    ]
    names = [n.target._schema.name.split("::")[1] for n in local.graph.nodes if is_collective(n)]
    moved = Counter(name for name in names if name != "vary")
    inserted = ", ".join(f"{count} {name}" for name, count in sorted(moved.items())) or "none"
    return (
        f"graph of {len(graph.ops)} ops on {plan.mesh} (recipe {plan.recipe}): {'; '.join(splits)}; "
        f"collectives inserted: {inserted}"
    )


def _what_splits(graph: Graph, plan: Plan, axis: int) -> str:
    chosen = [op.choice(plan.ops[op.name][axis]) for op in graph.ops]
    counts = Counter(choice.factor for choice in chosen if choice.splits)
    if not counts:
        return "nothing"
    shown = [f"{factor} in {count} ops" for factor, count in counts.most_common(4)]
    return ", ".join(shown) + (", ..." if len(counts) > 4 else "")

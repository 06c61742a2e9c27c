"""`torch.compile(model, backend="autopar", options={"mesh": {"dp": 2, "tp": 2}, "recipe": "auto"})`.

An ordinary single-device script, started by torchrun, runs split over the ranks and sees nothing of it:
every rank gives the whole batch, holds plain whole parameters, or its shards of those that `autopar.shard_`
has cut, and receives the whole result; gradients lie as parameters do. What is split is the work, and with it
the activations kept for backward.

Each graph that dynamo finds is lifted to a module, captured, and planned with all parameters as they lie, so
that the plans of several graphs agree about them. Only collectives that are their own derivatives stand
between the ops (`autopar.ops.collectives`), and eager autograd, or that of compiled regions
(`autopar.runtime.compiled`), does the rest.

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

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.analysis.factors import analyze
from autopar.backend.lifting import Lifted, ReturnedView, argument_names, lift
from autopar.backend.sharding import (
    check_alike,
    device_of,
    hardware_of,
    layout_of,
    mesh_of,
    refuse_stages,
    whole_parameter,
    world_of,
)
from autopar.capture.captured import Captured
from autopar.capture.export import capture_forward
from autopar.errors import AutoparError, CaptureError, MeshError, RecipeError
from autopar.ir import Graph, Mesh, ParameterPlan, Plan, R
from autopar.ops.collectives import Collective
from autopar.ops.nodes import draws
from autopar.passes import bind_groups, clean_up, partition, verify_graph
from autopar.planning.planning import Prepared, make_plan
from autopar.program.program import check_plan
from autopar.program.recomputation import mark_blocks
from autopar.runtime.compiled import Executor
from autopar.runtime.entries import Entries
from autopar.runtime.gather import Gathers
from autopar.runtime.kept_programs import KEPT_PROGRAMS
from autopar.runtime.processes import (
    BUCKET_BYTES,
    agreed,
    check_world,
    join_process_group,
    world_size,
)
from autopar.runtime.world import World
from autopar.search import RecipeLike
from autopar.search.recipes import format_recipe, resolve, split_recipe
from autopar.search.request import Request

log = logging.getLogger("autopar")
# Before Dynamo reads a frame, and so here, when torch.compile looks the backend up: `options` come with a graph.
_torch.trace_recurrent_layers()
Run = Callable[[Sequence[Any]], list[Any]]


OPTIONS = ("mesh", "recipe", "hardware", "executor")


def autopar(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., list[Any]]:
    """The backend: what torch.compile calls with each graph.

    Args:
        module: the graph that dynamo found.
        example_inputs: its arguments.
        options: what is asked, by name. `mesh` maps an axis to its number of ranks; by default one axis
            `dp` of all ranks, or the mesh of `autopar.shard_`. `recipe` constrains the split, as in
            `autopar.compile`; parameters stay stored as they lie. `hardware` is what is priced: a name,
            the path of a file or figures; by default a guess from the device. `executor` runs the graph
            of a rank, as in `autopar.compile`: "eager", "aot_eager" or "inductor".
        mode: a mode of torch.compile, which this backend does not have.

    Raises AutoparError for an unknown option and for DTensors that `autopar.shard_` has not made, MeshError
    if the world or these do not match the mesh, RecipeError for an unknown recipe.
    """
    if mode is not None:
        raise AutoparError(f"The backend autopar has no mode {mode!r}; leave mode out.")
    given = _known(options or {})
    names = argument_names(module)
    _refuse_distributed(module, names, example_inputs)
    device = device_of(example_inputs)
    join_process_group(device)
    stored = [mesh_of(x) for x in example_inputs if isinstance(x, DTensor)]
    request = _request(given, stored[0] if stored else None, device)
    assert request.mesh is not None, "a request of the backend has a mesh"
    executor = Executor(given.get("executor", "eager"))
    return _SplitGraph(module, names, request, world_of(request.mesh, device), executor)


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises AutoparError for an option that the backend does not have."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise AutoparError(
            f"The backend autopar has no option {unknown[0]!r}; it takes {', '.join(OPTIONS)}. "
            "Other settings are those of autopar.compile."
        )
    return options


def _request(options: Mapping[str, Any], stored: Mesh | None, device: torch.device) -> Request:
    """What the options ask of every graph, on the mesh where parameters are `stored`, if they are.

    Raises MeshError unless the mesh is that one and has as many ranks as run, and RecipeError.
    """
    given, recipe = options.get("mesh"), options.get("recipe", "auto")
    mesh = stored or Mesh((("dp", world_size()),))
    if given is not None:
        mesh = Mesh.of(given)
    refuse_stages(mesh)
    if stored not in (None, mesh):
        raise MeshError(
            f"autopar.shard_ has cut the parameters over the mesh {stored}, and the backend is given "
            f"{mesh}; leave the option out, or shard over the same."
        )
    if split_recipe(recipe)[0]:
        raise RecipeError(
            f"The recipe {recipe!r} is one of pipeline stages, and those need the whole step: use "
            "autopar.compile and its `step`, or another recipe."
        )
    check_world(mesh)
    return Request(hardware_of(options.get("hardware"), device), mesh=mesh, recipe=recipe)


def _refuse_distributed(
    module: fx.GraphModule, names: Sequence[str], arguments: Sequence[Any]
) -> None:
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, name, x in zip(placeholders, names, arguments, strict=True):
        if isinstance(x, DTensor) and not _is_read_whole(node):
            raise AutoparError(
                f"{name} is a DTensor of placements {x.placements}, and the backend takes plain tensors "
                "and the parameters that autopar.shard_ has cut, read by the model or a checkpointed block "
                "(not by the branches of torch.cond: read them before it)."
            )


def _is_read_whole(node: fx.Node) -> bool:
    """Whether all that uses an argument is `whole_parameter`, also in the bodies that it is passed to."""
    return all(
        user.target is whole_parameter or (inside and all(map(_is_read_whole, inside)))
        for user in node.users
        for inside in [_arguments_of_bodies(user, node)]
    )


def _arguments_of_bodies(call: fx.Node, given: fx.Node) -> list[fx.Node]:
    """What `given` is in the graphs that a call, such as that of a checkpointed block, takes and runs."""
    bodies = [x for x in call.args if isinstance(x, fx.Node) and x.op == "get_attr"]
    found = []
    for body in (getattr(call.graph.owning_module, str(x.target)) for x in bodies):
        if isinstance(body, fx.GraphModule):
            operands = [x for x in call.args if x not in bodies]
            inner = body.graph.find_nodes(op="placeholder")
            if len(inner) == len(operands):  # not those of torch.cond, which takes no DTensor
                found += [x for x, outer in zip(inner, operands, strict=True) if outer is given]
    return found


# --- one graph of dynamo


class _SplitGraph:
    """The function that dynamo calls in place of a graph; it plans at the first call of each set of shapes.

    [Note: programs are kept] in autopar/runtime/kept_programs.py.
    """

    def __init__(
        self, module: fx.GraphModule, names: Sequence[str], request: Request, world: World,
        executor: Executor,
    ) -> None:  # fmt: skip
        self._module, self._names = module, names
        self._request, self._world, self._executor = request, world, executor
        self._runs: dict[Any, Run] = {}

    def __call__(self, *arguments: Any) -> list[Any]:
        key = tuple(map(_kind, arguments))
        run = self._runs.pop(key, None)
        if run is None:
            check_alike(self._world, dict(zip(self._names, arguments, strict=True)))
            run = self._made(arguments)
        self._runs[key] = run  # last: what was used longest ago is let go first
        if len(self._runs) > KEPT_PROGRAMS:
            del self._runs[next(iter(self._runs))]
        return run(arguments)

    def _made(self, arguments: Sequence[Any]) -> Run:
        start = time.perf_counter()
        try:
            sharded = {i: x for i, x in enumerate(arguments) if isinstance(x, DTensor)}
            given = [_stand_in(x) if i in sharded else x for i, x in enumerate(arguments)]
            lifted = lift(self._module, self._names, given, frozenset(sharded))
            prepared = _prepare(lifted, tuple(arguments[i] for i in lifted.inputs))
            stored = {n: sharded[i] for n, i in lifted.parameters.items() if i in sharded}
            plan = _plan(prepared, self._world, self._request, stored)
            local = _local_graph(prepared, plan)
        except AutoparError as error:
            self._tell_whole(error)
            return _Whole(self._module, self._world)
        self._tell(prepared.analysis.graph, plan, local, time.perf_counter() - start)
        return _Split(lifted, prepared.captured, local, self._world, self._executor, arguments)

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
    """The properties of an argument that a plan depends on: the value of a number; of a tensor what its graph uses."""
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, DTensor):
        return tuple(x.shape), x.placements, x.dtype, x.device, x.requires_grad
    return tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad


# --- capture and plan


def _prepare(lifted: Lifted, inputs: tuple[Tensor, ...]) -> Prepared:
    if not any(result is None for result in lifted.results) and not lifted.buffers:
        raise CaptureError("It computes nothing but views of its arguments.")
    try:
        captured = capture_forward(lifted.module, inputs, {})
    except CaptureError as error:
        raise CaptureError(f"{error}{lifted.place}") from error
    clean_up(captured.module)
    positions = zip(captured.inputs, lifted.inputs, strict=True)
    captured = replace(
        captured,
        # Activations of the graph before take a gradient, too.
        differentiable=frozenset(name for name, i in positions if i in lifted.differentiable),
        whole_outputs=True,
    )
    return Prepared(captured, analyze(captured))


def _plan(
    prepared: Prepared, world: World, request: Request, stored: Mapping[str, DTensor]
) -> Plan:
    """A plan, the same on all ranks, with everything whole at the edges of the graph.

    Parameters lie as they are `stored`, all others whole.
    A recipe that the graph leaves no room for, as a fragment between two graph breaks or an uneven batch
    may, gives way to "auto": first on one axis, then on all.
    """
    replicated = (R,) * len(world.mesh.axes)
    graph = prepared.analysis.graph
    layouts = {
        name: layout_of(stored[name], graph.tensors[tensor].dims, world.mesh)
        if name in stored
        else replicated
        for name, tensor in graph.parameters.items()
    }

    lying = {name: ParameterPlan(at, at) for name, at in layouts.items()}

    def search(recipe: RecipeLike) -> Plan:
        return make_plan(prepared, request.but(recipe=recipe), fixed_storage=lying)

    def search_any() -> Plan:
        for recipe in _relaxed(request.recipe, world.mesh):
            try:
                return search(recipe)
            except AutoparError as error:
                log.info("recipe %s gives way for a graph: %s", format_recipe(recipe), error)
        return search("auto")

    plan = agreed(search_any)
    return replace(plan, inputs=dict.fromkeys(plan.inputs, replicated))


def _relaxed(recipe: RecipeLike, mesh: Mesh) -> Iterator[RecipeLike]:
    """A recipe, then with one axis after the other left to the search."""
    yield recipe
    rows = {axis: row.name for axis, row in zip(mesh.names, resolve(recipe, mesh), strict=True)}
    if len(rows) > 1:
        for axis in rows:
            yield {**rows, axis: "auto"}


def _local_graph(prepared: Prepared, plan: Plan) -> fx.GraphModule:
    """The graph of one rank, which returns new values of buffers and then the results, all whole."""
    check_plan(prepared.captured, prepared.analysis, plan)
    local, _ = partition(prepared.captured, prepared.analysis, plan)
    verify_graph(local, after="partition")
    mark_blocks(local, prepared.analysis.graph, plan)
    return local


@torch.inference_mode(False)  # whose tensors have no version
def _stand_in(parameter: DTensor) -> nn.Parameter:
    """A tensor of the shape of a whole parameter that takes no memory."""
    found = _torch.without_memory(parameter.shape, parameter.dtype, parameter.device)
    return nn.Parameter(found, requires_grad=parameter.requires_grad)


# --- running


@dataclass(frozen=True)
class _Shard:
    """What is to be known of a parameter to group it with others, with no values."""

    local: Tensor
    parameter: Tensor

    @classmethod
    def of(cls, parameter: Tensor) -> _Shard:
        like = torch.empty_like(_torch.local_tensor(parameter), device="meta")
        return cls(like, like.detach().requires_grad_(parameter.requires_grad))

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The format in which its gradient is added up, as autograd gives it."""
        return self.local.dtype


class _Shards:
    """The parameters of a graph as `Gathers` sees them; their gradients go back through autograd."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.kept = self.specs = list(map(_Shard.of, parameters))
        self.leaves: list[Tensor] = []

    def shape(self, i: int) -> tuple[int, ...]:
        """The shape of the part that a rank holds."""
        return tuple(self.kept[i].local.shape)


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
        executor: what runs it.
        examples: example value of each argument.
    """

    def __init__(
        self,
        lifted: Lifted,
        captured: Captured,
        local: fx.GraphModule,
        world: World,
        executor: Executor,
        examples: Sequence[Any],
    ) -> None:
        self._lifted = lifted
        self._constants = list(captured.constants.values())
        self._parameters = [lifted.parameters[name] for name in captured.parameters.values()]
        self._buffers = [lifted.buffers[name] for name in captured.buffers.values()]
        self._changed = [lifted.buffers[name] for _, name in sorted(captured.mutated.items())]
        sources = _Shards([examples[i] for i in self._parameters])
        self._gathers = Gathers(sources, world)
        self._gathers.install(local, world.mesh, BUCKET_BYTES)
        self._entries = Entries(world)
        self._entries.install(local, [each.local for each in sources.kept], BUCKET_BYTES)
        bind_groups(local, world.group_names)
        verify_graph(local, after="binding to process groups")
        is_random = any(draws(node) for node in local.graph.nodes)
        self._graph = executor.ready(local)
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
        state = [arguments[i].clone() if i in changed else arguments[i] for i in self._buffers]
        inputs = [arguments[i] for i in self._lifted.inputs]
        shards = [_torch.differentiable_local(arguments[i]) for i in self._parameters]
        with self._seed(), self._casts, self._gathers.watching():
            leaves = self._entries.open(shards)
            results = list(self._graph(*leaves, *state, *self._constants, *inputs))
        with torch.no_grad():
            for i, value in zip(self._changed, results, strict=False):
                arguments[i].copy_(value)
        return self._results(results[len(self._changed) :], arguments)

    def _results(self, made: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        fresh = iter(made)
        return [
            next(fresh) if r is None else r.of(arguments) if isinstance(r, ReturnedView) else r
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


# --- what is reported


def _summary(graph: Graph, plan: Plan, local: fx.GraphModule) -> str:
    """`graph of 31 ops on dp=2,tp=2: dp splits batch in 30; tp splits ...; 4 all_reduce, 2 shard`."""
    splits = [
        f"{axis} splits {_what_splits(graph, plan, i)}" for i, axis in enumerate(plan.mesh.names)
    ]
    calls = [call for node in local.graph.nodes if (call := Collective.of(node))]
    moved = Counter(call.name for call in calls if call.name != "vary")
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

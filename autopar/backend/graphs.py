"""A graph of torch.compile as the backend runs it.

The first four sets of sizes are planned at once; a later set only after it has recurred.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.backend.comparing import check_alike, check_calls
from autopar.backend.interpreter import place_of
from autopar.backend.lifting import lift
from autopar.backend.plans import local_graph, meshes, plan_of, prepare, stand_in
from autopar.backend.recurrence import Recurrence
from autopar.backend.running import LocalGraph, WholeGraph
from autopar.backend.unwatched import CachedCalls, HooksOfAllModules, Methods
from autopar.errors import AutoparError, CaptureError
from autopar.ir import Graph, Mesh, Plan
from autopar.ops.collectives import Collective
from autopar.ops.ring import Ring
from autopar.options import shared_words
from autopar.runtime.execute.compiled import Executor
from autopar.runtime.model.program_cache import KEPT_PROGRAMS
from autopar.runtime.ranks.comparison import Comparison
from autopar.runtime.ranks.stderr_log import heard
from autopar.runtime.ranks.world import World
from autopar.search.request.options import PlanOptions
from autopar.search.request.recipes import is_open
from autopar.search.request.request import Request

log = logging.getLogger("autopar")
Run = Callable[[Sequence[Any]], list[Any]]
_SHOWN_GRAPHS = 8  # a script with graph breaks has more
_HINT = "TORCH_LOGS=+autopar shows the plans; logging.getLogger('autopar').setLevel('WARNING') hides these lines"
_LAST = "TORCH_LOGS=autopar shows such a line for every further graph"
_shown = set[str]()  # lines of the user's code with whose graphs plans were shown


class SplitGraph:
    """The function that dynamo calls in place of a graph.

    It makes a plan for a set of sizes that recurs; other calls run whole on every rank. See [Note: programs are
    kept] in autopar/runtime/model/program_cache.py, and [Note: sizes that depend on values] in
    autopar/backend/recurrence.py.

    Args:
        module: the graph.
        names: readable names of its arguments.
        request: what is asked of its plans.
        world_on: this rank's view of a mesh.
        executor: what runs its local graphs.
        comparison: compares texts of all ranks.
        unwatched: the methods of classes that the graph was made from, its calls of functions with a cache, and hooks.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        names: Sequence[str],
        request: Request,
        world_on: Callable[[Mesh], World],
        executor: Executor,
        comparison: Comparison,
        unwatched: Sequence[Methods | CachedCalls | HooksOfAllModules],
    ) -> None:
        self._module, self._names, self._comparison = module, names, comparison
        self._request, self._world_on, self._executor = request, world_on, executor
        self._world = world_on(meshes(request)[0])  # all ranks, on whichever mesh a plan is
        self._unwatched = unwatched
        self._runs: dict[Any, Run] = {}
        self._recurrence = Recurrence()
        self._whole = WholeGraph(module, self._world)
        self._has_warned = False
        self._with_offsets = _reads_memory(module)

    def __call__(self, *arguments: Any) -> list[Any]:
        for each in self._unwatched:
            each.check()
        key = key_of(arguments, with_offsets=self._with_offsets)
        run = self._runs.pop(key, None)
        if run is None and not self._recurrence.pays(key):
            self._warn_of_sizes()
            return self._whole(arguments)
        if run is None:
            named = dict(zip(self._names, arguments, strict=True))
            options = [*shared_words(self._request, PlanOptions), f"executor={self._executor.name}"]
            check_calls(self._comparison, self._module.graph, named, place_of(self._module), options)
            check_alike(self._world, named)
            run = self._made(arguments)
            self._with_offsets = self._with_offsets or _share_storage(arguments)
            key = key_of(arguments, with_offsets=self._with_offsets)
        self._runs[key] = run  # last: what was used longest ago is let go first
        if len(self._runs) > KEPT_PROGRAMS:
            del self._runs[next(iter(self._runs))]
        return run(arguments)

    def _made(self, arguments: Sequence[Any]) -> Run:
        start = time.perf_counter()
        try:
            self._refuse_offsets(arguments)
            sharded = {i: x for i, x in enumerate(arguments) if isinstance(x, DTensor)}
            given = [stand_in(x) if i in sharded else x for i, x in enumerate(arguments)]
            with _torch.ending_transforms(), _torch.saving_nothing():
                lifted = lift(self._module, self._names, given, frozenset(sharded))
                prepared = prepare(lifted, tuple(arguments[i] for i in lifted.inputs))
            stored = {n: sharded[i] for n, i in lifted.parameters.items() if i in sharded}
            with self._heard():
                plan = plan_of(prepared, self._request, stored)
                local = local_graph(prepared, plan)
                self._tell(prepared.analysis.graph, plan, local, time.perf_counter() - start)
        except AutoparError as error:
            self._warn(str(error))
            return self._whole
        world = self._world_on(plan.mesh)
        return LocalGraph(lifted, prepared.captured, local, world, self._executor, arguments)

    def _refuse_offsets(self, arguments: Sequence[Any]) -> None:
        """Raises CaptureError if the graph uses as_strided on an argument with a storage offset."""
        if _reads_memory(self._module) and any(
            isinstance(x, Tensor) and not isinstance(x, DTensor) and x.storage_offset() for x in arguments
        ):
            raise CaptureError(
                "The graph uses as_strided, but an argument is a view with a storage offset; use slices, or give a "
                f"clone.{place_of(self._module)}"
            )

    def _heard(self) -> contextlib.AbstractContextManager[None]:
        """Shows the first plan of the graphs that begin at one line on stderr, as `autopar.compile` shows its plan."""
        place = place_of(self._module)
        if place in _shown or len(_shown) == _SHOWN_GRAPHS:
            return contextlib.nullcontext()
        _shown.add(place)
        return heard({1: _HINT, _SHOWN_GRAPHS: _LAST}.get(len(_shown), ""))

    def _tell(self, graph: Graph, plan: Plan, local: fx.GraphModule, seconds: float) -> None:
        if self._world.rank == 0:
            log.info("%s; planned in %.1f s", summary(graph, plan, local), seconds)
            log.debug("%s\n%s", plan, local.code)

    def _warn(self, reason: str) -> None:
        """Logs on the first rank that the graph runs whole on every rank, with the reason."""
        if self._world.rank == 0:
            calls = [n.name for n in self._module.graph.nodes if n.op.startswith("call")]
            place = f"{calls[0]} ... {calls[-1]}" if calls else "nothing"
            log.warning("A graph of %d calls (%s) runs whole on every rank: %s", len(calls), place, reason)

    def _warn_of_sizes(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"it was called with {self._recurrence.sets} sets of sizes, and further sets get a plan only if they "
                "recur often. Sizes that depend on values (x[mask], nonzero) seldom do: to have the work split, "
                "compute all rows and mask them with torch.where, or multiply sorted rows with "
                f"torch.nn.functional.grouped_mm. Lengths of batches: pad them to a few.{place_of(self._module)}"
            )


def key_of(arguments: Sequence[Any], *, with_offsets: bool = False) -> tuple[Any, ...]:
    """The properties of arguments that a plan depends on.

    Args:
        arguments: the arguments of a graph.
        with_offsets: whether the graph depends on where tensors begin in their storages.

    >>> import torch
    >>> data = torch.zeros(16, 4)
    >>> key_of([data[:8]]) == key_of([data[8:]]) != key_of([data[8:12]])
    True
    """
    return tuple(_kind(x, with_offsets) for x in arguments)


def _kind(x: Any, with_offsets: bool) -> Any:
    """The value of a number; the geometry and the type of a tensor."""
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, DTensor):
        return tuple(x.shape), x.placements, x.dtype, x.device, x.requires_grad
    offset = x.storage_offset() if with_offsets else None
    return tuple(x.shape), x.stride(), offset, x.dtype, x.device, x.requires_grad


def _reads_memory(module: fx.GraphModule) -> bool:
    """Whether a graph counts elements from the beginning of a storage, as as_strided does."""
    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    targets = (node.target for graph in graphs for node in graph.nodes)
    names = (getattr(target, "__name__", str(target)) for target in targets)
    return any(name in ("as_strided", "as_strided_", "storage_offset", "set_") for name in names)


def _share_storage(arguments: Sequence[Any]) -> bool:
    """Whether two arguments are views of one storage."""
    found = [
        _torch.storage_reference(x).cdata for x in arguments if isinstance(x, Tensor) and not isinstance(x, DTensor)
    ]
    return len(set(found)) < len(found)


def summary(graph: Graph, plan: Plan, local: fx.GraphModule) -> str:
    """What is split of a graph, and where nothing is, that every rank computes all of it, and what would split it.

    `graph of 31 ops on dp=2,tp=2 (recipe auto): dp splits batch in 30 ops; tp splits ...; 1 op runs whole on every
    rank; collectives inserted: 4 all_reduce, 2 shard`
    """
    head = f"graph of {len(graph.ops)} ops on {plan.mesh} (recipe {plan.recipe})"
    split = [op for op in graph.ops if any(op.choice(label).splits for label in plan.ops[op.name])]
    if not split:
        return f"{head}: {_nothing(plan)}"
    axes = [f"{axis} splits {_what_splits(graph, plan, i)}" for i, axis in enumerate(plan.mesh.names)]
    whole = len(graph.ops) - len(split)
    rest = [f"{whole} {'op runs' if whole == 1 else 'ops run'} whole on every rank"] if whole else []
    calls = [call for node in local.graph.nodes if (call := Collective.of(node) or Ring.of(node))]
    moved = Counter(call.name for call in calls if call.name != "vary")
    inserted = ", ".join(f"{count} {name}" for name, count in sorted(moved.items())) or "none"
    return f"{head}: {'; '.join([*axes, *rest])}; collectives inserted: {inserted}"


def _nothing(plan: Plan) -> str:
    if plan.mesh.size == 1:
        return "nothing is split, as there is one rank; start the script with torchrun --nproc-per-node 2"
    words = f"nothing is split: each of the {plan.mesh.size} ranks computes all of it, as one process would"
    if is_open(plan.recipe):
        words += ", because that was found fastest; options={'recipe': 'ddp'} insists on a split of the batch"
    return words


def _what_splits(graph: Graph, plan: Plan, axis: int) -> str:
    chosen = [op.choice(plan.ops[op.name][axis]) for op in graph.ops]
    counts = Counter(choice.factor for choice in chosen if choice.splits)
    if not counts:
        return "nothing"
    shown = [f"{factor} in {count} ops" for factor, count in counts.most_common(4)]
    return ", ".join(shown) + (", ..." if len(counts) > 4 else "")

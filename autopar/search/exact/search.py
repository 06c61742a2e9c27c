"""The search for a plan on one mesh, for any bound on memory.

The search works on a folded graph, in which repeated layers are one layer that counts several times. Descents from
many starts (`autopar.search.exact.descent`) find the best choices for it. They are then expanded to the whole graph,
whose cost is computed node by node and must equal the cost of the folded graph. On a mesh of one axis the result is a
proven optimum (to 0.01 % where the memory bound matters). On several axes it is a local optimum: no single axis can
be improved while the others stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cost_model import Hardware
from autopar.cost_model.compute import op_seconds
from autopar.cost_model.sizes import Sizes
from autopar.errors import MemoryBoundError, MeshError, SearchError, StateError
from autopar.ir import PIPELINE_AXIS, UNSPLIT, Graph, Layout, Mesh, Op, Plan
from autopar.pipeline.composed import StepCost, cost_of
from autopar.search.exact.checks import check_axes, check_used
from autopar.search.exact.decisions import Assignment, Outcome
from autopar.search.exact.descent import (
    best_of,
    descents,
    fits,
    least_seconds_within,
    may_fit_freely,
    named_recipes,
    smallest_fits,
)
from autopar.search.exact.owners import on_mesh, owner_notes, with_owners
from autopar.search.exact.problem import Problem
from autopar.search.exact.question import LayoutQuestion
from autopar.search.exact.rows import row_notes, with_rows
from autopar.search.request.notes import explain, under_bound
from autopar.search.request.recipe_rows import RecipeLike, Tiering
from autopar.search.request.recipes import format_recipe, resolve
from autopar.search.request.refusals import with_recipe_open
from autopar.search.request.single_rank_ops import LonePins, lone_notes, resolve_lone_pins, with_lone_ops, with_workers
from autopar.units import format_bytes

_TOLERANCE = 1e-6  # relative, between the cost of the folded graph and that of the plan


def search(graph: Graph, mesh: Mesh | Mapping[str, int], *, memory_bytes: int | None = None, **choices: Any) -> Plan:
    """Finds the fastest plan for `graph` on `mesh` that fits into memory.

    Args:
        graph: the captured model, at the size of one micro-batch.
        mesh: axes of the device mesh and their sizes.
        memory_bytes: bound on the peak memory of a rank, in bytes; None for no bound.
        choices: other attributes of `LayoutQuestion`, of which `hardware` has no default.

    Raises RecipeError for a recipe or pin that this model and mesh cannot satisfy, MeshError for an axis along which
    nothing in the model can be split, SearchError if no plan fits into memory.
    """
    return search_with_cost(graph, mesh, memory_bytes=memory_bytes, **choices).plan


@dataclass(frozen=True)
class Found:
    """A plan with its cost, and what else the search found.

    Attributes:
        plan: the plan.
        cost: time and memory of a step.
        descents: for every start, seconds of a step of the plan that it led to; inf where that plan did not fit.
        is_tight: whether the search found a faster plan that does not fit into memory.
    """

    plan: Plan
    cost: StepCost
    descents: tuple[float, ...]
    is_tight: bool


def search_with_cost(
    graph: Graph, mesh: Mesh | Mapping[str, int], *, memory_bytes: int | None = None, **choices: Any
) -> Found:
    """The same search as `search`, with the cost of the plan and figures of the search."""
    found = MeshSearch.of(graph, mesh, **choices)
    try:
        return found.within(memory_bytes)
    except MemoryBoundError as error:
        raise with_recipe_open(error, found.asked.recipe) from None


@dataclass(frozen=True)
class MeshSearch:
    """A search on one mesh for several memory bounds in turn; a new bound solves again only what it changes.

    Attributes:
        asked: what is asked; places of its mesh may be vacant.
        problem: the folded graph with the costs of its choices, and the solutions found so far.
        lone: ops that pins leave to single ranks.
    """

    asked: LayoutQuestion
    problem: Problem
    lone: LonePins
    _costs: dict[object, StepCost] = field(default_factory=dict, compare=False)
    _plans: dict[object, Found] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, graph: Graph, mesh: Mesh | Mapping[str, int], **choices: Any) -> MeshSearch:
        """A search without a memory bound yet; arguments and errors are those of `search`."""
        return cls.answering(LayoutQuestion(graph, Mesh.of(mesh), **choices))

    @classmethod
    def answering(cls, asked: LayoutQuestion) -> MeshSearch:
        """A search without a memory bound yet; errors are those of `search`."""
        mesh = asked.mesh.filled
        if PIPELINE_AXIS in mesh.names:
            raise MeshError(f"The axis name {PIPELINE_AXIS!r} is reserved for pipeline stages.")
        check_axes(asked.graph, mesh, resolve(asked.recipe, mesh))
        seconds = _durations(asked.graph, mesh, asked.software.on(asked.hardware))
        lone = resolve_lone_pins(asked.pins, asked.graph, mesh, seconds)
        return cls(asked, Problem(asked), lone)

    def under(self, recipe: RecipeLike, tiers: Sequence[Tiering] | None = None) -> MeshSearch:
        """The same search under another recipe, with the same folded graph and prices; errors as in `search`.

        Args:
            recipe: the other recipe.
            tiers: memories in which parameters may be, where no recipe names one; by default those of this search.
        """
        rows = resolve(recipe, self.problem.mesh)
        check_axes(self.problem.graph, self.problem.mesh, rows)
        problem = self.problem if tiers is None else self.problem.with_tiers(tiers)
        return replace(self, problem=problem.under(rows), asked=replace(self.asked, recipe=recipe, tiers=problem.tiers))

    def within(self, memory_bytes: int | None) -> Found:
        """The fastest plan within a memory bound. Raises SearchError if no plan fits."""
        return self._once(("within", memory_bytes), lambda: self._within(memory_bytes))

    def _once(self, asked: object, find: Callable[[], Found]) -> Found:
        """The plan that answers a question, found once; searches under other recipes share what is known."""
        key = self.problem, format_recipe(self.asked.recipe), asked
        if key not in self._plans:
            self._plans[key] = find()
        return self._plans[key]

    def _within(self, memory_bytes: int | None) -> Found:
        problem = self.problem
        if memory_bytes is not None and may_fit_freely(problem, memory_bytes):
            free = self.within(None)
            if free.cost.memory_bytes <= memory_bytes:
                notes = under_bound(free.plan.notes, free.cost, self.asked.hardware.memory_bytes, memory_bytes)
                return replace(free, plan=replace(free.plan, notes=notes))
        found = descents(problem, memory_bytes)
        best = best_of(found, memory_bytes)
        if not fits(best, memory_bytes):
            assert memory_bytes is not None, "without a bound everything fits"
            raise _does_not_fit(best, memory_bytes, problem)
        spread = self._found(best, found, memory_bytes)
        needed = spread.cost.memory_bytes
        if memory_bytes is not None and needed > memory_bytes >= best.bytes:
            raise _too_uneven(needed, memory_bytes, problem)
        return spread

    @property
    def flat_seconds(self) -> float:
        """Seconds of the fastest step without a bound on memory."""
        return self.within(None).cost.seconds

    def exceeds(self, memory_bytes: int) -> bool:
        """Whether every plan takes more memory than this, so that `within` would raise SearchError."""
        return self.problem.least_bytes > memory_bytes

    def has_only_slower(self, memory_bytes: int, than_seconds: float) -> bool:
        """Whether plans fit into memory, but it is known without a search that all take as long as `than_seconds`."""
        if math.isinf(than_seconds) or self.exceeds(memory_bytes):
            return False
        is_slower = least_seconds_within(self.problem, memory_bytes) >= than_seconds
        return is_slower and smallest_fits(self.problem, memory_bytes)

    def state_exceeds(self, memory_bytes: int) -> bool:
        """Whether parameters, gradients, optimizer states and buffers alone take more memory than this.

        The error of `within` is a StateError then.
        """
        return _state_bytes(self.problem) > memory_bytes

    def at_price(self, byte_seconds: float) -> Found:
        """The fastest plan if every byte of a rank's peak memory counts as this many more seconds."""
        return self._once(("price", byte_seconds), lambda: self._at_price(byte_seconds))

    def _at_price(self, byte_seconds: float) -> Found:
        found = descents(self.problem.weighed(byte_seconds), None)
        return self._found(best_of(found, None), found, None)

    def smallest(self) -> Found:
        """The plan with the smallest peak memory that the search finds, whether or not it fits."""
        found = descents(self.problem, 0)
        return self._found(best_of(found, 0), found, None)

    def fastest_plan(self) -> Plan:
        """The plan that `within(None)` finds, without its cost and notes."""
        found = descents(self.problem, None)
        return self._with_owners(self._expanded(best_of(found, None)))

    def _expanded(self, best: Outcome) -> Plan:
        problem, recipe = self.problem, format_recipe(self.asked.recipe)
        plan = expand(problem, best.assignment, recipe, self.asked.fingerprint)
        check_used(problem.graph, plan, problem.recipes)
        return plan

    def _found(self, best: Outcome, found: Sequence[Outcome], memory_bytes: int | None) -> Found:
        """The plan of the best descent for the whole graph, with owners of parameters and notes."""
        problem, plan = self.problem, self._expanded(best)
        cost = self._cost_once(best.assignment, plan)
        _agree(best, cost)
        spread = self._with_owners(plan)
        is_spread = spread != plan
        if is_spread:
            plan, cost = spread, self._cost(spread)
        seconds = tuple(d.seconds if fits(d, memory_bytes) else math.inf for d in found)
        notes = explain(
            problem.graph,
            plan,
            cost,
            bound_bytes=memory_bytes or self.asked.hardware.memory_bytes,
            hardware=self.asked.hardware,
            descents_seconds=() if is_spread else seconds,
        )
        is_tight = any(min(d.seconds, d.refused_seconds) < best.seconds for d in found)
        notes += owner_notes(problem.graph, plan.parameters, plan.mesh)
        notes += row_notes(plan, problem.prices.nodes)
        notes += lone_notes(self._alone)
        return Found(replace(plan, notes=notes), cost, seconds, is_tight)

    def _cost_once(self, assignment: Assignment, plan: Plan) -> StepCost:
        """The cost of the plan of an assignment; searches under other recipes and bounds find the same ones again."""
        key = assignment.key
        if key not in self._costs:
            self._costs[key] = self._cost(plan)
        return self._costs[key]

    def _cost(self, plan: Plan) -> StepCost:
        asked = self.asked
        return cost_of(asked.graph, plan, asked.hardware, software=asked.software, training_state=asked.training_state)

    @property
    def _alone(self) -> LonePins:
        """The ops that single ranks run, by pins and by recipes."""
        problem = self.problem
        return with_workers(self.lone, problem.graph, problem.mesh, problem.recipes)

    def _with_owners(self, plan: Plan) -> Plan:
        """The plan with the owners of parameters and of ops that recipes and pins ask for.

        A gradient on its way to an owner is sent whole or by rows.
        """
        problem = self.problem
        owned = with_owners(problem.graph, plan.parameters, plan.mesh, problem.recipes)
        plan, alone = replace(plan, parameters=owned), self._alone
        if alone.owners:
            plan = with_lone_ops(
                problem.graph,
                plan,
                alone,
                fixed=problem.fixed_storage,
                opens=[row.name == "auto" for row in problem.recipes],
                seconds=lambda each: self._cost(each).seconds,
            )
        if self.asked.mesh.occupied is not None:
            fixed = problem.fixed_storage
            plan = on_mesh(problem.graph, plan, self.asked.mesh, problem.recipes, alone, fixed)
        return with_rows(plan, problem.prices.nodes, problem.fixed_storage)

    def named(self) -> Iterator[tuple[float, MeshSearch]]:
        """The same search under every combination of recipes for the axes that have the recipe `auto`.

        Yields:
            Seconds of a step of the fastest plan under this combination without a memory bound, and the search.
        """
        for seconds, problem in named_recipes(self.problem):
            yield seconds, replace(self, problem=problem)


def _durations(graph: Graph, mesh: Mesh, hardware: Hardware) -> Callable[[Op], float]:
    """The function that gives the seconds of an op on one rank, forward and backward, in all layers it stands for."""
    sizes, whole = Sizes(mesh), (UNSPLIT,) * len(mesh.axes)

    def seconds(op: Op) -> float:
        one = op_seconds(op, whole, graph.tensors, sizes=sizes, hardware=hardware)
        return graph.layer_count.get(op.name, 1) * float(one.total)

    return seconds


def meshes_of(world_size: int, named: Sequence[str] = ()) -> Iterator[Mesh]:
    """All meshes with `world_size` ranks and at most the two axes dp and tp.

    Args:
        named: axes that the recipe names. If it names one, the mesh of this axis alone is among the results; if it
            names both, only meshes with both are.
    """
    if world_size == 1:
        yield Mesh(tuple((name, 1) for name in named or ("dp",)))
        return
    for major in range(1, world_size + 1):
        minor, rest = divmod(world_size, major)
        if rest == 0 and (len(named) > 1 or 1 < major < world_size):
            yield Mesh((("dp", major), ("tp", minor)))
    if len(named) <= 1:
        yield Mesh(((named[0] if named else "dp", world_size),))


def expand(problem: Problem, assignment: Assignment, recipe: str, fingerprint: str) -> Plan:
    """The plan for the whole graph: each op and tensor gets the choice of the folded one that stands for it."""
    graph, entries = problem.graph, problem.entries
    at = {name: (index, entry) for index, entry in enumerate(entries) for name in entry.names}

    def layout(tensor: str) -> Layout:
        return assignment.inputs.get(at[tensor][0], problem.whole)

    return Plan(
        mesh=problem.mesh,
        fingerprint=fingerprint,
        recipe=recipe,
        micro_batches=problem.micro_batches,
        parameters={name: assignment.parameters[at[tensor][0]] for name, tensor in graph.parameters.items()},
        inputs={name: layout(tensor) for name, tensor in graph.inputs.items()},
        ops={op.name: assignment.labels[problem.fold.class_of[op.name]] for op in graph.ops},
        precision=graph.precision,
        loss_tile_bytes=graph.loss_tile_bytes,
    )


def _agree(found: Outcome, cost: StepCost) -> None:
    assert math.isclose(found.seconds, cost.seconds, rel_tol=_TOLERANCE, abs_tol=1e-15), (
        f"the search said {found.seconds!r} s, but the expanded plan costs {cost.seconds!r} s"
    )
    # A parameter whose owner was not chosen yet counts in parts of a byte, which `memory_bytes` rounds.
    taken_bytes = cost.price.peak_bytes
    assert math.isclose(found.bytes, taken_bytes, rel_tol=_TOLERANCE), (
        f"the search said {found.bytes} bytes, but the expanded plan takes {taken_bytes}"
    )


def _too_uneven(needed: float, bound: int, problem: Problem) -> SearchError:
    return SearchError(
        f"On the mesh {problem.mesh} the rank that owns most parameters needs {format_bytes(needed)}, "
        f"{format_bytes(needed - bound)} more than the {format_bytes(bound)} it has: each parameter has one owner, and "
        "they cannot be divided evenly. What would help: zero1, which cuts every parameter."
    )


def _state_bytes(problem: Problem) -> int:
    """The least bytes of a rank's parameters, gradients, optimizer states and buffers, under any plan."""
    return math.ceil(problem.least_state_bytes)


def _does_not_fit(found: Outcome, bound: int, problem: Problem) -> MemoryBoundError:
    needed, state_bytes = math.ceil(found.bytes), _state_bytes(problem)
    batch, state = ["a smaller batch (or more micro-batches of a smaller one)"], ""
    if state_bytes > bound:
        batch = []
        state = f"; parameters, gradients, optimizer states and buffers alone take {format_bytes(state_bytes)}"
    return (StateError if state else MemoryBoundError).of(
        f"No plan for the mesh {problem.mesh} fits into {format_bytes(bound)}: the smallest found takes "
        f"{format_bytes(needed)} of a rank, {format_bytes(needed - bound)} too much{state}.",
        ["more ranks", *batch],
        needed,
    )

"""The search for a plan on one mesh, for any bound on memory.

Descents from many starts (`autopar.search.descent`) find the best assignment of the folded graph. It is
expanded to the whole graph, composed again node by node, and must cost what the folded graph said. One
axis is solved to a proven optimum (to 0.01 % where memory binds). Over several axes the result is a local
optimum: no single axis can be improved while the others stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from autopar.cost_model import Hardware
from autopar.cost_model.items import FULL, TrainingState
from autopar.cost_model.software import AUTOPAR, Software
from autopar.errors import MeshError, SearchError, StateError
from autopar.ir import PIPELINE_AXIS, Graph, Layout, Mesh, ParameterPlan, Plan
from autopar.pipeline.composed import StepCost, cost_of
from autopar.search.checks import check_axes, check_used
from autopar.search.descent import Descent, best_of, descents, fits, named_recipes
from autopar.search.notes import explain
from autopar.search.owners import owner_notes, with_owners
from autopar.search.pins import resolve_pins
from autopar.search.problem import Assignment, Problem
from autopar.search.recipes import ON_DEVICE, RecipeLike, Tiering, format_recipe, resolve
from autopar.units import format_bytes

_TOLERANCE = 1e-6  # relative, between the price of the folded graph and that of the plan


class Choices(TypedDict, total=False):
    """What a search on one mesh is told in addition to graph, mesh and hardware; all of it is optional.

    Attributes:
        recipe: constraints, see `autopar.search.recipes`; by default none.
        pins: single choices that are fixed, see `autopar.search.pins`.
        micro_batches: number of micro-batches of a step; by default 1.
        fingerprint: hash of the captured model, which the plan notes.
        fixed_storage: parameters whose plan is already made, by name.
        repeats: whether repeated blocks are folded into one; by default they are.
        software: figures of the runtime; by default autopar's own.
        training_state: bytes that training keeps in addition to parameters; by default `FULL`.
        tiers: tiers that a parameter may be stored and used in where no recipe has one; by default the device.
    """

    recipe: RecipeLike
    pins: Mapping[str, str] | None
    micro_batches: int
    fingerprint: str
    fixed_storage: Mapping[str, ParameterPlan] | None
    repeats: bool
    software: Software
    training_state: TrainingState
    tiers: Sequence[Tiering]


def search(
    graph: Graph,
    mesh: Mesh | Mapping[str, int],
    *,
    hardware: Hardware,
    memory_bytes: int | None = None,
    **choices: Unpack[Choices],
) -> Plan:
    """Finds the fastest plan for `graph` on `mesh` that fits into memory.

    Args:
        graph: the captured model, at the size of one micro-batch.
        hardware: figures that the prices are made of.
        memory_bytes: bound on the bytes of a rank; None for no bound.
        choices: further choices, see `Choices`.

    Raises RecipeError for a recipe or pin that cannot hold, MeshError for an axis that divides
    nothing, SearchError if no plan fits into memory.
    """
    return search_with_cost(
        graph, mesh, hardware=hardware, memory_bytes=memory_bytes, **choices
    ).plan


@dataclass(frozen=True)
class Found:
    """A plan with its price and what is known about its optimality.

    Attributes:
        plan: the plan.
        cost: composed time and memory of the plan.
        gap: the largest relative gap that the solver left open along one axis, 0 if proven.
        programs: rows, columns and binaries of the program of every axis, in order.
        descents: seconds of the plan that every start ended in, inf where it did not fit.
        is_tight: whether something faster was found that does not fit.
    """

    plan: Plan
    cost: StepCost
    gap: float
    programs: tuple[tuple[int, int, int], ...]
    descents: tuple[float, ...]
    is_tight: bool


def search_with_cost(
    graph: Graph,
    mesh: Mesh | Mapping[str, int],
    *,
    hardware: Hardware,
    memory_bytes: int | None = None,
    **choices: Unpack[Choices],
) -> Found:
    """`search`, with the figures behind its plan."""
    return MeshSearch.of(graph, mesh, hardware=hardware, **choices).within(memory_bytes)


@dataclass(frozen=True)
class MeshSearch:
    """A search on one mesh that can be asked for several bounds, and solves again only what a bound changes.

    Attributes:
        problem: the folded graph with its prices and its solutions.
        recipe: constraints, which the plan notes.
        fingerprint: hash of the captured model, which the plan notes.
        hardware, software, training_state: what the prices are made of.
    """

    problem: Problem
    recipe: RecipeLike
    fingerprint: str
    hardware: Hardware
    software: Software
    training_state: TrainingState

    @classmethod
    def of(
        cls,
        graph: Graph,
        mesh: Mesh | Mapping[str, int],
        *,
        hardware: Hardware,
        recipe: RecipeLike = "auto",
        pins: Mapping[str, str] | None = None,
        micro_batches: int = 1,
        fingerprint: str = "",
        fixed_storage: Mapping[str, ParameterPlan] | None = None,
        repeats: bool = True,
        software: Software = AUTOPAR,
        training_state: TrainingState = FULL,
        tiers: Sequence[Tiering] = (ON_DEVICE,),
    ) -> MeshSearch:
        """The search that `search` makes, before a bound is known.

        Arguments and errors are those of `search`, and the defaults here are those of `Choices`.
        """
        mesh = Mesh.of(mesh)
        if PIPELINE_AXIS in mesh.names:
            raise MeshError(f"The axis name {PIPELINE_AXIS!r} is reserved for pipeline stages.")
        rows = resolve(recipe, mesh)
        check_axes(graph, mesh)
        problem = Problem(
            graph, mesh, rows, hardware=hardware, pins=resolve_pins(pins, graph, mesh),
            micro_batches=micro_batches, fixed_storage=fixed_storage or {}, repeats=repeats,
            software=software, training_state=training_state, tiers=tiers,
        )  # fmt: skip
        return cls(problem, recipe, fingerprint, hardware, software, training_state)

    def within(self, memory_bytes: int | None) -> Found:
        """The fastest plan within a bound. Raises SearchError if no plan fits into memory."""
        problem, recipe = self.problem, format_recipe(self.recipe)
        found = descents(problem, memory_bytes)
        best = best_of(found, memory_bytes)
        if not fits(best, memory_bytes):
            assert memory_bytes is not None, "without a bound everything fits"
            raise _does_not_fit(best, memory_bytes, problem, recipe)
        spread = self._found(best, found, memory_bytes)
        needed = spread.cost.memory_bytes
        if memory_bytes is not None and needed > memory_bytes >= best.bytes:
            raise _too_uneven(needed, memory_bytes, problem)
        return spread

    def smallest(self) -> Found:
        """The plan that takes least memory, of those that no bound leads to."""
        found = descents(self.problem, 0)
        return self._found(best_of(found, 0), found, None)

    def _found(self, best: Descent, found: Sequence[Descent], memory_bytes: int | None) -> Found:
        """A plan with its notes."""
        problem, recipe = self.problem, format_recipe(self.recipe)
        plan = expand(problem, best.assignment, recipe, self.fingerprint)
        check_used(problem.graph, plan, problem.recipes)
        cost = cost_of(
            problem.graph, plan, self.hardware, software=self.software,
            training_state=self.training_state,
        )  # fmt: skip
        _agree(best, cost)
        owned = with_owners(problem.graph, plan.parameters, plan.mesh)
        is_spread = owned != plan.parameters
        if is_spread:
            plan = replace(plan, parameters=owned)
            cost = cost_of(
                problem.graph, plan, self.hardware, software=self.software,
                training_state=self.training_state,
            )  # fmt: skip
        seconds = tuple(d.seconds if fits(d, memory_bytes) else math.inf for d in found)
        notes = explain(
            problem.graph, plan, cost, bound_bytes=memory_bytes or self.hardware.memory_bytes,
            hardware=self.hardware, descents_seconds=() if is_spread else seconds,
        )  # fmt: skip
        is_tight = any(min(d.seconds, d.refused_seconds) < best.seconds for d in found)
        notes += owner_notes(problem.graph, plan.parameters, plan.mesh)
        return Found(replace(plan, notes=notes), cost, best.gap, best.programs, seconds, is_tight)

    def named(self) -> Iterator[tuple[float, MeshSearch]]:
        """The same search under every combination of recipes for the open axes.

        Yields:
            Composed seconds of the fastest plan that splits ops alike, with any memory, and the search.
        """
        for seconds, problem in named_recipes(self.problem):
            yield seconds, replace(self, problem=problem)


def meshes_of(world_size: int, named: Sequence[str] = ()) -> Iterator[Mesh]:
    """All meshes of at most two axes, dp and tp, with `world_size` ranks.

    A recipe that names one axis is tried on that axis alone too, one that names both on two axes only.
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
    """The plan for the whole graph: what a class or entry decided, for every member."""
    graph, entries = problem.graph, problem.entries
    at = {name: (index, entry) for index, entry in enumerate(entries) for name in entry.names}

    def layout(tensor: str) -> Layout:
        return assignment.inputs.get(at[tensor][0], problem.whole)

    return Plan(
        mesh=problem.mesh,
        fingerprint=fingerprint,
        recipe=recipe,
        micro_batches=problem.micro_batches,
        parameters={
            name: assignment.parameters[at[tensor][0]] for name, tensor in graph.parameters.items()
        },
        inputs={name: layout(tensor) for name, tensor in graph.inputs.items()},
        ops={op.name: assignment.labels[problem.fold.class_of[op.name]] for op in graph.ops},
        precision=graph.precision,
    )


def _agree(found: Descent, cost: StepCost) -> None:
    assert math.isclose(found.seconds, cost.seconds, rel_tol=_TOLERANCE, abs_tol=1e-15), (
        f"the search said {found.seconds!r} s, and the expanded plan costs {cost.seconds!r} s"
    )
    assert math.isclose(found.bytes, cost.memory_bytes, rel_tol=_TOLERANCE), (
        f"the search said {found.bytes} bytes, and the expanded plan takes {cost.memory_bytes}"
    )


def _too_uneven(needed: float, bound: int, problem: Problem) -> SearchError:
    return SearchError(
        f"On the mesh {problem.mesh} the rank that owns most parameters needs {format_bytes(needed)}, "
        f"{format_bytes(needed - bound)} more than the {format_bytes(bound)} there are: a parameter has one owner, "
        "and they cannot be shared out evenly. What would help: zero1, which cuts every parameter."
    )


def _does_not_fit(found: Descent, bound: int, problem: Problem, recipe: str) -> SearchError:
    needed, state_bytes = math.ceil(found.bytes), math.ceil(problem.least_state_bytes)
    free = "" if recipe == "auto" else f' recipe="auto" instead of {recipe!r},'
    batch = " a smaller batch (or more micro-batches of a smaller one),"
    state = ""
    if state_bytes > bound:
        batch = ""
        state = (
            "; parameters, gradients, optimizer states and buffers alone take "
            f"{format_bytes(state_bytes)}"
        )
    return (StateError if state else SearchError)(
        f"No plan for the mesh {problem.mesh} fits into {format_bytes(bound)}: the smallest found takes "
        f"{format_bytes(needed)} of a rank, {format_bytes(needed - bound)} too much{state}. "
        f"What would help:{free} more ranks,{batch} or memory_bytes={needed} if a rank has that much."
    )

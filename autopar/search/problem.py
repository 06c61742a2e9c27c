"""Everything about a search that does not change while it runs: the folded graph with its prices.

[Note: collapse] A view moves nothing, and converting its operand or its result costs the same. If
it is the only consumer of its operand, and leads every state that the producer may leave the
operand in to exactly one state of its result, then deciding for the view is deciding twice: it
takes whatever state it is given. Its result then counts as the producer's, in the states that the
views lead to. Anything else (casts and activations cost time, a shared operand may be converted
for all at once) keeps a decision of its own, so collapsing never changes the optimum.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cost_model import (
    Hardware,
    SavedTensors,
    Sizes,
    conversion_seconds,
    op_seconds,
    own_seconds,
    use_seconds,
)
from autopar.errors import RecipeError
from autopar.ir import (
    Choice,
    Dims,
    Graph,
    Labels,
    Layout,
    Mesh,
    Op,
    ParameterPlan,
    R,
    State,
    divides,
    operand_layouts,
    result_layouts,
)
from autopar.search.fold import Entry, Fold, fold
from autopar.search.parameters import Strategy, priced, strategies
from autopar.search.pins import Pins
from autopar.search.recipes import ChoiceFilter, Recipe

_States = Mapping[State, State]


@dataclass(frozen=True)
class Layouts:
    """Where an op's tensors lie under some labels: operands, then results."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True)
class Made:
    """By which free class a tensor is made, and through which collapsed views it then went."""

    index: int
    position: int
    views: tuple[_States, ...] = ()

    def state(self, state: State) -> State:
        """The state after the views, given that of the producer's result."""
        for view in self.views:
            state = view[state]
        return state

    def layout(self, results: Sequence[Layout]) -> Layout:
        """The layout after the views, given those of the producer's results."""
        return tuple(self.state(state) for state in results[self.position])


class Problem:
    """A folded graph on a mesh under recipes, with remembered prices.

    Attributes:
        free: classes that have a decision of their own.
        made: entry -> `Made`, for tensors that an op makes.
        collapsed: class of a collapsed view -> how its operand is made.
        strategies: entry of a parameter -> its strategies.
        fixed: entries whose parameter the caller fixed.
        solved: what the programs of single axes gave, by all they depend on.
        priced_entries: all entries but those inside a producer with its collapsed views.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        recipes: Sequence[Recipe],
        *,
        hardware: Hardware,
        pins: Pins,
        micro_batches: int,
        fixed_storage: Mapping[str, ParameterPlan],
        repeats: bool = True,
    ) -> None:
        self.graph, self.mesh, self.hardware = graph, mesh, hardware
        self.pins, self.micro_batches, self.fixed_storage = pins, micro_batches, fixed_storage
        self.sizes = Sizes(mesh)
        self.saved = SavedTensors(graph)
        self.whole: Layout = (R,) * len(mesh.axes)
        self.buffer_bytes = sum(self.bytes(name, self.whole) for name in graph.buffers.values())
        self.fold: Fold = fold(graph, mark=self._mark, repeats=repeats)
        self.entries = self.fold.entries
        self.ops = [each.op for each in self.fold.classes]
        self._counts = [each.count for each in self.fold.classes]
        self._entries_of = self._find_entries()
        self._dividing = [self._dividing_choices(op) for op in self.ops]
        self._kind_of = self._number_kinds()
        self._layouts: dict[tuple[int, Labels], Layouts] = {}
        self._legal: dict[tuple[int, Labels], bool] = {}
        self._cuts: dict[tuple[Dims, Layout], bool] = {}
        self._op_seconds: dict[tuple[int, Labels], float] = {}
        self._conversions: dict[tuple[int, Layout, Layout], float] = {}
        self._constrain(recipes)

    def under(self, recipes: Sequence[Recipe]) -> Problem:
        """The same problem under other recipes; remembered prices are shared."""
        other = copy.copy(self)
        other._constrain(recipes)
        return other

    def _constrain(self, recipes: Sequence[Recipe]) -> None:
        self.recipes = tuple(recipes)
        self._filters = [ChoiceFilter(self.graph, recipe) for recipe in recipes]
        self.collapsed, self.made = self._collapse()
        self.free = [c for c in range(len(self.ops)) if c not in self.collapsed]
        self.priced_entries = [e for e in range(len(self.entries)) if not self._is_inside(e)]
        self.fixed: set[int] = set()
        self.strategies = self._strategies()
        self._serving: dict[tuple[int, int, Layout], list[Strategy]] = {}
        self.solved: dict[object, Any] = {}

    def _mark(self, name: str) -> Hashable:
        """What keeps an op or parameter from sharing decisions with others."""
        return self.pins.labels.get(name), self.pins.storage.get(name), self.fixed_storage.get(name)

    def allowed(self, index: int, axis: int, labels: Labels) -> list[Choice]:
        """The choices of a class along `axis` that are legal given its labels on the other axes."""
        legal = [
            choice
            for choice in self._dividing[index][axis]
            if self._is_legal(index, (*labels[:axis], choice.label, *labels[axis + 1 :]))
        ]
        allowed = self._filters[axis].allowed(self.ops[index], legal)
        return self._pinned(index, axis, allowed, legal)

    def layouts(self, index: int, labels: Labels) -> Layouts:
        """Layouts of the operands and results of a class."""
        key = (index, labels)
        if key not in self._layouts:
            op = self.ops[index]
            self._layouts[key] = Layouts(operand_layouts(op, labels), result_layouts(op, labels))
        return self._layouts[key]

    def op_seconds(self, index: int, labels: Labels) -> float:
        """Seconds per step of all members of a class, with what they send inside themselves."""
        key = (index, labels)
        if key not in self._op_seconds:
            op, tensors = self.ops[index], self.graph.tensors
            one = op_seconds(op, labels, tensors, sizes=self.sizes, hardware=self.hardware).total
            one += own_seconds(op, labels, sizes=self.sizes, hardware=self.hardware).total
            self._op_seconds[key] = one * self._counts[index] * self.micro_batches
        return self._op_seconds[key]

    def conversion_seconds(self, index: int, source: Layout, target: Layout) -> float:
        """Seconds per step to convert all tensors of an entry, forward and backward."""
        if source == target:
            return 0.0
        key = (self._kind_of[index], source, target)
        if key not in self._conversions:
            self._conversions[key] = self._convert(self.entries[index], source, target)
        return self._conversions[key] * self.entries[index].count * self.micro_batches

    def follow(self, index: int, labels: Labels) -> Labels:
        """The labels of a collapsed view, given those of the class that makes its operand."""
        maker = self.collapsed[index]
        given = maker.layout(self.layouts(maker.index, labels).results)
        choices = self.ops[index].choices
        return tuple(
            next(choice.label for choice in choices if choice.operands[0] == state)
            for state in given
        )

    def serving(self, index: int, target: Layout) -> list[Strategy]:
        """The strategies that can serve a use of a parameter, with that use's seconds added."""
        key = (self._kind_of[index], id(self.strategies[index]), target)
        if key not in self._serving:
            needed = [frozenset({state}) for state in target]
            entry, times = self.entries[index], self.micro_batches
            self._serving[key] = [
                Strategy(plan, seconds + times * self._convert(entry, plan.resident, target), size)
                for plan, seconds, size in self.strategies[index]
                if self.serves(index, plan.resident, needed)
            ]
        return self._serving[key]

    def serves(
        self,
        index: int,
        resident: Layout,
        needed: Sequence[frozenset[State]],
        *,
        open_axis: int | None = None,
        mixed: bool = False,
    ) -> bool:
        """Whether a parameter in this resident layout may serve uses that need these states.

        Along each axis R serves uses in R alone and V is for all others, so that the gradient of V
        is reduced once per step and that of R never. Along `open_axis` the uses are still
        undecided and it is enough that one of them can be served; with `mixed` other uses may need
        what V is for.
        """
        if index in self.fixed:
            return True
        return all(
            self._serves_along(axis, state, states, axis == open_axis, mixed)
            for axis, (state, states) in enumerate(zip(resident, needed, strict=True))
        )

    def _serves_along(
        self, axis: int, state: State, needed: frozenset[State], undecided: bool, mixed: bool
    ) -> bool:
        if state.kind == "R":
            return R in needed or not needed if undecided else needed <= {R}
        if state.kind == "V":
            return mixed or bool(needed - {R})
        if self.recipes[axis].gathers:
            return True
        return state in needed if undecided else needed <= {state}

    def bytes(self, name: str, layout: Layout) -> int:
        """Bytes of a tensor that one rank holds."""
        return self.sizes.bytes(self.graph.tensors[name], layout)

    def _convert(self, entry: Entry, source: Layout, target: Layout) -> float:
        if entry.leaf == "parameter":
            return use_seconds(
                entry.tensor,
                source,
                target,
                entry.is_saved,
                sizes=self.sizes,
                hardware=self.hardware,
            )
        return conversion_seconds(
            entry.tensor, source, target, sizes=self.sizes, hardware=self.hardware
        ).total

    def _number_kinds(self) -> list[int]:
        """For every entry a number that it shares with those whose conversions cost the same."""
        numbers: dict[object, int] = {}

        def kind(entry: Entry) -> int:
            tensor, is_parameter = entry.tensor, entry.leaf == "parameter"
            key = (
                tensor.dims, tensor.formats, tensor.needs_grad, is_parameter,
                is_parameter and entry.is_saved,
            )  # fmt: skip
            return numbers.setdefault(key, len(numbers))

        return [kind(entry) for entry in self.entries]

    def _find_entries(self) -> dict[int, list[int]]:
        """Class -> the entries of what it makes."""
        found: dict[int, list[int]] = {}
        for index, entry in enumerate(self.entries):
            if entry.producer is not None:
                found.setdefault(entry.producer[0], []).append(index)
        return found

    def _dividing_choices(self, op: Op) -> list[list[Choice]]:
        """For every axis the choices whose factor its size divides; `-` on an axis of size 1."""
        return [
            [c for c in op.choices if c.size % size == 0] if size > 1 else [op.choices[0]]
            for size in self.mesh.sizes
        ]

    def _is_legal(self, index: int, labels: Labels) -> bool:
        key = (index, labels)
        if key not in self._legal:
            op, layouts = self.ops[index], self.layouts(index, labels)
            self._legal[key] = all(
                self._divides(name, layout)
                for name, layout in zip(
                    (*op.operands, *op.results), (*layouts.operands, *layouts.results), strict=True
                )
            )
        return self._legal[key]

    def _divides(self, name: str, layout: Layout) -> bool:
        key = (self.graph.tensors[name].dims, layout)
        if key not in self._cuts:
            self._cuts[key] = divides(*key, self.mesh)
        return self._cuts[key]

    def _pinned(
        self, index: int, axis: int, allowed: list[Choice], legal: list[Choice]
    ) -> list[Choice]:
        op = self.ops[index]
        label = dict(self.pins.labels.get(op.name, ())).get(axis)
        if label is None:
            return allowed
        pinned = [choice for choice in allowed if choice.label == label]
        if not pinned:
            why = (
                f"the recipe {self.recipes[axis].name} leaves it only "
                f"{', '.join(choice.label for choice in allowed)}"
                if label in [choice.label for choice in legal]
                else "another axis already splits that factor as far as it divides"
            )
            raise RecipeError(
                f"The pin of {op.name} to {label}@{self.mesh.names[axis]} cannot hold: {why}."
            )
        return pinned

    def _strategies(self) -> dict[int, tuple[Strategy, ...]]:
        public = {tensor: name for name, tensor in self.graph.parameters.items()}
        found: dict[int, tuple[Strategy, ...]] = {}
        known: dict[object, tuple[Strategy, ...]] = {}
        shared = {
            "micro_batches": self.micro_batches, "sizes": self.sizes, "hardware": self.hardware
        }  # fmt: skip
        for index, entry in enumerate(self.entries):
            if entry.leaf != "parameter":
                continue
            tensor, name = entry.tensor, public[entry.names[0]]
            if fixed := self.fixed_storage.get(name):
                self.fixed.add(index)
                found[index] = (priced(fixed, tensor, **shared),)  # type: ignore[arg-type]
                continue
            pinned = self.pins.storage.get(name, ())
            key = (tensor.dims, tensor.formats, tensor.needs_grad, pinned)
            if key not in known:
                known[key] = strategies(tensor, name, self.recipes, pinned, **shared)  # type: ignore[arg-type]
            found[index] = known[key]
        return found

    def _collapse(self) -> tuple[dict[int, Made], dict[int, Made]]:
        """See [Note: collapse]. Returns (collapsed class -> its operand, entry -> its maker)."""
        collapsed: dict[int, Made] = {}
        made: dict[int, Made] = {}
        for index in range(len(self.ops)):
            operand = self._only_operand(index)
            passed = self._passes(index, made[operand]) if operand is not None else None
            if operand is not None and passed is not None:
                collapsed[index] = made[operand]
            for entry in self._entries_of.get(index, ()):
                producer = self.entries[entry].producer
                assert producer is not None
                made[entry] = passed or Made(*producer)
        return collapsed, made

    def _is_inside(self, index: int) -> bool:
        """Whether a tensor lies between its producer and a collapsed view: never converted."""
        return any(consumer in self.collapsed for consumer, _ in self.entries[index].consumers)

    def _only_operand(self, index: int) -> int | None:
        """The entry of a class' operand, if one class makes it for this class alone."""
        op = self.ops[index]
        uses = [e for e, entry in enumerate(self.entries) if (index, 0) in entry.consumers]
        if not op.is_view or len(op.operands) != 1 or len(uses) != 1:
            return None
        entry = self.entries[uses[0]]
        if entry.producer is None or entry.is_output or len(entry.consumers) > 1:
            return None
        siblings = [
            other
            for other in self._entries_of[entry.producer[0]]
            if self.entries[other].producer == entry.producer
        ]
        return uses[0] if len(siblings) == 1 else None

    def _passes(self, index: int, maker: Made) -> Made | None:
        """How the result of a view is made if the view is collapsed, None if it cannot be."""
        op, source = self.ops[index], self.ops[maker.index]
        view = self.saved.view(op.results[0])
        if (
            view is None
            or not view.is_whole
            or op.name in self.pins.labels
            or not self._same_factors(op)
        ):
            return None
        onward = {before: after for after, before in view.states.items()}
        for axis, choices in enumerate(self._filters):
            given = choices.allowed(source, self._dividing[maker.index][axis])
            taken = choices.allowed(op, self._dividing[index][axis])
            accepted = {choice.operands[0] for choice in taken}
            unsplit = [choice for choice in source.choices if not choice.splits]
            reached = {maker.state(choice.results[maker.position]) for choice in given}
            fallback = {maker.state(choice.results[maker.position]) for choice in unsplit}
            if not reached <= accepted or not reached | fallback <= onward.keys():
                return None
        return Made(maker.index, maker.position, (*maker.views, onward))

    def _same_factors(self, op: Op) -> bool:
        """Whether a view's choices split factors of the same size in its operand and result."""
        before, after = (self.graph.tensors[name].dims for name in (op.operands[0], op.results[0]))
        pairs = [(c.operands[0], c.results[0]) for c in op.choices if c.splits]
        return all(
            a.kind == b.kind == "S" and before[a.dim][a.factor] == after[b.dim][b.factor]
            for a, b in pairs
        )

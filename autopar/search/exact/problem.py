"""The data of a search on one mesh that stay fixed while it runs: the folded graph with its prices.

In a folded graph (`autopar.search.exact.fold`) the equal ops of repeated layers form one *class*, which has one
decision, and the equal tensors of repeated layers form one *entry*, which has one layout.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from autopar.cost_model import SavedTensors, Sizes
from autopar.cost_model.buckets import hidden_by, largest_bytes, usual_bucket_bytes, whole_bytes
from autopar.cost_model.items import WorkItem
from autopar.cost_model.node_items import regions_of
from autopar.errors import RecipeError
from autopar.ir import (
    Choice,
    Dims,
    Labels,
    Layout,
    Op,
    ParameterPlan,
    R,
    State,
    Tensor,
    TieredLayout,
    go_together,
    operand_layouts,
    parts_fit,
    result_layouts,
)
from autopar.search.exact.choice_filter import ChoiceFilter
from autopar.search.exact.collapse import CollapsedViews
from autopar.search.exact.decisions import Layouts
from autopar.search.exact.fold import Entry, Fold, fold
from autopar.search.exact.parameters import Select, Strategy, storable, strategies
from autopar.search.exact.prices import MarginalCosts, Prices, seconds_of
from autopar.search.exact.question import LayoutQuestion
from autopar.search.exact.solver import Solved
from autopar.search.request.pins import AxisStates, resolve_pins
from autopar.search.request.recipe_rows import Recipe, Tiering
from autopar.search.request.recipes import resolve
from autopar.search.request.single_rank_ops import without_lone_pins


class Problem:
    """A folded graph on a mesh under recipes, with a cache of prices.

    Attributes:
        free: indices of the classes that have a decision of their own, because they are not collapsed.
        made: index of an entry that an op computes -> the class that computes it.
        collapsed: index of the class of a collapsed view -> the class that computes its operand.
        fixed: indices of the entries whose parameters the caller has placed already.
        constant_bytes: memory that every plan takes: buffers, and the memory that tensors cannot use.
        tiers: tiers that parameters may be stored in where no recipe names any.
        exposure: slopes of the step's seconds at which work is charged, see [Note: exposure] in
            `autopar.search.exact.prices`.
        byte_seconds: price of memory, in seconds of a step for each byte of a rank's peak; 0 for no price.
        solved: solutions of the programs of single axes, see `autopar.search.exact.axis`.
        programs: solutions by the numbers of their programs, also under other recipes and exposures.
        priced_entries: indices of the entries that can be converted: all but operands of collapsed views.
    """

    def __init__(self, asked: LayoutQuestion) -> None:
        graph, mesh = asked.graph, asked.mesh.filled
        self.graph, self.mesh, self.tiers = graph, mesh, tuple(asked.tiers)
        self.pins = resolve_pins(without_lone_pins(asked.pins), graph, mesh)
        self.micro_batches, self.fixed_storage = asked.micro_batches, asked.fixed_storage or {}
        self.sizes = Sizes(mesh)
        self.saved = SavedTensors(graph)
        self.whole: Layout = (R,) * len(mesh.axes)
        self._regions = regions_of(graph)
        self.bucket_bytes = asked.bucket_bytes or usual_bucket_bytes(whole_bytes(graph), mesh.sizes)
        software, hides = asked.software, asked.software.on(asked.hardware).hides
        self._hides = bool(hides or software.hides_activations or software.runs_ahead)
        self.fold: Fold = fold(graph, mark=self._mark, repeats=asked.repeats)
        self._least = MarginalCosts.least(min(hides, self._buckets_hide()), software.hides_activations)
        self.prices = Prices(asked, self.fold, self.sizes)
        self.exposure, self.byte_seconds = self._least, 0.0
        self.constant_bytes = asked.hardware.reserved_bytes + sum(h.bytes for h in self.prices.buffers())
        self.entries = self.fold.entries
        self.ops = [each.op for each in self.fold.classes]
        self._dividing = [self._dividing_choices(op) for op in self.ops]
        self._layouts: dict[tuple[int, Labels], Layouts] = {}
        self._legal: dict[tuple[int, Labels], bool] = {}
        self._cuts: dict[tuple[Dims, tuple[tuple[str, ...], ...], Layout], bool] = {}
        self._allowed_plans: dict[object, tuple[ParameterPlan, ...]] = {}
        self.programs = Solved()
        self._views: dict[tuple[Recipe, ...], tuple[list[ChoiceFilter], CollapsedViews]] = {}
        self._public = {tensor: name for name, tensor in graph.parameters.items()}
        self.fixed = frozenset(i for i, each in enumerate(self.entries) if self._placed(each) is not None)
        self._forget_prices()
        self.recipes = resolve(asked.recipe, mesh)
        self._forms: dict[object, list[Problem]] = {(self.recipes, self.tiers, self.byte_seconds): [self]}
        self._constrain()

    def under(self, recipes: Sequence[Recipe]) -> Problem:
        """This problem under other recipes."""
        return self._form(recipes=tuple(recipes))

    def with_tiers(self, tiers: Sequence[Tiering]) -> Problem:
        """This problem with other tiers for parameters."""
        return self._form(tiers=tuple(tiers))

    def exposed(self, exposure: MarginalCosts) -> Problem:
        """This problem with another exposure."""
        return self._form(exposure=exposure)

    def weighed(self, byte_seconds: float) -> Problem:
        """This problem with a price of memory, in seconds of a step for each byte of a rank's peak."""
        return self._form(byte_seconds=byte_seconds)

    def _form(self, **changed: Any) -> Problem:
        """This problem with something changed, and with the same cache of prices. Equal forms are the same object."""
        other = copy.copy(self)
        vars(other).update(changed)
        alike = self._forms.setdefault((other.recipes, other.tiers, other.byte_seconds), [])
        known = next((each for each in alike if each.exposure == other.exposure), None)
        if known is not None:
            return known
        if other.exposure != self.exposure:
            other._forget_prices()
        other._constrain()
        alike.append(other)
        return other

    def _buckets_hide(self) -> float:
        """What buckets let hide where every parameter travels whole, which is the most for any assignment."""
        leaves = (each for each in self.fold.entries if each.leaf == "parameter")
        sent = ((largest_bytes(x.tensor, [self.whole], self.sizes), x.count) for x in leaves)
        return hidden_by(sent, self.bucket_bytes)

    @property
    def most_hidden(self) -> float:
        """The largest part of messages of parameters that any assignment hides."""
        return 1 - self._least.reductions

    def ways(self, index: int) -> tuple[ParameterPlan, ...]:
        """All ways to store a parameter that the recipes and pins allow."""
        entry = self.entries[index]
        if fixed := self._placed(entry):
            return (fixed,)
        name = self._public[entry.names[0]]
        return self._storable(name, entry.tensor, self.pins.storage.get(name, ()))

    @property
    def hides_most(self) -> bool:
        """Whether work is charged as if everything hid that can."""
        return self.exposure == self._least

    def _forget_prices(self) -> None:
        self._op_seconds: dict[tuple[int, Labels], float] = {}
        self._conversions: dict[int, float] = {}
        self._entry_seconds: dict[tuple[int, TieredLayout, Layout], float] = {}
        self._kept: dict[object, Strategy] = {}
        self._ways: dict[object, tuple[Strategy, ...]] = {}
        self._best: dict[object, tuple[tuple[Strategy, ...], list[Strategy]]] = {}

    def _constrain(self) -> None:
        if self.recipes not in self._views:
            self._views[self.recipes] = self._collapse()
        self._filters, views = self._views[self.recipes]
        self.collapsed, self.made = views.collapsed, views.made
        self.free = [c for c in range(len(self.ops)) if c not in self.collapsed]
        self.priced_entries = [e for e in range(len(self.entries)) if not self._is_inside(e)]
        self.__dict__.pop("strategies", None)  # those of other recipes
        self.solved: dict[object, object] = {}

    def _collapse(self) -> tuple[list[ChoiceFilter], CollapsedViews]:
        """The choices that the recipes allow on every axis, and the views that are collapsed under them."""
        filters = [ChoiceFilter(self.graph, recipe) for recipe in self.recipes]
        views = CollapsedViews(self.graph, self.fold, self.saved, self.pins, filters, self._dividing)
        return filters, views

    def _mark(self, name: str) -> Hashable:
        """A mark of an op or parameter; ops that are otherwise equal share a decision only if their marks are equal."""
        pins, region = self.pins, self._region(name) if self._hides else ""
        return pins.labels.get(name), pins.storage.get(name), self.fixed_storage.get(name), region

    def _region(self, name: str) -> str:
        """Region of an op, parameter or input. Communication overlaps only with compute of the same region."""
        op = self.graph.by_name.get(name)
        if self.graph.stack_of(op.module if op else name) is not None:
            return "layers"
        return self._regions.get(name, "before")

    def allowed(self, index: int, axis: int, labels: Labels) -> list[Choice]:
        """The choices of a class along `axis` that are legal given its labels on the other axes."""
        legal = [
            choice
            for choice in self._dividing[index][axis]
            if self._is_legal(index, (*labels[:axis], choice.label, *labels[axis + 1 :]))
        ]
        allowed = self._filters[axis].allowed(self.ops[index], legal)
        return self._pinned(index, axis, allowed, legal)

    def joint_labels(self, index: int) -> list[Labels]:
        """The labels of a class on all axes at once of which each is allowed given the others."""
        every = itertools.product(*([choice.label for choice in along] for along in self._dividing[index]))
        return [labels for labels in every if self._is_legal(index, labels) and self._is_allowed(index, labels)]

    def _is_allowed(self, index: int, labels: Labels) -> bool:
        return all(label in {c.label for c in self.allowed(index, a, labels)} for a, label in enumerate(labels))

    def layouts(self, index: int, labels: Labels) -> Layouts:
        """Layouts of the operands and results of a class."""
        key = (index, labels)
        if key not in self._layouts:
            op = self.ops[index]
            self._layouts[key] = Layouts(operand_layouts(op, labels), result_layouts(op, labels))
        return self._layouts[key]

    def op_seconds(self, index: int, labels: Labels) -> float:
        """Seconds that all ops of a class add to a step, including collectives inside the ops."""
        key = (index, labels)
        if key not in self._op_seconds:
            self._op_seconds[key] = self._seconds(self.prices.op(index, labels))
        return self._op_seconds[key]

    def conversion_seconds(self, index: int, source: TieredLayout, target: Layout) -> float:
        """Seconds that a conversion adds to a step, forward and backward, for all tensors of an entry."""
        key = (index, source, target)
        if key not in self._entry_seconds:
            self._entry_seconds[key] = self.entries[index].count * self._convert(*key)
        return self._entry_seconds[key]

    def _convert(self, index: int, source: TieredLayout, target: Layout) -> float:
        items = self.prices.conversion(index, source, target)
        key = id(items)  # these lists exist as long as the prices
        if key not in self._conversions:
            self._conversions[key] = self._seconds(items)
        return self._conversions[key]

    def _seconds(self, items: Iterable[WorkItem]) -> float:
        return seconds_of(items, self.exposure, self.prices.step)

    def follow(self, index: int, labels: Labels) -> Labels:
        """The labels of a collapsed view, given the labels of the class that computes its operand."""
        producer = self.collapsed[index]
        given = producer.layout(self.layouts(producer.index, labels).results)
        choices = self.ops[index].choices
        return tuple(next(choice.label for choice in choices if choice.operands[0] == state) for state in given)

    def serving(self, index: int, target: Layout, select: Select) -> list[Strategy]:
        """The best ways to store a parameter for one use in the layout `target`, each with the seconds of that use.

        `select` picks the best ones of all that the use allows.
        """

        def found(ways: Sequence[Strategy]) -> list[Strategy]:
            needed = [frozenset({state}) for state in target]
            served = (way for way in ways if self.serves(index, way.plan.resident, needed))
            priced = [s._replace(seconds=s.seconds + self._convert(index, s.plan.in_use, target)) for s in served]
            return select(priced)

        return self._best_ways(index, (target, select), found)

    def resident(
        self, index: int, needed: Sequence[frozenset[State]], open_axis: int, select: Select
    ) -> list[Strategy]:
        """The best ways to store a parameter for each layout in use that several uses allow; see `serves`."""

        def found(ways: Sequence[Strategy]) -> list[Strategy]:
            by_resident: dict[TieredLayout, list[Strategy]] = {}
            for way in ways:
                if self.serves(index, way.plan.resident, needed, open_axis=open_axis):
                    by_resident.setdefault(way.plan.in_use, []).append(way)
            return [each for alike in by_resident.values() for each in select(alike)]

        return self._best_ways(index, (*needed, open_axis, select), found)

    def _best_ways(
        self, index: int, asked: Hashable, find: Callable[[Sequence[Strategy]], list[Strategy]]
    ) -> list[Strategy]:
        """Ways to store a parameter, found once for all entries with its prices and all recipes that store it alike."""
        ways = self.strategies[index]
        gathers = tuple(row.gathers for row in self.recipes)
        key = (self.prices.kind(index), index in self.fixed, id(ways), gathers, asked)
        if key not in self._best:
            self._best[key] = ways, find(ways)  # with the ways, so that no others get their id
        return self._best[key][1]

    def serves(
        self,
        index: int,
        resident: Layout,
        needed: Sequence[frozenset[State]],
        *,
        open_axis: int | None = None,
        mixed: bool = False,
    ) -> bool:
        """Whether a parameter in this resident layout may be used in these states.

        Along each axis a parameter in R may be used only in R (no gradient is reduced), and a parameter in V must have
        some use in another state (its gradient is reduced once per step). A split parameter may be used in another
        state only if the recipe lets uses gather it.

        Args:
            index: index of the parameter's entry.
            resident: resident layout of the parameter.
            needed: for every axis, the states in which the uses need the parameter.
            open_axis: axis along which `needed` lists possible uses, of which one must be allowed; None for no such
                axis.
            mixed: whether the parameter may have uses other than those in `needed`.
        """
        if index in self.fixed:
            return True
        return all(
            self._serves_along(axis, state, states, axis == open_axis, mixed)
            for axis, (state, states) in enumerate(zip(resident, needed, strict=True))
        )

    def _serves_along(self, axis: int, state: State, needed: frozenset[State], undecided: bool, mixed: bool) -> bool:
        if state.kind == "R":
            return R in needed or not needed if undecided else needed <= {R}
        if state.kind == "V":
            return mixed or bool(needed - {R})
        if self.recipes[axis].gathers:
            return True
        return state in needed if undecided else needed <= {state}

    def bytes(self, name: str, layout: Layout) -> int:
        """Bytes of a tensor in a layout on one rank."""
        return self.sizes.bytes(self.graph.tensors[name], layout)

    @property
    def least_state_bytes(self) -> float:
        """A lower bound on parameters, gradients, optimizer states and buffers of a rank, under any plan."""
        smallest = (
            self.entries[index].count * min((each.bytes for each in options), default=0.0)
            for index, options in self.strategies.items()
        )
        return self.constant_bytes + sum(smallest)

    @property
    def least_bytes(self) -> float:
        """A lower bound on the peak memory of a rank that recomputes nothing: state, and its share of saved tensors."""
        whole = sum(
            entry.count * self.least_saved_bytes(name for *_, name in entry.savers) for entry in self.fold.saved
        )
        return self.least_state_bytes + whole / math.prod(self.mesh.sizes)

    def least_saved_bytes(self, names: Iterable[str]) -> int:
        """A lower bound on the bytes that all ranks together save, where ops save these views of one memory.

        A plan may convert a view before an op saves it, and then the memory around the view is not saved.
        """
        return max(min(self.bytes(each, self.whole) for each in self.saved.shown(name)) for name in names)

    def _dividing_choices(self, op: Op) -> list[list[Choice]]:
        """For every axis, the choices whose factor it can split; on an axis of one rank only `-`."""
        return [
            [c for c in op.choices if self.graph.can_cut(c, size)] if size > 1 else [op.choices[0]]
            for size in self.mesh.sizes
        ]

    def _is_legal(self, index: int, labels: Labels) -> bool:
        key = (index, labels)
        if key not in self._legal:
            op, layouts = self.ops[index], self.layouts(index, labels)
            self._legal[key] = (
                go_together(labels)
                and parts_fit(op, labels, self.mesh)
                and all(
                    self._takes(name, layout)
                    for name, layout in zip(
                        (*op.operands, *op.results), (*layouts.operands, *layouts.results), strict=True
                    )
                )
            )
        return self._legal[key]

    def _takes(self, name: str, layout: Layout) -> bool:
        tensor = self.graph.tensors[name]
        key = (tensor.dims, tensor.factors, layout)
        if key not in self._cuts:
            self._cuts[key] = self.graph.can_take(name, layout, self.mesh)
        return self._cuts[key]

    def _pinned(self, index: int, axis: int, allowed: list[Choice], legal: list[Choice]) -> list[Choice]:
        op = self.ops[index]
        label = dict(self.pins.labels.get(op.name, ())).get(axis)
        if label is None:
            return allowed
        pinned = [choice for choice in allowed if choice.label == label]
        if not pinned:
            why = (
                f"the recipe {self.recipes[axis].name} allows only {', '.join(choice.label for choice in allowed)}"
                if label in [choice.label for choice in legal]
                else "another axis already splits that factor completely, or only one of the two exchanges its rows"
            )
            raise RecipeError(
                f"The pin of {op.name} to {label}@{self.mesh.names[axis]} is refused: {why}. Leave the pin out, or "
                "name another recipe for the axis."
            )
        return pinned

    def _placed(self, entry: Entry) -> ParameterPlan | None:
        """How the caller has placed an entry's parameter already."""
        return self.fixed_storage.get(self._public.get(entry.names[0], ""))

    @cached_property
    def strategies(self) -> Mapping[int, tuple[Strategy, ...]]:
        """Index of a parameter's entry -> ways to store the parameter; pricing them takes long, and some need none.

        Raises RecipeError for a pin that the recipes contradict.
        """
        found: dict[int, tuple[Strategy, ...]] = {}
        known, asked = self._ways, tuple(each.storage for each in self.recipes)
        for index, entry in enumerate(self.entries):
            if entry.leaf != "parameter":
                continue
            tensor, name = entry.tensor, self._public[entry.names[0]]
            if fixed := self._placed(entry):
                found[index] = (self._strategy(index, fixed),)
                continue
            pinned = self.pins.storage.get(name, ())
            region = self._region(name)
            key = (asked, self.tiers, tensor.dims, tensor.formats, tensor.needs_grad, pinned, region)
            if key not in known:
                plans = self._storable(name, tensor, pinned)
                known[key] = strategies(plans, partial(self._strategy, index))
            found[index] = known[key]
        return found

    def _storable(self, name: str, tensor: Tensor, pinned: AxisStates) -> tuple[ParameterPlan, ...]:
        """The ways to store a parameter; they do not depend on prices."""
        asked = tuple(each.storage for each in self.recipes)
        key = (asked, tensor.dims, pinned, self.tiers)
        if key not in self._allowed_plans:
            self._allowed_plans[key] = storable(tensor, name, self.recipes, pinned, self.mesh, tiers=self.tiers)
        return self._allowed_plans[key]

    def _strategy(self, index: int, how: ParameterPlan) -> Strategy:
        """A way to store one parameter of an entry, with its bytes and the seconds of its conversions between steps."""
        key = (self.prices.kind(index), how)
        if key not in self._kept:
            items, holdings = self.prices.parameter(index, how)
            seconds = self._seconds(items) + self.prices.optimizer_seconds(holdings)
            near = sum(h.bytes for h in holdings if h.tier == "device")
            self._kept[key] = Strategy(how, seconds, float(near))
        return self._kept[key]

    def _is_inside(self, index: int) -> bool:
        """Whether an entry is the operand of a collapsed view, so that it is never converted."""
        return any(consumer in self.collapsed for consumer, _ in self.entries[index].consumers)

"""The mixed-integer program of one mesh axis, given the choices on the others.

The variables are

    x[c, k]         1 if op class c (ops of repeated layers that decide alike) takes choice k along the axis
    p[e, i]         1 if parameter e is stored by strategy i
    y[e, g, s, t]   1 if tensor e is converted from layout s to layout t for its consumers in group g
    z[c, s, t]      1 if consumer c uses the conversion from s to t

A layout has the states on all axes: the state that is open on this axis, and the given states on the others. So every
cost is that of the whole plan. Consumers of e that need the same states on the other axes form a group g; a group pays
for each conversion once. The program is

    minimize    sum of seconds * (x, p, y)
    subject to  sum_k x[c, k] = 1,  sum_i p[e, i] = 1
                sum_s z[c, s, t] = x[c, t]     c gets the operand in the layout t that it needs
                sum_t z[c, s, t] = x[e, s]     c gets it from the layout s that e has
                z[c, s, t] <= y[e, g, s, t]    for every consumer c of e in g
                T >= bytes that exist only while a block runs, for every block
                T + bytes of parameters and of saved activations <= bound

where x[c, t] is the sum of x over the choices of c that need layout t, and x[e, s] the sum over the choices (for a
parameter, over the strategies) that give e in layout s. The z of one consumer form the polytope of a transport
problem, so y and z need not be declared integer. (A program without z, with inequalities on y, is smaller and has the
same integer solutions. But its linear relaxation is up to 14 % off on Llama, and closing this gap took seconds; the
relaxation with z was integral whenever the memory bound did not matter.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

from autopar.ir import Labels, Layout, ParameterPlan, R, State, TieredLayout
from autopar.search.exact.assignment_parts import composed
from autopar.search.exact.decisions import Assignment, Outcome
from autopar.search.exact.parameters import Strategy, fastest, pareto
from autopar.search.exact.problem import Problem
from autopar.search.exact.solver import MixedIntegerProgram, Objective, Solution, columns_of, picked

_FEASIBLE = 1e-5  # part of a bound by which the solver may exceed it, at most
_TIES = 1e-6  # part of the largest price that preferences may add to the objective

_ByLayout = dict[Layout, list[int]]  # layout -> the columns that need a tensor in this layout
_ByTiered = dict[TieredLayout, list[int]]  # layout and tier -> the columns that give it
_Prices = dict[tuple[TieredLayout, Layout], float | None]


class AxisProgram:
    """The mixed-integer program of one mesh axis, while the choices on the other axes are fixed.

    Args:
        problem: the folded graph with its costs.
        axis: position of the mesh axis whose choices the program decides.
        given: assignment whose choices on the other axes are kept.
        saves_memory: with False, the program has only the fastest storage strategy of a parameter for each layout
            in use, which is enough if memory does not matter. With True it also has slower ones that save memory.
    """

    def __init__(self, problem: Problem, axis: int, given: Assignment, *, saves_memory: bool) -> None:
        self.problem, self.axis, self.given = problem, axis, given
        self._saves_memory = saves_memory
        self._select = pareto if saves_memory else fastest
        self.program = MixedIntegerProgram(problem.programs)
        self._ops: dict[int, dict[int, Labels]] = {}
        self._parameters: dict[int, dict[int, ParameterPlan]] = {}
        self._inputs: dict[int, dict[int, Layout]] = {}
        self._moments: dict[tuple[int, str], dict[int, float]] = {}
        self._one = self.program.binary(bytes=problem.constant_bytes)
        self.program.row([self._one], lower=1.0, upper=1.0)
        self._add_ops()
        for index in problem.priced_entries:
            self._add_entry(index)
        self._add_saved()
        if saves_memory:
            self._add_transient()

    def solve(self, *, minimize: Objective = "seconds", max_bytes: float | None = None) -> Outcome | None:
        """Solves the program; None if no assignment stays within `max_bytes`.

        Args:
            minimize: objective, the duration of a step or the memory of a rank.
            max_bytes: bound on the peak memory of a rank, in bytes; None for no bound.
        """
        price = self.problem.byte_seconds
        solution = self.program.solve(minimize=minimize, max_bytes=max_bytes, byte_seconds=price)
        if solution is None:
            return None
        chosen = {column for column, value in enumerate(solution.values) if value > 0.5}
        assignment = Assignment(
            labels=self._read_labels(chosen),
            parameters={e: picked(options, chosen) for e, options in self._parameters.items()},
            inputs={e: picked(options, chosen) for e, options in self._inputs.items()},
        )
        step = composed(self.problem, assignment)
        seconds, bytes = float(step.seconds()), float(step.peak_bytes())
        return Outcome(
            assignment,
            seconds,
            bytes,
            seconds + price * bytes,
            self._saves_memory,
            self._least_bytes(solution) if minimize == "bytes" else 0.0,
            self._least_seconds(solution) if minimize == "seconds" else 0.0,
        )

    def least_seconds(self, max_bytes: float) -> float:
        """A lower bound on the weighed seconds of all assignments within `max_bytes`, by the linear relaxation.

        It is 0 if the program's slopes are not those of a step in which everything hides that can, and infinite if
        there is no assignment.
        """
        if not self.problem.hides_most:
            return 0.0
        price = self.problem.byte_seconds
        least = self.program.least_seconds(max_bytes=max_bytes, byte_seconds=price)
        return (1 - _FEASIBLE) * least + self._views_seconds

    def _least_seconds(self, solution: Solution) -> float:
        """A lower bound on the weighed seconds of all solutions, given the best one if everything hides that can.

        Under a bound on memory, it is one for all solutions within it.
        """
        if not self.problem.hides_most:
            return 0.0
        weighed = solution.seconds + self.problem.byte_seconds * solution.bytes
        return (1 - solution.gap - _FEASIBLE) * weighed + self._views_seconds

    @cached_property
    def _views_seconds(self) -> float:
        """The least seconds of collapsed views, which the program leaves out because they follow other ops."""
        return sum(
            min(self.problem.op_seconds(index, labels) for _, labels in self._labels(index))
            for index in self.problem.collapsed
        )

    def _least_bytes(self, solution: Solution) -> float:
        """A lower bound on the bytes of all solutions, given the one of least bytes and the solver's tolerances."""
        ties = _TIES * max(self.program.bytes)
        return (1 - solution.gap - _FEASIBLE) * solution.bytes - ties

    def _read_labels(self, chosen: set[int]) -> tuple[Labels, ...]:
        problem = self.problem
        labels = {index: picked(options, chosen) for index, options in self._ops.items()}
        for index, producer in problem.collapsed.items():
            labels[index] = problem.follow(index, labels[producer.index])
        return tuple(labels[index] for index in range(len(problem.ops)))

    # Decisions

    def _add_ops(self) -> None:
        for index in self.problem.free:
            given = self.given.labels[index]
            columns = {}
            for rank, choice in enumerate(self.problem.allowed(index, self.axis, given)):
                labels = (*given[: self.axis], choice.label, *given[self.axis + 1 :])
                seconds = self.problem.op_seconds(index, labels)
                column = self.program.binary(seconds=seconds, preference=float(rank))
                columns[column] = labels
                self._work(column, index, labels)
            self._choose_one(columns)
            self._ops[index] = columns

    def _choose_one(self, columns: Iterable[int]) -> None:
        self.program.row(list(columns), lower=1.0, upper=1.0)

    def _labels(self, index: int) -> list[tuple[int, Labels]]:
        """The columns that decide for an op class, each with the labels that the class gets if the column is 1."""
        producer = self.problem.collapsed.get(index)
        if producer is None:
            return list(self._ops[index].items())
        made = self._ops[producer.index].items()
        return [(column, self.problem.follow(index, labels)) for column, labels in made]

    def _add_entry(self, index: int) -> None:
        entry = self.problem.entries[index]
        demands = [self._demand(*consumer) for consumer in entry.consumers]
        if entry.leaf == "parameter" and len(demands) == 1:
            self._add_lone_parameter(index, demands[0])
        elif entry.leaf == "parameter":
            self._convert(index, self._parameter(index, demands), demands)
        elif entry.leaf == "input":
            self._convert(index, self._input(index, demands), demands)
        elif entry.leaf == "buffer":
            self._convert(index, {TieredLayout(self.problem.whole): [self._one]}, demands)
        else:
            self._convert(index, self._made(index), demands)

    def _demand(self, index: int, position: int) -> _ByLayout:
        """The layouts in which an op class can need one of its operands."""
        return columns_of(
            (self.problem.layouts(index, labels).operands[position], column) for column, labels in self._labels(index)
        )

    def _made(self, index: int) -> _ByTiered:
        """The layouts in which the op class that computes a tensor can give it."""
        producer = self.problem.made[index]
        return columns_of(
            (TieredLayout(producer.layout(self.problem.layouts(producer.index, labels).results)), column)
            for column, labels in self._ops[producer.index].items()
        )

    def _input(self, index: int, demands: list[_ByLayout]) -> _ByTiered:
        """The layouts of an input: whole on every rank, or as one of its consumers needs it."""
        layouts = {self.problem.whole: None}
        for demand in demands:
            layouts |= {tuple(s if s.kind == "S" else R for s in layout): None for layout in demand}
        options = {self.program.binary(preference=1.0): layout for layout in layouts}
        self._choose_one(options)
        self._inputs[index] = options
        return columns_of((TieredLayout(layout), column) for column, layout in options.items())

    def _parameter(self, index: int, demands: list[_ByLayout]) -> _ByTiered:
        """The resident layouts of a parameter that has several consumers, or none."""
        needed = _needed([layout for demand in demands for layout in demand], self.problem)
        options = {
            self._strategy(strategy, self.problem.entries[index].count): strategy.plan
            for strategy in self.problem.resident(index, needed, self.axis, self._select)
        }
        self._choose_one(options)
        self._parameters[index] = options
        return columns_of((plan.in_use, column) for column, plan in options.items())

    def _strategy(self, strategy: Strategy, count: int) -> int:
        return self.program.binary(seconds=strategy.seconds * count, bytes=strategy.bytes * count, preference=1.0)

    def _add_lone_parameter(self, index: int, demand: _ByLayout) -> None:
        """Adds a parameter with one consumer, for which the best strategies are known for each layout that it needs."""
        count = self.problem.entries[index].count
        options = self._parameters[index] = {}
        for target, needing in demand.items():
            best = self.problem.serving(index, target, self._select)
            if not best:
                self._forbid(needing)
            elif len(best) == 1:
                self._charge(needing, best[0].seconds * count, best[0].bytes * count)
                self._gather(needing, index, best[0].plan.in_use, target)
                options.update(dict.fromkeys(needing, best[0].plan))
            else:
                columns = {self._strategy(strategy, count): strategy.plan for strategy in best}
                for column, how in columns.items():
                    self._gather([column], index, how.in_use, target)
                self.program.row(list(columns), needing, lower=0.0, upper=0.0)
                options.update(columns)

    # Conversions

    def _convert(self, index: int, sources: _ByTiered, demands: list[_ByLayout]) -> None:
        groups: dict[Layout, list[_ByLayout]] = {}
        for demand in demands:
            groups.setdefault(self._elsewhere(next(iter(demand))), []).append(demand)
        delivered: dict[TieredLayout, Layout] = {}
        if self.problem.entries[index].is_output:
            delivered = {s: self.problem.graph.delivered(s.layout) for s in sources}
            groups.setdefault(self._elsewhere(next(iter(delivered.values()))), [])
        for elsewhere, group in groups.items():
            mine = {s: t for s, t in delivered.items() if self._elsewhere(t) == elsewhere}
            self._convert_group(index, sources, group, mine)

    def _elsewhere(self, layout: Layout) -> Layout:
        """The states of a layout on the other axes."""
        return layout[: self.axis] + layout[self.axis + 1 :]

    def _convert_group(
        self, index: int, sources: _ByTiered, demands: list[_ByLayout], delivered: dict[TieredLayout, Layout]
    ) -> None:
        targets = list(dict.fromkeys([t for d in demands for t in d] + list(delivered.values())))
        prices = {(s, t): self._price(index, s, t) for s in sources for t in targets}
        if not any(price is None or price > 0 for price in prices.values()):
            return
        if not demands:
            for source, target in delivered.items():
                self._pay(sources[source], index, source, target, prices)
        elif len(targets) == 1:
            for source, columns in sources.items():
                self._pay(columns, index, source, targets[0], prices)
        elif len(sources) == 1 and len(demands) == 1 and not delivered:
            for target, columns in demands[0].items():
                self._pay(columns, index, next(iter(sources)), target, prices)
        else:
            self._flow(index, prices, sources, demands, delivered)

    def _pay(self, columns: list[int], index: int, source: TieredLayout, target: Layout, prices: _Prices) -> None:
        """Adds the seconds of a conversion to the columns that require it."""
        self._charge(columns, prices[source, target])
        if prices[source, target] is not None:
            self._gather(columns, index, source, target)

    def _price(self, index: int, source: TieredLayout, target: Layout) -> float | None:
        """Seconds of a conversion; None where the recipe forbids to use a parameter in this layout."""
        problem = self.problem
        if problem.entries[index].leaf == "parameter":
            needed = _needed([target], problem)
            if not problem.serves(index, source.layout, needed, mixed=True):
                return None
        return problem.conversion_seconds(index, source, target)

    def _charge(self, columns: list[int], seconds: float | None, size_bytes: float = 0.0) -> None:
        if seconds is None:
            self._forbid(columns)
            return
        for column in columns:
            self.program.seconds[column] += seconds
            self.program.bytes[column] += size_bytes

    def _forbid(self, columns: list[int]) -> None:
        for column in columns:
            self.program.forbid(column)

    def _flow(
        self,
        index: int,
        prices: _Prices,
        sources: _ByTiered,
        demands: list[_ByLayout],
        delivered: dict[TieredLayout, Layout],
    ) -> None:
        """Adds y and z of a group of consumers, and the rows that contain them."""
        y = {pair: self.program.continuous(seconds=price) for pair, price in prices.items() if price is not None}
        for (source, target), column in y.items():
            self._gather([column], index, source, target)
        if len(demands) == 1 and not delivered:
            self._transport(y, sources, demands[0])
            return
        for demand in demands:
            z = {pair: self.program.continuous() for pair in y if pair[1] in demand}
            self._transport(z, sources, demand)
            for pair, column in z.items():
                self.program.row([y[pair]], [column], lower=0.0, upper=math.inf)
        for source, target in delivered.items():
            self.program.row([y[source, target]], sources[source], lower=0.0, upper=math.inf)

    def _transport(self, z: dict[tuple[TieredLayout, Layout], int], sources: _ByTiered, demand: _ByLayout) -> None:
        """Adds the rows of a transport problem: z sums to what each layout needs, and to what each layout gives."""
        for target, columns in demand.items():
            into = [column for (_, t), column in z.items() if t == target]
            self.program.row(into, columns, lower=0.0, upper=0.0)
        for source, columns in sources.items():
            out = [column for (s, _), column in z.items() if s == source]
            self.program.row(out, columns, lower=0.0, upper=0.0)

    # Memory

    def _add_saved(self) -> None:
        for entry in self.problem.fold.saved:
            savers: dict[tuple[str, Layout], list[list[int]]] = {}
            for index, position, name in entry.savers:
                for memory, columns in self._memory(index, position, name).items():
                    if columns not in savers.setdefault(memory, []):
                        savers[memory].append(columns)
            for (name, layout), keeping in savers.items():
                self._keep(entry.count * self.problem.bytes(name, layout), keeping)

    def _memory(self, index: int, position: int, name: str) -> dict[tuple[str, Layout], list[int]]:
        """(tensor, layout) that an op class can save for backward -> the columns under which it does."""
        found: dict[tuple[str, Layout], list[int]] = {}
        for column, labels in self._labels(index):
            layouts = self.problem.layouts(index, labels)
            layout = (*layouts.operands, *layouts.results)[position]
            found.setdefault(self.problem.saved.memory(name, layout), []).append(column)
        return found

    def _keep(self, size_bytes: int, keeping: list[list[int]]) -> None:
        if len(keeping) == 1:
            self._charge(keeping[0], 0.0, size_bytes)
            return
        kept = self.program.continuous(bytes=size_bytes)
        for columns in keeping:
            self.program.row([kept], columns, lower=0.0, upper=math.inf)

    # Memory that exists only while a block runs

    def _work(self, column: int, index: int, labels: Labels) -> None:
        """Records the bytes that an op class needs only while it runs, under a column."""
        prices = self.problem.prices
        if self._saves_memory and (size := prices.working_bytes(index, labels)):
            for block, counts in enumerate(prices.blocks):
                if index in counts:
                    self._note(block, "working", [column], counts[index] * size)

    def _gather(self, columns: list[int], index: int, source: TieredLayout, target: Layout) -> None:
        """Records the bytes of parameters that a conversion gathers, and of their gradients, under columns."""
        if self._saves_memory and self.problem.entries[index].leaf == "parameter":
            prices = self.problem.prices
            size = 2 * prices.gathered_bytes(index, source, target)
            for block, count in prices.blocks_using(index).items() if size else ():
                self._note(block, "gathered", columns, count * size)

    def _note(self, block: int, kind: str, columns: list[int], size_bytes: float) -> None:
        noted = self._moments.setdefault((block, kind), {})
        for column in columns:
            noted[column] = noted.get(column, 0.0) + size_bytes

    def _add_transient(self) -> None:
        """Adds T as a column, which is at least the bytes of every block and kind; see `Step._transient`."""
        most = max((sum(noted.values()) for noted in self._moments.values()), default=0.0)
        if not most:
            return
        transient = self.program.continuous(bytes=most)
        for noted in self._moments.values():
            terms = {column: -size / most for column, size in noted.items()}
            self.program.weighted_row({transient: 1.0, **terms}, lower=0.0, upper=math.inf)


def _needed(layouts: list[Layout], problem: Problem) -> list[frozenset[State]]:
    """For every axis, the states in which the uses of a parameter need it."""
    return [frozenset(layout[a] for layout in layouts) for a in range(len(problem.mesh.axes))]

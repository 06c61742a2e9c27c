"""A mixed-integer program as arrays, solved by HiGHS (Huangfu and Hall 2018).

Every column has two prices, seconds and bytes. One of the two is minimized, and the sum of the bytes may have a bound.
Runs are repeatable: they use one thread, a fixed seed, and a limit on branch-and-bound nodes that is reached before the
limit on time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import highspy
import numpy as np

from autopar.errors import SearchError

_SCALE = 1e6  # the objective is scaled to about this size, far above HiGHS' absolute tolerances
# Prices are far less accurate than this. The gap matters only if memory is tight: the bound is then a
# knapsack, and solving it to the last digits took minutes (for Swin and T5 at 80 % of the memory of
# their fastest plans).
_RELATIVE_GAP = 1e-4
_MAX_NODES = 1_000
_MAX_SECONDS = 120.0
# What all preferences together add to the objective, as a part of the largest price.
_PREFERRED = 1e-6
_INTEGRAL = 1e-9  # how far from 0 or 1 a value of the relaxation may be
_INFEASIBLE = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)

Objective = Literal["seconds", "bytes"]


@dataclass(frozen=True)
class Solution:
    """A solution of HiGHS.

    Attributes:
        values: value of every column.
        seconds: price of the values in seconds, without preferences.
        bytes: price of the values in bytes.
        gap: relative optimality gap: how far the proven bound lies below the objective, divided by the objective.
    """

    values: np.ndarray
    seconds: float
    bytes: float
    gap: float


@dataclass(frozen=True)
class Solved:
    """The solutions of programs that were solved before, by all numbers of a program.

    Searches under other recipes, or along axes that are alike, often build the same program again.
    """

    _found: dict[bytes, tuple[np.ndarray, float] | None] = field(default_factory=dict)
    _least: dict[bytes, float] = field(default_factory=dict)

    def solve(self, lp: highspy.HighsLp, binary: np.ndarray) -> tuple[np.ndarray, float] | None:
        """The values of a program's columns with the relative gap, or None if the program is infeasible.

        Args:
            lp: the program.
            binary: whether a column has to be whole.

        Raises SearchError if a limit is reached without a solution.
        """
        key = _digest(lp, binary)
        if key not in self._found:
            self._found[key] = _run(lp, binary)
        return self._found[key]

    def least(self, lp: highspy.HighsLp, binary: np.ndarray) -> float:
        """A lower bound on a program's objective, by its linear relaxation.

        It is infinite for an infeasible program, and minus infinity where the relaxation was not solved in time.
        """
        key = _digest(lp, binary)
        if key not in self._least:
            self._least[key] = _bound_of(_relaxed(lp))
        return self._least[key]


class MixedIntegerProgram:
    """A mixed-integer program, built column by column and row by row.

    A *preference* is a small extra price that only breaks ties; it is scaled so that all
    preferences together stay under a millionth of the objective.

    Args:
        solved: solutions of programs that were solved before.
    """

    def __init__(self, solved: Solved | None = None) -> None:
        self._solved = solved or Solved()
        self.seconds: list[float] = []
        self.bytes: list[float] = []
        self._preference: list[float] = []
        self._upper: list[float] = []
        self._binary: list[bool] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._starts: list[int] = [0]
        self._indices: list[int] = []
        self._values: list[float] = []

    def binary(self, *, seconds: float = 0.0, bytes: float = 0.0, preference: float = 0.0) -> int:
        """Adds a column that is 0 or 1; returns its index."""
        return self._column(seconds, bytes, preference, True)

    def continuous(self, *, seconds: float = 0.0, bytes: float = 0.0) -> int:
        """Adds a column between 0 and 1 that need not be whole; returns its index."""
        return self._column(seconds, bytes, 0.0, False)

    def _column(self, seconds: float, bytes: float, preference: float, binary: bool) -> int:
        self.seconds.append(seconds)
        self.bytes.append(bytes)
        self._preference.append(preference)
        self._upper.append(1.0)
        self._binary.append(binary)
        return len(self.seconds) - 1

    def forbid(self, column: int) -> None:
        """Fixes a column to 0."""
        self._upper[column] = 0.0

    def row(self, plus: Sequence[int], minus: Sequence[int] = (), *, lower: float, upper: float) -> None:
        """Adds lower <= sum of the columns `plus` - sum of the columns `minus` <= upper."""
        self._indices += [*plus, *minus]
        self._values += [1.0] * len(plus) + [-1.0] * len(minus)
        self._starts.append(len(self._indices))
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def weighted_row(self, terms: Mapping[int, float], *, lower: float, upper: float) -> None:
        """Adds lower <= sum of columns times their weights <= upper."""
        self._indices += terms.keys()
        self._values += terms.values()
        self._starts.append(len(self._indices))
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def solve(
        self, *, minimize: Objective = "seconds", max_bytes: float | None = None, byte_seconds: float = 0.0
    ) -> Solution | None:
        """The best solution; None if the program is infeasible. Raises SearchError if a limit is reached without one.

        Args:
            minimize: the price to minimize.
            max_bytes: bound on the sum of the bytes; None for no bound.
            byte_seconds: seconds that are added to the objective "seconds" for each byte.
        """
        lp = self._model(self._costs(minimize, byte_seconds), max_bytes)
        found = self._solved.solve(lp, np.array(self._binary))
        if found is None:
            return None
        values, gap = found
        return Solution(values, float(values @ self.seconds), float(values @ self.bytes), gap)

    def least_seconds(self, *, max_bytes: float | None = None, byte_seconds: float = 0.0) -> float:
        """A lower bound on the seconds of all solutions, which takes a small part of the time of `solve`.

        The result is infinite if there is no solution. Arguments are those of `solve`.
        """
        costs = self._costs("seconds", byte_seconds)
        least = self._solved.least(self._model(costs, max_bytes), np.array(self._binary))
        size = costs.max(initial=0.0) or 1.0
        return (least / _SCALE - _PREFERRED) * size

    def _model(self, costs: np.ndarray, max_bytes: float | None) -> highspy.HighsLp:
        starts, indices, values = self._starts, self._indices, self._values
        lower, upper = self._row_lower, self._row_upper
        if max_bytes is not None:
            heavy = np.flatnonzero(self.bytes)
            indices = [*indices, *heavy.tolist()]
            scale = max(max_bytes, 1.0)  # a bound of nothing is a bound, too
            values = [*values, *(np.asarray(self.bytes)[heavy] / scale).tolist()]
            starts = [*starts, len(indices)]
            lower, upper = [*lower, -highspy.kHighsInf], [*upper, max_bytes / scale]
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.seconds), len(lower)
        lp.col_cost_ = self._objective(costs)
        lp.col_lower_ = np.zeros(len(self.seconds))
        lp.col_upper_ = np.array(self._upper)
        lp.row_lower_, lp.row_upper_ = np.array(lower), np.array(upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.array(indices, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(values)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[binary] for binary in self._binary]
        return lp

    def _costs(self, minimize: Objective, byte_seconds: float) -> np.ndarray:
        if minimize == "bytes":
            return np.array(self.bytes)
        return np.array(self.seconds) + byte_seconds * np.array(self.bytes)

    def _objective(self, costs: np.ndarray) -> np.ndarray:
        size = costs.max(initial=0.0) or 1.0
        preference = np.array(self._preference)
        tie_break = preference / (preference.sum() or 1.0) * _PREFERRED
        return _SCALE * (costs / size + tie_break)


class _SilentHighs(highspy.Highs):
    """A solver that writes nothing to stdout, which is a command's or a script's; no other class makes solvers here.

    HiGHS 1.16 writes its version when callbacks are set, which the constructor does before one can set an option.
    """

    def enableCallbacks(self) -> None:  # its name in highspy
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


_OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 0,
    "mip_rel_gap": _RELATIVE_GAP,
    "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": 1e-9,
    "mip_max_nodes": _MAX_NODES,
    "time_limit": _MAX_SECONDS,
    # The bound at the root is within a few percent, and the tree is small. On Llama 8B under a tight
    # memory bound, restarts and these heuristics took five sixths of the time.
    "mip_allow_restart": False,
    "mip_root_presolve_only": True,  # the programs of heuristics are small, and presolving each took 10 to 25 %
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
}


def _digest(lp: highspy.HighsLp, binary: np.ndarray) -> bytes:
    """A hash of all numbers of a program."""
    numbers = hashlib.blake2b(digest_size=16)
    rows = lp.a_matrix_
    for each in (
        lp.col_cost_,
        lp.col_upper_,
        lp.row_lower_,
        lp.row_upper_,
        binary,
        rows.start_,
        rows.index_,
        rows.value_,
    ):
        numbers.update(np.asarray(each).tobytes())
    return numbers.digest()


def _run(lp: highspy.HighsLp, binary: np.ndarray) -> tuple[np.ndarray, float] | None:
    """The values of a program's columns and the relative gap, or None if the program is infeasible.

    The linear relaxation is solved first. It is often integral, and is then the solution. Presolving it took two to
    three times as long as its simplex iterations (programs of Llama, GPT-2, Mixtral and T5).
    """
    solver = _relaxed(lp)
    if solver.getModelStatus() in _INFEASIBLE:
        return None
    if _is_integral(solver, binary):
        return np.asarray(solver.getSolution().col_value), 0.0
    solver.setOptionValue("solve_relaxation", False)
    solver.setOptionValue("presolve", "choose")
    solver.run()
    return _searched(solver)


def _bound_of(relaxed: highspy.Highs) -> float:
    status = relaxed.getModelStatus()
    if status in _INFEASIBLE:
        return math.inf
    is_solved = status == highspy.HighsModelStatus.kOptimal
    return float(relaxed.getInfo().objective_function_value) if is_solved else -math.inf


def _relaxed(lp: highspy.HighsLp) -> highspy.Highs:
    """A solver that has solved the linear relaxation of a program."""
    solver = _SilentHighs()
    for option, value in _OPTIONS.items():
        solver.setOptionValue(option, value)
    solver.passModel(lp)
    solver.setOptionValue("solve_relaxation", True)
    solver.setOptionValue("presolve", "off")
    solver.run()
    return solver


def _searched(solver: highspy.Highs) -> tuple[np.ndarray, float] | None:
    status, info = solver.getModelStatus(), solver.getInfo()
    if status in _INFEASIBLE:
        return None
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        raise SearchError(
            f"The solver found no plan within {_MAX_SECONDS:.0f} s and {_MAX_NODES} nodes; a "
            "recipe or pins make the problem smaller."
        )
    return np.asarray(solver.getSolution().col_value), float(info.mip_gap)


def _is_integral(solver: highspy.Highs, binary: np.ndarray) -> bool:
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return False
    values = np.asarray(solver.getSolution().col_value)[binary]
    return bool(np.all(np.abs(values - np.round(values)) < _INTEGRAL))


_T = TypeVar("_T")

_K = TypeVar("_K")


def columns_of(pairs: Iterable[tuple[_K, int]]) -> dict[_K, list[int]]:
    """Groups pairs of key and column: the columns of each key."""
    found: dict[_K, list[int]] = {}
    for key, column in pairs:
        found.setdefault(key, []).append(column)
    return found


def picked(options: Mapping[int, _T], chosen: set[int]) -> _T:
    picked = [option for column, option in options.items() if column in chosen]
    assert len(picked) == 1, f"the solver chose {len(picked)} of {len(options)} options"
    return picked[0]

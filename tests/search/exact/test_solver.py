"""Programs of two columns, whose solutions can be read off."""

from __future__ import annotations

import importlib
import math

import pytest

from autopar.search.exact.solver import MixedIntegerProgram, Solved

solver = importlib.import_module("autopar.search.exact.solver")


def one_of_two(solved: Solved, slow_seconds: float = 2.0) -> MixedIntegerProgram:
    """A fast column that takes two bytes, or a slow one that takes one."""
    program = MixedIntegerProgram(solved)
    both = [program.binary(seconds=1.0, bytes=2.0), program.binary(seconds=slow_seconds, bytes=1.0)]
    program.row(both, lower=1.0, upper=1.0)
    return program


def test_equal_programs_are_solved_once_and_others_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = [], solver._run
    monkeypatch.setattr(solver, "_run", lambda *program: (runs.append(1), run(*program))[1])
    solved, found = Solved(), []
    for slow_seconds, max_bytes in [(2.0, None), (2.0, 1.0), (3.0, 1.0), (2.0, 0.5)] * 2:
        solution = one_of_two(solved, slow_seconds).solve(max_bytes=max_bytes)
        found.append(solution and (solution.seconds, solution.bytes))
    assert found == [(1.0, 2.0), (2.0, 1.0), (3.0, 1.0), None] * 2
    assert len(runs) == 4


def test_the_least_seconds_are_those_of_the_relaxation() -> None:
    """Half of each column takes 1.5 bytes and 1.5 seconds; less than a byte is infeasible."""
    program = one_of_two(Solved())
    assert program.least_seconds() == pytest.approx(1.0, rel=1e-5)
    assert program.least_seconds(max_bytes=1.5) == pytest.approx(1.5, rel=1e-5)
    assert program.least_seconds(max_bytes=0.5) == math.inf

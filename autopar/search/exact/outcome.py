"""The outcome of a mixed-integer program, or of a descent over several: an assignment with its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.search.exact.decisions import Assignment


@dataclass(frozen=True)
class Outcome:
    """An assignment, which has a choice for every op class and a layout for every parameter and input, and its cost.

    Attributes:
        assignment: the choices and layouts.
        seconds: duration of a step.
        bytes: peak memory of a rank, in bytes.
        weighed_seconds: duration of a step plus the price of its bytes (`Problem.byte_seconds`).
        saves_memory: whether the program had slower strategies that save memory.
        least_bytes: bytes that every assignment takes as the program counts them; 0 if they were not minimized.
        least_seconds: weighed seconds that no assignment within the program's bound on memory falls below, whatever
            its slopes; 0 if they are not known.
        refused_seconds: duration of the fastest step on the way that did not fit into memory; infinite if all fitted.
    """

    assignment: Assignment
    seconds: float
    bytes: float
    weighed_seconds: float
    saves_memory: bool
    least_bytes: float = 0.0
    least_seconds: float = 0.0
    refused_seconds: float = math.inf

"""Decisions of a plan for the classes and entries of a folded graph, what they cost, and the layouts that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir import Labels, Layout, ParameterPlan, State

States = Mapping[State, State]


@dataclass(frozen=True)
class Assignment:
    """All decisions of a plan, for the classes and entries of the folded graph.

    Attributes:
        labels: for every class, the label of its choice on every axis.
        parameters: index of a parameter's entry -> layouts of the parameter.
        inputs: index of an input's entry -> layout of the input.
    """

    labels: tuple[Labels, ...]
    parameters: Mapping[int, ParameterPlan]
    inputs: Mapping[int, Layout]

    @property
    def key(self) -> object:
        """All decisions in order, which is also the order in which their prices are added up."""
        return self.labels, tuple(self.parameters.items()), tuple(self.inputs.items())


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


@dataclass(frozen=True)
class Layouts:
    """The layouts of the operands and results of an op, given its labels."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True)
class Made:
    """The class that computes a tensor, and the collapsed views between the class and the tensor.

    Attributes:
        index: index of the class; it is not collapsed.
        position: position among the results of the class.
        views: for each collapsed view in order, state of its operand -> state of its result.
    """

    index: int
    position: int
    views: tuple[States, ...] = ()

    def state(self, state: State) -> State:
        """The state of the tensor after the views, given the state in which the class leaves its result."""
        for view in self.views:
            state = view[state]
        return state

    def layout(self, results: Sequence[Layout]) -> Layout:
        """The layout of the tensor after the views, given the layouts of the results of the class."""
        return tuple(self.state(state) for state in results[self.position])

"""Decisions of a plan for the classes and entries of a folded graph, and the layouts that follow from them."""

from __future__ import annotations

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

"""The interface between the compiled module and the planner: requests for programs, and the programs made.

The runtime loads no solver: it knows the planner only as a `ProgramBuilder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from autopar.capture.guards.guards import Guards, NumberInput, Place
from autopar.capture.guards.writes import Write
from autopar.ir import ParameterPlan, Pipeline, Plan
from autopar.ir.recompute import Recompute
from autopar.ir.saved import SavedLayout
from autopar.program.captures import Captures, Shapes
from autopar.program.program import Program
from autopar.runtime.parameters.stage_partition import Users
from autopar.runtime.ranks.world import World

# Number of micro-batches, and that of one of them -> a context in which the model can be captured with its arguments.
StandIns = Callable[[int, int], AbstractContextManager[tuple[tuple[Any, ...], dict[str, Any]]]]


@dataclass(frozen=True)
class Programs:
    """The programs that were made from one capture.

    Attributes:
        whole: the program of the whole model.
        stages: the programs of its stages.
        guards: guards of the Python values that the capture read.
        writes: changes of attributes of modules that the forward makes.
        numbers: numbers of Python that are inputs of the programs.
    """

    whole: Program
    stages: Sequence[Program]
    guards: Guards
    writes: Sequence[Write]
    numbers: Sequence[NumberInput] = ()

    @property
    def pipeline(self) -> Pipeline | None:
        return self.whole.plan.pipeline


@dataclass(frozen=True)
class Fixed:
    """The decisions of the first program that all later programs keep.

    Attributes:
        parameters: parameter name -> its layouts on the mesh of its stage.
        pipeline: the stages of the first program; None for a single stage.
        recompute: the recomputation of the first program.
        users: parameter name -> the stages that use it.
        saved: the first program's saved lines.
    """

    parameters: Mapping[str, ParameterPlan]
    pipeline: Pipeline | None
    recompute: Recompute
    users: Users
    saved: Mapping[str, SavedLayout] = field(default_factory=dict)


@dataclass(frozen=True)
class ProgramRequest:
    """Requirements on a program that the planner is to make.

    Attributes:
        is_step: whether it is a training step; otherwise it is a forward.
        micro_batches: number of micro-batches of a step; None leaves it open.
        fixed: layouts that the parameters already have; None for the first program.
        rows: function from a number of micro-batches to the rows of each of them.
        shapes: function from a number of micro-batches, and that of one of them, to the shapes of its tensors.
        captures: captures of the model in its present state.
        numbers: places of the Python numbers that are to be inputs where they can be.
        differentiable: positions of the tensors among the inputs to which gradients are to flow.
    """

    is_step: bool
    micro_batches: int | None
    fixed: Fixed | None
    rows: Callable[[int], Sequence[int]]
    shapes: Callable[[int, int], Shapes]
    captures: Captures
    numbers: Sequence[Place] = ()
    differentiable: frozenset[int] = frozenset()


class ProgramBuilder(Protocol):
    """Makes programs and knows the mesh they run on (implemented by autopar.api.planner)."""

    def program(self, model: nn.Module, stand_ins: StandIns, asked: ProgramRequest) -> Programs:
        """Captures and plans a model, with arguments from `stand_ins` for micro-batches."""
        ...

    def predicted(self, plan: Plan) -> tuple[float, float]:
        """Predicted seconds of a step and peak bytes of a rank, of the plan of the first program."""
        ...

    def world(self) -> World:
        """The mesh of ranks; known after the first program."""
        ...

    def explain(self, plan: Plan) -> object:
        """The plan of the first program for people."""
        ...

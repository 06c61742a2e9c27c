"""Every exception autopar raises for people, drawn as a tree.

AutoparError (ValueError)
 +-- MeshError        the mesh, its axes, or the world size
 +-- LayoutError      a layout that a tensor cannot take
 +-- CaptureError     a model that torch.export cannot capture
 +-- PlanError        a plan that is damaged, of another version, or of another model
 +-- RecipeError      an unknown recipe, or a pin that cannot hold
 +-- SearchError      no plan satisfies the constraints (memory, pins)
 +-- StepError        a batch, a loss function or a loss that `step` cannot use
      +-- NoLossError a model that returns no loss, without a loss function

RuntimeError
 +-- PeerError        a collective that failed because another rank died or hangs

Our own mistakes are `assert`s or `VerifierError`, which is not a ValueError on purpose.
"""

from __future__ import annotations


class AutoparError(ValueError):
    """Base of every error that a person can mend."""


class MeshError(AutoparError):
    """The mesh, its axes or the world size do not fit together."""


class LayoutError(AutoparError):
    """A layout that the tensor's dims cannot take."""


class CaptureError(AutoparError):
    """The model cannot be captured as a graph."""


class PlanError(AutoparError):
    """A plan that is damaged, of an unknown version, or of another model."""


class RecipeError(AutoparError):
    """An unknown recipe, or a pin that no strategy satisfies."""


class SearchError(AutoparError):
    """No plan satisfies the constraints."""


class StateError(SearchError):
    """Parameters and what training keeps of them do not fit into memory, however a step is run."""


class StepError(AutoparError):
    """A batch, loss function or loss that `step` cannot use."""


class NoLossError(StepError):
    """`step` needs a loss, the model returns none, and no loss function was given."""


class PeerError(RuntimeError):
    """A collective failed, because another rank died, hangs, or runs something else.

    Attributes:
        collective: its name, such as `all_reduce`.
        group: the c10d name of the process group.
        reason: what torch.distributed says of it.
        op: what the collective was for, in words: an op of the model, or parameters; "" where it is not known.
    """

    def __init__(
        self, message: str, *, collective: str, group: str, reason: str = "", op: str = ""
    ) -> None:
        super().__init__(message)
        self.collective, self.group, self.reason, self.op = collective, group, reason, op


class VerifierError(AssertionError):
    """A pass broke an invariant of the graph: a defect of autopar, not of the model."""

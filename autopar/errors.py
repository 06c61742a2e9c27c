"""Every exception autopar raises for people, drawn as a tree.

AutoparError (ValueError)
 +-- MeshError        the mesh, its axes, or the world size
 +-- LayoutError      a layout that a tensor cannot take
 +-- CaptureError     a model that torch.export cannot capture
 +-- PlanError        a plan that is damaged, of another version, or of another model
 +-- RecipeError      an unknown recipe, or a pin that cannot hold
 +-- SearchError      no plan satisfies the constraints (memory, pins)
 |    +-- MemoryBoundError    no plan fits into the memory of a rank
 |         +-- StateError     nor do parameters and what training keeps of them, by themselves
 +-- StepError        a batch, a loss function or a loss that `step` cannot use
      +-- NoLossError a model that returns no loss, without a loss function

RuntimeError
 +-- PeerError        a collective that failed because another rank died or hangs

Our own mistakes are `assert`s or `VerifierError`, which is not a ValueError on purpose.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self


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


class MemoryBoundError(SearchError):
    """No plan fits into the memory of a rank.

    Attributes:
        finding: what was found, without what would help.
        remedies: what would help besides memory.
        needed_bytes: memory of a rank that the smallest plan takes, reserved memory included; 0 where it is not known.
    """

    finding: str = ""
    remedies: tuple[str, ...] = ()
    needed_bytes: int = 0

    @classmethod
    def of(cls, finding: str, remedies: Iterable[str], needed_bytes: int) -> Self:
        """The error, whose text ends with remedies."""
        words = (*remedies, f"or memory_bytes={needed_bytes} (--max-memory) if a rank has that much")
        space = "\n" if "\n" in finding else " "
        made = cls(f"{finding}{space}What would help: {', '.join(words)}.")
        made.finding, made.remedies, made.needed_bytes = finding, words[:-1], needed_bytes
        return made

    def beside(self, other: MemoryBoundError, how: str) -> Self:
        """This error joined with that of another search, `how`, with the remedies of both listed once."""
        remedies = dict.fromkeys((*self.remedies, *other.remedies))
        finding = f"{self.finding}\nNor does it {how}: {other.finding}"
        return self.of(finding, remedies, min(self.needed_bytes, other.needed_bytes))


def both(first: SearchError, second: SearchError, how: str) -> SearchError:
    """Joins the errors of two searches; `how` says how the second one searched, such as "with blocks recomputed"."""
    if str(first) == str(second):
        return first
    if isinstance(first, MemoryBoundError) and isinstance(second, MemoryBoundError) and second.needed_bytes:
        if first.needed_bytes:
            return first.beside(second, how)
        return second.of(
            f"{first.finding or first}\nNor does it {how}: {second.finding}", second.remedies, second.needed_bytes
        )
    return type(first)(f"{first}\nNor does it {how}: {second}")


class StateError(MemoryBoundError):
    """Parameters with their gradients and optimizer states do not fit into memory, however a step is run."""


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

    def __init__(self, message: str, *, collective: str, group: str, reason: str = "", op: str = "") -> None:
        super().__init__(message)
        self.collective, self.group, self.reason, self.op = collective, group, reason, op


class VerifierError(AssertionError):
    """A pass broke an invariant of the graph: a defect of autopar, not of the model."""


def first_line(said: BaseException | str) -> str:
    """The first line of an error's text; of an error without text the name of its kind.

    >>> first_line(RuntimeError("Connection closed.\\nException raised from ...")), first_line(KeyboardInterrupt())
    ('Connection closed.', 'KeyboardInterrupt')
    """
    return next(iter(str(said).strip().splitlines()), type(said).__name__)


def did_you_mean(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The known names that are written almost like this, as a question; "" for none.

    >>> did_you_mean("recpie", ["mesh", "recipe"])
    ' (did you mean recipe?)'
    """
    near = difflib.get_close_matches(str(name).lower(), list(known), n=3, cutoff=cutoff)
    return f" (did you mean {' or '.join(near)}?)" if near else ""

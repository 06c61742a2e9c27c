"""The layout in which a block keeps a tensor between forward and backward.

Autograd saves a tensor in the layout in which the op used it. Along an axis that replicates the tensor (states R and
V of `autopar.ir.layout`) all ranks would save the same values. A plan can say that each rank saves only a slice:

    saved layers.*.input: S(1)@tp             the first activation that enters each layer, sliced along its dim 1
    saved layers.5.input#2: S(0)@dp           the second activation that enters layer 5
    saved layers.*.norm/layer_norm: S(1)@tp   the result of an op
    saved layers.*.mlp.up/linear<0: S(1)@tp   the first operand of an op, after its conversion for the op

Taking the slice needs no communication, because every rank has the whole tensor. Before backward uses the tensor, one
all-gather along the axis restores it. For the inputs of recomputed blocks this is P_a, the partitioned activation
checkpoints of ZeRO-R (Rajbhandari et al. 2020, section 6.1). For operands that sequence parallelism gathers it is
Megatron-LM's second gather (Korthikanti et al. 2022, section 4.2.2).

A `saved` line changes nothing along an axis that it does not name, or along which the tensor is split already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError
from autopar.ir.conversion import steps
from autopar.ir.layout import Dims, Layout, R, divides, format_layout, parse_layout
from autopar.ir.mesh import Mesh


@dataclass(frozen=True)
class SavedLayout:
    """The value of a `saved` line of a plan.

    Attributes:
        split: one state per mesh axis: S(d) where each rank keeps a slice along dim d, R where nothing changes.
    """

    split: Layout

    def text(self, mesh: Mesh) -> str:
        """The value as text, such as `S(1)@tp`; the inverse of `parse`."""
        return format_layout(self.split, mesh)

    @classmethod
    def parse(cls, text: Any, name: str, mesh: Mesh) -> SavedLayout:
        """Reads `S(1)@tp`. Raises PlanError for any state but S, and the errors of `parse_layout`."""
        if not isinstance(text, str):
            raise PlanError(
                f"What is saved of {name} lies in a layout such as S(1)@tp, not {text!r}."
            )
        split = parse_layout(text, mesh)
        kinds = {state.kind for state in split} - {"R"}
        if kinds != {"S"}:
            raise PlanError(
                f"The plan's line saved {name}: {text} slices nothing; write a dim and an axis, such as "
                f"S(1)@{mesh.names[-1]}, or leave the line out."
            )
        return cls(split)

    def of(self, layout: Layout) -> Layout:
        """The layout in which a tensor is saved that has `layout` in forward; existing splits stay.

        >>> from autopar.ir import R, S, V
        >>> SavedLayout((R, S(1))).of((S(0), V)) == (S(0), S(1))
        True
        """
        return tuple(
            new if new.kind == "S" and old.kind in ("R", "V") else R if old.kind == "V" else old
            for new, old in zip(self.split, layout, strict=True)
        )


def can_slice(dims: Dims, layout: Layout, slice_layout: Layout, mesh: Mesh) -> bool:
    """Whether every rank can take its slice of the tensor without communication.

    The dims to slice must exist and divide. A factor that a later axis splits already cannot be sliced by an earlier
    axis, see [Note: nested splits] in `autopar.ir.conversion`.
    """
    for old, new in zip(layout, slice_layout, strict=True):
        if new != old and new.kind == "S" and not (new.dim < len(dims) and dims[new.dim]):
            return False
        if new.kind == "S" and new.factor >= len(dims[new.dim]):
            return False
    if not divides(dims, slice_layout, mesh):
        return False
    return all(step.transition.forward == "shard" for step in steps(layout, slice_layout))


def words_of_saved(saved: Mapping[str, SavedLayout], mesh: Mesh) -> str:
    """A clause for reports: which tensors are kept in slices, and along which axes; "" for none.

    >>> mesh = Mesh.parse("dp=2,tp=4")
    >>> words_of_saved({"layers.*.input": SavedLayout.parse("S(1)@tp", "it", mesh)}, mesh)
    'layers.*.input kept in slices along tp until backward'
    """
    if not saved:
        return ""
    axes = [
        name
        for axis, name in enumerate(mesh.names)
        if any(how.split[axis].kind == "S" for how in saved.values())
    ]
    names = list(saved)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} kept in slices along {' and '.join(axes)} until backward"


def parse_saved(document: object, mesh: Mesh) -> dict[str, SavedLayout]:
    """Reads the `saved` part of a plan's JSON, a mapping from names to texts. Raises PlanError."""
    if not isinstance(document, Mapping):
        raise PlanError(f"The saved tensors of a plan are layouts by name, not {document!r}.")
    return {name: SavedLayout.parse(text, name, mesh) for name, text in document.items()}

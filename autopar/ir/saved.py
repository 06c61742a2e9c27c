"""The layout in which a block keeps a tensor between forward and backward, and the memory where it keeps it.

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

A tier behind the layout (`autopar.ir.tier`) says that what a rank saves leaves the device until backward wants it:

    saved layers.*.input: S(1)@tp host        each rank's slice lies in the host's memory (P_a+cpu of ZeRO-R)
    saved layers.*.input: R host              the tensor as it is does
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError
from autopar.ir.conversion import steps
from autopar.ir.layout import Dims, Layout, R, divides
from autopar.ir.mesh import Mesh
from autopar.ir.tier import Tier, format_place, parse_place
from autopar.ir.uneven import uneven_axes


@dataclass(frozen=True)
class SavedLayout:
    """The value of a `saved` line of a plan.

    Attributes:
        split: one state per mesh axis: S(d) where each rank keeps a slice along dim d, R where nothing changes.
        tier: the memory that has it between forward and backward, device or host.
    """

    split: Layout
    tier: Tier = "device"

    def text(self, mesh: Mesh) -> str:
        """The value as text, such as `S(1)@tp host`; the inverse of `parse`."""
        return format_place(self.split, self.tier, mesh)

    @classmethod
    def parse(cls, text: Any, name: str, mesh: Mesh) -> SavedLayout:
        """Reads `S(1)@tp`, `S(1)@tp host` or `R host`.

        Raises PlanError for a state besides S, for a line that says nothing and for the tier nvme, and the errors of
        `parse_layout`.
        """
        if not isinstance(text, str):
            raise PlanError(f"The layout in which {name} is saved must be such as S(1)@tp, not {text!r}.")
        split, tier = parse_place(text, mesh)
        kinds = {state.kind for state in split} - {"R"}
        if kinds - {"S"} or (not kinds and tier == "device"):
            raise PlanError(
                f"The plan's line saved {name}: {text} slices nothing; write a dim and an axis, such as "
                f"S(1)@{mesh.names[-1]}, a tier as in R host, or leave the line out."
            )
        if tier == "nvme":
            raise PlanError(
                f"The plan's line saved {name}: {text} keeps an activation in files, but only parameters can be kept "
                f"there; write {format_place(split, 'host', mesh)} for the host's memory."
            )
        return cls(split, tier)

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
    uneven = uneven_axes(dims, layout, mesh)  # as they are, as are the parts of the batch
    others = tuple(R if axis in uneven else state for axis, state in enumerate(slice_layout))
    if uneven_axes(dims, slice_layout, mesh) != uneven or not divides(dims, others, mesh):
        return False
    return all(step.transition.forward == "shard" for step in steps(layout, slice_layout))


def words_of_saved(saved: Mapping[str, SavedLayout], mesh: Mesh) -> str:
    """A clause for reports: which tensors are kept in slices, along which axes, and whether on the host; "" for none.

    >>> mesh = Mesh.parse("dp=2,tp=4")
    >>> words_of_saved({"layers.*.input": SavedLayout.parse("S(1)@tp", "it", mesh)}, mesh)
    'layers.*.input kept in slices along tp until backward'
    """
    if not saved:
        return ""
    axes = [name for axis, name in enumerate(mesh.names) if any(how.split[axis].kind == "S" for how in saved.values())]
    names = list(saved)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    how = f" in slices along {' and '.join(axes)}" if axes else ""
    tiers = {each.tier for each in saved.values()}
    where = f" in the host's memory{'' if tiers == {'host'} else ' (some)'}" if "host" in tiers else ""
    return f"{', '.join(names[:3])}{more} kept{how}{where} until backward"


def parse_saved(document: object, mesh: Mesh) -> dict[str, SavedLayout]:
    """Reads the `saved` part of a plan's JSON, a mapping from names to texts. Raises PlanError."""
    if not isinstance(document, Mapping):
        raise PlanError(f"The saved tensors of a plan are layouts by name, not {document!r}.")
    return {name: SavedLayout.parse(text, name, mesh) for name, text in document.items()}

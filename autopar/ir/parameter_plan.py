"""How one parameter lies between steps and in a step, as part of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.errors import PlanError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.tier import Tier, TieredLayout, format_place, is_farther

# What is said of parameters by their ZeRO stage along an axis; of stage 0 they are replicated.
PARAMETER_WORDS = {1: "ZeRO-1", 2: "ZeRO-2", 3: "sharded (ZeRO-3)"}

Reduction = Literal["step", "micro_batch"]


@dataclass(frozen=True)
class ParameterPlan:
    """The layouts of one parameter on the mesh.

    Attributes:
        storage: layout between steps; its states are R, S or O.
        resident: layout from the start of a step to its end.
        reduce: whether the gradient of the resident copy is converted to the storage layout once per "step" or after
            every "micro_batch".
        tier: memory of the storage, and between steps also of gradients and optimizer states.
        resident_tier: memory of the resident layout; it may not be farther from the device than `tier`.
        by_rows: whether the gradient is sent to its owner as the rows that are not zero, each with its index, in place
            of the whole tensor; see [Note: by rows] in autopar/ir/conversion.py.

    Raises PlanError where `resident_tier` is farther from the device than `tier`.
    """

    storage: Layout
    resident: Layout
    reduce: Reduction = "step"
    tier: Tier = "device"
    resident_tier: Tier = "device"
    by_rows: bool = False

    def __post_init__(self) -> None:
        if is_farther(self.resident_tier, self.tier):
            raise PlanError(
                f"A parameter that is stored in the tier {self.tier} cannot be on {self.resident_tier} during a step; "
                f"store it on {self.resident_tier}, or use it from {self.tier}."
            )

    @property
    def in_use(self) -> TieredLayout:
        """Layout and memory of the parameter from the start of a step to its end."""
        return TieredLayout(self.resident, self.resident_tier)

    def stored_text(self, mesh: Mesh) -> str:
        """Layout and memory of the parameter between steps, as words such as `S(0)@dp host, used from host`."""
        text = format_place(self.storage, self.tier, mesh)
        return text if self.resident_tier == "device" else f"{text}, used from {self.resident_tier}"

    def zero_stage(self, axis: int) -> int:
        """The ZeRO stage along one axis: 0 (not split), 1, 2 or 3 (gathered around each use)."""
        if self.storage[axis].kind != "S":
            return 0
        if self.resident[axis] == self.storage[axis]:
            return 3
        return 1 if self.reduce == "step" else 2

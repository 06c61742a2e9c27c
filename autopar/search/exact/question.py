"""What a search of layouts on one mesh is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_model import Hardware
from autopar.cost_model.items import FULL, TrainingState
from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.ir import Graph, Mesh, ParameterPlan
from autopar.search.request.recipe_rows import ON_DEVICE, RecipeLike, Tiering


@dataclass(frozen=True)
class LayoutQuestion:
    """What a search of layouts on one mesh is asked.

    Attributes:
        graph: the captured model, at the size of one micro-batch.
        mesh: axes of the device mesh and their sizes; layouts are searched as if no place was vacant.
        hardware: machine whose figures give the times.
        recipe: constraints, see `autopar.search.request.recipes`.
        pins: single choices that the user fixes, see `autopar.search.request.pins`.
        micro_batches: number of micro-batches of a step.
        fingerprint: hash of the captured model, which the plan records.
        fixed_storage: name of a parameter -> the layouts that it has to have, because an earlier plan placed it.
        repeats: whether repeated layers are folded into one.
        software: figures of the runtime, such as what it overlaps.
        training_state: gradients and optimizer states that training keeps for each parameter.
        tiers: memories in which parameters may be, where no recipe names one.
        bucket_bytes: bytes of a bucket; None for the usual size.
    """

    graph: Graph
    mesh: Mesh
    hardware: Hardware
    recipe: RecipeLike = "auto"
    pins: Mapping[str, str] | None = None
    micro_batches: int = 1
    fingerprint: str = ""
    fixed_storage: Mapping[str, ParameterPlan] | None = None
    repeats: bool = True
    software: Software = AUTOPAR
    training_state: TrainingState = FULL
    tiers: Sequence[Tiering] = (ON_DEVICE,)
    bucket_bytes: int | None = None

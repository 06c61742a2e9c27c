"""From a module to a plan: capture, clean up, analyze, search. Needs no process group and no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.capture import Captured, LossFunction, capture_forward, capture_step
from autopar.cost_model import Hardware
from autopar.errors import MeshError
from autopar.factors import Analysis, analyze
from autopar.ir import PIPELINE_AXIS, Mesh, ParameterPlan, Plan
from autopar.passes import clean_up
from autopar.search import RecipeLike, search, search_mesh


@dataclass(frozen=True)
class Prepared:
    """A captured, cleaned and analyzed model."""

    captured: Captured
    analysis: Analysis


def prepare_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
) -> Prepared:
    """Captures forward and loss of one micro-batch. Raises CaptureError or StepError."""
    return _prepared(capture_step(model, args, dict(kwargs or {}), loss_fn))


def prepare_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Prepared:
    """Captures the forward alone. Raises CaptureError."""
    return _prepared(capture_forward(model, args, dict(kwargs or {})))


def _prepared(captured: Captured) -> Prepared:
    clean_up(captured.module)
    return Prepared(captured, analyze(captured))


def make_plan(
    prepared: Prepared,
    mesh: Mesh | Mapping[str, int] | None,
    *,
    world_size: int | None = None,
    hardware: Hardware,
    recipe: RecipeLike = "auto",
    pins: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    micro_batches: int = 1,
    fixed_storage: Mapping[str, ParameterPlan] | None = None,
) -> Plan:
    """Searches a plan; without a mesh its shape is searched too, for `world_size` ranks.

    Raises MeshError, RecipeError or SearchError where none can be.
    """
    graph, fingerprint = prepared.analysis.graph, prepared.captured.fingerprint
    if mesh is None:
        assert world_size is not None and not fixed_storage, "a searched mesh needs a world size"
        return search_mesh(
            graph, world_size, hardware=hardware, recipe=recipe, pins=pins,
            memory_bytes=memory_bytes, micro_batches=micro_batches, fingerprint=fingerprint,
        )  # fmt: skip
    mesh = Mesh.of(mesh)
    refuse_pipeline(mesh)
    return search(
        graph, mesh, hardware=hardware, recipe=recipe, pins=pins, memory_bytes=memory_bytes,
        micro_batches=micro_batches, fingerprint=fingerprint, fixed_storage=fixed_storage,
    )  # fmt: skip


def refuse_pipeline(mesh: Mesh) -> None:
    """Raises MeshError if an axis asks for pipeline stages, which this version has not."""
    if PIPELINE_AXIS in mesh.names:
        raise MeshError(
            f"The axis {PIPELINE_AXIS!r} of {mesh} is reserved for pipeline stages, which this "
            "version of autopar does not have; give its ranks to another axis, such as dp or tp."
        )

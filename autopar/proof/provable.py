"""Checks that a model can be compared: it must have real weights, and the capture must draw as it does."""

from __future__ import annotations

from torch import nn

from autopar.capture.remedies import traced_line
from autopar.errors import AutoparError
from autopar.planning.planning import Prepared
from autopar.proof.single_device import Batch, SingleDevice


def require_weights(model: nn.Module) -> None:
    """Raises AutoparError for a model with parameters on the meta device."""
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty:
        raise AutoparError(
            f"To prove a plan the model needs real weights, but {len(empty)} of its parameters are on the "
            f"meta device ({empty[0]} first). Build it on the CPU, smaller if need be."
        )


def require_same_draws(prepared: Prepared, device: SingleDevice, batch: Batch) -> None:
    """Raises AutoparError if a single device does not make the same draws in the same order as the capture."""
    ops = device.streams.ops
    if not ops:
        return
    found, expected = device.drawn(batch), device.streams.shapes
    if found == expected:
        return
    nodes = {node.name: node for node in prepared.captured.module.graph.nodes}
    lines = [f"{x.target} at {traced_line(x)}" for name in ops for x in (nodes[name],)]
    raise AutoparError(
        f"The model draws {len(found)} random tensors on a single device, of shapes {found}, but the captured step "
        f"{len(expected)}, of shapes {expected} ({'; '.join(lines)}): there is nothing to compare. Let the model draw "
        "in the same order in every call, or verify it in evaluation mode or with dropout 0."
    )

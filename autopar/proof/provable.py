"""Checks that a model can be compared: it must have real weights, and draw no random numbers."""

from __future__ import annotations

from torch import fx, nn

from autopar.capture.remedies import traced_line
from autopar.errors import AutoparError
from autopar.ops.nodes import bound_arguments, draws, is_operator
from autopar.planning.planning import Prepared


def require_weights(model: nn.Module) -> None:
    """Raises AutoparError for a model with parameters on the meta device."""
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty:
        raise AutoparError(
            f"To prove a plan the model needs real weights, and {len(empty)} of its parameters are on the "
            f"meta device ({empty[0]} first). Build it on the CPU, smaller if need be."
        )


def require_determinism(prepared: Prepared) -> None:
    """Raises AutoparError, with a remedy, for a model that draws random numbers."""
    random = [n for n in prepared.captured.module.graph.nodes if draws(n)]
    if random:
        raise AutoparError(
            f"The model draws random numbers ({random[0].target}, at {traced_line(random[0])}), and a plan draws "
            f"others than a single device: there is nothing to compare. {_without_draws(random[0])}"
        )


def _without_draws(node: fx.Node) -> str:
    """A remedy: how a model computes the same without the random numbers of an op."""
    arguments = bound_arguments(node) if is_operator(node) else {}
    if "dropout" in str(node.target) or {"train", "training"} & arguments.keys():
        return "Set its dropout to 0, or verify model.eval()."
    return (
        "Give it the numbers, as an input or as FractionalMaxPool2d takes `_random_samples`; what draws in training "
        "alone is proved by model.eval()."
    )

"""What ranks compare of a graph: its ops with their numbers, but not the number of a device."""

from __future__ import annotations

import torch
from torch import fx

from autopar.backend.comparing import _ops


def texts(device: int, factor: float) -> list[str]:
    """What a rank says of a graph that moves its input to a device of its own, and multiplies it."""
    graph = fx.Graph()
    moved = graph.call_method("cuda", (graph.placeholder("x"), device))
    graph.output(graph.call_function(torch.mul, (moved, factor)))
    return [text for text, _ in _ops(graph)]


def test_each_rank_may_name_its_own_device() -> None:
    assert texts(0, 2.0) == texts(1, 2.0) == ["cuda()", "mul(2.0)"]


def test_another_number_is_another_graph() -> None:
    assert texts(0, 3.0) == ["cuda()", "mul(3.0)"]

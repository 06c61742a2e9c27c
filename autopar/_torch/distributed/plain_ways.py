"""What scripts do with parameters that torch refuses, or does otherwise, where these are DTensors."""

from __future__ import annotations

from autopar._torch.distributed.anomalies import detect_anomalies
from autopar._torch.distributed.averages import average_dtensors_apart
from autopar._torch.distributed.random_fills import draw_whole_on_processors
from autopar._torch.distributed.whole_operands import cut_whole_operands


def treat_as_plain() -> None:
    """Lets scripts fill DTensors with random numbers, write plain tensors into them, average them, find anomalies."""
    draw_whole_on_processors()
    cut_whole_operands()
    detect_anomalies()
    average_dtensors_apart()

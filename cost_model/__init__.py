"""Time, traffic and memory of a partitioning: a numeric roofline over `autopar.ir`.

The figures come from `hardware`, the formulas from `collectives`, `compute` and `memory`, and
`price` sums them over a graph and a plan.
"""

from autopar.cost_model.collectives import Seconds, collective_seconds, conversion_seconds
from autopar.cost_model.compute import op_seconds
from autopar.cost_model.hardware import (
    A100,
    CPU_GLOO,
    H100,
    HARDWARE,
    Hardware,
    Link,
    find_hardware,
)
from autopar.cost_model.memory import ParameterBytes, SavedTensors, keeps, parameter_bytes
from autopar.cost_model.price import Cost, per_step_seconds, price, use_seconds
from autopar.cost_model.sizes import Sizes

__all__ = [
    "A100", "CPU_GLOO", "Cost", "H100", "HARDWARE", "Hardware", "Link", "ParameterBytes",
    "SavedTensors", "Seconds", "Sizes", "collective_seconds", "conversion_seconds", "find_hardware",
    "keeps", "op_seconds", "parameter_bytes", "per_step_seconds", "price", "use_seconds",
]  # fmt: skip

"""Time, traffic and memory of a partitioning, as numbers for a search and as formulas for people.

The figures come from `hardware` and `software`, the formulas from `collectives`, `compute` and
`memory`; `price` sums them for a search, `items` lists them, `step` composes a whole step of them,
and `symbols` makes expressions of it all.
"""

from autopar.cost_model.catalogue import (
    A100,
    CPU_GLOO,
    H100,
    HARDWARE,
    canonical_gpu,
    find_hardware,
)
from autopar.cost_model.cluster import Cluster, find_cluster
from autopar.cost_model.collectives import (
    Seconds,
    collective_seconds,
    conversion_seconds,
    own_seconds,
)
from autopar.cost_model.compute import op_seconds
from autopar.cost_model.hardware import Hardware, Source
from autopar.cost_model.hardware_toml import read_hardware, save_hardware
from autopar.cost_model.links import Link, axis_link
from autopar.cost_model.memory import ParameterBytes, SavedTensors, keeps, parameter_bytes
from autopar.cost_model.price import Cost, per_step_seconds, price, use_seconds
from autopar.cost_model.sizes import Sizes
from autopar.cost_model.unruled import Unruled, unruled

__all__ = [
    "A100", "CPU_GLOO", "Cluster", "Cost", "H100", "HARDWARE", "Hardware", "Link",
    "ParameterBytes", "SavedTensors", "Seconds", "Sizes", "Source", "axis_link", "canonical_gpu",
    "collective_seconds", "conversion_seconds", "find_cluster", "find_hardware", "keeps",
    "op_seconds", "own_seconds", "parameter_bytes", "per_step_seconds", "price", "read_hardware",
    "save_hardware", "Unruled", "unruled", "use_seconds",
]  # fmt: skip

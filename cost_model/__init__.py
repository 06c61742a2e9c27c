"""Predicts time, traffic and memory of a plan: as numbers for the search, and as formulas for people.

`hardware` and `software` have the figures of machines and runtimes; `collectives`, `compute` and `memory` have the
formulas. `pricer` applies them to a plan and lists its `items`, from which `step` composes the time and memory of a
whole step. `symbols` does the same with symbols in place of numbers. `price` is a simpler sum, with which tests check
the search.
"""

from autopar.cost_model.catalogue import A100, CPU_GLOO, H100, HARDWARE, find_hardware
from autopar.cost_model.collectives import (
    Seconds,
    collective_seconds,
    conversion_seconds,
    own_seconds,
)
from autopar.cost_model.compute import op_seconds
from autopar.cost_model.machines.cluster import Cluster, find_cluster
from autopar.cost_model.machines.gpu_names import canonical_gpu
from autopar.cost_model.machines.hardware import Hardware, Source
from autopar.cost_model.machines.hardware_toml import read_hardware
from autopar.cost_model.machines.hardware_writing import save_hardware
from autopar.cost_model.machines.links import Link, axis_link
from autopar.cost_model.memory import ParameterBytes, SavedTensors, keeps, parameter_bytes
from autopar.cost_model.ops_without_rule import Unruled, unruled
from autopar.cost_model.price import Cost, per_step_seconds, price, use_seconds
from autopar.cost_model.sizes import Sizes

__all__ = [
    "A100",
    "CPU_GLOO",
    "Cluster",
    "Cost",
    "H100",
    "HARDWARE",
    "Hardware",
    "Link",
    "ParameterBytes",
    "SavedTensors",
    "Seconds",
    "Sizes",
    "Source",
    "axis_link",
    "canonical_gpu",
    "collective_seconds",
    "conversion_seconds",
    "find_cluster",
    "find_hardware",
    "keeps",
    "op_seconds",
    "own_seconds",
    "parameter_bytes",
    "per_step_seconds",
    "price",
    "read_hardware",
    "save_hardware",
    "Unruled",
    "unruled",
    "use_seconds",
]

"""Predicts time, traffic and memory of a plan: as numbers for the search, and as formulas for people.

`hardware` and `software` have the figures of machines and runtimes; `collectives`, `compute` and `memory` have the
formulas. `pricer` applies them to a plan and lists its `items`, from which `step` composes the time and memory of a
whole step. `symbols` does the same with symbols in place of numbers.
"""

from autopar.cost_model.catalogue import A100, CPU_GLOO, H100, HARDWARE, find_hardware
from autopar.cost_model.collectives import collective_seconds, conversion_seconds
from autopar.cost_model.compute import op_seconds
from autopar.cost_model.machines.cluster import Cluster, find_cluster
from autopar.cost_model.machines.gpu_names import canonical_gpu
from autopar.cost_model.machines.hardware import Hardware, Source
from autopar.cost_model.machines.hardware_toml import read_hardware
from autopar.cost_model.machines.hardware_writing import save_hardware
from autopar.cost_model.machines.links import Link, axis_link
from autopar.cost_model.memory import SavedTensors, keeps, parameter_bytes
from autopar.cost_model.ops_without_rule import unruled
from autopar.cost_model.sizes import Sizes

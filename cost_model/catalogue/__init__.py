"""The machines that have a name, such as `h100`; each is a TOML file of this folder, see `hardware_toml`.

The files are for people to read and correct: every figure has its kind and source next to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from autopar.cost_model.machines.gpu_names import canonical_gpu, catalogue_names
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.machines.hardware_toml import named_hardware, read_hardware

HARDWARE: Mapping[str, Hardware] = MappingProxyType({name: named_hardware(name).hardware for name in catalogue_names()})
H100, A100, CPU_GLOO = HARDWARE["h100"], HARDWARE["a100"], HARDWARE["cpu-gloo"]


def find_hardware(given: Hardware | str | os.PathLike[str]) -> Hardware:
    """The hardware for a name, the path of a TOML file, or a value.

    >>> find_hardware("A100-40GB SXM").name
    'a100-40'

    Args:
        given: a name as people write it, see `canonical_gpu`; a path that ends with `.toml`, such as
            `autopar calibrate` writes; or the figures themselves, which are returned as they are.

    Raises AutoparError with the nearest names for an unknown name, and for a file that is missing or wrong.
    """
    if isinstance(given, Hardware):
        return given
    text = os.fspath(given)
    if text.endswith(".toml"):
        return read_hardware(os.path.expanduser(text)).hardware
    return HARDWARE[canonical_gpu(text)]

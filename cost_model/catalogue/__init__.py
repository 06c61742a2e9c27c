"""The machines that have a name, such as `h100`; each is a TOML file of this folder, see `hardware_toml`.

The files are for people to read and correct: every figure has its kind and source next to it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from autopar.cost_model.hardware import Hardware
from autopar.cost_model.hardware_toml import catalogue_names, named_hardware, read_hardware
from autopar.errors import AutoparError

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {name: named_hardware(name).hardware for name in catalogue_names()}
)
H100, A100, CPU_GLOO = HARDWARE["h100"], HARDWARE["a100"], HARDWARE["cpu-gloo"]

ALIASES: Mapping[str, str] = MappingProxyType(
    {"a100-80": "a100", "h100-80": "h100", "v100-32": "v100", "cpu": "cpu-gloo", "4090": "rtx4090"}
)
# Chips that exist with several sizes of memory: chip -> GB of memory -> name in the catalogue.
_BY_MEMORY: Mapping[str, Mapping[int, str]] = MappingProxyType(
    {
        "v100": {16: "v100-16", 32: "v100"},
        "a100": {40: "a100-40", 80: "a100"},
        "h100": {80: "h100", 96: "h100-96"},
    }
)
_CHIP = re.compile(r"(?:gb|gh|rtx|mi|[a-z])\d{1,4}[a-z]*|\d{4}")
_VENDOR = re.compile(r"^(?:nvidia|amd|instinct|geforce|tesla|\s|-|_)+")


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
        return read_hardware(Path(text).expanduser()).hardware
    return HARDWARE[canonical_gpu(text)]


def canonical_gpu(text: str) -> str:
    """The catalogue's name of a GPU as people write it: `A100-40GB SXM (DGX-A100)` is `a100-40`.

    The first word that looks like a chip decides, then `PCIe`, then the gigabytes of its memory.
    Raises AutoparError with the nearest names where the catalogue has none.
    """
    word = text.strip().lower()
    if word in HARDWARE:
        return word
    if word in ALIASES:
        return ALIASES[word]
    plain = re.sub(r"\bRTX[\s_-]+", "rtx", _VENDOR.sub("", word), flags=re.IGNORECASE)
    chip = _CHIP.match(re.split(r"[\s_\-(,/]", plain, maxsplit=1)[0])
    if chip is None:
        raise _unknown(text, word)
    return _variant(text, ALIASES.get(chip[0], chip[0]), plain[chip.end() :])


def _variant(text: str, chip: str, rest: str) -> str:
    """The machine with this chip that the rest of a name describes."""
    if "pcie" in rest:
        name = f"{chip}-pcie"
    elif chip in _BY_MEMORY and (memory := re.search(r"(\d+)\s*gi?b(?![/\w])", rest)):
        name = _BY_MEMORY[chip].get(int(memory[1]), f"{chip}-{memory[1]}")
    else:
        name = chip
    if name not in HARDWARE:
        raise _unknown(text, name)
    return name


def _unknown(text: str, name: str) -> AutoparError:
    known = [*HARDWARE, *ALIASES]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "none of its names is near."
    return AutoparError(
        f"There is no GPU {text!r} in the catalogue; {hint} It has {', '.join(HARDWARE)}. "
        "A machine of your own can be a TOML file, see docs/hardware.md."
    )

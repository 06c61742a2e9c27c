"""Names of the machines in the catalogue, and of GPUs as people write them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

from autopar.errors import AutoparError
from autopar.ir.files import is_count

ALIASES: Mapping[str, str] = MappingProxyType(
    {"a100-80": "a100", "h100-80": "h100", "v100-32": "v100", "cpu": "cpu-gloo", "4090": "rtx4090", "5090": "rtx5090"}
)
# Chip -> GB of memory -> name in the catalogue.
_BY_MEMORY: Mapping[str, Mapping[int, str]] = MappingProxyType(
    {
        "v100": {16: "v100-16", 32: "v100"},
        "a100": {40: "a100-40", 80: "a100"},
        "h100": {80: "h100", 96: "h100-96"},
        "h200": {141: "h200"},
        "b200": {180: "b200", 192: "b200"},
        "gb200": {186: "gb200", 192: "gb200"},
        "b300": {270: "b300", 288: "b300"},
        "gb300": {279: "gb300", 288: "gb300"},
        "h20": {96: "h20"},
        "mi300x": {192: "mi300x"},
        "mi325x": {256: "mi325x"},
        "mi350x": {288: "mi350x"},
        "mi355x": {288: "mi355x"},
        "l4": {24: "l4"},
        "l40s": {48: "l40s"},
        "rtx4090": {24: "rtx4090"},
        "rtx5090": {32: "rtx5090"},
    }
)
_CHIP = re.compile(r"(?:gb|gh|rtx|mi|[a-z])\d{1,4}[a-z]*|\d{4}")
# `A100-40GB SXM`, `a100 40` and `a100-sxm4-40`
_MEMORY = re.compile(r"\d+\s*gi?b?(?![/\w])|^[\s_-]+\d+$|[-_]\d{2,}$")
_VENDOR = re.compile(r"^(?:nvidia|amd|instinct|geforce|tesla|\s|-|_)+")


@cache
def catalogue_names() -> tuple[str, ...]:
    """Names of the machines in the catalogue, sorted."""
    files = resources.files("autopar.cost_model").joinpath("catalogue").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def canonical_gpu(text: str) -> str:
    """The catalogue's name of a GPU as people write it: `A100-40GB SXM (DGX-A100)` is `a100-40`.

    The first word that looks like a chip decides, then `PCIe`, then the gigabytes of its memory.
    Raises AutoparError with the nearest names where the catalogue has none.
    """
    word = text.strip().lower()
    if word in catalogue_names():
        return word
    if word in ALIASES:
        return ALIASES[word]
    plain = re.sub(r"\bRTX[\s_-]+", "rtx", _VENDOR.sub("", word), flags=re.IGNORECASE)
    chip = _CHIP.fullmatch(re.split(r"[\s_\-(,/]", plain, maxsplit=1)[0])
    if chip is None:
        raise _unknown(text, word)
    return _variant(text, ALIASES.get(chip[0], chip[0]), plain[chip.end() :])


def _variant(text: str, chip: str, rest: str) -> str:
    """The machine with this chip that the rest of a name describes."""
    if "pcie" in rest:
        name = f"{chip}-pcie"
    elif memory := _MEMORY.search(rest):
        size = re.sub(r"\D", "", memory[0])
        name = _BY_MEMORY.get(chip, {}).get(int(size) if is_count(size) else 0, f"{chip}-{size}")
    else:
        name = chip
    if name not in catalogue_names():
        raise _unknown(text, name)
    return name


def _unknown(text: str, name: str) -> AutoparError:
    known = [*catalogue_names(), *ALIASES]
    near = [*dict.fromkeys(ALIASES.get(each, each) for each in difflib.get_close_matches(name, known, n=3, cutoff=0.5))]
    hint = f"did you mean {' or '.join(near)}?" if near else "none of its names is near."
    return AutoparError(
        f"There is no GPU {text!r} in the catalogue; {hint} It has {', '.join(catalogue_names())}. "
        "A machine of your own can be a TOML file, see docs/hardware.md."
    )

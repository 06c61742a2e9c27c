"""Writes hardware as a TOML file, which `autopar.cost_model.machines.hardware_toml` reads back as the same hardware."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.machines.hardware_fields import CURVES, LINKS, OPTIONAL, REQUIRED
from autopar.ir.files import save_text


def save_hardware(
    hardware: Hardware,
    path: str | Path,
    *,
    nodes: int = 1,
    curves: Mapping[str, Sequence[Mapping[str, str | float]]] = MappingProxyType({}),
) -> None:
    """Writes a hardware file; `read_hardware` reads it back as the same hardware.

    A figure with an entry in `hardware.sources` is written with this source, any other figure as a guess.

    Args:
        hardware: the machine, with numbers as figures.
        path: path of the file, which is replaced.
        nodes: number of nodes in the cluster.
        curves: rows of measurements by table, `matmul` or `collective`.

    Raises AutoparError for a file that cannot be written.
    """
    save_text(format_hardware(hardware, nodes=nodes, curves=curves), path)


def format_hardware(
    hardware: Hardware,
    *,
    nodes: int = 1,
    curves: Mapping[str, Sequence[Mapping[str, str | float]]] = MappingProxyType({}),
) -> str:
    """The text of the file that `save_hardware` writes."""
    lines = [f"name = {_text(hardware.name)}"]
    if nodes != 1:
        lines.append(f'nodes = {{value = {nodes}, kind = "measured", source = "as run"}}')
    lines += _entries(hardware, "", {k: getattr(hardware, k) for k in (*REQUIRED, *OPTIONAL)})
    lines += ["", "[peak_flops]", *_entries(hardware, "peak_flops", _flops(hardware))]
    for link in LINKS:
        lines += ["", f"[{link}]", *_entries(hardware, link, vars(getattr(hardware, link)))]
    for table, memory in (("host", hardware.host), ("nvme", hardware.nvme)):
        if memory is not None:
            lines += ["", f"[{table}]", *_entries(hardware, table, vars(memory))]
    for name, rows in curves.items():
        assert name in CURVES, f"a curve is one of {CURVES}, not {name!r}"
        for row in rows:
            lines += ["", f"[[{name}]]", *(f"{k} = {_text(v)}" for k, v in row.items())]
    return "\n".join(lines) + "\n"


def _flops(hardware: Hardware) -> dict[str, float]:
    if hardware.dtype_flops:
        return dict(hardware.dtype_flops)
    names = {1: "float8", 2: "bfloat16", 4: "float32", 8: "float64"}
    return {names[size]: flops for size, flops in hardware.peak_flops}


def _entries(hardware: Hardware, table: str, values: Mapping[str, float]) -> Iterator[str]:
    """Lines of a table; a figure that has its default value and no source is left out."""
    default = {f.name: f.default for f in (*dataclasses.fields(Hardware), *dataclasses.fields(Link))}
    stated = dict(hardware.sources)
    for key, value in values.items():
        figure = f"{table}.{key}" if table else key
        if figure not in stated and value == default.get(key):
            continue
        source = hardware.source(figure)
        yield f'{key} = {{value = {value!r}, kind = "{source.kind}", source = {_text(source.text)}}}'


def _text(value: str | float) -> str:
    """A value as TOML, which is JSON but for the character DEL: JSON leaves it as it is, and TOML does not take it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

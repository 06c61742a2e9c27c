"""Hardware as a TOML file: the files of the catalogue, of users, and those that `autopar calibrate` writes.

    name = "my-cluster"
    like = "h100"                      # optional: start from a machine of the catalogue, by any of its names
    nodes = {value = 16, kind = "guess", source = "the order"}
    launch_seconds = {value = 3.5e-6, kind = "measured", source = "torch 2.13, x + 1 on 8 elements"}

    [peak_flops]                       # by number format, see `DTYPE_BYTES`
    bfloat16 = {value = 989.4e12, kind = "datasheet", source = "NVIDIA H100 SXM"}

    [inside_node]                      # and [across_nodes]: the fields of `Link`
    bandwidth_bytes_per_second = {value = 350e9, kind = "measured", source = "nccl-tests"}

    [host]              # optional: one rank's share of the machine around the devices; see `Host`
    memory_bytes = {value = 250_000_000_000, kind = "guess", source = "2 TB for 8 devices"}

    [nvme]              # optional: one rank's share of the machine's disks; see `Disk`
    memory_bytes = {value = 3_840_000_000_000, kind = "guess", source = "a disk for each device"}

    [[matmul]]          # optional rows of measurements, also [[collective]]
    rows = 1024

A cluster of several kinds of machines has a file that lists them, in the order of their ranks:

    name = "ours"
    kinds = ["h100x8x2", "slow.toml x 8 x 2"]      # names as `find_cluster` takes them; files lie beside this one

    [between_kinds]                    # optional, the fields of `Link`; by default the slower of their across_nodes
    bandwidth_bytes_per_second = {value = 12e9, kind = "measured", source = "nccl-tests over both"}
    latency_seconds = {value = 2e-5, kind = "guess", source = "two switches"}

Every figure has a value, a kind (datasheet, measured, fitted or guess) and a source. An error about a file names the
file and the line.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from autopar.cost_model.machines.gpu_names import ALIASES, canonical_gpu, catalogue_names
from autopar.cost_model.machines.hardware import DTYPE_BYTES, KINDS, Disk, Hardware, Host, Link, Source
from autopar.cost_model.machines.hardware_fields import (
    CURVES,
    LINK_REQUIRED,
    LINKS,
    MEMORIES,
    OPTIONAL,
    REQUIRED,
    TABLES,
    FigureRule,
    Rows,
)
from autopar.errors import AutoparError
from autopar.ir.files import is_number, read_text

_BETWEEN = "between_kinds"
_MOST_BYTES = 8 * 2**20  # of a file; one that `autopar calibrate` writes has less than 100 KB
_LEAST, _MOST = 1e-30, 1e30  # of a figure, so that products and quotients of several are still numbers


@dataclass(frozen=True)
class HardwareFile:
    """The contents of a hardware file.

    Attributes:
        hardware: the machine, with the source of every figure.
        nodes: number of nodes in the cluster; 1 where the file has no number.
        curves: rows of measurements, by table ("matmul" or "collective").
    """

    hardware: Hardware
    nodes: int = 1
    curves: Mapping[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class KindsFile:
    """The contents of a file that lists the kinds of a cluster.

    Attributes:
        path: the file.
        name: name of the cluster.
        kinds: names of the kinds, in the order of their ranks.
        between: link between two kinds; None where the file has none.
        line: number of the line with the kinds.
    """

    path: Path
    name: str
    kinds: tuple[str, ...]
    between: Link | None
    line: int


def read_hardware(path: str | Path) -> HardwareFile:
    """Reads a hardware file. Raises AutoparError with the name of the file and the line of the error."""
    return parse_hardware(_text_of(path), str(path))


def read_cluster_file(path: Path) -> HardwareFile | KindsFile:
    """Reads a file of one kind of machine, or of several. Raises AutoparError as `read_hardware` does."""
    file = _File(_text_of(path), str(path))
    return file.parse_kinds(path) if "kinds" in file.document else file.parse()


def _text_of(path: str | Path) -> str:
    try:
        return read_text(path, most_bytes=_MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise AutoparError(f"Cannot read the hardware of {path}: {reason}.") from error


def parse_hardware(text: str, where: str) -> HardwareFile:
    """Reads the text of a hardware file. Raises AutoparError, in which `where` names the file."""
    return _File(text, where).parse()


def named_hardware(name: str) -> HardwareFile:
    """Reads the catalogue's file for the machine called `name`, such as `h100`."""
    return parse_hardware(_catalogue_text(name), f"{name}.toml")


def _catalogue_text(name: str) -> str:
    file = resources.files("autopar.cost_model").joinpath("catalogue", f"{name}.toml")
    return file.read_text(encoding="utf-8")


class _File:
    """Reader of one file; every error names a line of the file."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        try:
            self.document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            message, _, position = str(error).partition(" (at ")
            line = re.search(r"line (\d+)", position)
            self._fail(message + ".", int(line[1]) if line else text.count("\n") + 1)
        except (RecursionError, ValueError) as error:  # of a whole number with thousands of digits
            deep = isinstance(error, RecursionError)
            self._fail("lists or tables are nested too deeply." if deep else f"{error}.", 1)

    def parse(self) -> HardwareFile:
        if "kinds" in self.document:
            self._fail(
                "kinds lists the kinds of a cluster, which --cluster takes; here one machine is asked for", ("kinds",)
            )
        figures = self._base()
        own = dict(self._figures())
        figures |= own
        self._check_complete(figures)
        nodes = figures.pop("nodes", (1, Source("guess", "")))[0]
        hardware = _hardware(self._text("name"), figures)
        curves = {name: self._rows(name) for name in CURVES if name in self.document}
        return HardwareFile(hardware, int(nodes), MappingProxyType(curves))

    def parse_kinds(self, path: Path) -> KindsFile:
        known = ("name", "kinds", _BETWEEN)
        for key in self.document:
            if key not in known:
                self._fail(f"unknown key {key!r} beside kinds{_suggest(key, known)}", (key,))
        kinds = self.document["kinds"]
        is_list = isinstance(kinds, list) and all(isinstance(each, str) and each.strip() for each in kinds)
        if not is_list or len(kinds) < 2:
            self._fail('kinds lists two or more clusters, as in kinds = ["h100x8x2", "a100x8x2"]', ("kinds",))
        return KindsFile(path, self._text("name"), tuple(kinds), self._between(), line_of(self.text, ("kinds",)))

    def _between(self) -> Link | None:
        """The link of the table [between_kinds]; None without the table."""
        table = self.document.get(_BETWEEN)
        if table is None:
            return None
        if not isinstance(table, dict):
            self._fail(f"{_BETWEEN} is a table of figures, [{_BETWEEN}]", (_BETWEEN,))
        figures = {key: self._figure((_BETWEEN, key), entry)[0] for key, entry in table.items()}
        for key in LINK_REQUIRED:
            if key not in figures:
                self._fail(f"{key} of [{_BETWEEN}] is missing.", (_BETWEEN,))
        return Link(**figures)

    def _base(self) -> dict[str, tuple[float, Source]]:
        """Figures of the catalogue's machine that the key `like` names; none without this key."""
        if "like" not in self.document:
            return {}
        name = self._text("like")
        try:
            known = canonical_gpu(name)
        except AutoparError:
            self._fail(
                f"there is no {name!r} in the catalogue{_suggest(name, (*catalogue_names(), *ALIASES))}", ("like",)
            )
        base = _File(_catalogue_text(known), f"{known}.toml")
        return base._base() | dict(base._figures())

    def _figures(self) -> Iterator[tuple[str, tuple[float, Source]]]:
        """Pairs (`inside_node.latency_seconds`, its value and source) in the order of the file."""
        for key, entry in self.document.items():
            if key in ("name", "like", *CURVES):
                continue
            if key == _BETWEEN:
                self._fail(f"[{_BETWEEN}] stands beside kinds, and this file lists none", (key,))
            if key not in TABLES:
                yield key, self._figure(("", key), entry)
            elif not isinstance(entry, dict):
                self._fail(f"{key} is a table of figures, [{key}]", (key,))
            else:
                for name, inner in entry.items():
                    yield f"{key}.{name}", self._figure((key, name), inner)

    def _figure(self, at: tuple[str, str], entry: object) -> tuple[float, Source]:
        table, key = at
        path, rules = (table, key) if table else (key,), TABLES["across_nodes" if table == _BETWEEN else table]
        if key not in rules:
            known = [*rules, *(() if table else ("name", "like", *TABLES, *CURVES))]
            owner = f" in [{table}]" if table else ""
            self._fail(f"unknown key {key!r}{owner}{_suggest(key, known)}", path)
        if not isinstance(entry, dict):
            self._fail(
                f'{key} is a figure with its source: {key} = {{value = {entry!r}, kind = "guess", source = "..."}}.',
                path,
            )
        self._check_entry(entry, path)
        return self._number(entry["value"], rules[key], path), self._source(entry, path)

    def _check_entry(self, entry: Mapping[str, object], path: tuple[str, ...]) -> None:
        parts = ("value", "kind", "source")
        for part in entry:
            if part not in parts:
                self._fail(f"unknown key {part!r} of {path[-1]}{_suggest(part, parts)}", (*path, part))
        for part in parts:
            if part not in entry:
                self._fail(f"{path[-1]} lacks its {part}.", path)

    def _number(self, value: object, rule: FigureRule, path: tuple[str, ...]) -> float:
        fits = is_number(value)
        if fits and rule.whole and isinstance(value, float):
            fits = value.is_integer()
        if not fits or not rule.holds(value):  # type: ignore[arg-type]
            self._fail(f"{path[-1]} is {value!r}; it must be {rule.words}.", (*path, "value"))
        if value and not _LEAST <= value <= _MOST:  # type: ignore[operator]
            self._fail(f"{path[-1]} is {value:.3g}; figures are from {_LEAST} to {_MOST}.", (*path, "value"))
        return int(value) if rule.whole else float(value)  # type: ignore[call-overload,arg-type]

    def _source(self, entry: Mapping[str, object], path: tuple[str, ...]) -> Source:
        kind, text = entry["kind"], entry["source"]
        if kind not in KINDS:
            self._fail(f"the kind of {path[-1]} is {kind!r}; kinds are {', '.join(KINDS)}.", (*path, "kind"))
        if not isinstance(text, str) or not text.strip():
            self._fail(f"the source of {path[-1]} must say where it comes from.", (*path, "source"))
        return Source(kind, text)

    def _check_complete(self, figures: Mapping[str, object]) -> None:
        for key in REQUIRED:
            if key not in figures:
                self._fail(f"{key} is missing.", 1)
        for link in LINKS:
            for key in LINK_REQUIRED:
                if f"{link}.{key}" not in figures:
                    self._fail(f"{key} of [{link}] is missing.", (link,))
        for table, keys in MEMORIES.items():
            missing = [key for key in keys if f"{table}.{key}" not in figures]
            if missing and len(missing) < len(keys):
                self._fail(f"{missing[0]} of [{table}] is missing.", (table,))
        if not any(key.startswith("peak_flops.") for key in figures):
            self._fail(f"[peak_flops] is missing; give one of {', '.join(DTYPE_BYTES)}.", 1)

    def _rows(self, name: str) -> Rows:
        rows = self.document[name]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            self._fail(f"[[{name}]] is a list of tables.", (name,))
        for row in rows:
            self._check_row(row, name)
        return tuple(MappingProxyType(row) for row in rows)

    def _check_row(self, row: Mapping[str, object], name: str) -> None:
        columns = CURVES[name]
        for key, value in row.items():
            if key not in columns:
                self._fail(f"unknown key {key!r} in [[{name}]]{_suggest(key, columns)}", (name, key))
            if not is_number(value) and not isinstance(value, str):
                self._fail(f"{key} is {value!r}; it must be a number or a text.", (name, key))

    def _text(self, key: str) -> str:
        found = self.document.get(key)
        if not isinstance(found, str) or not found:
            self._fail(f'{key} must be a word, as in {key} = "h100".', (key,))
        return found

    def _fail(self, message: str, at: int | tuple[str, ...]) -> NoReturn:
        line = at if isinstance(at, int) else line_of(self.text, at)
        ending = "" if message.endswith((".", "?")) else "."
        raise AutoparError(f"{self.where}, line {line}: {message}{ending}")


def line_of(text: str, path: tuple[str, ...]) -> int:
    """Line number, from 1, of the key at `path`; if the key is missing, of the table around it."""
    table: tuple[str, ...] = ()
    best, depth = 1, 0
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([\w.\-\" ]+?)\s*\]", line):
            table = found = _keys(header[1])
        elif key := re.match(r"\s*([\w.\-\" ]+?)\s*=", line):
            found = (*table, *_keys(key[1]))
        else:
            continue
        if len(found) > depth and path[: len(found)] == found:
            best, depth = number, len(found)
    return best


def _keys(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip('"') for part in dotted.split("."))


def _suggest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, [k for k in known if k], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "."


def _hardware(name: str, figures: Mapping[str, tuple[float, Source]]) -> Hardware:
    values = {key: value for key, (value, _) in figures.items()}
    order = [f"{table}.{key}" if table else key for table, keys in TABLES.items() for key in keys]
    flops = {d: values[f"peak_flops.{d}"] for d in DTYPE_BYTES if f"peak_flops.{d}" in values}
    whole: dict[str, Any] = {key: values[key] for key in (*REQUIRED, *OPTIONAL) if key in values}
    return Hardware(
        name=name,
        peak_flops=_by_itemsize(flops),
        inside_node=_link("inside_node", values),
        across_nodes=_link("across_nodes", values),
        host=Host(**_table("host", values)) if "host.memory_bytes" in values else None,
        nvme=Disk(**_table("nvme", values)) if "nvme.memory_bytes" in values else None,
        dtype_flops=tuple(flops.items()),
        sources=tuple((key, figures[key][1]) for key in order if key in figures and key != "nodes"),
        **whole,
    )


def _by_itemsize(flops: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Pairs (bytes of an element, peak FLOP/s). The peak for float32 is not that of tf32, which users must turn on."""
    peaks: dict[int, float] = {}
    for dtype in ("float8", "bfloat16", "float16", "float32", "float64"):
        if dtype in flops:
            peaks.setdefault(DTYPE_BYTES[dtype], flops[dtype])
    return tuple(peaks.items()) or ((4, flops["tf32"]),)


def _link(table: str, values: Mapping[str, float]) -> Link:
    return Link(**_table(table, values))


def _table(table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one table, by their names inside the table."""
    prefix = f"{table}."
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}

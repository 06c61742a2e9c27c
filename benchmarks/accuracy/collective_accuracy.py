"""How far the formulas of collectives are from published nccl-tests.

    python benchmarks/accuracy/collective_accuracy.py --data DIR --json

Reads `collective_bandwidth.csv` of DIR: one collective of one size in a row, with its time in
microseconds or its bus bandwidth, on so many GPUs in so many nodes. Says per GPU, nodes and collective
the median and the worst error of the predicted time over sizes, |predicted / measured - 1|.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from autopar.cost_model import Hardware, canonical_gpu, collective_seconds, find_hardware
from autopar.errors import AutoparError

FILE = "collective_bandwidth.csv"
NAMES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send",
}
COLUMNS = (
    "collective",
    "gpu",
    "n_gpus",
    "n_nodes",
    "gpus_per_node",
    "interconnect",
    "size_bytes",
    "time_us",
    "busbw_gbps",
    "notes",
)
LEAST_BUSBW_GBPS = 0.1  # the tables print two digits behind the point; less is no measurement


class Skip(Exception):
    """A row that cannot be compared, with the reason."""


@dataclass(frozen=True)
class Measurement:
    """One row: `whole_bytes` of a collective over `ranks` on a machine took `seconds`."""

    machine: Hardware
    nodes: int
    ranks: int
    collective: str
    whole_bytes: float
    seconds: float

    @property
    def group(self) -> str:
        return f"{self.machine.name} {self.nodes}x{self.ranks // self.nodes} {self.collective}"

    def predicted_seconds(self) -> float:
        """What the formulas say."""
        whole, part = self.whole_bytes, self.whole_bytes / self.ranks
        before = part if self.collective == "all_gather" else whole
        after = part if self.collective == "reduce_scatter" else whole
        return collective_seconds(
            self.collective,
            before_bytes=before,
            after_bytes=after,
            ranks=self.ranks,
            link=self.machine.axis_link(1, self.ranks, self.ranks),
            hardware=self.machine,
        )

    def error(self) -> float:
        """Error of the prediction, as a fraction of the measured time."""
        return abs(self.predicted_seconds() / self.seconds - 1)


def measurement(row: Mapping[str, str]) -> Measurement:
    """Reads a row. Raises Skip with the reason."""
    if "NVLS_ENABLE=0" in row["notes"]:
        raise Skip("a run with NVLink SHARP switched off")
    if row["collective"] not in NAMES:
        raise Skip(f"collective {row['collective']}")
    ranks, nodes = _number(row, "n_gpus"), _number(row, "n_nodes")
    size = _number(row, "size_bytes")
    if ranks < 2 or size <= 0:
        raise Skip("no size, or fewer than 2 GPUs")
    machine = _machine(row, int(ranks), int(nodes))
    seconds = _seconds(row, NAMES[row["collective"]], size, ranks)
    return Measurement(machine, int(nodes), int(ranks), NAMES[row["collective"]], size, seconds)


def _number(row: Mapping[str, str], column: str) -> float:
    try:
        return float(row[column])
    except ValueError:
        raise Skip(f"no number in column {column}") from None


def _seconds(row: Mapping[str, str], name: str, size: float, ranks: float) -> float:
    if row["time_us"]:
        return float(row["time_us"]) * 1e-6
    busbw = _number(row, "busbw_gbps")
    if busbw < LEAST_BUSBW_GBPS:
        raise Skip("bus bandwidth with too few digits")
    sent = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0}.get(name, (ranks - 1) / ranks)
    return sent * size / (busbw * 1e9)


def _machine(row: Mapping[str, str], ranks: int, nodes: int) -> Hardware:
    """The catalogue's machine with the network and the ranks in a node of this row."""
    try:
        name = canonical_gpu(row["gpu"])
    except AutoparError:
        raise Skip(f"GPU {row['gpu']} is not in the catalogue") from None
    network = f"{row['gpu']} {row['interconnect']}"
    if name == "h100" and nodes > 1 and "HF cluster" in network:
        name = "h100-efa"
    machine = find_hardware(name)
    if row["gpus_per_node"] and nodes > 1 and name != "gb200":
        machine = dataclasses.replace(machine, devices_per_node=int(float(row["gpus_per_node"])))
    if name == "gb200":  # nodes are trays; NVLink reaches the rack
        racks = -(-ranks // machine.devices_per_node)
        machine = dataclasses.replace(machine, devices_per_node=ranks // racks)
    if nics := re.search(r"(\d+)x(\d+)Gb EFA per node", network):
        share = int(nics[1]) * int(nics[2]) / 8 * 1e9 / machine.devices_per_node
        machine = machine.with_network(0.96 * share)  # 48 of 50 GB/s, as h100
    return machine


def read(path: Path) -> tuple[list[Measurement], Counter[str]]:
    """The measurements of a file, and how many rows were skipped for which reason."""
    found, skipped = [], Counter[str]()
    for row in _rows(path):
        try:
            found.append(measurement(row))
        except Skip as reason:
            skipped[str(reason)] += 1
    return found, skipped


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise AutoparError(f"{path} lacks the columns {', '.join(missing)}.")
        yield from reader


def summary(measurements: Iterable[Measurement]) -> dict[str, dict[str, float]]:
    """Group -> rows, median and worst error."""
    errors: dict[str, list[float]] = defaultdict(list)
    for each in measurements:
        errors[each.group].append(each.error())
    return {
        group: {"rows": len(found), "time_error_median": statistics.median(found), "time_error_worst": max(found)}
        for group, found in sorted(errors.items())
    }


def show(groups: Mapping[str, Mapping[str, float]], skipped: Counter[str]) -> None:
    """Prints the summary as tables."""
    table = Table("GPU, nodes x ranks, collective", "rows", "median error", "worst error")
    for group, values in groups.items():
        table.add_row(
            group, f"{values['rows']:.0f}", f"{values['time_error_median']:.1%}", f"{values['time_error_worst']:.0%}"
        )
    reasons = Table("rows skipped", "because")
    for reason, count in skipped.most_common():
        reasons.add_row(str(count), reason)
    console = Console()
    console.print(table)
    console.print(reasons)


@click.command(help=__doc__)
@click.option("--data", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def main(data: Path, as_json: bool) -> None:
    path = data / FILE
    if not path.exists():
        raise click.ClickException(f"{data} has no {FILE}; nothing to compare with.")
    try:
        measurements, skipped = read(path)
    except AutoparError as error:
        raise click.ClickException(str(error)) from error
    groups = summary(measurements)
    if not as_json:
        show(groups, skipped)
        return
    errors = [each.error() for each in measurements]
    result = {
        "rows_used": len(measurements),
        "rows_skipped": dict(skipped),
        "time_error_median": statistics.median(errors) if errors else None,
        "groups": groups,
    }
    click.echo(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

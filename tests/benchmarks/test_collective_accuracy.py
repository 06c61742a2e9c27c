"""The check of collectives against tables: which rows it takes, and what it says of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopar.cost_model import H100
from benchmarks.accuracy.collective_accuracy import COLUMNS, FILE, Skip, main, measurement

ROW = {
    "collective": "all_reduce",
    "gpu": "H100 80GB HBM3 SXM",
    "n_gpus": "8.0",
    "n_nodes": "1",
    "gpus_per_node": "8.0",
    "interconnect": "NVLink4",
    "size_bytes": "1073741824.0",
    "time_us": "4029.4",
    "busbw_gbps": "466.33",
    "notes": "",
}


def write(folder: Path, *rows: dict[str, str]) -> None:
    lines = [",".join(COLUMNS), *(",".join(row[c] for c in COLUMNS) for row in rows)]
    (folder / FILE).write_text("\n".join(lines) + "\n")


def test_a_row_is_read_and_priced() -> None:
    found = measurement(ROW)
    assert (found.machine, found.ranks, found.whole_bytes) == (H100, 8, 2**30)
    assert found.seconds == pytest.approx(4.0294e-3)
    assert found.error() < 0.05


def test_a_bus_bandwidth_is_a_time() -> None:
    """An all-reduce of 1 GiB over 8 sends 2 * 7/8 of it: 1.879 GB at 466.33 GB/s in 4.029 ms."""
    assert measurement(ROW | {"time_us": ""}).seconds == pytest.approx(4.0294e-3, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "Gaudi 2"}, "GPU Gaudi 2 is not in the catalogue"),
        ({"collective": "broadcast"}, "collective broadcast"),
        ({"n_gpus": ""}, "no number in column n_gpus"),
        ({"n_gpus": "1"}, "fewer than 2 GPUs"),
        ({"time_us": "", "busbw_gbps": "0.01"}, "too few digits"),
        ({"notes": "NCCL_NVLS_ENABLE=0 (ring)"}, "SHARP switched off"),
    ],
)
def test_a_row_that_cannot_be_compared_says_why(change: dict[str, str], reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        measurement(ROW | change)


def test_nics_that_a_row_states_are_shared() -> None:
    """4 x 100 Gb/s for 8 GPUs: 6.25 GB/s each, of which 0.96 are reached."""
    row = ROW | {"gpu": "A100-80GB SXM", "n_nodes": "2", "n_gpus": "16", "interconnect": "4x100Gb EFA per node"}
    assert measurement(row).machine.across_nodes.bandwidth_bytes_per_second == pytest.approx(6e9)


def test_the_json_and_the_table(tmp_path: Path) -> None:
    write(tmp_path, ROW, ROW | {"size_bytes": "2147483648"}, ROW | {"gpu": "Gaudi 2"})
    result = CliRunner().invoke(main, ["--data", str(tmp_path), "--json"])
    found = json.loads(result.output)
    assert found["rows_used"] == 2
    assert found["rows_skipped"] == {"GPU Gaudi 2 is not in the catalogue": 1}
    assert set(found["groups"]) == {"h100 1x8 all_reduce"}
    assert "h100 1x8 all_reduce" in CliRunner().invoke(main, ["--data", str(tmp_path)]).output


def test_a_folder_without_the_table_and_a_table_without_columns(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--data", str(tmp_path)])
    assert result.exit_code == 1 and f"has no {FILE}" in result.output
    (tmp_path / FILE).write_text("gpu,size_bytes\n")
    result = CliRunner().invoke(main, ["--data", str(tmp_path)])
    assert result.exit_code == 1 and "lacks the columns collective, n_gpus" in result.output

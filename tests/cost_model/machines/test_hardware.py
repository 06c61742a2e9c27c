"""The catalogue, and hardware as a file: what is read back, and what is said of a bad one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autopar.cost_model import (
    A100,
    CPU_GLOO,
    H100,
    HARDWARE,
    Hardware,
    Link,
    Source,
    canonical_gpu,
    find_hardware,
    read_hardware,
    save_hardware,
)
from autopar.cost_model.machines.hardware import KINDS, Disk
from autopar.cost_model.machines.hardware_toml import parse_hardware
from autopar.cost_model.machines.hardware_writing import format_hardware
from autopar.errors import AutoparError
from autopar.ir.tier import moves

MINE = """\
name = "mine"
devices_per_node = {value = 4, kind = "datasheet", source = "the order"}
memory_bytes = {value = 80e9, kind = "datasheet", source = "the order"}
memory_bytes_per_second = {value = 2e12, kind = "measured", source = "a copy"}
launch_seconds = {value = 4e-6, kind = "measured", source = "x + 1"}

[peak_flops]
bfloat16 = {value = 300e12, kind = "datasheet", source = "the vendor"}

[inside_node]
bandwidth_bytes_per_second = {value = 200e9, kind = "measured", source = "nccl-tests"}
latency_seconds = {value = 2e-6, kind = "measured", source = "nccl-tests"}

[across_nodes]
bandwidth_bytes_per_second = {value = 25e9, kind = "measured", source = "nccl-tests"}
latency_seconds = {value = 1e-5, kind = "measured", source = "nccl-tests"}
"""


# The catalogue


def test_the_catalogue_has_what_people_train_on() -> None:
    names = {
        "v100",
        "a100-40",
        "a100",
        "h100",
        "h100-pcie",
        "h200",
        "b200",
        "gb200",
        "mi300x",
        "b300",
        "gb300",
        "h20",
        "mi325x",
        "mi350x",
        "mi355x",
        "l4",
        "l40s",
        "rtx4090",
        "rtx5090",
        "cpu-gloo",
    }
    assert names <= set(HARDWARE)
    assert all(hardware.name == name for name, hardware in HARDWARE.items())
    assert find_hardware("h100") is H100
    assert find_hardware("a100-80") is A100
    assert find_hardware("cpu") is CPU_GLOO


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
def test_every_figure_of_the_catalogue_has_its_source(hardware: Hardware) -> None:
    stated = dict(hardware.sources)
    for source in stated.values():
        assert source.kind in KINDS and source.text.strip() and "/work" not in source.text
    for name in ("memory_bytes", "memory_bytes_per_second", "launch_seconds", "devices_per_node"):
        assert name in stated
    for link in ("inside_node", "across_nodes"):
        fields = dataclasses.fields(Link)
        values = {f.name: (getattr(getattr(hardware, link), f.name), f.default) for f in fields}
        assert all(f"{link}.{k}" in stated for k, (value, default) in values.items() if value != default)
    assert {f"peak_flops.{dtype}" for dtype, _ in hardware.dtype_flops} <= set(stated)


def test_a_peak_for_every_number_format() -> None:
    """H100's datasheet: 1979 TFLOP/s in float8, half of it in bfloat16, a quarter in tf32."""
    assert [H100.flops_per_second(size) for size in (1, 2, 4, 8)] == [1978.9e12, 989.4e12, 67e12, 67e12]
    assert H100.dtype_flops_per_second("tf32") == 494.7e12
    assert A100.flops_per_second(1) == 312e12  # no float8: what is narrow is computed in 2 bytes
    with pytest.raises(AutoparError, match="a100 has no figure for products of float8; it has bfloat16"):
        A100.dtype_flops_per_second("float8")


def test_a_node_of_gb200_is_the_rack() -> None:
    assert find_hardware("GB200 NVL72").devices_per_node == 72


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100 SXM 80GB", "h100"),
        ("h100_80gb", "h100"),
        ("H100 80GB HBM3 SXM", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("H100 SXM 96GB HBM2e 2.4TB/s (500W)", "h100-96"),
        ("A100-80GB SXM", "a100"),
        ("a100_40gb", "a100-40"),
        ("v100-32", "v100"),
        ("a100_40", "a100-40"),
        ("A100 40", "a100-40"),
        ("a100-sxm4-40", "a100-40"),
        ("V100-SXM2-16", "v100-16"),
        ("h200-141", "h200"),
        ("l4-24gb", "l4"),
        ("GB200 NVL 72", "gb200"),
        ("A100-40GB SXM (DGX-A100)", "a100-40"),
        ("A100 SXM", "a100"),
        ("V100-SXM2-32GB", "v100"),
        ("V100-SXM2-16GB", "v100-16"),
        ("H200 SXM 141GB", "h200"),
        ("B200 (power limited)", "b200"),
        ("GB200 NVL72", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090 32GB", "rtx5090"),
        ("L4", "l4"),
        ("L40S 48GB", "l40s"),
        ("H20 96GB HBM3", "h20"),
        ("B300 SXM 288GB", "b300"),
        ("GB300 NVL72", "gb300"),
        ("AMD MI325X 256GB", "mi325x"),
        ("MI350X", "mi350x"),
        ("AMD Instinct MI355X 288GB", "mi355x"),
        ("CPU", "cpu-gloo"),
    ],
)
def test_gpus_as_people_write_them(written: str, name: str) -> None:
    assert canonical_gpu(written) == name


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("h1000", "did you mean h100"),
        ("h100../", "did you mean h100"),
        ("a100:40", "did you mean a100-40"),
        ("L40", "did you mean l40s or l4"),
        ("A100 PCIe", "did you mean h100-pcie"),
        ("H100 64GB", "did you mean h100"),
        ("a100-41", "did you mean a100-40"),
        ("h200-80", "did you mean h100 or h200"),
        ("H200 80GB", "did you mean h100 or h200"),
        ("a100_41", "did you mean a100-40"),
        ("H800 SXM5 (H100-class)", "did you mean h200 or h100"),
        ("GB400 NVL72", "did you mean gb[23]00 or gb[23]00"),
        ("potato", "none of its names is near"),
        ("", "none of its names is near"),
    ],
)
def test_an_unknown_gpu_suggests_the_nearest_names(written: str, near: str) -> None:
    with pytest.raises(AutoparError, match=near) as caught:
        find_hardware(written)
    assert repr(written) in str(caught.value)
    assert "a100, a100-40, b200" in str(caught.value)


# Files


def test_a_file_is_read() -> None:
    file = parse_hardware(MINE, "mine.toml")
    assert file.nodes == 1 and not file.curves
    assert file.hardware.name == "mine"
    assert file.hardware.memory_bytes == 80_000_000_000
    assert isinstance(file.hardware.memory_bytes, int)
    assert file.hardware.peak_flops == ((2, 300e12),)
    assert file.hardware.inside_node == Link(200e9, 2e-6)
    assert file.hardware.source("inside_node.latency_seconds") == Source("measured", "nccl-tests")
    assert file.hardware.source("host_seconds") == Source("guess", "not stated")


def test_a_file_may_start_from_a_machine_of_the_catalogue() -> None:
    text = """
        name = "ours"
        like = "h100"
        nodes = {value = 3, kind = "datasheet", source = "the order"}
        [across_nodes]
        bandwidth_bytes_per_second = {value = 12e9, kind = "measured", source = "nccl-tests"}
    """
    file = parse_hardware(text, "ours.toml")
    assert file.nodes == 3
    across = dataclasses.replace(H100.across_nodes, bandwidth_bytes_per_second=12e9)
    figure = "across_nodes.bandwidth_bytes_per_second"
    assert file.hardware.source(figure) == Source("measured", "nccl-tests")
    expected = dataclasses.replace(H100, name="ours", across_nodes=across, sources=file.hardware.sources)
    assert file.hardware == expected
    assert [name for name, _ in file.hardware.sources] == [name for name, _ in H100.sources]


@pytest.mark.parametrize("like", ["cpu", "CPU", "cpu-gloo", "A100-40GB SXM", "rtx4090"])
def test_a_file_may_start_from_every_name_that_finds_a_machine(like: str) -> None:
    found = parse_hardware(f'name = "ours"\nlike = "{like}"', "ours.toml").hardware
    assert dataclasses.replace(found, name=find_hardware(like).name) == find_hardware(like)


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
def test_what_is_saved_is_read_back(hardware: Hardware, tmp_path: Path) -> None:
    path = tmp_path / "saved.toml"
    save_hardware(hardware, path)
    assert read_hardware(path).hardware == hardware


def test_nodes_and_curves_are_saved_too(tmp_path: Path) -> None:
    rows = [{"rows": 64, "seconds": 1.5e-5, "dtype": "bfloat16"}, {"rows": 128, "seconds": 2e-5}]
    save_hardware(A100, tmp_path / "a.toml", nodes=4, curves={"matmul": rows})
    file = read_hardware(tmp_path / "a.toml")
    assert (file.hardware, file.nodes) == (A100, 4)
    assert [dict(row) for row in file.curves["matmul"]] == rows


def test_a_figure_without_source_is_saved_as_a_guess() -> None:
    plain = dataclasses.replace(
        parse_hardware(MINE, "mine.toml").hardware, sources=(), dtype_flops=(), host_seconds=5e-6
    )
    text = format_hardware(plain)
    assert 'host_seconds = {value = 5e-06, kind = "guess", source = "not stated"}' in text
    again = parse_hardware(text, "again.toml").hardware
    assert dataclasses.replace(again, sources=(), dtype_flops=()) == plain
    assert again.source("host_seconds") == Source("guess", "not stated")


@pytest.mark.parametrize("text", ['the "fast" way\\ in Zürich', "\x00\x1b\x7f\x85\n\U0001f600"])
def test_quotes_umlauts_and_odd_characters_survive(text: str, tmp_path: Path) -> None:
    source = ("launch_seconds", Source("measured", text))
    hardware = parse_hardware(MINE, "mine.toml").hardware
    named = dataclasses.replace(hardware, sources=(source,))
    save_hardware(named, tmp_path / "q.toml")
    assert read_hardware(tmp_path / "q.toml").hardware.source("launch_seconds") == source[1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("value = 4,", "value = 4 4,", r"mine.toml, line 2: "),
        ("value = 4,", "value = 0,", "line 2: devices_per_node is 0; it must be a positive whole number"),
        ("value = 4,", "value = -8,", "line 2: devices_per_node is -8; it must be"),
        ("value = 4,", "value = 2.5,", "line 2: devices_per_node is 2.5; it must be"),
        ("value = 4,", "value = true,", "line 2: devices_per_node is True; it must be"),
        ("value = 2e12", 'value = "2e12"', "line 4: memory_bytes_per_second is '2e12'; it must be a pos"),
        ("value = 4,", f"value = 1{'0' * 400},", "line 2: devices_per_node is 10{400}; it must be a positive whole"),
        ("value = 2e12", f"value = 1{'0' * 400}", "line 4: memory_bytes_per_second is 10{400}; it must be a positive"),
        ("[peak_flops]", f"[[matmul]]\nrows = 1{'0' * 400}\n[peak_flops]", "line 8: rows is 10{400}; it must be a num"),
        (
            "value = 2e12",
            "value = 1e300",
            r"line 4: memory_bytes_per_second is 1e\+300; figures are from 1e-30 to 1e\+30",
        ),
        ("value = 25e9", "value = 1e-300", "line 15: bandwidth_bytes_per_second is 1e-300; figures are from 1e-30"),
        ("value = 2e12", "value = nan", "line 4: memory_bytes_per_second is nan; it must be a positive"),
        ("value = 2e12", "value = inf", "line 4: memory_bytes_per_second is inf; it must be a positive"),
        ("value = 2e-6", "value = -1", "line 12: latency_seconds is -1; it must be a number, 0 or more"),
        ("value = 25e9", "value = 0", "line 15: bandwidth_bytes_per_second is 0; it must be a positive"),
        (
            'kind = "datasheet", source = "the v',
            'kind = "rumour", source = "the v',
            "line 8: the kind of bfloat16 is 'rumour'; kinds are datasheet, measured, fitted, guess",
        ),
        ('"x + 1"', '""', "line 5: the source of launch_seconds must say where it comes from"),
        (', source = "x + 1"', "", "line 5: launch_seconds lacks its source"),
        ("{value = 4e-6,", "{valeu = 4e-6,", "line 5: unknown key 'valeu' of launch_seconds; did you mean 'va"),
        ("launch_seconds", "lunch_seconds", "line 5: unknown key 'lunch_seconds'; did you mean 'launch_sec"),
        ("bfloat16 =", "bflaot16 =", r"line 8: unknown key 'bflaot16' in \[peak_flops\]; did you mean 'bfloat16'"),
        (
            "latency_seconds = {value = 1e-5",
            "latency = {value = 1e-5",
            r"line 16: unknown key 'latency' in \[across_nodes\]; did you mean 'latency_seconds'",
        ),
        (
            '{value = 4e-6, kind = "measured", source = "x + 1"}',
            "4e-6",
            "line 5: launch_seconds is a figure with its source: launch_seconds = {value = 4e-06, kind",
        ),
        ("launch_seconds", "#", "line 1: launch_seconds is missing"),
        (
            "latency_seconds = {value = 2e-6",
            "# = {value = 2e-6",
            r"line 10: latency_seconds of \[inside_node\] is missing",
        ),
        ("[peak_flops]\nbfloat16", "#\n#", r"line 1: \[peak_flops\] is missing; give one of float8"),
        ('name = "mine"', "name = 7", "line 1: name must be a word"),
        (
            'name = "mine"',
            'name = "mine"\nlike = "h1oo"',
            "line 2: there is no 'h1oo' in the catalogue; did you mean 'h100'",
        ),
        ("[peak_flops]\n", "[peak_flosp]\n", "line 7: unknown key 'peak_flosp'; did you mean 'peak_flops'"),
        (
            "[across_nodes]\n",
            "[across_nodes]\nreduce_gain = {value = 3, kind = 'guess', source = 'x'}\n",
            "line 15: reduce_gain is 3; it must be a number from 1 to 2",
        ),
        ("launch_seconds", "matmul = 3\nlaunch_seconds", r"line 5: \[\[matmul\]\] is a list of tables"),
        (
            "[peak_flops]",
            "[[matmul]]\nrowz = 8\n[peak_flops]",
            r"line 8: unknown key 'rowz' in \[\[matmul\]\]; did you mean 'rows'",
        ),
        ("[peak_flops]", "[[matmul]]\nrows = nan\n[peak_flops]", "line 8: rows is nan; it must be a number"),
        ('name = "mine"', "name = " + "[" * 10_000, "line 1: lists or tables are nested too deeply"),
        ("value = 4,", f"value = {'9' * 10_000},", "line 1: Exceeds the limit"),
    ],
)
def test_a_bad_file_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert old in MINE
    with pytest.raises(AutoparError, match=f"mine.toml, {message.removeprefix('mine.toml, ')}"):
        parse_hardware(MINE.replace(old, new, 1), "mine.toml")


def test_a_key_that_is_written_twice_is_found_in_its_table() -> None:
    """latency_seconds stands in two tables; the one of [across_nodes] is wrong."""
    with pytest.raises(AutoparError, match="line 16: latency_seconds is -3"):
        parse_hardware(MINE.replace("value = 1e-5", "value = -3"), "mine.toml")


def test_a_file_that_is_missing_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match=r"Cannot read the hardware of .*none.toml: No such file"):
        read_hardware(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(AutoparError, match=r"Cannot read the hardware of .*binary.toml"):
        read_hardware(tmp_path / "binary.toml")


# The host


HOST = """
[host]
memory_bytes = {value = 250e9, kind = "datasheet", source = "the order"}
bandwidth_bytes_per_second = {value = 50e9, kind = "measured", source = "a copy"}
latency_seconds = {value = 1e-5, kind = "guess", source = "a small copy"}
"""
UPDATE = 'update_bytes_per_second = {value = 60e9, kind = "guess", source = "half of the memory"}\n'


def test_a_host_is_read_and_written() -> None:
    mine = parse_hardware(MINE + HOST + UPDATE, "mine.toml").hardware
    assert mine.host is not None and mine.host.memory_bytes == 250_000_000_000
    assert mine.source("host.latency_seconds").kind == "guess"
    assert parse_hardware(format_hardware(mine), "again").hardware == mine
    assert parse_hardware(MINE, "mine.toml").hardware.host is None


def test_half_a_host_is_refused_by_its_line() -> None:
    with pytest.raises(AutoparError, match=r"line \d+: update_bytes_per_second of \[host\] is missing"):
        parse_hardware(MINE + HOST, "mine.toml")


def test_every_machine_of_the_catalogue_says_what_its_host_has() -> None:
    assert all(hardware.host is not None for hardware in HARDWARE.values())


NVME = """
[nvme]
memory_bytes = {value = 4_000_000_000_000, kind = "guess", source = "a disk"}
read_bytes_per_second = {value = 6e9, kind = "guess", source = "a disk"}
write_bytes_per_second = {value = 3e9, kind = "guess", source = "a disk"}
latency_seconds = {value = 1e-4, kind = "guess", source = "a disk"}
"""


def test_disks_are_read_and_written() -> None:
    mine = parse_hardware(MINE + NVME, "mine.toml").hardware
    assert mine.nvme == Disk(4_000_000_000_000, 6e9, 3e9, 1e-4)
    assert parse_hardware(format_hardware(mine), "again.toml").hardware == mine
    with pytest.raises(AutoparError, match=r"latency_seconds of \[nvme\] is missing"):
        parse_hardware(MINE + NVME.rpartition("latency")[0], "mine.toml")


def test_reads_and_writes_of_a_disk_take_their_own_time() -> None:
    """6 GB take 1 s to read and 2 s to write; an update reads and writes 3 GB in 1.5 s."""
    mine = dataclasses.replace(H100, nvme=Disk(4_000_000_000_000, 6e9, 3e9, 0.0))
    (there,), (back,) = moves("nvme", "host"), moves("host", "nvme")
    assert mine.move_seconds(there, 6e9) == 1.0 and mine.move_seconds(back, 6e9) == 2.0
    assert 6e9 / mine.updates_per_second("nvme") == pytest.approx(1.5)


def test_a_machine_without_a_tier_says_which_it_has() -> None:
    with pytest.raises(AutoparError, match=r"nvme: .* table \[nvme\].* its tiers: device, host\."):
        dataclasses.replace(H100, nvme=None).storing("nvme")

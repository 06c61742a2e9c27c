"""What was measured, as a file that the cost model reads."""

import math
import os
import stat
from dataclasses import replace

import pytest

from autopar.calibrate import to_hardware
from autopar.calibrate.document import check_hardware_output, to_toml
from autopar.cost_model import Link, find_cluster, read_hardware
from autopar.errors import AutoparError
from autopar.ir.files import write_whole
from tests.calibrate.curves import LINK, machine, messages


def test_the_hardware_is_what_the_curves_were_made_with():
    hardware = to_hardware(machine(), "my")
    assert dict(hardware.dtype_flops) == {"bfloat16": 8e14, "float32": 8e13}
    assert hardware.peak_flops == ((2, 8e14), (4, 8e13))
    assert (hardware.matmul_efficiency, hardware.matmul_half_size) == (1.0, 200.0)
    assert hardware.inside_node == LINK
    assert hardware.memory_bytes_per_second == 6e12
    # a byte at the bandwidth and one at a third of it: 2 bytes in the time of 4
    assert hardware.memory_efficiency == 0.5
    assert (hardware.launch_seconds, hardware.host_seconds) == (4e-6, 2e-5)
    assert (hardware.devices_per_node, hardware.reserved_bytes) == (8, 10**9)


@pytest.mark.parametrize(("nodes", "kind"), [(1, "cuda"), (2, "cuda"), (1, "cpu")])
def test_the_file_reads_as_the_same_hardware(tmp_path, nodes, kind):
    found = machine(nodes=nodes, kind=kind)
    path = tmp_path / "my.toml"
    write_whole(to_toml(found, "my"), path)
    file = read_hardware(path)
    assert file.hardware == to_hardware(found, "my")
    assert file.nodes == nodes
    assert find_cluster(str(path)).ranks == 8 * nodes
    assert len(file.curves["matmul"]) == len(found.products)
    assert len(file.curves["collective"]) == len(found.messages)
    for row in (*file.curves["matmul"], *file.curves["collective"]):
        assert math.isclose(row["seconds"], row["predicted_seconds"], rel_tol=1e-3), row


def test_every_figure_has_a_source():
    hardware = to_hardware(machine(), "my")
    assert hardware.source("launch_seconds").kind == "measured"
    latency = hardware.source("inside_node.latency_seconds")
    assert latency.kind == "fitted"
    assert "all_reduce 0.0 %" in latency.text
    assert "Imaginary GPU" in latency.text and "4 nccl ranks at once" in latency.text
    assert "mean error 0.0 %" in hardware.source("matmul_half_size").text
    assert hardware.source("peak_flops.float32").kind == "fitted"


def test_the_same_measurements_give_the_same_text():
    assert to_toml(machine(), "my") == to_toml(machine(), "my")


def test_links_that_were_not_measured_are_guesses():
    alone = to_hardware(machine(local_ranks=1, messages=(), backend=""), "my")
    for link in ("inside_node", "across_nodes"):
        source = alone.source(f"{link}.bandwidth_bytes_per_second")
        assert source.kind == "guess" and "one rank" in source.text
    across = to_hardware(machine(), "my").source("across_nodes.latency_seconds")
    assert across.kind == "guess" and "one node" in across.text


def test_both_links_are_told_apart():
    slow = Link(5e9, 2e-5)
    both = (*messages(4), *messages(2, link=slow, name="across_nodes"))
    hardware = to_hardware(machine(nodes=2, messages=both), "my")
    assert (hardware.inside_node, hardware.across_nodes) == (LINK, slow)


def test_nodes_of_one_rank_have_one_link():
    across = messages(2, name="across_nodes")
    hardware = to_hardware(machine(local_ranks=1, nodes=2, messages=across), "my")
    assert hardware.inside_node == hardware.across_nodes == LINK
    assert hardware.source("inside_node.latency_seconds").kind == "guess"


def test_a_format_stands_in_for_a_missing_main_one():
    old = tuple(replace(p, number_format="float16") for p in machine().products if p.number_format != "float32")
    hardware = to_hardware(machine(products=old), "v")
    assert hardware.peak_flops == ((2, 8e14),)
    assert "in float16" in hardware.source("matmul_efficiency").text


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("old")
    write_whole("new", path)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["my.toml"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole("new \ud800", path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["my.toml"]


def test_a_file_that_cannot_be_written_is_said_first(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    for path, says in (
        (tmp_path / "nowhere" / "my.toml", "there is no folder"),
        (tmp_path / "folder.toml", "it is a folder"),
        (tmp_path / "my.json", "is called NAME.toml, not 'my.json'"),
    ):
        with pytest.raises(AutoparError, match=says):
            check_hardware_output(path)
    assert os.listdir(tmp_path) == ["folder.toml"]

"""Clusters of several kinds of machines: their names and files, what they reach, and the machines of stages."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from autopar.cost_model import A100, H100, HARDWARE, Cluster, Hardware, find_cluster, find_hardware, save_hardware
from autopar.cost_model.machines.kinds import each_kind, mixed, slowest, stage_machines, together
from autopar.cost_model.machines.software import Software, with_eager_runs
from autopar.errors import AutoparError
from autopar.ir import Mesh

BOTH = "h100x8x2+a100x8x2"


def test_names() -> None:
    found = find_cluster(BOTH)
    assert (found.ranks, found.devices_per_node, found.nodes) == (32, 8, 4)
    assert found.kinds == (Cluster(H100, 2), Cluster(A100, 2))
    assert str(found) == found.hardware.name == BOTH
    assert find_cluster(" H100 x 8 x 2 + A100-80GB SXM x8x2 ") == found == find_cluster(BOTH)


def test_one_kind_is_the_case_of_one() -> None:
    assert find_cluster("h100x8x3").kinds == (Cluster(H100, 3),)
    assert find_cluster("h100x8x2+h100x8+h100x8") == find_cluster("h100x8x4")
    assert [str(each) for each in find_cluster("h100x8+a100x8+a100x8+h100x4").kinds] == [
        "h100x8x1",
        "a100x8x2",
        "h100x4x1",
    ]


def test_nodes_of_different_sizes_count_by_their_common_divisor() -> None:
    found = find_cluster("h100x8x2+l4x4x3")
    assert (found.ranks, found.devices_per_node, found.nodes) == (28, 4, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100x8+a10x8", "There is no GPU 'a10' in the catalogue; did you mean .*a100"),
        ("h100x8+", "beside a \\+ stands a kind; write h100x8x2\\+a100x8x2"),
        ("+h100x8", "beside a \\+ stands a kind"),
        ("h100x8+a100x16", "16 ranks in a node, but a node of a100 has 8"),
        ("h100x8x16000+a100x8x16000", "256000 ranks cannot be planned"),
    ],
)
def test_a_bad_name_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        find_cluster(text)


FILE = """name = "ours"
kinds = ["h100x8x2", "slow.toml x 4 x 2"]

[between_kinds]
bandwidth_bytes_per_second = {value = 1e9, kind = "guess", source = "one cable"}
latency_seconds = {value = 5e-4, kind = "guess", source = "one cable"}
"""


def test_a_file_lists_kinds(tmp_path: Path) -> None:
    slow = dataclasses.replace(A100, name="slow")
    save_hardware(slow, tmp_path / "slow.toml", nodes=16)
    path = tmp_path / "ours.toml"
    path.write_text(FILE)
    found = find_cluster(path)
    assert str(found) == "ours"
    assert [(each.hardware.name, each.ranks) for each in found.kinds] == [("h100", 16), ("slow", 8)]
    assert found.hardware.across_nodes.bandwidth_bytes_per_second == 1e9
    assert found.hardware.across_nodes.latency_seconds == 5e-4
    assert found.kinds[1].hardware.across_nodes == A100.across_nodes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[between_kinds]",
            "[between_kind]",
            "line 4: unknown key 'between_kind' beside kinds; did you mean 'between_k",
        ),
        (
            "latency_seconds",
            "latency",
            "line 6: unknown key 'latency' in .between_kinds.; did you mean 'latency_seconds'",
        ),
        ("latency_seconds", "start_seconds", "line 4: latency_seconds of .between_kinds. is missing"),
        ("kinds = [", "nodes = 4\nkinds = [", "line 2: unknown key 'nodes' beside kinds"),
        ('"h100x8x2", ', "", "line 2: kinds lists two or more clusters"),
        ('"h100x8x2"', "4", "line 2: kinds lists two or more clusters"),
        ('"h100x8x2"', '"h10x8x2"', "line 2: There is no GPU 'h10' in the catalogue; did you mean h100"),
        ("slow.toml", "slower.toml", "line 2: Cannot read the hardware of .*slower.toml"),
        ('name = "ours"', "", "name must be a word"),
        ("1e9", "-1", "line 5: bandwidth_bytes_per_second is -1; it must be a positive number"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    save_hardware(A100, tmp_path / "slow.toml")
    path = tmp_path / "ours.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(AutoparError, match=message):
        find_cluster(path)


def test_a_file_of_kinds_has_no_sizes_and_is_no_single_machine(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('name = "ours"\nkinds = ["h100x8", "a100x8"]\n')
    with pytest.raises(AutoparError, match=r"ours\.toml lists kinds, which have their own: leave them out"):
        find_cluster(f"{path}x8x2")
    with pytest.raises(
        AutoparError, match="line 2: kinds lists the kinds of a cluster, which --cluster takes; here one machine"
    ):
        find_hardware(path)
    save_hardware(A100, path)
    path.write_text(path.read_text() + FILE.partition("\n\n")[2])
    with pytest.raises(AutoparError, match=r"between_kinds\] stands beside kinds, and this file lists none"):
        find_cluster(path)


# --- what they reach


def _times(hardware: Hardware) -> list[float]:
    """Durations of a product, of a copy, of attention, and of messages of all links."""
    links = (hardware.inside_node, hardware.across_nodes)
    peak = hardware.flops_per_second(2)
    return [
        1 / (peak * hardware.matmul_efficiency),
        1 / (peak * hardware.attention_efficiency),
        1 / (hardware.flops_per_second(4) * hardware.matmul_efficiency),
        1 / (hardware.memory_bytes_per_second * hardware.memory_efficiency),
        hardware.launch_seconds,
        hardware.host_seconds,
        *(1 / (each.bandwidth_bytes_per_second * each.reduce_gain) for each in links),
        *(1 / (each.bandwidth_bytes_per_second * each.send_gain) for each in links),
        *(each.latency_seconds for each in links),
    ]


@pytest.mark.parametrize("pair", [*itertools.combinations(sorted(HARDWARE), 2)], ids="+".join)
def test_ranks_that_wait_are_as_slow_as_the_slower_in_everything_and_together_no_slower(pair: tuple[str, str]) -> None:
    machines = [HARDWARE[name] for name in pair]
    own = [_times(each) for each in machines]
    slow, fast = _times(slowest(machines)), _times(together(machines))
    most = [max(each) for each in zip(*own, strict=True)]
    attention = 1  # has one efficiency for all formats, so that it is the least of them
    assert slow[attention] >= most[attention] * (1 - 1e-12)
    slow[attention] = most[attention]
    assert slow == pytest.approx(most)
    assert all(quick <= each * (1 + 1e-12) for quick, each in zip(fast, most, strict=True))
    assert slowest(machines).memory_bytes == min(each.memory_bytes for each in machines)


def test_equal_machines_are_one() -> None:
    assert slowest([H100, H100]) is H100
    assert together([H100, H100]) is H100


def test_a_faster_kind_is_a_mean_of_rates_together() -> None:
    """Rates 3 and 1: a step of equal stages at the rate 2 takes as long as stages of 3/4 and 1/4."""
    fast = dataclasses.replace(A100, peak_flops=tuple((size, 3 * flops) for size, flops in A100.peak_flops))
    both = together([fast, A100])
    assert both.flops_per_second(2) * both.matmul_efficiency == pytest.approx(2 * A100.flops_per_second(2) * 0.869)


# --- the machines of stages


@pytest.mark.parametrize(
    ("cluster", "mesh", "names"),
    [
        (BOTH, "pp=2,dp=16", ["h100", "a100"]),
        (BOTH, "pp=4,dp=8", ["h100", "h100", "a100", "a100"]),
        (BOTH, "dp=32", [BOTH]),
        (BOTH, "dp=16,pp=2", [BOTH, BOTH]),
        (BOTH, "dp=2,pp=2,tp=8", [BOTH, BOTH]),
        ("h100x8x3+a100x8x1", "pp=2,dp=16", ["h100", "h100x8x3+a100x8x1"]),
        ("h100x8+a100x8+l4x8x2", "pp=2,dp=16", ["h100x8x1+a100x8x1", "l4"]),
        (BOTH, "pp=2,dp=8", [BOTH, BOTH]),  # of fewer ranks nobody knows the kinds
        ("h100x8x2", "pp=2,dp=8", ["h100", "h100"]),
    ],
)
def test_a_stage_has_the_machine_of_its_ranks(cluster: str, mesh: str, names: list[str]) -> None:
    found = stage_machines(find_cluster(cluster).hardware, Mesh.parse(mesh))
    assert [each.name for each in found] == names
    assert not any(each.kinds for each in found if "+" not in each.name)


def test_a_change_is_one_of_every_kind() -> None:
    hardware = find_cluster(BOTH).hardware
    halved = each_kind(hardware, lambda each: dataclasses.replace(each, memory_bytes=each.memory_bytes // 2))
    assert halved.memory_bytes == H100.memory_bytes // 2
    assert [each.memory_bytes for each, _ in halved.kinds] == [H100.memory_bytes // 2, A100.memory_bytes // 2]
    stale = dataclasses.replace(hardware, launch_seconds=1.0)
    with pytest.raises(AssertionError, match="use each_kind"):
        stage_machines(stale, Mesh.parse("pp=2,dp=16"))


def test_runtimes_are_on_every_kind() -> None:
    eager = with_eager_runs(find_cluster(BOTH))
    assert [each.hardware for each in eager.kinds] == [with_eager_runs(Cluster(h)).hardware for h in (H100, A100)]
    quick = Software(matmul_efficiency=0.5, network_efficiency=0.5).on(eager.hardware)
    assert {each.matmul_efficiency for each, _ in quick.kinds} == {0.5}
    assert mixed(quick.kinds) == quick
    assert quick.across_nodes.bandwidth_bytes_per_second == 0.5 * A100.across_nodes.bandwidth_bytes_per_second

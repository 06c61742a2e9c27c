"""Names of clusters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autopar.cost_model import H100, Cluster, find_cluster, find_hardware, save_hardware
from autopar.errors import AutoparError


@pytest.mark.parametrize(
    ("text", "name", "in_node", "nodes"),
    [
        ("h100", "h100", 8, 1),
        ("h100x4", "h100", 4, 1),
        ("h100x8x16", "h100", 8, 16),
        ("H100 x 8 x 16", "h100", 8, 16),
        ("h100×8×16", "h100", 8, 16),
        ("a100-40x8x2", "a100-40", 8, 2),
        ("A100-40GB SXM x8x2", "a100-40", 8, 2),
        ("mi300x", "mi300x", 8, 1),
        ("mi300xx8x2", "mi300x", 8, 2),
        ("rtx4090", "rtx4090", 8, 1),
        ("rtx4090x2x3", "rtx4090", 2, 3),
        ("gb200x64x2", "gb200", 64, 2),
        ("cpux4", "cpu-gloo", 4, 1),
    ],
)
def test_names(text: str, name: str, in_node: int, nodes: int) -> None:
    cluster = find_cluster(text)
    assert cluster.hardware.name == name
    assert (cluster.devices_per_node, cluster.nodes) == (in_node, nodes)
    assert cluster.ranks == in_node * nodes
    assert find_cluster(str(cluster)) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100x0", "'h100x0' has 0 ranks in a node; it needs at least 1"),
        ("h100x-8x2", "has -8 ranks in a node; it needs at least 1"),
        ("h100x8x0", "has 0 nodes; it needs at least 1"),
        ("h100x8x-1", "has -1 nodes; it needs at least 1"),
        ("h100x2.5", "'2.5' is not a number of ranks in a node; write h100x8x16"),
        ("h100x8x99999999999999999999", "the most are 131072; write h100x8x16384"),
        ("h100x8x1000000", "A cluster of 8000000 ranks cannot be planned: the most are 131072"),
        ("h100x8x16384+a100x8", "of 131080 ranks cannot be planned: .*; name fewer nodes of its kinds"),
        ("~nobody9/ours.toml", "Cannot read the hardware of ~nobody9/ours.toml: No such file"),
        ("h100x8x" + "9" * 5000, "is not a number of nodes"),
        ("h100x8x\u0663", "'\u0663' is not a number of nodes"),
        ("h100xeight", "'eight' is not a number of ranks in a node; write h100x8x16"),
        ("h100x8x2x2", "write GPU x ranks in a node x nodes, as h100x8x16"),
        ("h100x16", "16 ranks in a node, but a node of h100 has 8; write h100x8x2 for 16 ranks"),
        ("h10x8x2", "There is no GPU 'h10' in the catalogue; did you mean h100"),
        ("x100x8", "There is no GPU 'x100' in the catalogue; did you mean .*h100"),
        ("  ", "named as h100x8x16"),
        ("nowhere.toml", "Cannot read the hardware of nowhere.toml: No such file"),
    ],
)
def test_a_bad_name_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        find_cluster(text)


def test_a_file_is_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "my cluster.toml"
    save_hardware(H100, path, nodes=16)
    assert find_cluster(str(path)) == Cluster(H100, 16)
    assert find_cluster(f"{path}x4x2").ranks == 8
    assert find_cluster(f"{path}x4").ranks == 4


def test_a_kind_lists_no_kinds(tmp_path: Path) -> None:
    """A file that lists itself would be read without end, and the link of an inner list would be lost."""
    path = tmp_path / "ours.toml"
    path.write_text('name = "ours"\nkinds = ["h100x8", "ours.toml"]\n')
    with pytest.raises(AutoparError, match=r"ours.toml, line 2: ours.toml lists kinds, and is named as one kind of ou"):
        find_cluster(path)
    with pytest.raises(AutoparError, match=r"ours.toml lists kinds, .*: name its kinds there instead"):
        find_cluster(f"a100x8+{path}")


def test_nodes_alike_with_a_slow_link_between_are_two_kinds(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    figure = '{value = %s, kind = "guess", source = "two halls"}'
    path.write_text(
        'name = "ours"\nkinds = ["h100x8x2", "h100x8x2"]\n[between_kinds]\n'
        f"bandwidth_bytes_per_second = {figure % '1e9'}\nlatency_seconds = {figure % '1e-3'}\n"
    )
    found = find_cluster(path)
    assert (len(found.kinds), found.ranks, found.hardware.across_nodes.latency_seconds) == (2, 32, 1e-3)


def test_many_kinds_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('name = "ours"\nkinds = [' + '"none.toml", ' * 100_000 + "]\n")
    for text in ("h100x1+a100x1+" * 1000 + "h100x1", str(path)):
        with pytest.raises(
            AutoparError, match=r"kinds cannot be planned: the most are 4\. Write neighbours that are al"
        ):
            find_cluster(text)


def test_files_of_kinds_lie_beside_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs x 4"
    folder.mkdir()
    save_hardware(dataclasses.replace(H100, name="slow"), folder / "a+b.toml")
    (folder / "ours.toml").write_text('name = "ours"\nkinds = ["h100x8", "a+b.toml x 8 x 2"]\n')
    monkeypatch.chdir("/")
    assert [str(kind) for kind in find_cluster(folder / "ours.toml").kinds] == ["h100x8x1", "slowx8x2"]


def test_a_cluster_checks_itself() -> None:
    with pytest.raises(AutoparError, match="a positive number of nodes, not 0"):
        Cluster(find_hardware("h100"), 0)


def test_hardware_is_a_name_a_path_or_a_value(tmp_path: Path) -> None:
    h100 = find_hardware("h100")
    path = tmp_path / "own.toml"
    save_hardware(dataclasses.replace(h100, name="own"), path)
    assert find_hardware(h100) is h100
    assert find_hardware(path).name == find_hardware(str(path)).name == "own"
    assert find_cluster(h100) == find_cluster("h100") == Cluster(h100)
    assert find_cluster(path).hardware == find_hardware(path)
    assert find_cluster(Cluster(h100, 3)).ranks == 24
    with pytest.raises(AutoparError, match="Cannot read the hardware of"):
        find_hardware(tmp_path / "missing.toml")

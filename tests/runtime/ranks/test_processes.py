"""What ranks agree on."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar import _torch
from autopar.errors import AutoparError, MeshError, SearchError
from autopar.ir import Mesh, Plan
from autopar.runtime.ranks.processes import Seat, agreed, join_process_group, why_not_together
from autopar.runtime.ranks.world import World
from tests.runtime.gloo_ranks import Ranks
from tests.support.accelerators import seeming_accelerators

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    two = Ranks(2)
    yield two
    two.stop()


def _fails(kind: type[Exception]) -> tuple[str, str]:
    """What a rank is told where the first one fails to plan."""

    def make() -> Plan:
        raise kind("no plan")

    try:
        agreed(make)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("kind", [SearchError, AutoparError])
def test_an_error_for_people_is_the_same_on_every_rank(ranks: Ranks, kind: type[Exception]) -> None:
    assert ranks.run(_fails, kind) == [(kind.__name__, "no plan")] * 2


def test_no_rank_waits_for_a_first_one_that_fails_by_a_mistake_of_ours(ranks: Ranks) -> None:
    first, second = ranks.run(_fails, StopIteration)
    assert first == ("StopIteration", "no plan")
    assert second == ("AutoparError", "Planning failed on rank 0: StopIteration: no plan")


def _seated(devices: tuple[str, str], identities: tuple[str, str]) -> tuple[list[str], str]:
    """The device that a rank takes of a machine with two, and the error that it meets."""
    rank = dist.get_rank()
    with (
        seeming_accelerators(2) as taken,
        mock.patch.object(_torch, "uses_own_backend", lambda device: True),
        mock.patch.object(_torch, "identity_of", lambda device: identities[rank]),
    ):
        try:
            join_process_group(torch.device(devices[rank]))
        except MeshError as error:
            return taken, str(error)
    return taken, ""


def test_ranks_that_share_a_device_are_refused_on_all_ranks_alike(ranks: Ranks) -> None:
    (first, one), (second, other) = ranks.run(_seated, ("cuda:0", "cuda:0"), ("GPU-a", "GPU-a"))
    assert (first, second) == (["cuda:0"], ["cuda:0"]) and one == other
    assert "Ranks 0 and 1 compute on one device, cuda:0 of " in one
    assert 'torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))' in one


def test_ranks_with_devices_of_their_own_are_not(ranks: Ranks) -> None:
    found = ranks.run(_seated, ("xpu:0", "xpu:1"), ("GPU-a", "GPU-b"))
    assert found == [(["xpu:0"], ""), (["xpu:1"], "")]


def test_ranks_on_devices_of_two_kinds_are_refused_on_all_ranks_alike(ranks: Ranks) -> None:
    found = ranks.run(_seated, ("mtia:0", "cpu"), ("GPU-a", ""))
    assert [taken for taken, _ in found] == [["mtia:0"], []]
    assert len({error for _, error in found}) == 1
    assert "Rank 0 computes on mtia:0 of " in found[0][1] and "and rank 1 on cpu of " in found[0][1]


def test_more_ranks_than_devices_are_told_how_many_to_start() -> None:
    seats = [Seat("cuda:0", "node0", "node0 GPU-a", 1)] * 2
    assert why_not_together(seats) == (
        "Ranks 0 and 1 compute on one device, cuda:0 of node0, but each rank needs a device of its own. 2 ranks run "
        "on this machine, which has 1 cuda device: start 1 (--nproc-per-node 1), or pass device='cpu' to train on "
        "processors."
    )
    apart = [Seat("cuda:0", f"node{i}", f"node{i} GPU-{i}", 1) for i in range(2)]
    assert why_not_together(apart) == ""
    assert why_not_together([Seat("cpu", "node0", "", 0)] * 4) == ""


def agreed_number() -> int:
    """What the ranks agree on where a tensor on their device has no values."""
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return World(Mesh((("dp", 2),)), torch.device("meta"), device_mesh).agree(5 + dist.get_rank())


def test_ranks_agree_on_a_number_without_their_devices(ranks: Ranks) -> None:
    """So no host waits until its device has done all it was given, as it would to read a number there."""
    assert ranks.run(agreed_number) == [5, 5]


@pytest.mark.parametrize(("size", "milliseconds"), [("0", "1000"), ("2000", None)])
def test_ranks_end_soon_unless_a_flight_recorder_is_to_be_written(
    monkeypatch: pytest.MonkeyPatch, size: str, milliseconds: str | None
) -> None:
    environment = {"WORLD_SIZE": "2", "RANK": "0", "TORCH_FR_BUFFER_SIZE": size}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # So that what is set here goes with the test.
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1")
    monkeypatch.delenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
    with mock.patch.object(dist, "init_process_group") as made:
        join_process_group(torch.device("cpu"))
    assert made.called and os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC") == milliseconds

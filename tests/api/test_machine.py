"""The device that a rank computes on: which one is taken, and what is asked of torch for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.api.machine import device_of, hardware_of, words_of_device
from autopar.cost_model import find_cluster
from autopar.cost_model.machines.software import with_eager_runs
from autopar.errors import AutoparError
from autopar.runtime.model.module import CompiledModule
from tests.support.accelerators import first_script, seeming_accelerators


def model_on(device: str) -> nn.Module:
    return nn.Linear(2, 2, device=device)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the second of two ranks of a machine."""
    for name, value in (("LOCAL_RANK", "1"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)


@pytest.fixture
def ended() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Stepped(Exception):
    """A script has come to its first step."""


@pytest.mark.usefixtures("launched", "ended")
def test_the_first_script_asks_for_the_accelerator_of_its_rank_and_nccl() -> None:
    join, asked, reached = dist.init_process_group, list[Any](), list[CompiledModule]()

    def joined(backend: str) -> None:
        asked.append(backend)
        join("fake", store=FakeStore(), rank=1, world_size=2)

    def step(module: CompiledModule, *batch: Any) -> None:
        reached.append(module)
        raise Stepped

    with (
        seeming_accelerators(2) as taken,
        mock.patch.object(dist, "init_process_group", joined),
        mock.patch.object(CompiledModule, "step", step),
        pytest.raises(Stepped),
    ):
        exec(first_script(), {})
    assert (asked, taken) == (["cpu:gloo,cuda:nccl"], ["cuda:1"])
    settings = reached[0]._settings
    assert settings.device == torch.device("cuda:1")
    assert settings.device_mesh is not None and settings.device_mesh.device_type == "cuda"
    # The parameters go there with the first step, one by one.
    assert {p.to_local().device.type for p in reached[0].parameters()} == {"cpu"}


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("lies", ["cpu", "meta"])
def test_under_a_launcher_a_rank_takes_the_accelerator_of_its_number(lies: str) -> None:
    with seeming_accelerators(4):
        assert device_of(model_on(lies), None, None) == torch.device("cuda:1")
        assert device_of(model_on(lies), None, "cuda") == torch.device("cuda:1")
        assert device_of(model_on(lies), None, "cpu") == torch.device("cpu")
        # As accelerate names it.
        assert device_of(model_on(lies), None, "cpu:0") == torch.device("cpu")
    with seeming_accelerators(4, current=3):  # the script has set it
        assert device_of(model_on(lies), None, None) == torch.device("cuda:3")
    with seeming_accelerators(1):  # of its own, where each process sees one
        assert device_of(model_on(lies), None, None) == torch.device("cuda:0")


def test_without_a_launcher_a_model_stays_and_the_start_line_says_so() -> None:
    with seeming_accelerators(1):
        assert device_of(model_on("cpu"), None, None) == torch.device("cpu")
        expected = "on cpu, although an accelerator is idle; device='cuda' uses it"
        assert words_of_device(torch.device("cpu")) == expected
        assert words_of_device(torch.device("cuda:0")) == "on cuda:0"
    assert words_of_device(torch.device("cpu")) == "on cpu"


@pytest.mark.usefixtures("launched", "ended")
def test_a_process_group_or_a_mesh_of_processors_keeps_the_model_there() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    with seeming_accelerators(2):
        assert device_of(model_on("cpu"), None, None) == torch.device("cpu")
        with mock.patch.object(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl"):
            assert device_of(model_on("cpu"), None, None) == torch.device("cuda:1")
            assert device_of(model_on("cpu"), mesh, None) == torch.device("cpu")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(AutoparError, match=r"device='cuda' is not there: torch \S+ finds 0"):
        device_of(model_on("cpu"), None, "cuda")
    with seeming_accelerators(2), pytest.raises(AutoparError, match="finds 2 devices of the kind"):
        device_of(model_on("cpu"), None, "cuda:2")


def test_the_machine_may_have_several_kinds() -> None:
    found, notes = hardware_of("h100x8+a100x8", torch.device("cuda"))
    assert found == with_eager_runs(find_cluster("h100x8+a100x8")).hardware and not notes
    assert [each.name for each, _ in found.kinds] == ["h100", "a100"]


def test_a_model_on_several_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = [torch.nn.Parameter(torch.empty(0)), mock.Mock(is_meta=False, device="cuda:0")]
    with (
        mock.patch.object(model, "parameters", lambda: iter(parameters)),
        pytest.raises(AutoparError, match=r"several devices \(cpu, cuda:0\); move it to one"),
    ):
        device_of(model, None, None)

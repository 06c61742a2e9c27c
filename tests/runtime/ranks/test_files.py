"""Parameters in files: training is exact, states lie in files too, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_model import CPU_GLOO
from autopar.pipeline.composed import step_of, stored_bytes
from autopar.planning.planning import policy_of, prepare_step
from autopar.runtime.ranks.files import Files
from autopar.runtime.ranks.tiers import Tiers
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make, mean_square
from tests.runtime.ranks.test_tiers import LAYERS, PARAMETERS, ROWS, WIDTH, network
from tests.runtime.training import compiled, difference, distance_from_one_process, single
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

NVME = "zero-infinity-nvme"


@pytest.mark.parametrize("options", [{"steps": 10}, {"micro_batches": 2, "recompute": "full"}], ids=str)
def test_training_equals_one_process(two_ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    assert distance_from_one_process(two_ranks, NVME, nvme=str(tmp_path), **options) < 1e-9
    assert not list(tmp_path.iterdir())


def test_one_device_without_process_groups(tmp_path: Path) -> None:
    assert difference(compiled("gpt", {"dp": 1}, NVME, nvme=tmp_path), single("gpt")) < 1e-9


@captured_once()
def measured(folder: str, precision: str | None) -> dict[str, Any]:
    """What a rank kept in files and moved in one step after the first, and what was priced."""
    model = network()
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    made = autopar.compile(
        model, loss_fn=mean_square, mesh={"dp": 2}, recipe=NVME, nvme=folder, micro_batches=1, precision=precision
    )
    optimizer = torch.optim.AdamW(made.parameters())
    made.step(*batch)
    optimizer.step()
    optimizer.zero_grad()
    (ready,) = made._kept.ready[True]
    tiers: Tiers = ready.bound._runner.world.tiers
    before = dict(tiers.moved_bytes)
    made.step(*batch)
    gc.collect()
    graph = prepare_step(network(), batch, loss_fn=mean_square, precision=policy_of(precision)).analysis.graph
    to_move: dict[Any, float] = {}
    for i in step_of(graph, made.plan, CPU_GLOO).items:
        if i.resource in ("host", "nvme"):
            key = i.resource, i.kind
            to_move[key] = to_move.get(key, 0.0) + float(i.count * i.traffic_bytes)
    return {
        "kept": tiers.live_bytes["nvme"],
        "priced": stored_bytes(graph, made.plan, CPU_GLOO, "nvme"),
        "moved": {key: tiers.moved_bytes[key] - before.get(key, 0) for key in to_move},
        "to move": to_move,
        "files": os.listdir(folder),
    }


@pytest.mark.parametrize("precision", [None, "bf16 reduce=bf16"])
def test_bytes_kept_and_moved_are_those_of_the_price(two_ranks: Ranks, tmp_path: Path, precision: str | None) -> None:
    """Files keep parameter, gradient and two moments in float32, 16 bytes over the ranks.

    A step reads 4 bytes of each parameter and writes 4 of its gradient. On the host they are cast, and from there they
    go to the device for each use: all in forward, in backward the weights but the first.
    """
    size = 4 if precision is None else 2
    down = PARAMETERS + (LAYERS - 1) * WIDTH * WIDTH
    for found in two_ranks.run(measured, str(tmp_path), precision):
        assert found["kept"] == found["priced"] == 16 * PARAMETERS / 2
        assert found["moved"] == found["to move"]
        assert found["moved"] == {
            ("nvme", "to_host"): 4 * PARAMETERS / 2,
            ("nvme", "from_host"): 4 * PARAMETERS / 2,
            ("host", "to_device"): size * down / 2,
            ("host", "from_device"): size * PARAMETERS / 2,
        }
        assert not found["files"], "a file has a name for a moment alone"


def test_a_checkpoint_goes_on_from_and_into_files(two_ranks: Ranks, tmp_path: Path) -> None:
    ways = [("zero3", "zero3"), (NVME, "zero3"), ("zero3", NVME)]
    found = [two_ranks.run(_resumed, str(tmp_path / str(n)), str(tmp_path), *way)[0] for n, way in enumerate(ways)]
    assert all(losses == pytest.approx(found[0], rel=1e-12) for losses in found)


@captured_once()
def _resumed(folder: str, nvme: str, first: str, then: str) -> list[float]:
    """Losses of two steps under one recipe, and of two more under another from its checkpoint."""
    losses = []
    for recipe in (first, then):
        torch.manual_seed(0)
        model, batch, _ = make("mlp")
        made = autopar.compile(
            model, loss_fn=mean_square, mesh={"dp": 2}, recipe=recipe, example_inputs=batch, nvme=nvme
        )
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        if losses:
            autopar.checkpoint.load_checkpoint(folder, made, optimizer)
        for _ in range(2):
            losses.append(made.step(*batch).item())
            optimizer.step()
            optimizer.zero_grad()
        autopar.checkpoint.save_checkpoint(folder, made, optimizer)
    return losses


def made_on_one_rank(**options: Any) -> autopar.CompiledModule:
    model, batch, _ = make("mlp")
    return autopar.compile(model, loss_fn=mean_square, mesh={"dp": 1}, recipe=NVME, example_inputs=batch, **options)


def test_a_plan_with_files_asks_for_a_folder() -> None:
    with pytest.raises(autopar.AutoparError, match=r"no folder was named.*nvme='/path"):
        made_on_one_rank()


@pytest.mark.parametrize("folder", ["", 7])
def test_what_names_no_folder_is_refused(folder: Any) -> None:
    with pytest.raises(autopar.AutoparError, match=f"nvme={folder!r} does not name a folder; give a path"):
        made_on_one_rank(nvme=folder)


def test_a_folder_that_the_plan_does_not_use_is_a_warning(tmp_path: Path) -> None:
    model, batch, _ = make("mlp")
    with pytest.warns(UserWarning, match=r"is not used: the plan \(recipe zero3\) keeps no"):
        autopar.compile(model, loss_fn=mean_square, mesh={"dp": 1}, recipe="zero3", example_inputs=batch, nvme=tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(autopar.AutoparError, match=r"'.*/nowhere' is not a folder"):
        made_on_one_rank(nvme=tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written_to_is_found_before_training() -> None:
    with pytest.raises(autopar.AutoparError, match=r"Cannot keep 1 bytes in a file of /proc: "):
        made_on_one_rank(nvme="/proc")


def test_a_full_disk_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 0, 1000))
    with pytest.raises(
        autopar.AutoparError, match=r"keeps .* in files of every rank.* 1 rank, .* together, and has 1.00 kB free"
    ):
        made_on_one_rank(nvme=tmp_path)
    assert not list(tmp_path.iterdir())


def test_one_rank_without_a_folder_is_an_error_on_all(two_ranks: Ranks, tmp_path: Path) -> None:
    messages = two_ranks.run(_refused, str(tmp_path))
    assert all("is not a folder" in message for message in messages)


@captured_once()
def _refused(folder: str) -> str:
    rank = torch.distributed.get_rank()
    with pytest.raises(autopar.AutoparError) as found:
        compiled("mlp", {"dp": 2}, NVME, nvme=folder if rank == 0 else f"{folder}/nowhere")
    return str(found.value)


def test_no_room_for_a_tensor_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(autopar.AutoparError, match=r"Cannot keep 4.*kB .*No space left on device"):
        Files(tmp_path).empty(torch.Size([1000]), torch.float32)
    assert not list(tmp_path.iterdir())


def test_bytes_in_files_are_counted_for_as_long_as_they_live(tmp_path: Path) -> None:
    tiers = Tiers(torch.device("cpu"), Files(tmp_path))
    kept = nn.Parameter(tiers.keep(torch.arange(8.0), "nvme"))
    assert tiers.live_bytes["nvme"] == 32 and kept.equal(torch.arange(8.0))
    near = tiers.to_host(kept, "nvme")
    assert near.equal(kept) and near.data_ptr() != kept.data_ptr()
    del kept
    gc.collect()
    assert dict(tiers.live_bytes) == {"nvme": 0, "host": 32}

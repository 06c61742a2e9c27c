"""A rank that dies in mid-step: the others end with an error that says so, and do not hang."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from tests.runtime.gloo_ranks import CONTEXT, join
from tests.runtime.models import mean_square

pytestmark = pytest.mark.multiprocess

RANKS = 3
BOUND_SECONDS = 30  # to notice; Gloo notices a closed connection at once
HANG_SECONDS = 4.0  # that a rank waits for one that hangs


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(10 * BOUND_SECONDS)


def work(rank: int, folder: str, recipe: str, accident: Callable[[], None], timeout_seconds: float) -> None:
    join(rank, RANKS, f"{folder}/store")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
    batch = (torch.randn(6, 12), torch.randn(6, 12))
    made = autopar.compile(
        model,
        loss_fn=mean_square,
        mesh={"dp": RANKS},
        recipe=recipe,
        example_inputs=batch,
        timeout_seconds=timeout_seconds,
    )
    made.step(*batch)
    if rank == 1:
        (ready,) = made._kept.ready[True]
        leaf = ready.bound._runner.leaves[2]
        leaf.register_hook(lambda grad: accident())
    try:
        made.step(*batch)
    except autopar.PeerError as error:
        Path(folder, f"error{rank}").write_text("\n".join([str(error), *error.__notes__]))
        os._exit(3)
    os._exit(0)


@pytest.mark.parametrize(
    ("recipe", "accident", "timeout_seconds"),
    [
        pytest.param("ddp", die, 60, id="ddp", marks=pytest.mark.slow),
        pytest.param("zero3", die, 60, id="zero3"),
        pytest.param("tp", die, 60, id="tp"),  # whose collectives are ops of the graph
        pytest.param("ddp", hang, HANG_SECONDS, id="hang"),
    ],
)
def test_the_others_end_with_an_error(
    tmp_path: Path, recipe: str, accident: Callable[[], None], timeout_seconds: float
) -> None:
    run_all(work, tmp_path, recipe, accident, timeout_seconds)
    for rank in (0, 2):
        message = (tmp_path / f"error{rank}").read_text()
        assert message.startswith("Step 2 broke in ")
        assert f"over axis 'dp' of dp={RANKS} on rank {rank}: another rank of that axis died" in message
        assert re.search(r"waited in Step 2: \w+ over axis 'dp' of dp=3", message), message
        # The collectives of tp in backward are those of autograd, which knows no op.
        assert ("\nfor:    the " in message) == (recipe != "tp")
    # A rank does not wait long for others to say where they are; the last one knows of all.
    said = [(tmp_path / f"error{rank}").read_text() for rank in (0, 2)]
    assert any("Rank 1 says nothing: it died, hangs, or computes" in each for each in said)


def run_all(target: Callable[..., None], folder: Path, *args: object) -> None:
    """Runs all ranks, of which the one in the middle has an accident and the others find out in time."""
    processes = [CONTEXT.Process(target=target, args=(rank, str(folder), *args)) for rank in range(RANKS)]
    try:
        for process in processes:
            process.start()
        processes[0].join(60)
        begin_seconds = time.monotonic()
        processes[2].join(BOUND_SECONDS)
        assert time.monotonic() - begin_seconds < BOUND_SECONDS
        assert [processes[rank].exitcode for rank in (0, 2)] == [3, 3]
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def as_replicas(rank: int, folder: str, accident: Callable[[], None]) -> None:
    join(rank, RANKS, f"{folder}/store")
    torch.manual_seed(0)
    model = nn.Linear(12, 12)
    batch = (torch.randn(6, 12), torch.randn(6, 12))
    made = autopar.compile(
        model,
        loss_fn=mean_square,
        mesh={"dp": RANKS},
        recipe="local:2",
        example_inputs=batch,
        timeout_seconds=HANG_SECONDS,
    )
    made.step(*batch)
    made.step(*batch)
    if rank == 1:
        accident()
    try:
        made.step(*batch)
    except autopar.PeerError as error:
        Path(folder, f"error{rank}").write_text(str(error))
        os._exit(3)
    os._exit(0)


@pytest.mark.parametrize("accident", [pytest.param(die, marks=pytest.mark.slow), hang])
def test_replicas_do_not_wait_forever(tmp_path: Path, accident: Callable[[], None]) -> None:
    run_all(as_replicas, tmp_path, accident)
    for rank in (0, 2):
        message = (tmp_path / f"error{rank}").read_text()
        assert message.startswith(
            f"The meeting of 3 replicas after 2 steps broke in all_reduce over axis 'dp' of dp=3 on rank {rank}: "
        )


def in_stages(rank: int, folder: str, accident: Callable[[], None]) -> None:
    join(rank, RANKS, f"{folder}/store")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(6)))
    batch = (torch.randn(6, 12), torch.randn(6, 12))
    made = autopar.compile(
        model,
        loss_fn=mean_square,
        mesh={"pp": RANKS},
        recipe="1f1b",
        micro_batches=3,
        example_inputs=batch,
        timeout_seconds=HANG_SECONDS if accident is hang else 15,
    )
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made.step(*batch)
    optimizer.step()
    save_checkpoint(f"{folder}/good", made, optimizer, steps=1)
    if rank == 1:
        (ready,) = made._kept.ready[True]
        (runner,) = ready.bound.runners.values()
        runner.leaves[0].register_hook(lambda grad: accident())
    try:
        made.step(*batch)
    except autopar.PeerError as error:
        Path(folder, f"error{rank}").write_text(str(error))
        os._exit(3)
    os._exit(0)


@pytest.mark.parametrize("accident", [die, hang])
def test_a_stage_is_lost(tmp_path: Path, accident: Callable[[], None]) -> None:
    run_all(in_stages, tmp_path, accident)
    for rank in (0, 2):
        message = (tmp_path / f"error{rank}").read_text()
        assert message.startswith("Step 2 broke in send or receive over axis 'pp'")
    alone = nn.Sequential(*(nn.Linear(12, 12) for _ in range(6)))
    assert load_checkpoint(tmp_path / "good", alone) == {"steps": 1}

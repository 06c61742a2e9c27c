"""Where the search decides whether anything is split, it knows what a message takes between the ranks of this run."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.api import machine
from autopar.api.machine import hardware_of, measured_hardware
from autopar.calibrate import at_start
from autopar.calibrate.at_start import kept_text, measured_at_start
from autopar.cost_model import CPU_GLOO, Hardware
from autopar.ir.note import kind_of
from autopar.planning.cache_files import read_cached, write_cached
from tests.runtime.gloo_ranks import Ranks, equal_on_all, kept_ranks

BATCH = (torch.ones(8, 4), torch.ones(8, 4))


def measured(folder: Path) -> tuple[Hardware, bool, str]:
    """The figures of a start, whether a second one finds them, and the note."""
    start = time.perf_counter()
    state = torch.get_rng_state()
    found, (note,) = measured_hardware(CPU_GLOO, folder)
    assert torch.equal(state, torch.get_rng_state()), "a model that is made next has the weights of its seed"
    assert time.perf_counter() - start < 30, "a second, on a machine that does nothing else"
    return found, measured_at_start(CPU_GLOO, folder) is found, note


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    yield from kept_ranks(2)


@pytest.mark.multiprocess
def test_all_ranks_have_the_times_of_this_machine_and_the_next_start_has_them_too(ranks: Ranks, tmp_path: Path) -> None:
    found, is_kept, note = equal_on_all(ranks.run(measured, tmp_path))
    assert is_kept and "for a message" in note
    assert found.source("launch_seconds").kind == found.source("inside_node.latency_seconds").kind == "measured"
    assert found.host_seconds == found.launch_seconds > 2e-6, "no op is priced below what Python takes to issue it"
    slower = [theirs / ours for (_, ours), (_, theirs) in zip(found.peak_flops, CPU_GLOO.peak_flops, strict=True)]
    assert slower == pytest.approx([slower[0]] * len(slower), rel=0.1) and slower[0] > 0.1
    (file,) = tmp_path.iterdir()
    write_cached(read_cached(file).replace(f"{found.launch_seconds}", "0.25"), file)
    ranks.stop()
    assert {each.launch_seconds for each, _, _ in ranks.run(measured, tmp_path)} == {0.25}
    file.rename(file.with_name("cpu-gloo-2.toml"))  # as an earlier autopar called it, which measured less
    ranks.stop()
    assert 0.25 not in {each.launch_seconds for each, _, _ in ranks.run(measured, tmp_path)}


def test_times_that_another_user_could_have_written_or_that_are_damaged_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "cpu.toml"
    assert kept_text(file) is None
    write_cached("x = 1", file)
    assert kept_text(file) == "x = 1"
    file.chmod(0o664)
    assert kept_text(file) is None
    file.chmod(0o644)
    for damaged in (file.read_bytes().replace(b"1", b"3", 1), b"\xff"):
        file.write_bytes(damaged)
        assert kept_text(file) is None


def test_one_process_is_measured_once_for_a_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_start, "_found", weakref.WeakKeyDictionary())
    guessed, _ = hardware_of(None, torch.device("cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found, (note,) = measured_hardware(guessed, None)
    assert measured_at_start(guessed, None) is found
    assert "for an op" in note and "for a message" not in note and kind_of(note) != "guess"
    assert found.step_seconds > found.host_seconds == found.launch_seconds > found.update_seconds / 2 > 0
    assert found.inside_node == guessed.inside_node, "one process sends nothing"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert measured_at_start(guessed, None) is not found


def test_an_open_start_on_processors_is_priced_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """So one process is; hardware that is named is not, nor a recipe, whose plan would differ from start to start."""
    slow = replace(CPU_GLOO, host_seconds=1.0, launch_seconds=1.0, update_seconds=3.0, step_seconds=50.0)
    monkeypatch.setattr(machine, "measured_at_start", lambda hardware, folder: slow)
    made = autopar.compile(nn.Linear(4, 4), loss_fn=torch.nn.functional.mse_loss, example_inputs=BATCH)
    seconds = made.explain().step_seconds  # type: ignore[attr-defined]
    updates = 2 * 10 * 3.0  # two parameters, ten ops of AdamW each
    linear, loss, mean, sums = 1 + 2, 1 + 1, 1 + 1, 2  # forward and backward; a sum of gradients for each parameter
    assert seconds == pytest.approx(50 + updates + linear + loss + mean + sums, rel=1e-6)
    for options in ({"hardware": "cpu-gloo"}, {"recipe": "ddp"}):
        named = autopar.compile(nn.Linear(4, 4), loss_fn=torch.nn.functional.mse_loss, example_inputs=BATCH, **options)
        assert named.explain().step_seconds < 1  # type: ignore[attr-defined]

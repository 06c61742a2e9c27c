"""Captures that the processes of a test session share: one captures, and the others take what it has stored."""

import multiprocessing
import time

import pytest

from tests.support import shared_captures
from tests.support.shared_captures import SharedCaptures


@pytest.fixture
def shared(starts, tmp_path):
    """Starts that ask a shared folder."""
    folder = tmp_path / "shared"
    folder.mkdir()
    starts.stored = SharedCaptures(folder)
    return starts


def test_the_second_process_to_ask_takes_the_capture_of_the_first_as_its_own(shared):
    first, second = shared.start(), shared.start()
    assert shared.count == 1 and first.fingerprint == second.fingerprint
    assert not first.is_stored and not second.is_stored


def test_processes_that_ask_at_once_wait_for_one(shared):
    """Forks, which have the files of the script from their parent."""
    context = multiprocessing.get_context("fork")
    counts = context.Queue()

    def ask():
        time.sleep(0.1)  # until all have started
        shared.start()
        counts.put(shared.count)

    processes = [context.Process(target=ask) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted(counts.get(timeout=60) for _ in processes) == [0, 0, 1]
    for process in processes:
        process.join(10)


def test_nobody_waits_for_what_cannot_be_stored(shared, monkeypatch):
    shared.edit("helper", "return x + LIST[0]", "open\n    return x + LIST[0]")
    shared.start()
    monkeypatch.setattr(shared_captures, "_lock", never)
    shared.start()
    assert shared.count == 2


def test_a_process_that_has_waited_too_long_captures_by_itself(shared, monkeypatch):
    monkeypatch.setattr(shared_captures, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(shared_captures.fcntl, "flock", of_another)
    shared.start()
    assert shared.count == 1


def never(file):
    raise AssertionError("a process waits")


def of_another(file, operation):
    raise BlockingIOError

"""What a person sees of ranks that fail under torchrun."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar.errors import PeerError, StepError
from autopar.runtime.failures import failures
from benchmarks.wrong_inputs.cases import CASES, Case, Door
from benchmarks.wrong_inputs.run import met
from tests.support.launched import ROWS, Screen, launch

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

import autopar

def train():
    model = autopar.compile(nn.Linear(8, 8), loss_fn=nn.functional.mse_loss, mesh={"dp": 2}, recipe="ddp")
    FAILS

train()
"""


def shown(folder: Path, fails: str) -> tuple[str, str]:
    """What the ranks print, and torchrun's summary."""
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("FAILS", fails))
    screen = launch(script, ranks=2, timeout_seconds=120)
    assert screen.exit_code == 1, screen.text
    ranks, _, rest = screen.text.partition("torch/distributed/elastic/multiprocessing/api.py")
    return ranks, rest.partition("ChildFailedError")[2]


@pytest.mark.multiprocess
def test_one_rank_says_what_all_know(tmp_path: Path) -> None:
    ranks, summary = shown(tmp_path, "model.step(torch.ones(4, 8), torch.ones(4, 8), 1, 2, 3)")
    assert len(re.findall(r"^\[rank \d\] ", ranks, re.M)) == 1, ranks
    assert len(ranks.splitlines()) < ROWS, ranks
    assert "script.py:10, in train: model.step(" in ranks and "script.py:10" in summary
    whole = Path(re.search(r"all frames: (\S+)", ranks)[1])  # type: ignore[index]
    assert "Traceback (most recent call last)" in whole.read_text()


@pytest.mark.multiprocess
def test_the_rank_that_knows_the_cause_speaks(tmp_path: Path) -> None:
    """Rank 0 only loses its peer, and torchrun takes rank 1's error for the root cause."""
    ranks, summary = shown(
        tmp_path,
        "model.step(torch.ones(4, 8), torch.ones(4, 8)); print(1 / (1 - dist.get_rank())); "
        "model.step(torch.ones(4, 8), torch.ones(4, 8))",
    )
    assert "[rank 1] ZeroDivisionError: division by zero" in ranks and "[rank 0]" not in ranks
    assert "ZeroDivisionError" in summary.partition("Root Cause")[2]


def given(name: str, door: Door) -> tuple[Case, Screen]:
    """A wrong input of the page benchmarks/results/wrong_inputs.md."""
    (case,) = (case for case in CASES if case.name == name)
    row = met(case, door)
    return case, row.screen


def torchrun_was_first(screen: Screen) -> bool:
    """Whether torchrun ended a rank before it could say that it had lost the killed one.

    torchrun looks ten times a second, and on a busy machine a rank may still be at its batch then.
    """
    return "exitcode  : -15" in screen.text and "[rank" not in screen.text


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "door"),
    [
        ("a rank that is killed", "backend"),
        pytest.param("a rank with another batch shape", "backend", marks=pytest.mark.slow),
        pytest.param("Ctrl-C", "compile", marks=pytest.mark.slow),
        pytest.param("a mesh of four ranks, where two run", "backend", marks=pytest.mark.slow),
        pytest.param("an input of the wrong shape", "compile", marks=pytest.mark.slow),
        pytest.param("an input of the wrong shape", "backend", marks=pytest.mark.slow),
    ],
)
def test_the_first_screen_holds_cause_and_remedy(name: str, door: Door) -> None:
    for _ in range(3):
        case, screen = given(name, door)
        if not torchrun_was_first(screen):
            break
    assert re.search(case.cause, screen.first), screen.text
    assert re.search(case.remedy, screen.first), screen.text
    assert screen.exit_code not in (0, None)


def test_without_torchrun_nothing_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    before = sys.excepthook
    failures.show_failures()
    assert sys.excepthook is before


@pytest.fixture
def error_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that torchrun would name, and no hook."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    return tmp_path / "error.json"


def test_it_is_hooked_once(error_file: Path) -> None:
    failures.show_failures()
    first = sys.excepthook
    failures.show_failures()
    assert sys.excepthook is first is not sys.__excepthook__


def test_the_file_holds_the_text_of_the_screen(error_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures.show_failures()
    error = ValueError("wrong")
    error.add_note("where:  here")
    sys.excepthook(ValueError, error, None)
    printed = capsys.readouterr().err
    message = json.loads(error_file.read_text())["message"]["message"]
    assert printed == f"[rank 0] {message}\n"
    assert message.startswith("ValueError: wrong\n  where:  here\n  all frames: ")


def test_a_handler_that_python_did_not_install_stays(error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python knows such a handler as None, and cannot install it again."""
    failures.show_failures()
    replaced: list[object] = []
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: replaced.append(handler))
    sys.excepthook(ValueError, ValueError("wrong"), None)
    assert replaced == [] and "ValueError: wrong" in error_file.read_text()


def test_a_long_message_is_cut_to_a_screen() -> None:
    (text,) = failures.screen(ValueError("\n".join(str(i) * 300 for i in range(100))))
    lines = text.splitlines()
    assert len(lines) < ROWS and lines[-1] == "  ..." and max(map(len, lines)) <= 640


def test_own_frames_are_told_from_those_of_autopar() -> None:
    try:
        raise ValueError("here")
    except ValueError as error:
        line = failures.screen(error)[-1]
    assert line.endswith('raise ValueError("here")')


def test_a_lost_peer_is_no_cause() -> None:
    lost = [
        PeerError("all_reduce broke", collective="all_reduce", group="0"),
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
        dist.DistNetworkError("no store"),
    ]
    known = [ValueError("x"), RuntimeError("mat1 and mat2 shapes cannot be multiplied")]
    assert all(map(failures._lost_peer, lost)) and not any(map(failures._lost_peer, known))


class Store(dict):  # type: ignore[type-arg]
    """The calls of a key-value store that ranks report through."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self.looks = getattr(self, "looks", 0) + len(keys)
        return all(key in self for key in keys)

    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return int(self[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.setdefault(key, desired.encode())  # type: ignore[no-any-return]


def reports(knows: dict[int, bool], size: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The speaker that each rank finds, where the ranks fail one after the other, the last first."""
    for name in ("_PATIENCE_SECONDS", "_LONG_PATIENCE_SECONDS"):
        monkeypatch.setattr(failures, name, 0.05)
    store, found = Store(), []
    for rank in sorted(knows, reverse=True):
        each = failures._Reports(rank, size, store)  # type: ignore[arg-type]
        speaker = failures._speaker(each.exchange(knows=knows[rank]))
        found.append(each.settled(speaker, knows=knows[rank]))
    return found


def test_ranks_that_fail_late_leave_the_word_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 2, 1 and 0 come one after the other, each when the patience of the one before is over."""
    assert reports({0: False, 1: False, 2: True}, 4, monkeypatch) == [2, 2, 2]
    assert reports({0: True, 1: False, 2: True}, 4, monkeypatch) == [2, 2, 2]
    assert reports({0: True, 3: False}, 4, monkeypatch) == [3, 0]
    assert reports({1: False, 3: False}, 4, monkeypatch) == [3, 3]


def test_a_rank_knows_whether_its_error_is_that_of_the_speaker() -> None:
    store = Store()
    first, second = (failures._Reports(rank, 2, store) for rank in (0, 1))  # type: ignore[arg-type]
    assert second.headline(0) == ""
    first.exchange(knows=True, headline="MeshError: 8 ranks")
    assert second.exchange(knows=True, headline="MeshError: 8 ranks") == {0: True, 1: True}
    assert second.headline(0) == "MeshError: 8 ranks"


def test_a_look_for_reports_is_for_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that knows no cause looks every 20 ms, for 0.1 s, and 1,024 ranks are silent."""
    monkeypatch.setattr(failures, "_LONG_PATIENCE_SECONDS", 0.1)
    store = Store()
    failures._Reports(0, 1024, store).exchange(knows=False)  # type: ignore[arg-type]
    assert store.looks <= 8


def test_of_ranks_that_report_in_time_the_lowest_that_knows_speaks() -> None:
    assert failures._speaker({0: False, 1: True, 2: True}) == 1
    assert failures._speaker({1: False, 3: False}) == 1


def test_silent_ranks_are_named_where_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    (line,) = failures._silent({0: False, 2: False}, knows=False)
    assert line.startswith("  ranks [1, 3] report no error: killed")
    assert not failures._silent({0: True}, knows=True)


def test_a_signal_waits_for_the_report() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with failures._finishing():
            signal.raise_signal(signal.SIGTERM)
            assert not seen
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_beside_a_wait_that_ends_well_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between two looks, of which the second finds everybody: nobody raises an error that tells of it."""
    sent: list[int] = []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/null")
    monkeypatch.setattr(failures.os, "kill", lambda _, number: sent.append(number))
    with pytest.raises(PeerError), failures.told_to_end():
        signal.raise_signal(signal.SIGTERM)
        raise PeerError("The wait is in vain.", collective="", group="")
    assert not sent
    with failures.told_to_end() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals == [signal.SIGTERM] and not sent
    assert sent == [signal.SIGTERM]


WAITS = """
import datetime, os, signal, sys, threading
import torch.distributed as dist
from autopar.runtime.ranks.comparison import Comparison

os.environ["TORCHELASTIC_ERROR_FILE"] = "/dev/null"
store = dist.HashStore()
store.set("1/0", "here")
found = Comparison(timeout_seconds=60.0, ranks=[0, 1])
timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
timer.start()
try:
    found._wait(store, {0: "1/0", 1: "1/1"}, "The batch is new.", "Give all the same.")
except Exception as error:
    print(type(error).__name__, error)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


def test_a_rank_that_waits_says_so_when_torchrun_ends_it() -> None:
    """Another rank was killed before it came; torchrun then ends those who wait for it."""
    ended = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("PeerError This rank was told to end while it waited for ranks [1]")
    assert "another rank has died" in ended.stdout and "The batch is new." in ended.stdout


def test_an_error_that_names_a_part_and_the_whole_is_shown_with_what_gave_the_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "_PARTS", {})
    failures.blame_parts(64, 128, "this rank has 64 of 128 rows")
    said = failures.screen(ValueError("Expected input batch_size (64) to match target batch_size (128)."))
    assert said[1] == "  remedy: this rank has 64 of 128 rows"
    others = (ValueError("Expected 64 and got 640"), StepError("64, not 128"))
    assert [len(failures.screen(each)) for each in others] == [1, 1]


def test_a_wait_for_ranks_that_do_not_gather_a_tensor_is_shown_with_a_remedy() -> None:
    """Gloo says so where the others do something else, and after the time of the process group."""
    code = "raise RuntimeError('Application timeout caused pair closure')"
    shown = []
    for file in ("torch/distributed/tensor/_redistribute.py", "script.py"):
        with pytest.raises(RuntimeError) as raised:
            exec(compile(code, file, "exec"))
        shown.append(" ".join(failures.screen(raised.value)))
    assert ["not under `if rank == 0`" in each for each in shown] == [True, False]

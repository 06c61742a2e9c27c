"""Functions and scripts on ranks of this machine, without torchrun in the terminal."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import autopar
from autopar.cli import main
from autopar.cli.run import Life, Restarts, _cause, _is_killed, _say, _summary
from autopar.errors import AutoparError, MeshError
from autopar.runtime.failures import failures
from autopar.runtime.ranks.launch import check_processes, first_failure

pytestmark = pytest.mark.multiprocess


def trained(rate: float) -> tuple[int, float]:
    """Rank, and the second loss of a linear model by gradient descent."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    compiled = autopar.compile(model, loss_fn=torch.nn.functional.mse_loss, recipe="zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    batch = torch.arange(16.0).reshape(4, 4), torch.ones(4, 1)
    compiled.step(*batch)
    optimizer.step()
    loss = compiled.step(*batch).item()
    return dist.get_rank() if dist.is_initialized() else 0, loss


def test_a_function_runs_on_ranks_and_equals_one_process() -> None:
    (_, alone) = trained(1e-3)
    found = autopar.launch(trained, 1e-3, ranks=2)
    assert [rank for rank, _ in found] == [0, 1]
    assert [loss for _, loss in found] == pytest.approx([alone, alone], rel=1e-6)


def test_a_function_without_a_name_runs_as_a_copy_of_this_process() -> None:
    factor = torch.tensor(3)
    assert autopar.launch(lambda x: int(factor * x), 2, ranks=2) == [6, 6]


def test_the_error_of_a_rank_is_raised_here() -> None:
    def failing() -> None:
        raise ValueError("no such file: data.bin")

    expected = r"Rank \d of 2 failed: ValueError: no such file: data.bin"
    with pytest.raises(AutoparError, match=expected) as caught:
        autopar.launch(failing, ranks=2)
    assert "test_launch.py" in str(caught.value)


def test_no_ranks_are_an_error() -> None:
    with pytest.raises(MeshError, match="ranks=0: give the number of processes"):
        autopar.launch(trained, ranks=0)


def test_more_processes_than_a_machine_can_hold_are_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for starts in ("autopar.cli.run.torchrun", "autopar.calibrate.run.measure_in_processes"):
        monkeypatch.setattr(starts, lambda *_, **__: pytest.fail("processes are started"))
    says = "1000000 processes were asked for, but at most 64 on each of the 2 cores here can be started. .* 128 ranks"
    with pytest.raises(MeshError, match=says):
        check_processes(1_000_000)
    check_processes(128)
    if not torch.accelerator.device_count():
        (tmp_path / "train.py").write_text("")
        for command in (["run", str(tmp_path / "train.py")], ["calibrate", "--output", str(tmp_path / "x.toml")]):
            result = CliRunner().invoke(main, [*command, "--ranks", "1000000"])
            assert result.exit_code == 1 and re.search(says, result.output)


SCRIPT = """
import sys
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
Path(__file__).with_name(f"rank{dist.get_rank()}").write_text(" ".join(sys.argv[1:]))
dist.destroy_process_group()
sys.exit(int(sys.argv[-1]))
"""


def test_a_script_runs_with_its_own_arguments_and_its_failure_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = CliRunner().invoke(main, ["run", str(script), "--ranks", "2", "--max-restarts", "0", "--local", "5", "3"])
    assert result.exit_code == 1
    assert re.search(r"train.py failed on rank [01]: exit code 3", result.output)
    said = [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)]
    assert said == ["--local 5 3"] * 2  # torchrun has options that begin so


def failure(folder: Path, rank: int, text: str, same_as: int | None, code: int) -> ProcessFailure:
    """A rank that failed, as its error file and its exit code say."""
    file = folder / f"{rank}.json"
    if text:
        failures._record(file, text, follows=same_as is not None, same_as=same_as)
    return ProcessFailure(rank, 100 + rank, code, str(file))


def test_ranks_with_the_error_of_another_have_no_line_of_their_own(tmp_path: Path) -> None:
    said = {
        0: ("MeshError: 8 ranks, but 4 run\n  at train.py:2\n  all frames: /tmp/a", None, -15),
        1: ("as on rank 0 (all frames: /tmp/b)", 0, 1),
        2: ("OSError: no space (see rank 0 for more; all frames: /tmp/c)", None, 1),
        3: ("", None, -15),
    }
    ranks = {rank: failure(tmp_path, rank, *each) for rank, each in said.items()}
    assert list(_summary(ChildFailedError("train.py", ranks))) == [
        "rank 0: MeshError: 8 ranks, but 4 run",
        "rank 2: OSError: no space (see rank 0 for more; all frames: /tmp/c)",
    ]
    ranks[1].timestamp -= 5  # a rank that reports the error of another is not the first, however early it reports
    assert first_failure(ChildFailedError("train.py", ranks))[0] == 0
    assert [_is_killed(ranks[rank]) for rank in (0, 3)] == [False, True]
    assert _cause(failure(tmp_path, 4, "", None, -9)) == "killed by SIGKILL"


KILLED = """
import os, signal, torch, autopar
x = torch.ones(2, 4)
layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
model = autopar.compile(layers, loss_fn=torch.nn.functional.mse_loss, recipe="tp", example_inputs=(x, x))
for step in (1, 2, 3):
    model.step(x, x)
    if step == 2:  # as NCCL's watchdog ends a rank
        os.kill(os.getpid(), signal.SIGABRT)
"""


def test_names_in_lines_about_ranks_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    _say("rank 0: \x1b[31mred failed")
    assert capsys.readouterr().err == "autopar run: rank 0: \\x1b[31mred failed\n"


def test_what_killed_ranks_called_last_is_said(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    result = CliRunner().invoke(main, ["run", str(script), "--ranks", "2", "--max-restarts", "0"])
    assert re.search(r"train.py failed on rank [01]: killed by SIGABRT", result.output)
    assert re.search(r"the last call of a collective was \d+ in step 2, all_reduce over axis", result.output)


DYING = """
import os, signal, sys
from pathlib import Path
log = Path(__file__).with_name("log")
before = log.read_text().split() if log.exists() else []
size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
if rank == size - 1:
    log.write_text(" ".join([*before, str(size)]))
    if sys.argv[1] == "error":
        raise SystemExit("no data")
    if size > 2 or sys.argv[1] == "twice" and len(before) < 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("accident", "options", "sizes", "exit_code"),
    [
        ("twice", ["--ranks", "2", "--max-restarts", "1", "--restore-minutes", "0"], [2, 2, 2], 0),
        ("large", ["--ranks", "4", "--max-restarts", "1", "--min-ranks", "2"], [4, 4, 3, 3, 2], 0),
        pytest.param("large", ["--ranks", "3", "--max-restarts", "0"], [3], 1, marks=pytest.mark.slow),
        ("error", ["--ranks", "2"], [2, 2], 1),
    ],
    ids=["again", "fewer", "never", "twice the same error"],
)
def test_all_ranks_start_again_when_one_dies(
    tmp_path: Path, accident: str, options: list[str], sizes: list[int], exit_code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(DYING)
    result = CliRunner().invoke(main, ["run", *options, str(script), accident])
    assert result.exit_code == exit_code
    assert [int(size) for size in (tmp_path / "log").read_text().split()] == sizes
    again = f"train.py starts again on {sizes[-1]} of {sizes[0]} ranks."
    assert (again in result.output) == (len(sizes) > 1)


def attempted(restarts: Restarts, lives: list[Life]) -> list[int]:
    """The numbers of ranks of the attempts, where those after the given ones are short and killed."""
    given, found = iter(lives), list[int]()
    so_far: list[Life] = []
    for ranks in restarts.attempts(so_far):
        found.append(ranks)
        so_far.append(next(given, Life("", 1.0)))
    return found


def test_a_long_life_gives_all_restarts_back() -> None:
    restarts = Restarts(ranks=2, most=2, least=2, good_seconds=600)
    short, long = Life("", 599.0), Life("", 600.0)
    assert attempted(restarts, []) == [2] * 3
    assert attempted(restarts, [short, short]) == [2] * 3
    assert attempted(restarts, [short, short, long]) == [2] * 5
    assert attempted(restarts, [long] * 10) == [2] * 12


def test_a_long_life_without_restarts_gives_none_back() -> None:
    assert attempted(Restarts(4, most=0, least=2, good_seconds=600), [Life("", 1e4)]) == [4, 3, 2]


def test_an_error_that_comes_twice_is_no_accident_however_long_it_took() -> None:
    restarts = Restarts(ranks=2, most=2, least=2, good_seconds=600)
    assert attempted(restarts, [Life("exit code 1: no data", 1e4)] * 9) == [2, 2]


def test_a_plan_that_cannot_be_is_not_asked_for_again() -> None:
    restarts = Restarts(ranks=4, most=2, least=2, good_seconds=600)
    assert attempted(restarts, [Life(f"MeshError: {n} ranks", 1.0) for n in (4, 3)]) == [4, 3, 2, 2, 2]
    assert attempted(restarts, [Life("RecipeError: There is no recipe 'a'", 1.0)] * 3) == [4, 3]
    assert attempted(restarts, [Life("ValueError: no data", 1.0)] * 9) == [4, 4, 3, 3]
    assert attempted(restarts, [Life("ValueError: no data", 1.0)]) == [4, 4, 4, 3, 3, 3, 2, 2, 2]


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["run", str(tmp_path / "absent.py"), "--ranks", "2"])
    assert result.exit_code == 2 and "absent.py" in result.output


def test_more_ranks_at_least_than_at_first_are_an_error() -> None:
    result = CliRunner().invoke(main, ["run", __file__, "--ranks", "2", "--min-ranks", "3"])
    assert result.exit_code == 1 and "--min-ranks 3 is more than the 2 ranks" in result.output

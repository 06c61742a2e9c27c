"""Real runs on this machine, short and bounded."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from autopar.calibrate import calibrate, ranks
from autopar.calibrate.measure import COLLECTIVES, KernelCount
from autopar.cli import main
from autopar.cost_model import collective_seconds, read_hardware
from autopar.errors import AutoparError
from tests.runtime.gloo_ranks import Ranks

if "calibrate" not in main.commands:  # the command works in the group before it is part of it
    from autopar.calibrate.command import calibrate_command

    main.add_command(calibrate_command)

QUICK = ("calibrate", "--device", "cpu", "--quick", "--dtype", "float32", "--output")


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def left():
    """What this test has started and left behind; ranks that other tests share are not among it."""
    before = {process.pid for process in multiprocessing.active_children()}
    return lambda: [p for p in multiprocessing.active_children() if p.pid not in before]


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_two_ranks_measure_this_machine(tmp_path, left):
    path = tmp_path / "my.toml"
    start = time.perf_counter()
    result = run(*QUICK, path, "--ranks", 2, "--dtype", "bfloat16", "--name", "here")
    assert result.exit_code == 0, result.output
    assert time.perf_counter() - start < 180  # bounded, however busy the machine
    assert not left()
    assert f"Wrote {path}" in result.output
    file = read_hardware(path)
    assert (file.hardware.name, file.hardware.devices_per_node) == ("here", 2)
    check_plausible(file.hardware)
    check_all_reduce(file)
    assert {row["name"] for row in file.curves["collective"]} == set(COLLECTIVES)
    assert {row["dtype"] for row in file.curves["matmul"]} == {"float32", "bfloat16"}


def check_plausible(hardware):
    """Within what a core has done in the last decades, and a margin for a busy machine."""
    assert 1e8 < hardware.dtype_flops_per_second("float32") < 1e13
    assert 1e8 < hardware.memory_bytes_per_second < 1e12
    assert 1e8 < hardware.memory_bytes < 1e14
    assert 1e7 < hardware.reserved_bytes < 1e10
    assert 1e-7 < hardware.launch_seconds < 1e-3
    assert hardware.host_seconds == 0
    assert 0 < hardware.matmul_efficiency <= 1 and 0 < hardware.memory_efficiency <= 1
    assert 1e6 < hardware.inside_node.bandwidth_bytes_per_second < 1e12
    assert 0 <= hardware.inside_node.latency_seconds < 0.1
    assert hardware.source("inside_node.latency_seconds").kind == "fitted"
    assert hardware.source("across_nodes.latency_seconds").kind == "guess"


def check_all_reduce(file):
    """The file carries what the cost model, given the file, says of every all-reduce it measured.

    How near that is to the measurement depends on how busy the machine is, which no test can know;
    that the fit finds true constants is tested on curves that are known (test_fit).
    """
    rows = [row for row in file.curves["collective"] if row["name"] == "all_reduce"]
    assert len(rows) >= 4
    for row in rows:
        predicted = collective_seconds(
            "all_reduce",
            before_bytes=row["bytes"],
            after_bytes=row["bytes"],
            ranks=2,
            link=file.hardware.inside_node,
            hardware=file.hardware,
        )
        assert row["predicted_seconds"] == pytest.approx(predicted, rel=1e-2)
        assert row["seconds"] > 0


@pytest.mark.multiprocess
def test_one_rank_reports_every_step_and_guesses_links(left):
    seen = []
    found = calibrate(device="cpu", ranks=1, quick=True, formats=["float64"], progress=lambda *step: seen.append(step))
    assert found.messages == () and found.backend == ""
    assert {p.number_format for p in found.products} == {"float64"}
    assert [done for _, done, _ in seen] == list(range(len(seen)))
    assert {total for *_, total in seen} == {len(seen)}
    assert not left()


def told_by_torchrun(rank, count, store):
    """What torchrun tells a rank, which has joined no process group yet."""
    meeting = dist.FileStore(store, count)
    if rank == 0:
        with socket.create_server(("localhost", 0)) as free:
            meeting.set("port", str(free.getsockname()[1]))
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": meeting.get("port").decode()}
    numbers = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    os.environ.update(where | {name: str(number) for name, number in numbers.items()})


def written(path):
    result = run(*QUICK, path)
    return result.exit_code, result.output


@pytest.mark.multiprocess
def test_the_ranks_of_torchrun_are_used(tmp_path):
    path = tmp_path / "my.toml"
    ranks = Ranks(2, told_by_torchrun)
    try:
        done = ranks.run(written, path)
    finally:
        ranks.stop()
    assert [code for code, _ in done] == [0, 0], done
    assert ["Wrote" in output for _, output in done] == [True, False]  # the first rank alone
    assert len(read_hardware(path).curves["collective"]) >= 4 * len(COLLECTIVES)


@pytest.mark.multiprocess
@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="needs Linux")
def test_ranks_end_with_a_process_that_is_killed():
    script = "from autopar.calibrate import calibrate; calibrate(device='cpu', ranks=2)"
    killed = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    try:
        assert becomes(lambda: len(ranks_of(killed.pid)) == 2)
        left = ranks_of(killed.pid)
    finally:
        killed.kill()
        killed.wait(10)
    assert becomes(lambda: not any(is_running(pid) for pid in left))


def ranks_of(pid):
    """Processes that multiprocessing started for this one."""
    started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for each in started if "spawn_main" in command_line(each)]


def is_running(pid):
    return "spawn_main" in command_line(pid)


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def becomes(condition):
    """Whether a condition comes to hold within 30 seconds."""
    deadline = time.monotonic() + 30
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_measures_itself(tmp_path):
    path = tmp_path / "my.toml"
    result = run("calibrate", "--device", "cuda", "--quick", "--ranks", 1, "--output", path)
    assert result.exit_code == 0, result.output
    hardware = read_hardware(path).hardware
    assert hardware.host_seconds > 0 and hardware.launch_seconds > 0
    assert hardware.reserved_bytes > 1e7
    assert max(flops for _, flops in hardware.peak_flops) > 1e12


def test_kernels_are_counted_without_views():
    x = torch.ones(2, 3)
    with KernelCount() as count:
        x.t() @ x + x.sum()  # a view, a product, two element-wise kernels
    assert count.kernels == 3


# --- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--output", "/nowhere/my.toml"], "Cannot write /nowhere/my.toml: there is no folder /nowhere"),
        (["--ranks", "0"], "A machine is measured with at least 1 rank, not 0."),
        (["--dtype", "float12"], "There is no dtype 'float12' to measure; choose from bfloat16"),
        (["--dtype", "tf32", "--ranks", "1"], "has no matrix products in tf32; it has bfloat16"),
        (["--device", "tpu"], "There is no kind of device 'tpu'; choose cpu or cuda."),
    ],
)
def test_errors_are_one_sentence(tmp_path, left, arguments, says):
    result = run("calibrate", "--device", "cpu", "--output", tmp_path / "my.toml", *arguments)
    assert result.exit_code != 0
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not os.listdir(tmp_path) and not left()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_said():
    with pytest.raises(AutoparError, match=r"this machine lacks 2, torch .* sees 0"):
        calibrate(device="cuda", ranks=2)


def test_torchrun_has_the_last_word_on_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(AutoparError, match="4 ranks are running already, so --ranks 2 cannot be"):
        calibrate(device="cpu", ranks=2)


def test_a_rank_that_fails_is_named(monkeypatch):
    for sent, says in (
        (("failed", "Traceback\n  ...\nMemoryError: 3 bytes"), "Rank 1 failed .* MemoryError: 3"),
        (("refused", "A sentence."), "^A sentence.$"),
        (None, "Rank 1 died"),
    ):
        with pytest.raises(AutoparError, match=says):
            listen_to(sent)
    monkeypatch.setattr(ranks, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(AutoparError, match="No sign of life from rank 1"):
        listen_to("nothing")


def listen_to(sent):
    """Two ranks: the first is done, the second sends this."""
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    ours, theirs = zip(*pipes, strict=True)
    theirs[0].send(("done", "measurements"))
    if sent is None:
        theirs[1].close()
    elif sent != "nothing":
        theirs[1].send(sent)
    ranks._listen(list(ours), lambda *step: None)


def test_progress_of_the_first_rank_alone_is_shown():
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(2)), strict=True)
    for rank, pipe in enumerate(theirs):
        pipe.send(("progress", (f"rank {rank}", 0, 1)))
        pipe.send(("done", f"of rank {rank}"))
    seen = []
    assert ranks._listen(list(ours), lambda *step: seen.append(step)) == "of rank 0"
    assert seen == [("rank 0", 0, 1)]

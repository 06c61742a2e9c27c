"""The command for accelerators: its runner, its page, and a slice of every part on the processor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from benchmarks.accelerator.__main__ import main
from benchmarks.accelerator.figures import Figure, Picture, Result
from benchmarks.accelerator.page import summary, to_html
from benchmarks.accelerator.parts import PARTS, Context
from benchmarks.accelerator.runner import Run, run_parts
from benchmarks.accelerator.trace import Interval, Kind, Trace, traced
from tests.benchmarks.odd_parts import odd_part

IDENTITY = {"version": "1", "device": "cpu"}


def call(folder: Path, seconds: float = 60.0, **identity: str) -> Run:
    context = Context(torch.device("cpu"), "slice", folder)
    return Run(context, seconds, IDENTITY | identity)


def nothing(part: object) -> None:
    """Shows no progress."""


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Starts the server that parts are forked from, so that no test waits for its imports."""
    run_parts(call(tmp_path_factory.mktemp("warm")), [odd_part("fails")], nothing)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def ends(pid: int, seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    end = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_running(pid)


def test_a_part_that_raises_or_dies_is_reported_and_the_others_run(tmp_path: Path) -> None:
    parts = [odd_part(name) for name in ("raises", "dies", "counts")]
    raised, died, counted = run_parts(call(tmp_path), parts, nothing)
    assert (raised.state, died.state, counted.state) == ("raised", "died", "done")
    assert raised.why.endswith("RuntimeError: a kernel is missing\n")
    assert died.why == f"ended with code {-signal.SIGSEGV}"
    # What was found before the end is kept.
    assert [len(each.figures) for each in (raised, died, counted)] == [1, 1, 2]
    assert [each.passed for each in (raised, died, counted)] == [False, False, True]


def test_a_part_that_hangs_is_ended_in_its_share_of_the_time(tmp_path: Path) -> None:
    start = time.monotonic()
    late, done = run_parts(call(tmp_path, 10.0), [odd_part("hangs"), odd_part("counts")], nothing)
    # 10 s, of which the first of two equal parts has half.
    assert 5 < time.monotonic() - start < 10
    assert (late.state, late.why, len(late.figures)) == ("late", "took over 5 s", 1)
    assert done.state == "done"
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_what_is_done_is_not_run_again_unless_the_code_changed(tmp_path: Path) -> None:
    (first,) = run_parts(call(tmp_path), [odd_part("counts")], nothing)
    (second,) = run_parts(call(tmp_path), [odd_part("counts")], nothing)
    assert second == first
    assert (tmp_path / "calls").read_text().count("called") == 1
    run_parts(call(tmp_path, version="2"), [odd_part("counts")], nothing)
    assert (tmp_path / "calls").read_text().count("called") == 2


SCRIPT = """
import sys
from pathlib import Path
from tests.benchmarks.odd_parts import odd_part
from tests.benchmarks.test_accelerator import call, nothing
from benchmarks.accelerator.runner import run_parts
if __name__ == "__main__":
    run_parts(call(Path(sys.argv[1])), [odd_part("counts"), odd_part("hangs")], nothing)
"""


def test_a_run_that_is_killed_leaves_no_process_and_goes_on_where_it_was(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    runner = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment)
    pid = tmp_path / "pid"
    while not pid.exists() and runner.poll() is None:
        time.sleep(0.05)
    runner.kill()
    runner.wait()
    assert ends(int(pid.read_text()), seconds=10)
    parts = [odd_part("counts"), odd_part("hangs")]
    counted, hung = run_parts(call(tmp_path, seconds=4.0), parts, nothing)
    assert (tmp_path / "calls").read_text().count("called") == 1  # before the kill
    assert (counted.state, len(counted.figures)) == ("done", 2)
    assert (hung.state, len(hung.figures)) == ("late", 1)


def test_the_verdicts_of_figures() -> None:
    found = [
        Figure("a", 1.0, "ratio", limit=1.0),
        Figure("b", 1.1, "ratio", limit=1.0),
        Figure("c", float("nan"), "ratio", limit=1.0),
        Figure("d", 1.1, "ratio", limit=1.0, asked=False),
        Figure("e", None, "ratio", limit=1.0),
        Figure("f", 1.1, "ratio"),
    ]
    expected = ["pass", "FAIL", "FAIL", "not asked", "not measured", ""]
    assert [figure.verdict for figure in found] == expected


def test_the_page_and_the_screen_show_every_figure_with_a_limit(tmp_path: Path) -> None:
    curve = Picture("Rates", "curves", "bytes/s", {"copy": [(1e3, 1e9), (1e6, 3e9)]}, "bytes")
    bars = Picture("Times", "bars", "seconds", {"ours": [("gpt2", 0.1)], "plain": [("gpt2", 0.2)]})
    figures = [Figure("step <ratio>", 1.5, "ratio", limit=1.0), Figure("x", float("inf"), "error")]
    result = Result("calibrate", IDENTITY, "done", "", figures, [curve, bars], ["One GPU <only>."])
    page = to_html([result], PARTS)
    assert page.count("<svg") == 2 and "step &lt;ratio&gt;" in page and "One GPU &lt;only&gt;." in page
    document = page.split('id="document">')[1].split("</script>")[0]
    assert json.loads(document)["results"][0]["figures"][1]["value"] == "inf"
    console = Console(width=100, record=True, file=(tmp_path / "screen").open("w"))
    console.print(summary([result]))
    row = next(line for line in console.export_text().splitlines() if "step <ratio>" in line)
    assert row.split()[-3:] == ["1.500", "1.000", "FAIL"]
    assert Result.from_json(json.loads(json.dumps(result.to_json()))).figures == figures


def test_an_unknown_part_is_refused_by_name(tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["--out", str(tmp_path), "--device", "cpu", "--only", "speed"])
    assert found.exit_code == 1
    assert "There is no part 'speed'; choose from calibrate" in found.output


# What the other three ask is asked by the slow row, and of more plans by tests/proof and tests/runtime.
QUICK = ("calibrate", "start", "overlap", "precision", "faults", "determinism")
EVERY = tuple(part.name for part in PARTS)


@pytest.mark.parametrize(
    ("names", "passes"),
    [pytest.param(QUICK, 10, id="quick"), pytest.param(EVERY, 20, id="every", marks=pytest.mark.slow)],
)
def test_a_slice_of_the_parts_holds_on_the_processor(tmp_path: Path, names: tuple[str, ...], passes: int) -> None:
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--minutes", "2.9"]
    found = CliRunner().invoke(main, [*arguments, "--only", ",".join(names)])
    results = {name: Result.from_json(json.loads((tmp_path / f"{name}.json").read_text())) for name in names}
    assert {name: result.state for name, result in results.items()} == dict.fromkeys(results, "done"), {
        name: result.why for name, result in results.items()
    }
    verdicts = {(name, figure.name): figure.verdict for name, result in results.items() for figure in result.figures}
    assert not [name for name, verdict in verdicts.items() if verdict == "FAIL"]
    assert sum(verdict == "pass" for verdict in verdicts.values()) >= passes
    assert found.exit_code == 0, found.output
    assert (tmp_path / "page.html").read_text().count("<section") == len(names)


def test_the_page_describes_every_part() -> None:
    page = (Path(__file__).parents[2] / "benchmarks/results/accelerators.md").read_text()
    table = page.split("## The parts")[1].split("\n## ")[0]
    described = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert described == {*EVERY}


def test_a_trace_is_read_as_worked_out_by_hand() -> None:
    # compute 0-2 and 3-4, collectives 1-3 and 3.5-5: 1 + 0.5 of 3.5 lie beside compute
    spans: dict[Kind, list[Interval]] = {
        "compute": [(0.0, 2.0), (3.0, 4.0)],
        "communication": [(1.0, 3.0), (3.5, 5.0)],
        "copy": [],
    }
    trace = Trace(spans, (0.0, 5.0))
    assert trace.beside_compute("communication") == pytest.approx(1.5 / 3.5)
    assert trace.beside_compute("copy") is None
    assert trace.idle == pytest.approx(2 / 5)


def test_a_profiled_step_has_its_ops_as_compute() -> None:
    x = torch.randn(200, 200)
    found = traced(lambda: (x @ x).sum().item(), torch.device("cpu"))
    assert found.waits == 1
    assert len(found.spans["compute"]) >= 1 and not found.spans["communication"]
    assert 0 <= found.idle < 1

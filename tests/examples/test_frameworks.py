"""The examples of the frameworks run on two ranks, under torchrun or on ranks that tests share."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import socket
from functools import partial
from pathlib import Path

import pytest

from tests.integrations.small import as_launched, set_as_torchrun
from tests.runtime.gloo_ranks import Ranks
from tests.support.launched import launch
from tests.support.tables import often

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"

pytestmark = pytest.mark.multiprocess


def printed(name: str) -> str:
    """What an example prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return text.getvalue()


def printed_in_the_group(name: str) -> str:
    """The same where the process group is there already."""
    as_launched()
    return printed(name)


def on_new_ranks(name: str) -> str:
    """What an example prints on two ranks that have no process group yet, as torchrun starts them."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = Ranks(2, joined=partial(set_as_torchrun, port))
    try:
        return "".join(ranks.run(printed, name))
    finally:
        ranks.stop()


def launched(name: str, folder: Path) -> str:
    """What an example prints under torchrun."""
    script = folder / name
    script.write_text((EXAMPLES / name).read_text())
    screen = launch(script, ranks=2, timeout_seconds=240)
    assert screen.exit_code == 0, screen.text
    return screen.text


STARTS = ["forks", pytest.param("torchrun", marks=pytest.mark.slow)]


@pytest.mark.parametrize("start", STARTS)
def test_the_trainer_learns_and_saves(framework_ranks: Ranks, tmp_path: Path, start: str) -> None:
    """On ranks that tests share, or as the first lines of the example say."""
    if start == "forks":
        text = "".join(framework_ranks.run(printed_in_the_group, "trainer.py"))
    else:
        text = launched("trainer.py", tmp_path)
    losses = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", text)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 1
    assert "trained on 2 ranks" in text


@pytest.mark.parametrize("name", often(["accelerate_loop.py", "lightning_module.py"], ["accelerate_loop.py"]))
@pytest.mark.parametrize("start", STARTS)
def test_a_framework_makes_the_process_group_and_learns(tmp_path: Path, name: str, start: str) -> None:
    """Accelerate makes it here as it does for the trainers of transformers."""
    text = on_new_ranks(name) if start == "forks" else launched(name, tmp_path)
    right = re.findall(r"right: ([\d.]+)", text)
    assert len(right) == 1 and float(right[0]) > 0.9


@pytest.mark.slow
def test_the_adapters_learn_and_are_saved(tmp_path: Path) -> None:
    text = launched("sft_lora.py", tmp_path)
    losses = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", text)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert "adapters: adapter_config.json adapter_model.safetensors" in text

"""The examples of the frameworks run on two ranks, under torchrun or on ranks that tests share."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.small import as_launched
from tests.runtime.ranks import Ranks
from tests.support.launched import launch

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"

pytestmark = pytest.mark.multiprocess
OnTwoRanks = Callable[[str], str]


def printed(name: str) -> str:
    """What an example prints on this rank, whose process group is there already."""
    as_launched()
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return text.getvalue()


def launched(name: str, folder: Path) -> str:
    """What an example prints under torchrun."""
    script = folder / name
    script.write_text((EXAMPLES / name).read_text())
    screen = launch(script, ranks=2, timeout_seconds=240)
    assert screen.exit_code == 0, screen.text
    return screen.text


@pytest.fixture(params=["running ranks", pytest.param("torchrun", marks=pytest.mark.slow)])
def on_two_ranks(
    request: pytest.FixtureRequest, framework_ranks: Ranks, tmp_path: Path
) -> OnTwoRanks:
    """Runs an example by its name: on ranks that tests share, or as its first lines say."""
    if request.param == "torchrun":
        return lambda name: launched(name, tmp_path)
    return lambda name: "".join(framework_ranks.run(printed, name))


def test_the_trainer_learns_and_saves(on_two_ranks: OnTwoRanks) -> None:
    text = on_two_ranks("trainer.py")
    losses = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", text)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 1
    assert "trained on 2 ranks" in text


def test_the_accelerate_loop_learns(tmp_path: Path) -> None:
    """Under torchrun, where accelerate makes the process group, as it does for the trainers of transformers."""
    right = re.findall(r"right: ([\d.]+)", launched("accelerate_loop.py", tmp_path))
    assert len(right) == 1 and float(right[0]) > 0.9


def test_the_lightning_module_learns(tmp_path: Path) -> None:
    """Under torchrun, where Lightning makes the process group."""
    right = re.findall(r"right: ([\d.]+)", launched("lightning_module.py", tmp_path))
    assert len(right) == 1 and float(right[0]) > 0.9


@pytest.mark.slow
def test_the_adapters_learn_and_are_saved(tmp_path: Path) -> None:
    text = launched("sft_lora.py", tmp_path)
    losses = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", text)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert "adapters: adapter_config.json adapter_model.safetensors" in text

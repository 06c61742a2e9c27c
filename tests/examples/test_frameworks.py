"""The examples of the frameworks run on two ranks, as their first lines say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launched import launch

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"

pytestmark = pytest.mark.multiprocess


def on_two_ranks(name: str, folder: Path) -> str:
    script = folder / name
    script.write_text((EXAMPLES / name).read_text())
    screen = launch(script, ranks=2, timeout_seconds=240)
    assert screen.exit_code == 0, screen.text
    return screen.text


def test_the_trainer_learns_and_saves(tmp_path: Path) -> None:
    text = on_two_ranks("trainer.py", tmp_path)
    losses = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", text)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 1
    assert "trained on 2 ranks" in text


def test_the_accelerate_loop_learns(tmp_path: Path) -> None:
    text = on_two_ranks("accelerate_loop.py", tmp_path)
    right = re.findall(r"right: ([\d.]+)", text)
    assert len(right) == 1 and float(right[0]) > 0.9


def test_the_lightning_module_learns(tmp_path: Path) -> None:
    text = on_two_ranks("lightning_module.py", tmp_path)
    right = re.findall(r"right: ([\d.]+)", text)
    assert len(right) == 1 and float(right[0]) > 0.9


@pytest.mark.slow
def test_the_adapters_learn_and_are_saved(tmp_path: Path) -> None:
    text = on_two_ranks("sft_lora.py", tmp_path)
    losses = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", text)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert "adapters: adapter_config.json adapter_model.safetensors" in text

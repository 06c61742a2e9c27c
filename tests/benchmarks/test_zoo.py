"""The zoo makes configurations small, compares an architecture in a process, and writes its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers")

from benchmarks.zoo import PASSED, PLANS, Row, in_process, main, markdown, read
from benchmarks.zoo_small import make, shrink


def test_a_text_family_keeps_grouped_heads() -> None:
    config = shrink("llama")
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (2, 64, 16)
    assert config.num_attention_heads == 4
    assert config.vocab_size == 128 and config.attention_dropout == 0.0


def test_stages_of_a_vision_family_keep_their_ratios() -> None:
    config = shrink("convnext")
    assert list(config.hidden_sizes) == [8, 16, 32, 64]  # of 96, 192, 384, 768
    assert list(config.depths) == [1, 1, 1, 1]
    assert config.image_size == 32


def test_parts_of_a_multimodal_family_are_small_too() -> None:
    config = shrink("llava")
    assert config.text_config.num_hidden_layers == config.vision_config.num_hidden_layers == 2
    assert config.vision_config.image_size == 32
    assert config.image_token_id < config.text_config.vocab_size


def test_a_loss_of_ones_own_and_one_of_targets() -> None:
    own, targets = make("bert"), make("clip")
    assert own.step.inputs == ("input_ids", "labels") and own.kind == "text"
    assert targets.kind == "text + vision"
    for small in (own, targets):
        loss = small.step(*small.args)
        assert loss.shape == () and loss.requires_grad and loss > 0


def test_one_architecture_end_to_end(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    # a program of its own: it forks, which takes a process without other threads
    subprocess.run(
        [sys.executable, "benchmarks/zoo.py", "--only", "vit", "--results", str(results)],
        cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True, timeout=200, capture_output=True,
    )  # fmt: skip
    row = read(results)["vit"]
    assert row.plans == dict.fromkeys(PLANS, PASSED)
    assert row.passed and row.worst <= 1
    page = markdown([row], 605)
    assert "passed all six plans: 1 of 1" in page and "| vit |" in page


def test_time_is_bounded_and_says_where(tmp_path: Path) -> None:
    row = in_process("vit", 0.0, 8 * 10**9, tmp_path / "partial")
    assert row.stopped == "build took over 0 s" and not row.captured


def test_what_has_a_result_is_not_examined_again(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text('{"name": "vit", "stopped": "build took over 0 s"}\n')
    page = tmp_path / "zoo.md"
    found = CliRunner().invoke(
        main, ["--results", str(results), "--only", "vit", "--markdown", str(page)]
    )
    assert found.exit_code == 0, found.output
    assert read(results) == {"vit": Row("vit", stopped="build took over 0 s")}
    assert "| over the bound on time | 1 |" in page.read_text()

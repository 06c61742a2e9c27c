"""The verdicts on the zoo: results that go on where they ended, and their page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers")
from benchmarks.stored import store, stored
from benchmarks.zoo.rows import PASSED, Row
from benchmarks.zoo.verdicts import PLANS, Result, main, markdown, result_of

WORST = "gradient of model.wte, step 1, in bfloat16: error 1.0e-03, the single device's own 1.0e-03, bound 2.0e-02"
DONE = Row("gpt2", stage="done", plans=dict.fromkeys(PLANS, PASSED), worst=0.05, worst_tensor=WORST)


def test_plans_that_pass_give_a_verdict_with_the_worst_tensor() -> None:
    result = result_of(DONE, "bfloat16", "version")
    assert result.name == "gpt2 in bfloat16" and result.misses == {}
    assert result.cells == ("gpt2", "bfloat16", "passed", "0.050", "gradient of model.wte, in bfloat16")


def test_a_plan_that_does_not_pass_is_named_with_its_reason() -> None:
    row = replace(DONE, plans={**DONE.plans, "pp=2": "beyond the tolerance: loss"})
    result = result_of(row, "float32", "version")
    assert result.verdict == "**no**: pp=2"
    page = markdown([result], 600)
    assert "- **gpt2 in float32**, pp=2: beyond the tolerance: loss" in page
    assert "in float32: 0 of 1 that run in this format pass with all plans" in page


def test_a_model_that_does_not_run_is_no_miss() -> None:
    result = result_of(Row("gpt2", stopped="no kernel for bfloat16"), "bfloat16", "version")
    assert result.verdict == "not run" and not result.misses
    page = markdown([result], 600)
    assert "in bfloat16: 0 of 0" in page
    assert "- **gpt2 in bfloat16**: no kernel for bfloat16" in page


def test_a_process_that_ended_early_counts_as_not_run() -> None:
    assert result_of(Row("gpt2", stage="capture"), "float32", "").verdict == "not run"


def test_what_has_a_result_is_not_examined_again(tmp_path: Path) -> None:
    results, page = tmp_path / "verdicts.jsonl", tmp_path / "page.md"
    known = [result_of(DONE, dtype, "version") for dtype in ("float32", "bfloat16")]
    for result in known:
        store(results, result)
    found = CliRunner().invoke(main, ["--results", str(results), "--only", "gpt2", "--markdown", str(page)])
    assert found.exit_code == 0, found.output
    assert list(stored(results, Result).values()) == known
    assert "1 of 1 that run in this format pass with all plans" in page.read_text()


def test_a_plan_that_was_ended_for_its_time_is_neither_passed_nor_failed() -> None:
    row = replace(DONE, plans={**DONE.plans, "pp=2": "took over 120 s"})
    result = result_of(row, "float32", "version")
    assert result.verdict == "not in time: pp=2" and not result.failed
    assert "0 of 1 that run in this format pass with all plans, 0 fail, and 1" in markdown([result], 600)

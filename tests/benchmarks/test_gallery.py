"""The gallery: its page, its list of questions, its stored figures and its reports say the same."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from autopar import units
from autopar.explanation.launch import WIDTH
from benchmarks.site.gallery import FOLDER, PAGE, QUESTIONS, Question, figures_of, row, stored_figures, with_table


def test_the_page_is_written_from_the_list_and_the_stored_figures() -> None:
    assert with_table(PAGE.read_text(), stored_figures()) == PAGE.read_text()


def test_a_report_and_figures_are_there_for_every_question_and_no_other() -> None:
    names = sorted(question.name for question in QUESTIONS)
    assert sorted(path.stem for path in FOLDER.glob("*.html")) == names
    assert sorted(stored_figures().keys() - {"made"}) == names


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.name)
def test_the_row_has_the_figures_that_its_report_shows(question: Question) -> None:
    report = (FOLDER / f"{question.name}.html").read_text(encoding="utf-8")
    tiles = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", report))
    cells = row(question, stored_figures()[question.name])
    bound = units.format_bytes(stored_figures()[question.name]["memory_bound_bytes"])
    assert cells[3] == tiles["step"]
    assert f"{cells[4]} of {bound}" == tiles["memory of a rank"]
    assert cells[5] == tiles["model FLOPs utilization"]
    assert f"{cells[6]} on {question.cluster}" in report
    assert len(report) < 300_000


def test_a_report_of_the_gallery_claims_no_figures_as_json() -> None:
    report = (FOLDER / f"{QUESTIONS[0].name}.html").read_text(encoding="utf-8")
    assert "as JSON" not in report and '<script type="application/json" id="document">{}' in report


def test_the_calls_of_all_reports_are_in_lines_that_no_terminal_breaks() -> None:
    for question in QUESTIONS:
        report = (FOLDER / f"{question.name}.html").read_text(encoding="utf-8")
        _, _, after = report.partition("model = autopar.compile(")
        call = html.unescape(after.partition("</code>")[0])
        assert len(call.splitlines()) > 2 and all(len(line) <= WIDTH for line in call.splitlines())


@pytest.mark.slow
def test_the_figures_of_a_row_are_those_of_its_command() -> None:
    question = replace(QUESTIONS[0], model="gpt2")
    command = [sys.executable, "-m", *question.command.split(), "--json"]
    printed = json.loads(subprocess.check_output(command, text=True))
    figures = figures_of(question, question.answer())
    assert {k: figures[k] for k in ("step_seconds", "memory_bytes", "mfu")} == {
        k: printed[k] for k in ("step_seconds", "memory_bytes", "mfu")
    }
    assert printed["subtitle"].startswith(f"{row(question, figures)[6]} on {question.cluster}")

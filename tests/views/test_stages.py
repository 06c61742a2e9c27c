"""The table of stages: every figure of a stage, marks, and what a narrow terminal leaves out."""

import pytest

from autopar.explanation.report import as_text
from autopar.views.stages import HEAD, NARROW, StageSummary, stage_table
from tests.views import sample


@pytest.mark.parametrize(("width", "head"), [(80, NARROW), (160, HEAD)])
def test_columns_by_width(width, head):
    lines = as_text(StageSummary(sample.stages()), width=width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("Stages, one micro-batch each")
    shown = " ".join(lines[1:3])
    assert all(word in shown for name in head for word in name.split())
    assert ("sends" in shown) == (head is HEAD)


def test_figures_and_marks():
    first, second = as_text(StageSummary(sample.stages()), width=160).splitlines()[-2:]
    assert [cell.strip() for cell in first.split("│")] == [
        "0",
        "0",
        "embedding to layers.15",
        "16",
        "4.01 G",
        "31.0 ms",
        "66.0 ms",
        "2.00 ms",
        "2 x 1.10 GB",
        "9.20 GB",
        "11.8 GB",
    ]
    assert second.startswith("1*!") and "12.9 GB" in second


def test_one_stage_has_no_marks():
    alone = sample.stages()[:1]
    assert "0*" not in as_text(StageSummary(alone), width=160)
    assert "badge" not in stage_table(alone)


def test_a_stage_of_one_module_is_named_once():
    row = sample.stages()[0]._replace(last="embedding", layers=0, send_seconds=0.0)
    text = as_text(StageSummary((row,)), width=160)
    assert " to " not in text.splitlines()[-1] and "-" in text.splitlines()[-1]

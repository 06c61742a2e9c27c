"""A script that says no more than `backend="autopar"` sees what is split, and plainly where nothing is."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from autopar.backend import graphs


def lines_of(model: nn.Module, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a script without set-up of logging sees of two calls; pytest adds handlers of its own to each test."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(graphs, "_shown", set())
    torch.compiler.reset()
    compiled = torch.compile(model, backend="autopar")
    for rows in (4, 4, 6):
        compiled(torch.ones(rows, 4))
    return capsys.readouterr().err.splitlines()


def test_one_process_is_told_once_that_nothing_is_split(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, hint = lines_of(nn.Linear(4, 4), capsys, monkeypatch)
    assert said.startswith("autopar: graph of ") and "nothing is split, as there is one rank" in said
    assert "setLevel('WARNING') hides these lines" in hint


def test_a_level_of_the_logger_hides_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("autopar"), "level", logging.WARNING)
    assert lines_of(nn.Linear(4, 4), capsys, monkeypatch) == []

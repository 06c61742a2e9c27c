"""The line under a notebook's cell while a model is planned."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import autopar


def plan() -> autopar.Explanation:
    model, x = torch.nn.Linear(8, 8, device="meta"), torch.empty(8, 8, device="meta")
    return autopar.explain(model, x, mesh={"dp": 2}, cluster="h100x2", loss_fn=torch.mean)


class Line:
    """A display of IPython, which notes its texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        self.texts.append(data["text/plain"])


def test_a_notebook_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    line, module = Line(), types.ModuleType("IPython.display")

    def display(*args: Any, **options: Any) -> Line:
        return line

    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("autopar.api.announcing.Console", lambda: types.SimpleNamespace(is_jupyter=True))
    plan()
    *during, last = line.texts
    assert during == ["autopar: capturing the model ...", "autopar: searching the plan ..."]
    assert last.startswith("autopar: planned in ")


def test_elsewhere_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    plan()
    assert capsys.readouterr() == ("", "")

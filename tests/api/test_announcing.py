"""The line about the chosen plan is seen without set-up, once, and a script says whether it wants it."""

from __future__ import annotations

import logging

import pytest

from autopar.api.announcing import announce

LOG = logging.getLogger("autopar")


def announce_without_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announces as in a script that sets up no logging; pytest adds handlers of its own to each test."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    announce(lambda: "dp=2; recipe zero3", ["a note"])


def test_a_script_without_set_up_shows_the_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announce_without_setup(monkeypatch)
    first, hint = capsys.readouterr().err.splitlines()
    assert first == "autopar: dp=2; recipe zero3"
    assert "logging.getLogger('autopar').setLevel('WARNING') hides these lines" in hint
    assert (LOG.level, LOG.handlers) == (logging.NOTSET, [])


def test_a_level_of_the_logger_hides_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(LOG, "level", logging.WARNING)
    announce_without_setup(monkeypatch)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("level", "shown"), [(logging.INFO, 1), (logging.WARNING, 0)])
def test_where_logging_is_set_up_it_is_logged_there_alone(
    level: int, shown: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(level):
        announce(lambda: "dp=2", [])
    assert (caplog.messages, capsys.readouterr().err) == (["dp=2"] * shown, "")

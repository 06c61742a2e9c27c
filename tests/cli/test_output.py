"""Where commands print what is going on: a bar on a terminal, and nothing into a file or a pipe."""

import io

import pytest

from autopar.cli.output import working


class Terminal(io.StringIO):
    """A stderr of a person who watches."""

    def isatty(self) -> bool:
        return True


def shown(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with working() as progress:
        progress("searching the plan: setting 1")
    return stderr.getvalue()


def test_a_bar_is_shown_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "searching the plan: setting 1" in shown(Terminal(), monkeypatch)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert shown(io.StringIO(), monkeypatch) == ""
    assert capsys.readouterr().out == ""

"""Where commands print what is going on: a bar on a terminal, and nothing into a file or a pipe."""

import io

import click
import pytest
from click.testing import CliRunner
from rich.table import Table

from autopar.cli import output
from autopar.cli.group import main
from autopar.cli.options import POSITIVE, Real
from autopar.cli.output import console, working
from autopar.errors import AutoparError


class Terminal(io.StringIO):
    """A stderr of a person who watches."""

    def isatty(self) -> bool:
        return True


def shown(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with working() as progress:
        progress("searching the plan: dp=8")
    return stderr.getvalue()


def test_a_bar_is_shown_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "searching the plan: dp=8" in shown(Terminal(), monkeypatch)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert shown(io.StringIO(), monkeypatch) == ""
    assert capsys.readouterr().out == ""


def test_a_log_says_what_a_long_command_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every few seconds, and nothing where it takes no longer."""
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    with working() as progress:
        for now[0], message in ((1.0, "a"), (4.0, "b"), (6.0, "c"), (8.0, "d"), (11.5, "e")):
            progress(message)
    said = capsys.readouterr()
    assert said.err.split() == ["...", "a", "...", "b", "...", "c", "...", "d", "...", "e"] and not said.out


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1_0", "\u0663"])
def test_numbers_of_options_are_finite(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Real(min=0).convert(text, None, None)


@pytest.mark.parametrize("text", ["\u0663", "9" * 5000, "1_000", "2.5", "0"])
def test_counts_are_written_in_plain_digits(text: str) -> None:
    with pytest.raises(click.BadParameter):
        POSITIVE.convert(text, None, None)
    assert POSITIVE.convert("12", None, None) == 12


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither rich nor the terminal obeys them."""
    table = Table("name")
    table.add_row("[bold]x[/nope] :smile: \x1b[31m\x9b\u202e")
    console().print(table)
    said = capsys.readouterr().out
    assert r"[bold]x[/nope] :smile: \x1b" in said  # the rest is cut off, since rich measures before
    assert not {"\x1b", "\x9b", "\u202e"} & {*said}


def test_names_that_no_stream_takes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """As of a file whose name is no UTF-8."""
    console().print("model\udcff.json")
    assert r"model\udcff.json" in capsys.readouterr().out


def test_names_in_errors_are_shown_as_they_are() -> None:
    for arguments in (["explain", "\x1b[31mgpt", "--ranks", "2"], ["\x1b[31m"]):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code and "\x1b" not in result.output and r"\x1b[31m" in result.output


def test_a_model_that_ends_the_program_is_an_error() -> None:
    with pytest.raises(AutoparError, match=r"The model ends the program \(sys.exit\(0\)\)"), working():
        raise SystemExit(0)

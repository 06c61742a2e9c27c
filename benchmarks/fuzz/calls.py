"""Calls of the command line with odd arguments, in this process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from click.testing import CliRunner

from autopar.cli import main
from autopar.errors import AutoparError

_TARGETS = (
    "benchmarks.fuzz.calls:tiny", "benchmarks.fuzz.calls:leaves", "benchmarks.fuzz.calls:nothing", "no.such:thing",
    "benchmarks.fuzz.calls", ":", "", "[bold]x[/nope]", "\x1b[31mred", "{folder}/config.json", "{folder}", "/dev/null",
    "gpt9", "{folder}/deep.json",
)  # fmt: skip
_WILD = (
    "", "0", "-1", "1e999", "nan", "inf", "-inf", "٣", "1_0", "9" * 30, "x", "dp=2", "dp=0", "dp=-2,tp=2", "dp=2,dp=2",
    "dp:zero3", "dp:zero9,tp:", "a:b:c", "{", '{"layers.*": []}', "[[[[", "auto", "h100", "h100x4", "h100x0",
    "h100x8x1e9", "h100x8x99999999999999999999", "{folder}/none.toml", "{folder}", "/dev/full", "/dev/null",
    "{folder}/no/such/file", "\x1b]0;x\x07", "[red]", "bfloat16", "80GB", "1PB", "-5GB", "NaNGB", "full", "3", "0.5",
    "embed.weight=", "=R", "1000000",
)  # fmt: skip
_OPTIONS = (
    "--mesh", "--recipe", "--cluster", "--ranks", "--batch", "--seq", "--max-memory", "--headroom", "--pin",
    "--precision", "--micro-batches", "--stages", "--schedule", "--chunks", "--recompute", "--overlap-batches",
    "--save", "--html", "--trace", "--no", "--keep-inside-node", "--plan", "--seed", "--top", "--memory-gb",
    "--device", "--nonsense",
)  # fmt: skip
# Values with which a command goes on, so that half of the odd ones come to a search and to its files.
_PLAUSIBLE = {
    "--mesh": ("dp=2", "dp=2,tp=2"), "--recipe": ("ddp", "dp:zero3"), "--batch": ("4", "8"), "--micro-batches": ("2",),
    "--recompute": ("full", "none"), "--max-memory": ("80GB",), "--save": ("/dev/full", "{folder}", "{folder}/no/x"),
    "--html": ("/dev/full", "{folder}/no/x"), "--trace": ("/dev/full", "{folder}/x.json"), "--precision": ("bfloat16",),
}  # fmt: skip
_COMMANDS = ("explain", "explain", "explain", "fit", "compare", "diff", "verify", "run", "explian")


def tiny() -> object:
    """A model and its inputs."""
    import torch
    from torch import nn

    x = torch.ones(4, 4)
    return nn.Linear(4, 4), (x, x), nn.functional.mse_loss


def leaves() -> object:
    """A target that ends the program, as if it had been successful."""
    raise SystemExit(0)


def nothing() -> object:
    """A target that is no model."""
    return None


def calls(count: int, seed: int, folder: Path) -> Iterator[list[str]]:
    """Lists of arguments; files that some of them name lie in a folder."""
    (folder / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1000000000}')
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "plan.json").write_text('{"version": 1}')
    for number in range(count):
        draw = random.Random(f"{seed}/call/{number}")
        yield [text.replace("{folder}", str(folder)) for text in _arguments(draw)]


def _arguments(draw: random.Random) -> list[str]:
    command = draw.choice(_COMMANDS)
    if command == "diff":
        return [
            command,
            *(draw.choice(("{folder}/plan.json", "{folder}/deep.json", *_WILD)) for _ in "ab"),
        ]
    # Half of the calls are of a model that there is, so that options are looked at.
    target = _TARGETS[0] if draw.random() < 0.5 else draw.choice(_TARGETS)
    if command == "run":
        target = draw.choice(("{folder}/none.py", "{folder}", "", "/dev/null/x"))
    where = ["--mesh", "dp=2"]
    options = [*where, *_option(draw), *(_option(draw) if draw.random() < 0.4 else ())]
    return [command, target, *options, *draw.choice(((), (), ("--json",), ("--verbose",)))]


def _option(draw: random.Random) -> tuple[str, str]:
    if draw.random() < 0.5:
        name = draw.choice(list(_PLAUSIBLE))
        return name, draw.choice(_PLAUSIBLE[name])
    return draw.choice(_OPTIONS), draw.choice(_WILD)


def call(arguments: Sequence[str]) -> str | None:
    """Runs a command; the kind of fault, or None. Raises AutoparError for a command that ends with an error."""
    found = CliRunner().invoke(main, list(arguments))
    error = found.exception
    if error is not None and not isinstance(error, SystemExit):
        raise RuntimeError("a raw error") from error
    if found.exit_code not in (0, 1, 2):
        return "raw traceback"
    has_escape = any(ord(x) < 32 and x not in "\n\t" for x in found.output)
    # An end with 0 and without a word would be a failure that nobody hears of.
    is_silent = found.exit_code == 0 and not found.output.strip()
    if found.exit_code and not has_escape and "Traceback" not in found.output:
        raise AutoparError(found.output)
    return "silent change" if has_escape or is_silent or "Traceback" in found.output else None

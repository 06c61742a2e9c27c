"""Calls of the command line of which one thing is odd, in this process.

A call begins as one that is answered: a command, a model that there is, where to plan it, and up to two further
options. Then one value is changed: for one that can be read and fits few models, for a wild one, or by a letter. So
most calls come past the reading of options, to the search, to its texts and to its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from click.testing import CliRunner, Result

from autopar.cli import main
from autopar.errors import AutoparError

_TINY = "benchmarks.fuzz.calls:tiny"
_TARGETS = (
    "benchmarks.fuzz.calls:leaves",
    "benchmarks.fuzz.calls:nothing",
    "benchmarks.fuzz.calls:odd_names",
    "no.such:thing",
    "benchmarks.fuzz.calls",
    ":",
    "",
    "[bold]x[/nope]",
    "\x1b[31mred",
    "{folder}/config.json",
    "{folder}",
    "/dev/null",
    "gpt9",
    "{folder}/deep.json",
    "{folder}/minus.json",
    "{folder}/words.json",
)
_WILD = (
    "",
    "0",
    "-1",
    "1e999",
    "nan",
    "inf",
    "-inf",
    "٣",
    "1_0",
    "9" * 30,
    "x",
    "dp=2",
    "dp=0",
    "dp=-2,tp=2",
    "dp=2,dp=2",
    "dp:zero3",
    "dp:zero9,tp:",
    "a:b:c",
    "{",
    '{"layers.*": []}',
    "[[[[",
    "auto",
    "h100",
    "h100x4",
    "h100x0",
    "h100x8x1e9",
    "h100x8x99999999999999999999",
    "{folder}/none.toml",
    "{folder}",
    "/dev/full",
    "/dev/null",
    "/proc/self/mem",
    "{folder}/pipe.json",
    "{folder}/pipe.toml",
    "{folder}/slow.toml",
    "{folder}/extreme.toml",
    "model\udcff",
    "{folder}/no/such/file",
    "\x1b]0;x\x07",
    "[red]",
    "bfloat16",
    "80GB",
    "1PB",
    "-5GB",
    "NaNGB",
    "full",
    "3",
    "0.5",
    "0.weight=",
    "=R",
    "1000000",
)
# Values of each option with which a command is answered, or at least refused by the product and not by its reader.
_WHERE = (("--mesh", "dp=2"), ("--mesh", "dp=2,tp=2"), ("--mesh", "dp=4"), ("--cluster", "h100x2"), ("--ranks", "2"))
_PLANNED = {
    "--recipe": ("auto", "ddp", "zero1", "dp:zero3", "tp"),
    "--batch": ("4", "8"),
    "--micro-batches": ("1", "2"),
    "--recompute": ("none", "full", "0.5", "1"),
    "--max-memory": ("80GB", "1.5GB"),
    "--headroom": ("0.1",),
    "--pin": ("0.weight=R", "0.weight=dp"),
    "--precision": ("bf16",),
    "--no": ("zero3", "recompute"),
    "--keep-inside-node": ("tp", "dp"),
    "--stages": ("2",),
    "--chunks": ("1",),
    "--overlap-batches": ("1", "2"),
    "--schedule": ("gpipe", "1f1b"),
    "--seq": ("4",),
    "--training-state": ("adamw", "adamw8bit gradients=2"),
    "--decompose": ("auto",),
    "--memory-gb": ("20",),
}
# Values that the reader takes, and that fit few models: sizes that divide nothing, names of other machines.
_COUNTS = ("3", "5", "7", "64", "1000", "999983")
_READABLE = {
    "--mesh": ("dp=3", "tp=8", "pp=2", "pp=2,dp=2", "dp=1", "dp=2,tp=3", "x=2,y=2", "dp=2,tp=2 order tp,dp", "dp=64"),
    "--cluster": ("h100x3", "a100x8x2", "h200", "rtx4090x4", "b200x8x16384", "h100x8x2"),
    "--ranks": _COUNTS,
    "--recipe": ("zero2", "zero3-offload", "pp:gpipe", "dp:zero1,tp:tp+sp", "cp", "local:2", "naive-pp", "ep", "serve"),
    "--recompute": ("partitioned", "offloaded", "99", "0.001", "0"),
    "--max-memory": ("1MB", "999TB", "1e6"),
    "--headroom": ("0", "0.999"),
    "--memory-gb": ("0.001", "1e6"),
    "--precision": ("fp16", "bf16 reduce=fp16"),
    "--pin": ("9.weight=R", "*=R", "0.weight=S(7)@dp", "0.weight=@0", "0=tp"),
    "--price": ("0", "h100=1e9", "b200=2"),
    "--schedule": ("zbv", "pipedream", "interleaved"),
    "--training-state": ("sgd", "lion", "adamw masters=0"),
    "--decompose": ("dp", "tp,dp", "z"),
    "--no": ("dp", "tp", "ddp"),
    "--seed": ("0", "999999999999"),
}
_FILES = {
    "--save": ("{folder}/plan-{draw}.json",),
    "--html": ("{folder}/{draw}.html",),
    "--trace": ("{folder}/{draw}.json",),
}
_OPTIONS = {
    "explain": {**_PLANNED, **_FILES},
    "fit": {**_PLANNED, "--price": ("2.5", "h200=3")},
    "compare": {**_PLANNED, "--top": ("3",), "--html": _FILES["--html"]},
    "verify": {name: _PLANNED[name] for name in ("--recipe", "--micro-batches", "--precision", "--schedule")},
}
_MACHINE = """name = "mine"
like = "h100"
launch_seconds = {value = %s, kind = "guess", source = "none"}
memory_bytes_per_second = {value = %s, kind = "guess", source = "none"}
"""
_COMMANDS = (
    *["explain"] * 6,
    *["fit"] * 3,
    *["compare"] * 2,
    *["verify"] * 2,
    *["verify --plan"] * 2,
    "verify --random",
    *["diff"] * 2,
    "run",
)


def tiny() -> object:
    """A model and its inputs."""
    import torch
    from torch import nn

    x = torch.ones(8, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, (x, x), nn.functional.mse_loss


def odd_names() -> object:
    """A model whose module has a name that is markup, and one that a terminal would obey."""
    import torch
    from torch import nn

    model = nn.Sequential()
    model.add_module("[bold]x[/nope]", nn.Linear(4, 4))
    model.add_module("\x1b[31mred", nn.Linear(4, 4))
    x = torch.ones(8, 4)
    return model, (x, x), nn.functional.mse_loss


def leaves() -> object:
    """A target that ends the program, as if it had been successful."""
    raise SystemExit(0)


def nothing() -> object:
    """A target that is no model."""
    return None


def calls(count: int, seed: int, folder: Path) -> Iterator[list[str]]:
    """Lists of arguments; files that some of them name lie in a folder."""
    layers = '{"model_type": "llama", "num_hidden_layers": %s, "architectures": %s}'
    (folder / "config.json").write_text(layers % (1000000000, "[5]"))
    (folder / "minus.json").write_text(layers % (-1, '["LlamaForCausalLM"]'))
    (folder / "words.json").write_text(layers % ('"\\u0663"', "{}"))
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "version.json").write_text('{"version": 1}')
    for name, seconds, rate in (("slow", 1e308, 1e-308), ("extreme", 1e30, 1e-30)):
        (folder / f"{name}.toml").write_text(_MACHINE % (seconds, rate))
    for name in ("pipe.json", "pipe.toml"):
        os.mkfifo(folder / name)
    for mesh in ("dp=2", "dp=2,tp=2"):
        run(["explain", _TINY, "--mesh", mesh, "--save", str(folder / f"{mesh}.json")])
    for number in range(count):
        draw = random.Random(f"{seed}/call/{number}")
        texts = _arguments(draw)
        yield [t.replace("{folder}", str(folder)).replace("{draw}", str(number)) for t in texts]


def _arguments(draw: random.Random) -> list[str]:
    """A call with one odd value, seldom one odd word; one in four has none, since options may be odd together."""
    command, words = _plausible(draw)
    if draw.random() < 0.8:
        names = [at for at, word in enumerate(words) if word.startswith("--")]
        # A script that there is would be run.
        values = [at for at in range(command == "run", len(words)) if at not in names]
        at = draw.choice(names if names and draw.random() < 0.05 else values or names)
        words[at] = _odd(words[at], words[at - 1] if at else "", draw)
    return [*command.split()[:1], *words]


def _plausible(draw: random.Random) -> tuple[str, list[str]]:
    """A command and the words after it."""
    command = draw.choice(_COMMANDS)
    own = [f"{{folder}}/{draw.choice(('dp=2', 'dp=2,tp=2'))}.json" for _ in "ab"]
    if command == "diff":
        return command, own
    if command == "run":
        return command, ["{folder}/none.py", "--ranks", "2"]
    if command == "verify --plan":
        return command, [_TINY, "--plan", own[0]]
    where = draw.choice(_WHERE[:3] if "verify" in command else _WHERE)
    if command == "verify --random":
        return command, [_TINY, *where, "--random", "--seed", "3"]
    found = _OPTIONS[command]
    names = draw.sample(sorted(found), draw.choice((0, 1, 1, 1, 2)))
    options = [word for name in names for word in (name, draw.choice(found[name]))]
    shown = () if command == "verify" else draw.choice(((), ("--json",)))
    return command, [_TINY, *where, *options, *shown]


def _odd(word: str, option: str, draw: random.Random) -> str:
    """Another word in place of one after an option: one that can be read, a wild one, or the same but for a letter."""
    if word == _TINY:
        return draw.choice(_TARGETS)
    readable = _READABLE.get(option, _COUNTS if word.isdigit() else ())
    if readable and draw.random() < 0.6:
        return draw.choice(readable)
    if draw.random() < 0.5 and not word.startswith("--"):
        return draw.choice(_WILD)
    at = draw.randrange(len(word))
    return word[:at] + draw.choice(("", "0", "9", "-", "=", ",", ":", "x", "٣", " ")) + word[at + 1 :]


class Misread(AutoparError):
    """A command line that ends while its options are read, before anything is asked of the product."""


def run(arguments: Sequence[str]) -> Result:
    """Runs a command."""
    return CliRunner().invoke(main, list(arguments))


def call(arguments: Sequence[str]) -> str | None:
    """Runs a command in a folder of its own; the kind of fault, or None.

    Raises AutoparError for a command that ends with an error, Misread where its options could not be read.
    """
    with tempfile.TemporaryDirectory() as here, contextlib.chdir(here):
        found = run(arguments)
        left = os.listdir()
    error = found.exception
    if error is not None and not isinstance(error, SystemExit):
        raise RuntimeError("a raw error") from error
    if found.exit_code not in (0, 1, 2) or "Traceback" in found.output:
        return "raw traceback"
    is_refused = "Error: " in found.stderr
    if _is_silent(arguments, found, is_refused=is_refused, left=left):
        return "silent change"
    if is_refused:
        raise (Misread if found.exit_code == 2 else AutoparError)(found.output)
    return None


def _is_silent(arguments: Sequence[str], found: Result, *, is_refused: bool, left: list[str]) -> bool:
    """Whether a command ended well without a word, said half an answer, or left what nobody asked for."""
    if any(ord(x) < 32 and x not in "\n\t" for x in found.output):
        return True
    if is_refused:
        return bool(found.stdout) or not found.exit_code or bool(left)
    if any(name not in "\n".join(arguments) for name in left) or not found.stdout.strip():
        return True
    if "--json" in arguments:
        json.loads(found.stdout)
    return False

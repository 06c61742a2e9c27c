"""Gives mutated files to every reader, and mutated arguments to the command line, and counts what may not happen.

OMP_NUM_THREADS=1 python benchmarks/fuzz/run.py --markdown benchmarks/fuzz/results.md

The counts of each format lie in `results.json` as soon as they are there; `--format` makes those of some formats anew.
A fault is printed with the seed of its try.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[2]))
from autopar.errors import AutoparError
from benchmarks.fuzz.calls import Misread, call, calls
from benchmarks.fuzz.formats import Format, formats
from benchmarks.fuzz.mutations import mutated
from benchmarks.fuzz.page import replace_part
from benchmarks.fuzz.watch import KINDS, LIMIT_SECONDS, Seen, Watch
from benchmarks.stored import write_whole
from benchmarks.tables import markdown_table

RESULTS = Path(__file__).with_name("results.json")


@dataclass
class Count:
    """What was counted of one kind of file, or of the calls.

    Attributes:
        name: the kind.
        tries: number of tries.
        refused: number that ended with an error for people.
        misread: number of those that ended while the options of a command were read.
        faults: number of each of `KINDS`.
        slowest_seconds: time of the processor for the slowest try.
        examples: seed and error of some faults.
        seed: seed of the tries.
    """

    name: str
    tries: int = 0
    refused: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    examples: list[str] = field(default_factory=list)
    seed: int = 0
    misread: int = 0

    def add(self, seed: str, seen: Seen, faults: Sequence[str]) -> None:
        """Counts a try."""
        self.tries += 1
        self.refused += seen.error is not None
        self.misread += isinstance(seen.error, Misread)
        self.slowest_seconds = max(self.slowest_seconds, seen.seconds)
        self.faults.update(faults)
        if faults and len(self.examples) < 20:
            self.examples.append(f"{seed}: {', '.join(faults)}: {seen.where}")


def try_file(kind: Format, path: Path, seed: str, watch: Watch) -> tuple[Seen, list[str]]:
    """Reads one mutated file; what was seen, and the faults."""
    path.write_bytes(kind.content)
    meant = kind.read(path)
    content = mutated(kind.content, random.Random(seed), is_json=kind.is_json)
    path.write_bytes(content)
    seen = watch.call(lambda: kind.read(path))
    faults = seen.faults((AutoparError,))
    if seen.error is None and not _means_what_it_says(kind, content, seen.value, meant):
        faults.append("silent change")
    return seen, faults


def _means_what_it_says(kind: Format, content: bytes, found: object, meant: object) -> bool:
    """Whether a changed file that was read means what stands in it: see `formats`."""
    if kind.is_sealed:
        return bool(found == meant)
    if kind.again is not None and kind.again(found) != found:
        return False
    # Other values with the same meaning: the reader has passed over some.
    values = kind.values
    return (
        values is None
        or bool(found != meant)
        or values(content.decode("utf-8", "replace")) == values(kind.content.decode())
    )


def fuzz_files(kinds: Sequence[Format], count: int, seed: int, watch: Watch) -> Iterator[Count]:
    """Gives so many files to the readers, as many to each."""
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(kinds):
            found = Count(kind.name)
            path = Path(folder, f"file{kind.ending}")
            for each in range(count // len(kinds) + (number < count % len(kinds))):
                name = f"{seed}/{kind.name}/{each}"
                found.add(name, *try_file(kind, path, name, watch))
            yield found


def fuzz_calls(count: int, seed: int, watch: Watch) -> Count:
    """Calls the command line so often."""
    found = Count("calls of the command line")
    with tempfile.TemporaryDirectory() as folder:
        for number, arguments in enumerate(calls(count, seed, Path(folder))):
            seen = watch.call(lambda given=arguments: call(given))  # type: ignore[misc]
            faults = seen.faults((AutoparError,))
            if seen.error is None and seen.value is not None:
                faults.append(seen.value)
            found.add(f"{seed}/call/{number} {arguments}", seen, faults)
    return found


def kept() -> dict[str, Count]:
    """The counts of earlier runs by their names."""
    values = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {name: Count(**{**each, "faults": Counter(each["faults"])}) for name, each in values.items()}


def keep(count: Count, seed: int) -> None:
    """Puts counts into the file of results, in place of those of the same name."""
    found = kept() | {count.name: dataclasses.replace(count, seed=seed)}
    values = {name: vars(each) | {"faults": dict(each.faults)} for name, each in found.items()}
    write_whole(values, RESULTS)


def table(counts: Sequence[Count]) -> list[str]:
    """The counts as lines of Markdown."""
    heads = ("what", "seed", "tries", "refused", *KINDS, "slowest, s")
    rows = [
        (
            c.name,
            str(c.seed),
            f"{c.tries:,}",
            f"{c.refused:,}",
            *(str(c.faults[kind]) for kind in KINDS),
            f"{c.slowest_seconds:.2f}",
        )
        for c in counts
    ]
    return [
        f"{sum(c.tries for c in counts):,} files and calls with odd arguments, each kind in one process. No answer is "
        f"one after {LIMIT_SECONDS:g} s of a processor; memory, growth by more than 1 GB in one try. Of the calls that "
        f"were refused {sum(c.misread for c in counts):,} ended while their options were read, the others later.",
        "",
        *markdown_table(heads, rows, text_columns=1),
    ]


@click.command()
@click.option("--files", default=10_000, help="Number of mutated files.")
@click.option("--calls", "call_count", default=1_000, help="Number of calls of the command line.")
@click.option("--seed", default=0)
@click.option("--format", "only", default="", help="Only formats with this word in their name.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Page to write.")
def main(files: int, call_count: int, seed: int, only: str, markdown: Path | None) -> None:
    """Counts what bad inputs do."""
    # Where a cache is not used is a line of its log.
    logging.getLogger("autopar").setLevel(logging.CRITICAL)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        kinds = [kind for kind in formats(Path(folder) / "samples") if files and only in kind.name]
        for count in fuzz_files(kinds, files, seed, watch):
            keep(count, seed)
            print(count.name, count.tries, dict(count.faults), *count.examples, sep="\n  ", flush=True)
    if call_count:
        count = fuzz_calls(call_count, seed, watch)
        keep(count, seed)
        print(count.name, dict(count.faults), *count.examples, sep="\n  ")
    if markdown:
        replace_part(markdown, "Files and calls", table(list(kept().values())), "benchmarks/fuzz/run.py")


if __name__ == "__main__":
    main()

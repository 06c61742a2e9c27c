"""A table of how long the tests take, by folder and kind, from a log of `pytest --durations=0`.

python -m benchmarks.suite.durations suite.log
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import click

from benchmarks.suite.reach import seconds_of_cases
from benchmarks.tables import markdown_table

ROOT = Path(__file__).parents[2]
_RANKS = re.compile(r"two_ranks|four_ranks|kept_ranks|mark\.multiprocess")


def kind_of(text: str) -> str:
    """Where the tests of a module run.

    >>> kind_of("def test_a(two_ranks): ...")
    'real ranks'
    """
    if _RANKS.search(text):
        return "real ranks"
    return "other processes" if re.search(r"subprocess|launched|autopar\.launch", text) else "one process"


def rows(cases: dict[str, dict[str, float]], texts: dict[str, str]) -> Iterable[tuple[str, ...]]:
    """The rows of the table: folder, kind, functions, cases and seconds, the longest first.

    Args:
        cases: seconds of every case of every test function.
        texts: text of every module of tests, by path.
    """
    functions, counts, seconds = (Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]())
    for test, of_test in cases.items():
        path = test.partition("::")[0]
        key = "/".join(path.split("/")[:2]), kind_of(texts[path])
        functions[key] += 1
        counts[key] += len(of_test)
        seconds[key] += round(sum(of_test.values()))
    for key, total in seconds.most_common():
        yield *key, str(functions[key]), str(counts[key]), str(total)


@click.command()
@click.argument("log", type=Path)
def main(log: Path) -> None:
    """Prints the table."""
    cases = seconds_of_cases(log.read_text())
    texts = {path: (ROOT / path).read_text() for path in {test.partition("::")[0] for test in cases}}
    heads = ("folder", "where", "functions", "cases", "seconds")
    click.echo("\n".join(markdown_table(heads, rows(cases, texts), text_columns=2)))


if __name__ == "__main__":
    main()

"""Writes `tests/slow.txt`: the tests that only `make slow` runs.

A test function is redundant where at least FEW other tests reach each of its lines, but for SPARSE lines, and one
other test reaches those. The most expensive functions are asked first, and what is taken out no longer counts as
another test. Of a redundant function with several cases the cheapest quarter stays in the fast suite, and at least
one; a function with one case stays if it is cheap. What may be lost so is measured by
`benchmarks.suite.planted_faults`, and `benchmarks.suite.probes` writes the two files that this one reads.

    python -m benchmarks.suite.slow_tests --hits hits.txt --log suite.log
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from benchmarks.suite.reach import SLOW_TESTS, Reach, seconds_of_cases

FEW = 5  # tests by which a line is well tested
SPARSE = 15  # lines of a redundant function that fewer tests reach
ASKED_SECONDS = 3.0  # of a function that is asked whether it is redundant
CHEAP_SECONDS = 5.0  # of a redundant function with one case that stays

# They are what the product promises: every schedule and every recipe on real ranks.
KEPT = ("test_every_schedule", "test_one_axis")


def redundant(reach: Reach, seconds: Mapping[str, float]) -> Iterator[str]:
    """Functions without which the others still reach every line, and nearly every line often, the dearest first."""
    lines: dict[str, set[tuple[str, int]]] = {}
    for path, by_line in reach.tests.items():
        for line, tests in by_line.items():
            for test in tests:
                lines.setdefault(test, set()).add((path, line))
    left = Counter(place for places in lines.values() for place in places)
    for test in sorted(lines, key=lambda test: -seconds.get(test, 0.0)):
        if seconds.get(test, 0.0) < ASKED_SECONDS or test.endswith(KEPT):
            continue
        counts = [left[place] for place in lines[test]]
        if min(counts) > 1 and sum(count <= FEW for count in counts) <= SPARSE:
            left.subtract(lines[test])
            yield test


def slow_cases(cases: Mapping[str, float]) -> list[str]:
    """The cases of a redundant function that only the whole suite runs."""
    if len(cases) == 1:
        return [case for case, seconds in cases.items() if seconds >= CHEAP_SECONDS]
    return sorted(cases, key=lambda case: cases[case])[max(1, len(cases) // 4) :]


@click.command()
@click.option("--hits", type=Path, required=True, help="File that probes wrote.")
@click.option("--log", type=Path, required=True, help="Log of the suite with --durations=0.")
def main(hits: Path, log: Path) -> None:
    """Writes the list of slow tests, in place of the one that is there: the log has to be of all tests."""
    cases = seconds_of_cases(log.read_text())
    seconds = {test: sum(of_test.values()) for test, of_test in cases.items()}
    slow = [case for test in redundant(Reach.read(hits), seconds) for case in slow_cases(cases[test])]
    SLOW_TESTS.write_text("".join(f"{case}\n" for case in sorted(slow)))
    click.echo(f"{len(slow)} tests with {sum(cases[c.partition('[')[0]][c] for c in slow):.0f} s are slow.")


if __name__ == "__main__":
    main()

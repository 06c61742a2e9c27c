"""Compares the plans and prices of the law's questions and the gallery with those that were recorded.

    python -m benchmarks.goldens --results runs/goldens.jsonl             a line for each question that differs
    python -m benchmarks.goldens --results runs/goldens.jsonl --record    records the answers of today

About half an hour of one core. Answers are added to the results as they come; a question that stands there is not
asked again. The timeline of every plan has to end at the step that is shown, and the parts of the step to add up to it,
each within 1 %. The last line gives processor seconds beside those recorded, which compare only on one machine.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from benchmarks.goldens.answers import Answer, goldens
from benchmarks.stored import store, stored

RECORDED = Path(__file__).parent / "recorded.json.gz"
NEAR = 0.01  # largest part of a step by which its timeline or the sum of its parts may differ from it


@dataclass(frozen=True)
class Answered:
    """The answer of one question, as results keep it."""

    name: str
    answer: Answer


def recorded() -> dict[str, Answer]:
    """Question -> the recorded answer."""
    found: dict[str, Answer] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return found


def difference(now: Answer, before: Answer) -> str:
    """In which fields an answer differs from the recorded one; "" where nothing does."""
    found = []
    for field in sorted((now.keys() | before.keys()) - {"search_seconds"}):
        new, old = now.get(field), before.get(field)
        if new != old:
            found.append(f"{field} {old} -> {new}" if field != "plan" else f"plan: {_changed(new or {}, old or {})}")
    return "; ".join(found)


def _changed(new: Mapping[str, object], old: Mapping[str, object]) -> str:
    """The fields of a plan that differ."""
    return ", ".join(sorted(key for key in new.keys() | old.keys() if new.get(key) != old.get(key)))


def untrue(answer: Answer) -> Iterator[str]:
    """Sentences on a timeline or parts that are not those of the step."""
    if "error" in answer:
        return
    step = float(answer["step_seconds"])
    for field, what in (("timeline_seconds", "the timeline ends at"), ("parts_seconds", "the parts add up to")):
        ratio = float(answer[field]) / step
        if abs(ratio - 1) > NEAR:
            yield f"{what} {ratio:.4f} of the step"


@click.command(help=__doc__)
@click.option("--results", type=click.Path(path_type=Path), required=True, help="File that answers are added to.")
@click.option("--record", is_flag=True, help="Record the answers.")
@click.option("--only", default="", help="Ask only the questions whose name has this text.")
def main(results: Path, record: bool, only: str) -> None:
    known = stored(results, Answered)
    asked = [each for each in goldens() if only in each.name]
    for each in track(asked, console=Console(stderr=True)):
        if each.name not in known:
            known[each.name] = Answered(each.name, each.answer())
            store(results, known[each.name])
    answers = {each.name: known[each.name].answer for each in asked}
    wrong = [f"{name}: {line}" for name, answer in answers.items() for line in untrue(answer)]
    if record:
        RECORDED.write_bytes(gzip.compress(json.dumps(answers, indent=0, sort_keys=True).encode(), mtime=0))
    before = recorded()
    differ = [f"{name}: {text}" for name in answers if (text := difference(answers[name], before.get(name, {})))]
    print("\n".join([*wrong, *differ, *_summary(answers, before, len(differ), len(wrong))]))
    sys.exit(bool(differ or wrong))


def _summary(answers: Mapping[str, Answer], before: Mapping[str, Answer], differ: int, wrong: int) -> Iterator[str]:
    yield f"{differ} of {len(answers)} answers differ; {wrong} timelines or sums are not the step."
    now, then = (
        [a["search_seconds"] for n, a in x.items() if "search_seconds" in a and n in answers] for x in (answers, before)
    )
    if now and then:
        yield (
            f"Processor seconds: median {statistics.median(now):.1f}, worst {max(now):.1f}; "
            f"recorded {statistics.median(then):.1f}, {max(then):.1f}."
        )


if __name__ == "__main__":
    main()

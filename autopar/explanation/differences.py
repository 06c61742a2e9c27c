"""The differences between two plans, in words, with their costs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.explanation.candidate_rows import slower
from autopar.explanation.report import ZERO_NAMES, starred, used_axes
from autopar.ir import Plan
from autopar.ir.plan_reading import read_document
from autopar.ir.recompute import format_recompute
from autopar.units import format_as, format_bytes, format_seconds

_SMALL = 1e-4  # of the whole: parts that differ by less are as good as equal


@dataclass(frozen=True)
class Side:
    """A saved plan, or a whole document of `--json` with its costs.

    Attributes:
        name: name of the file.
        plan: the plan in the file.
        document: all of it; empty for a bare plan.
    """

    name: str
    plan: Plan
    document: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> Side:
        """Reads a file written by `--save` or `--json`. Raises PlanError for anything else."""
        document = read_document(path)
        if not isinstance(document, dict) or not isinstance(document.get("plan", document), dict):
            raise PlanError(f"{path} is neither a plan nor the output of `autopar explain --json`.")
        try:
            plan = Plan.from_json(document.get("plan", document))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        priced = {"time", "memory", "traffic", "cluster"} <= document.keys()
        return cls(path.name, plan, document if priced else {})


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        subject: "mesh", "recipe", "run", "model", "parameter" or "op".
        name: name of the parameter or op, numbers of layers starred; "" for the others.
        before, after: values in the first and in the second plan.
        count: number of parameters or ops with this difference.
    """

    subject: str
    name: str
    before: str
    after: str
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count}x)" if self.count > 1 else ""
        what = f"{self.subject} {self.name}".strip()
        return f"{what}{times}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class CostChange:
    """A part of a cost on both sides, in `unit` ("seconds" or "bytes")."""

    cost: str
    part: str
    unit: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before

    def __str__(self) -> str:
        sign = "+" if self.change >= 0 else "-"
        values = f"{format_as(self.unit, self.before)} -> {format_as(self.unit, self.after)}"
        return f"{self.part}: {values} ({sign}{format_as(self.unit, abs(self.change))})"


def differences(a: Side, b: Side) -> tuple[Difference, ...]:
    """The differences between two plans, the broadest first."""
    return tuple((*_headlines(a, b), *_of_parameters(a.plan, b.plan), *_of_ops(a, b)))


def _headlines(a: Side, b: Side) -> Iterator[Difference]:
    pairs = [
        ("model", a.plan.fingerprint, b.plan.fingerprint),
        ("mesh", str(a.plan.world_mesh), str(b.plan.world_mesh)),
        ("recipe", a.plan.recipe, b.plan.recipe),
        ("schedule", *(s.plan.pipeline.schedule if s.plan.pipeline else "none" for s in (a, b))),
        ("stages begin at", *map(_cuts, (a.plan, b.plan))),
        ("micro-batches", str(a.plan.micro_batches), str(b.plan.micro_batches)),
        ("buckets", *(str(side.plan.bucket_bytes or "usual") for side in (a, b))),
        ("tiles of the loss", *(str(side.plan.loss_tile_bytes or "none") for side in (a, b))),
        ("precision", *(str(side.plan.precision or "none") for side in (a, b))),
    ]
    if a.document and b.document:
        pairs.append(("cluster", a.document["cluster"]["name"], b.document["cluster"]["name"]))
        for name in ("stages", "recompute"):
            pairs.append((name, str(a.document["run"][name]), str(b.document["run"][name])))
    else:
        pairs.append(("recompute", *(format_recompute(s.plan.recompute) for s in (a, b))))
    pairs.append(("saved in slices", *(_saved(side.plan) for side in (a, b))))
    for subject, before, after in pairs:
        if before != after:
            yield Difference(subject, "", before, after)


def _saved(plan: Plan) -> str:
    lines = (f"{name} {how.text(plan.mesh)}" for name, how in plan.saved.items())
    return ", ".join(lines) or "nothing"


def _cuts(plan: Plan) -> str:
    """The ops with which stages after the first begin."""
    return ", ".join(plan.pipeline.cuts) if plan.pipeline else "the first op alone"


def _of_parameters(a: Plan, b: Plan) -> Iterator[Difference]:
    before, after = _storage(used_axes(a)), _storage(used_axes(b))
    counts: Counter[tuple[str, str, str]] = Counter()
    for name in dict.fromkeys((*before, *after)):
        pair = (before.get(name, "absent"), after.get(name, "absent"))
        if pair[0] != pair[1]:
            counts[(starred(name), *pair)] += 1
    for (name, one, other), count in counts.items():
        yield Difference("parameter", name, one, other, count)


def _storage(plan: Plan) -> dict[str, str]:
    """Where every parameter is kept, such as `S(0)@dp, ZeRO-1@dp`."""
    found = {}
    for name, how in plan.parameters.items():
        stages = [
            f"{ZERO_NAMES[stage]}@{axis}"
            for i, axis in enumerate(plan.mesh.names)
            if (stage := how.zero_stage(i)) in (1, 2)
        ]
        found[name] = ", ".join([how.stored_text(plan.mesh), *stages])
    return found


def _of_ops(a: Side, b: Side) -> Iterator[Difference]:
    before, after = _splits(a), _splits(b)
    counts: Counter[tuple[str, str, str]] = Counter()
    for name in dict.fromkeys((*before, *after)):
        title, one = before.get(name, after.get(name, ("", ""))), before.get(name, ("", "absent"))
        other = after.get(name, ("", "absent"))
        if one[1] != other[1]:
            counts[(title[0], one[1], other[1])] += 1
    for (name, one_text, other_text), count in counts.items():
        yield Difference("op", name, one_text, other_text, count)


def _splits(side: Side) -> dict[str, tuple[str, str]]:
    """Op -> its title, and what it splits along every axis of more than one rank."""
    plan = used_axes(side.plan)
    known: Mapping[str, Mapping[str, str]] = side.document.get("splits", {})
    found = {}
    for name, labels in plan.ops.items():
        words = known.get(name)
        title = words["op"] if words else re.sub(r"_\d+$", "", name)
        values = [words.get(axis, "-") for axis in plan.mesh.names] if words else list(labels)
        said = (f"{v} over {axis}" for v, axis in zip(values, plan.mesh.names, strict=True) if v not in ("-", "~"))
        found[name] = (title, ", ".join(said) or "whole")
    return found


def costs(a: Side, b: Side) -> tuple[CostChange, ...]:
    """The costs of the differences: step time, memory and traffic, with the parts that change.

    None where a side is a bare plan, which knows no cost.
    """
    if not (a.document and b.document):
        return ()
    return tuple(
        change
        for cost, unit in (("time", "seconds"), ("memory", "bytes"), ("traffic", "bytes"))
        for change in _parts(cost, unit, a.document[cost], b.document[cost])
    )


def _parts(cost: str, unit: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[CostChange]:
    whole = CostChange(cost, "step" if cost == "time" else cost, unit, before[unit], after[unit])
    yield whole
    values = [{p["name"]: p[unit] for p in tree.get("parts", [])} for tree in (before, after)]
    parts = [
        CostChange(cost, name, unit, values[0].get(name, 0.0), values[1].get(name, 0.0))
        for name in dict.fromkeys((*values[0], *values[1]))
    ]
    least = _SMALL * max(abs(whole.before), abs(whole.after))
    yield from sorted((p for p in parts if abs(p.change) > least), key=lambda p: -abs(p.change))


def verdict(a: Side, b: Side) -> str:
    """Which of the two is faster and which smaller, in one sentence."""
    if not (a.document and b.document):
        bare = " and ".join(side.name for side in (a, b) if not side.document)
        return (
            f"{bare} holds a plan without its cost; compare documents of `autopar explain --json` to see "
            "what the differences cost."
        )
    seconds = [side.document["step_seconds"] for side in (a, b)]
    memory = [side.document["memory_bytes"] for side in (a, b)]
    pace = slower(seconds[1], seconds[0])
    more = memory[1] - memory[0]
    than = f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'}"
    size = f"{than if more else 'the same'} memory a rank"
    steps = f"{format_seconds(seconds[1])} against {format_seconds(seconds[0])} a step"
    return f"{b.name} is {pace} {'as' if pace == 'as fast' else 'than'} {a.name} ({steps}) and takes {size}."


def to_json(a: Side, b: Side) -> dict[str, Any]:
    """Both lists and the verdict."""
    return {
        "a": a.name,
        "b": b.name,
        "verdict": verdict(a, b),
        "differences": [dict(vars(each)) for each in differences(a, b)],
        "costs": [
            {
                "cost": c.cost,
                "part": c.part,
                f"before_{c.unit}": c.before,
                f"after_{c.unit}": c.after,
                f"change_{c.unit}": c.change,
            }
            for c in costs(a, b)
        ],
    }

"""The page of the zoo: `benchmarks/results/zoo.md`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.zoo.diffusion import NAMES, installed
from benchmarks.zoo.rows import PASSED, PLANS, SPLIT_BY_BACKEND, WIDE, Row, packages_used

# (part of an error, what lies behind it); the first that matches counts.
CAUSES = (
    ("data-dependent", "Python control flow or a shape that depends on a tensor's value"),
    ("of a tensor's value", "a Python number or a size read off a tensor's value"),
    ("cannot be captured", "other code that export refuses"),
    ("requires the", "a package that is not installed (timm)"),
    ("took over", "over the bound on time"),
    ("ended with status", "over the bound on memory, or the process ended"),
    ("no inputs run", "the generic configuration or inputs are not what the model wants"),
    ("", "the model's class fails by itself"),
)
DIFFERS = "torch.export's own program is another function than the model"

OF_TRANSFORMERS = """\
Architectures of `transformers`, and diffusion blocks of `diffusers` where it is installed,"""
OF_LIBRARIES = """\
Models of libraries of layers (a small model of each family of timm, ViTs of vit-pytorch, options of x-transformers,
and others: `benchmarks/zoo/libraries.py`),"""

INTRODUCTION = """\
each built small from its configuration (no download), captured, and compared with the eager model on one device under
six plans, all ranks simulated: loss, every gradient, every updated buffer. Five plans are searched with a recipe (ddp,
tp, ddp x tp, zero3, stages with four micro-batches), one is drawn at random on an axis of two. What cannot be captured
is run by `torch.compile(backend="autopar")` on two processes over Gloo, split along `dp` and along `tp`, and loss and
every gradient are compared with the eager ones; `--backend all` does so with what can be captured, too."""

WORST = """\
`worst` is the largest error relative to its tolerance (1e-9 in float64, 2e-5 where any part of
the graph is of lower precision). Where float32 inside a model's code brings an error beyond that,
the plan is proved again with float64 in its place: `float64` in the table says that it then passed
at 1e-9, that is, that the error was rounding."""

# What was looked into: a line for each that it bears on.
EXPLAINED = {
    "paligemma": "Eagerly `transformers` drops a causal mask that masks nothing beside, and leaves it to "
    "`is_causal`, which is false in this model (`use_bidirectional_attention`): attention is bidirectional. Under "
    "`torch.export` and `torch.compile` it keeps the mask (`masking_utils._ignore_causal_mask_sdpa` asks "
    "`torch.compiler.is_exporting`): attention is causal. With `token_type_ids`, as its processor gives them, both "
    "make the same mask. `autopar.verify` reports the difference.",
    "clap": "PyTorch 2.13 itself: `batch_norm` of (4, 64, 64, 1) on the CPU gives a wrong gradient where its input is "
    "contiguous and the gradient of its output is transposed, as it is behind a gathered input in this plan and behind "
    "`x.transpose(1, 3).contiguous()` in eager code (finite differences tell which is right).",
    "d_fine": "So small, it is chaotic: batch norm over maps of 1 x 1. One of its maps, changed by 1e-14 of itself "
    "in eager code, changes what comes six layers later by 1e-1; each of its graphs gives what it does eagerly on the "
    "same inputs, to 2e-11.",
    "oneformer": "Rounding of float32: in eager code, parameters changed by 1e-7 of themselves change these gradients "
    "by 5e-5 to 6e-5.",
    "autoformer": "Rounding of float32: in eager code, parameters changed by 1e-7 of themselves change these gradients "
    "by 8e-4 to 1e-3.",
    "udop": "Dynamo's own: torch.compile(backend='eager') fails so, too.",
    "yoso": "Its `torch.autograd.Function` has a backward that is not the derivative of its forward. A captured "
    "graph keeps the forward alone, and the capture warns of it.",
}


def markdown(rows: Sequence[Row], known: int, note: str = "", *, of_libraries: bool = False) -> str:
    """The page of what was examined of `known` architectures; `note` says what is particular to this run."""
    lines = [
        "# The zoo of libraries" if of_libraries else "# The zoo",
        "",
        OF_LIBRARIES if of_libraries else OF_TRANSFORMERS,
        INTRODUCTION,
        "",
        *_making(rows, known, note, of_libraries=of_libraries),
        "",
        *_summary(rows),
        "",
        WORST,
        "",
        "## Captured",
        "",
        *_captured(rows),
        "",
        "## Failures",
        "",
        *_failures(rows),
        "",
        "## Captured, and run by the backend too",
        "",
        *_both(rows),
        "",
        "## Not captured",
        "",
        *_refused(rows),
        "",
        "## Not built",
        "",
        *_unbuilt(rows),
        "",
        "## Built with less, or more",
        "",
        *_notes(rows),
        "",
    ]
    return "\n".join(lines)


def _making(rows: Sequence[Row], known: int, note: str, *, of_libraries: bool) -> Iterator[str]:
    versions = sorted({row.version for row in rows})
    packages = ", ".join(f"{name} {version}" for name, version in packages_used().items())
    command = "OMP_NUM_THREADS=1 python benchmarks/zoo/run.py --results RESULTS.jsonl --jobs 2 --markdown"
    page = "libraries.md --libraries" if of_libraries else "zoo.md"
    yield "Made by"
    yield f"`{command} benchmarks/results/{page}`,"
    order = "" if of_libraries else "in an order drawn at random: "
    yield f"{order}{len(rows)} of {known}, with {packages}."
    yield (
        f"The code was {versions[0] if versions else 'none'} (`zoo_rows.code_version`)."
        if len(versions) < 2
        else (f"The rows are of {len(versions)} versions of the code: {', '.join(v or 'unknown' for v in versions)}.")
    )
    if not (of_libraries or installed()):
        yield f"diffusers is not installed: its {len(NAMES)} blocks were not tried (`pip install autopar[diffusers]`)."
    if note:
        yield note


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    built = [row for row in rows if row.built]
    captured = [row for row in rows if row.captured]
    passed = [row for row in captured if row.passed]
    wide = [row for row in passed if WIDE in row.plans.values()]
    refused = [row for row in built if not row.captured]
    by_backend = [row for row in refused if row.run_by_backend]
    kinds = Counter(row.kind for row in built).most_common()
    prefixes = Counter(row.name.partition(":")[0] for row in rows if ":" in row.name)
    libraries = ", ".join(f"{count} of {name.removesuffix(':')}" for name, count in prefixes.items())
    yield f"- tried: {len(rows)}{f', among them {libraries}' if libraries else ''}"
    yield f"- built and run eagerly: {len(built)} ({', '.join(f'{kind} {count}' for kind, count in kinds)})"
    yield f"- captured: {len(captured)}"
    yield (
        f"- passed all six plans: {len(passed)} of {len(captured)} "
        f"({100 * len(passed) / max(len(captured), 1):.0f} %), "
        f"{len(wide)} of them only with float64 in place of float32 (below)"
    )
    counts = {plan: sum(row.plans.get(plan) in (PASSED, WIDE) for row in captured) for plan in PLANS}
    yield f"- passed by plan: {', '.join(f'{plan} {count}' for plan, count in counts.items())}"
    yield f"- not captured, but run by the backend with parity: {len(by_backend)} of {len(refused)}"
    both = [row for row in captured if row.backend]
    if both:
        by_both = sum(row.run_by_backend for row in both)
        yield f"- captured, and run by the backend with parity too: {by_both} of {len(both)} that were tried"


def _captured(rows: Sequence[Row]) -> Iterator[str]:
    yield ("| architecture | model and inputs | kind | dtype | parameters | " + " | ".join(PLANS) + " | worst |")
    yield "|" + "---|" * (len(PLANS) + 6)
    shown = {PASSED: "yes", WIDE: "float64"}
    for row in sorted((row for row in rows if row.captured), key=lambda r: r.name):
        cells = " | ".join(shown.get(row.plans.get(plan, ""), "**no**") for plan in PLANS)
        yield (
            f"| {row.name} | `{row.model}` | {row.kind} | {row.dtype} | {row.parameters:,} | {cells} | "
            f"{row.worst:.0e} |"
        )


def _failures(rows: Sequence[Row]) -> list[str]:
    """Each failing plan in a line, those of one cause together."""
    lines = []
    for row in sorted((row for row in rows if row.captured), key=lambda r: r.name):
        reasons: dict[str, list[str]] = {}
        for plan, outcome in row.plans.items():
            if outcome not in (PASSED, WIDE):
                reasons.setdefault(outcome, []).append(plan)
        lines += [f"- **{row.name}**, {', '.join(plans)}: {_plain(why)}" for why, plans in reasons.items()]
        if reasons and row.name in EXPLAINED:
            lines.append(f"  {EXPLAINED[row.name]}")
    return lines or ["None."]


def _refused(rows: Sequence[Row]) -> Iterator[str]:
    """What was built and not captured: why, and what the backend makes of it."""
    refused = sorted((row for row in rows if row.built and not row.captured), key=lambda r: r.name)
    yield from _causes(refused)
    yield (
        "| architecture | model and inputs | what autopar.compile says | "
        + " | ".join(f"backend, {plan}" for plan in SPLIT_BY_BACKEND)
        + " |"
    )
    yield "|" + "---|" * (len(SPLIT_BY_BACKEND) + 3)
    for row in refused:
        cells = " | ".join(_by_backend(row, plan) for plan in SPLIT_BY_BACKEND)
        yield f"| {row.name} | `{row.model}` | {_plain(row.stopped or row.differs)} | {cells} |"
    yield ""
    yield from (f"**{row.name}**: {EXPLAINED[row.name]}" for row in refused if row.name in EXPLAINED)


def _both(rows: Sequence[Row]) -> Iterator[str]:
    """What was captured and run by the backend too, with the number of graphs and the worst error."""
    both = sorted((row for row in rows if row.captured and row.backend), key=lambda r: r.name)
    if not both:
        yield "None in this run: `--backend all` runs what is captured too."
        return
    yield f"| architecture | {' | '.join(SPLIT_BY_BACKEND)} |"
    yield "|" + "---|" * (len(SPLIT_BY_BACKEND) + 1)
    for row in both:
        yield f"| {row.name} | {' | '.join(_by_backend(row, plan) for plan in SPLIT_BY_BACKEND)} |"


def _by_backend(row: Row, plan: str) -> str:
    outcome = row.backend.get(plan, "")
    if outcome.startswith(PASSED):
        return f"yes{outcome.removeprefix(PASSED)}"
    return f"**no**: {_plain(outcome)}" if outcome else "not tried"


def _unbuilt(rows: Sequence[Row]) -> Iterator[str]:
    unbuilt = sorted((row for row in rows if not row.built), key=lambda r: r.name)
    yield from _causes(unbuilt)
    for row in unbuilt:
        yield f"- **{row.name}**: {_plain(row.stopped)}"


def _causes(rows: Sequence[Row]) -> Iterator[str]:
    causes = Counter(DIFFERS if row.differs else _cause(row.stopped) for row in rows)
    yield from ("| cause | architectures |", "|---|---|")
    yield from (f"| {cause} | {count} |" for cause, count in causes.most_common())
    yield ""


def _cause(text: str) -> str:
    return next(why for part, why in CAUSES if part in text)


def _notes(rows: Sequence[Row]) -> list[str]:
    noted = sorted((row for row in rows if row.note and row.built), key=lambda r: r.name)
    return [f"- **{row.name}** (`{row.model}`): {_plain(row.note)}" for row in noted] or ["None."]


def _plain(text: str) -> str:
    """Without the paths of this machine, and on one line."""
    text = re.sub(r"/[^\s(]*/site-packages/", "", text)
    return " ".join(text.replace("|", "\\|").split())

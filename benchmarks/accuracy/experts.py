"""Plans that autopar finds, beside the configurations that the makers of published runs chose.

    python benchmarks/accuracy/experts.py --data DIR --results runs/experts.jsonl [--markdown PATH] [--only TEXT]

A question is a model, a cluster, a batch and a sequence length that a table of DIR has a run for, on 64 GPUs or
more. Of several runs for one question the fastest is the makers' choice. autopar prices that choice (mesh, ZeRO
stage, sequence parallelism, schedule, chunks, micro-batches, recomputation) as it would run it itself, and then
answers the question with everything open. Both prices are those that `autopar explain` prints. Answers are added
to the file of results as they come, and a question that stands there is not asked again.

What makers used and autopar cannot express is replaced by something that is no slower in autopar's prices:
"cp" is context parallelism, in whose place the search chooses freely on an axis of that size; "sac" is
recomputation of single ops, in whose place nothing is recomputed. GPUs that fill no whole number of nodes (racks
of 72) are taken to be in nodes of the greatest common divisor.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where it runs as a script

from autopar.cost_model import Cluster
from autopar.cost_model.items import MIXED_FLOAT32_GRADIENTS, TrainingState
from autopar.cost_model.machines.software import with_eager_runs
from autopar.errors import AutoparError
from autopar.explanation.advice import Question
from autopar.ir import Mesh
from autopar.ir.recompute import Selection
from autopar.models import Transformer
from autopar.models.presets import Preset
from autopar.search.request.request import Request
from benchmarks.accuracy.rows import Row, Skip, is_training_table, rows
from benchmarks.accuracy.subjects import Subject, framework_of, hardware_of, subject
from benchmarks.stored import store, stored
from benchmarks.tables import markdown_table, plan_words

FEWEST_GPUS = 64
ZERO = ("ddp", "zero1", "zero2", "zero3")
HEADS = (
    "model",
    "GPUs",
    "batch",
    "sequence",
    "the makers' choice",
    "its price, s",
    "autopar's plan",
    "its price, s",
    "ratio",
    "search, s",
)


@dataclass(frozen=True)
class Choice:
    """The configuration of a run in the words of autopar's requests.

    Attributes:
        mesh: sizes of the axes, as text; axes of one rank are left out.
        recipe: ZeRO stage and tensor parallelism.
        micro_batches: number of micro-batches of a step.
        schedule: order of the pipeline's stages; "" without stages.
        chunks: number of stages of a pipeline rank.
        recompute: "full" or "none".
        stand_ins: what was replaced, among "cp" and "sac".
        repeats: ops of a layer whose results the makers' runtime does not keep, by their names in a plan.
    """

    mesh: str
    recipe: str
    micro_batches: int
    schedule: str
    chunks: int
    recompute: str
    stand_ins: tuple[str, ...]
    repeats: tuple[str, ...] = ()

    @property
    def recomputation(self) -> str | Selection:
        """What a request says of recomputation."""
        some = self.recompute == "none" and self.repeats
        return Selection((("layers.*", self.repeats),)) if some else self.recompute

    def __str__(self) -> str:
        stages = f"{self.schedule} x {self.chunks}, " * bool(self.schedule)
        marks = "".join(f" [{each}]" for each in self.stand_ins)
        marks += f" but {', '.join(self.repeats)}" * (self.recomputation != self.recompute)
        return (
            f"{self.mesh} {self.recipe}, {stages}{self.micro_batches} micro-batches, recompute {self.recompute}{marks}"
        )


def repeats_of(found: Subject) -> tuple[str, ...]:
    """What backward of a runtime makes again: gathered inputs of products, and what a fused kernel never wrote."""
    shape, model = found.shape, found.shape.family.description
    into = ("gate_up" if model.fused_projections else "gate") if model.gated else "up"
    products = ("query_key_value" if model.fused_projections else "query", into)
    gathers = [f"{at}.{name}/linear<0" for at, name in zip(("attention", "mlp"), products, strict=True)]
    is_split = shape.traits.regathers and shape.sequence_parallel and found.row.tp > 1
    return (*gathers * is_split, *["mlp/silu"] * (shape.traits.fused and model.gated))


def choice_of(row: Row, zero_stage: int, sequence_parallel: bool, repeats: tuple[str, ...] = ()) -> Choice:
    """The configuration that a row tells. Raises Skip for a batch that the ranks cannot share."""
    cp = round(1 / row.micro_batch) if row.micro_batch < 1 else 1
    sizes = {"pp": row.pp, "dp": row.dp // cp, "cp": cp, "tp": row.tp}
    if math.prod(sizes.values()) != row.n_gpus:
        raise Skip("the axes do not multiply to the GPUs")
    recipes = {"dp": ZERO[zero_stage], "cp": "auto", "tp": "tp+sp" if sequence_parallel else "tp"}
    used = {name: size for name, size in sizes.items() if size > 1}
    schedule = ("interleaved" if row.chunks > 1 else "1f1b") if row.pp > 1 else ""
    replaced = {"cp": cp > 1, "sac": row.recompute.startswith(("selective", "modules"))}
    return Choice(
        ",".join(f"{name}={size}" for name, size in used.items()),
        ",".join(f"{name}:{recipes[name]}" for name in used if name in recipes) or "auto",
        row.grad_accum,
        schedule,
        row.chunks if schedule else 1,
        "full" if row.recompute.startswith("full") else "none",
        tuple(name for name, is_replaced in replaced.items() if is_replaced),
        repeats,
    )


# --- questions


@dataclass(frozen=True)
class Case:
    """A question with the makers' answer to it.

    Attributes:
        source: name of the table.
        preset: the model.
        cluster: the GPUs of the run.
        batch: sequences of a step.
        seq: tokens of a sequence.
        choice: what the makers ran.
        measured_seconds: time of a step, as they measured it.
        training_state: bytes that they kept for each parameter, which both plans keep.
    """

    source: str
    preset: Preset
    cluster: Cluster
    batch: int
    seq: int
    choice: Choice
    measured_seconds: float | None
    training_state: TrainingState = MIXED_FLOAT32_GRADIENTS

    @property
    def name(self) -> str:
        """What tells the case from the others."""
        model = self.preset.description
        # makers run one name in several sizes
        size = f"{model.layers}x{model.hidden}, {model.heads} heads"
        place = f"{self.cluster} b{self.batch} s{self.seq}"
        return f"{self.source} {self.preset.name} {size} {place} {self.choice}"


def case_of(source: str, found: Subject) -> Case:
    """The case of a run. Raises Skip where autopar's models have no such run."""
    row, family = found.row, found.shape.family
    batch = row.micro_batch * row.grad_accum * row.dp
    assert row.vocab is not None and row.ffn is not None, "a subject has all sizes of its model"
    if batch != int(batch):
        raise Skip("a fraction of a sequence is left")
    node = math.gcd(found.hardware.devices_per_node, row.n_gpus)
    # Not the software of the makers: both configurations are priced as autopar would run them.
    hardware = hardware_of(row, framework_of(row).network)
    place = Cluster(replace(hardware, devices_per_node=node), row.n_gpus // node)
    description = replace(
        family.description,
        hidden=row.hidden,
        layers=row.layers,
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=row.hidden // row.heads,
        ffn=row.ffn,
        vocab=row.vocab,
        max_positions=row.seq,
    )
    assert isinstance(description, Transformer)
    preset = Preset(row.model, description, row.params or 0.0, row.source_ref)
    sp = found.shape.sequence_parallel and row.tp > 1
    choice = choice_of(row, found.shape.zero_stage, sp, repeats_of(found))
    return Case(
        source,
        preset,
        with_eager_runs(place),
        int(batch),
        row.seq,
        choice,
        row.step_seconds,
        found.shape.training_state,
    )


def cases(data: Path) -> Iterator[Case | Skip]:
    """The makers' fastest run of every question, or why a run is left out."""
    best: dict[tuple[object, ...], Case] = {}
    for path in sorted(data.glob("*.csv")):
        if not is_training_table(path):
            continue
        for row in rows(path):
            if isinstance(row, Row) and (row.n_gpus < FEWEST_GPUS or row.failed):
                continue
            try:
                found = case_of(path.stem, _described(row))
            except Skip as reason:
                yield reason
                continue
            key = (found.preset.description, found.cluster, found.batch, found.seq)
            best[key] = min(best.get(key, found), found, key=_measured)
    yield from best.values()


def _described(row: Row | Skip) -> Subject:
    if isinstance(row, Skip):
        raise row
    return subject(row)


def _measured(case: Case) -> float:
    return math.inf if case.measured_seconds is None else case.measured_seconds


# --- answers


@dataclass(frozen=True)
class Answer:
    """The prices of a case: of the makers' configuration and of autopar's plan.

    Attributes:
        name: name of the case.
        model: name of the preset.
        gpus: name of the cluster.
        batch: number of sequences of a step.
        seq: tokens of a sequence.
        choice: the makers' configuration, in words.
        choice_seconds: predicted duration of a step of that configuration.
        choice_fits: whether it keeps the bound on memory that autopar searches by.
        plan: autopar's plan, in words.
        plan_seconds: predicted duration of a step of that plan.
        search_seconds: processor time from the captured model to the plan.
        measured_seconds: duration of a step that the makers report; None where they report none.
        refusal: the reason why one of both has no price; "" where both have.
    """

    name: str
    model: str
    gpus: str
    batch: int
    seq: int
    choice: str
    choice_seconds: float | None = None
    choice_fits: bool | None = None
    plan: str = ""
    plan_seconds: float | None = None
    search_seconds: float = 0.0
    measured_seconds: float | None = None
    refusal: str = ""

    @property
    def ratio(self) -> float | None:
        """The plan's price over the price of the makers' choice."""
        if self.plan_seconds is None or self.choice_seconds is None:
            return None
        return self.plan_seconds / self.choice_seconds


def answer(case: Case) -> Answer:
    """Both prices of a case."""
    asked = Request.on(case.cluster, batch=case.batch, training_state=case.training_state)
    found = Answer(
        case.name,
        case.preset.name,
        str(case.cluster),
        case.batch,
        case.seq,
        str(case.choice),
        measured_seconds=case.measured_seconds,
    )
    start_seconds = time.process_time()
    try:
        plan = Question(case.preset, asked, case.seq).answer()
        found = replace(found, plan=plan_words(plan), plan_seconds=plan.step_seconds)
    except AutoparError as error:
        found = replace(found, refusal=f"search: {_first_line(error)}")
    found = replace(found, search_seconds=time.process_time() - start_seconds)
    try:
        chosen = Question(case.preset, _request(asked, case.choice), case.seq).answer()
    except AutoparError as error:
        return replace(found, refusal=f"{found.refusal} choice: {_first_line(error)}".strip())
    fits = chosen.memory_bytes <= asked.bound_bytes
    return replace(found, choice_seconds=chosen.step_seconds, choice_fits=fits)


def _request(asked: Request, choice: Choice) -> Request:
    return asked.but(
        mesh=Mesh.parse(choice.mesh),
        recipe=choice.recipe,
        micro_batches=choice.micro_batches,
        schedule=choice.schedule or None,
        chunks=choice.chunks if choice.schedule else None,
        recompute=choice.recomputation,
        must_fit=False,
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120]


# --- what is shown


def table_rows(answers: Iterable[Answer]) -> Iterator[tuple[str, ...]]:
    """The cells of every answer with two prices, those most in autopar's disfavour first."""
    priced = [each for each in answers if each.ratio is not None]
    for each in sorted(priced, key=lambda a: -(a.ratio or 0.0)):
        fits = "" if each.choice_fits else " (does not fit)"
        yield (
            each.model,
            each.gpus,
            str(each.batch),
            str(each.seq),
            each.choice + fits,
            f"{each.choice_seconds:.3f}",
            each.plan,
            f"{each.plan_seconds:.3f}",
            f"{each.ratio:.3f}",
            f"{each.search_seconds:.1f}",
        )


def summary(answers: Sequence[Answer]) -> str:
    """How many plans are no slower, and how the ratios are spread."""
    ratios = sorted(ratio for each in answers if (ratio := each.ratio) is not None)
    if not ratios:
        return "No question has two prices."
    slower = sum(ratio > 1.001 for ratio in ratios)
    return (
        f"{len(answers)} questions, {len(ratios)} with two prices; in {slower} of them autopar's plan is priced "
        f"slower (by more than 0.1 %). Ratio of the prices: median {ratios[len(ratios) // 2]:.3f}, "
        f"lowest {ratios[0]:.3f}, highest {ratios[-1]:.3f}."
    )


def markdown(answers: Sequence[Answer]) -> str:
    """The page of the results."""
    lines = [summary(answers), "", *markdown_table(HEADS, table_rows(answers))]
    refused = [each for each in answers if each.refusal]
    if refused:
        lines += ["", "Without two prices:", ""]
        lines += [f"- {each.name}: {each.refusal}" for each in refused]
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.option("--data", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--results", required=True, type=click.Path(path_type=Path))
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write the table there.")
@click.option("--only", default="", help="Ask only the questions whose name has this text.")
@click.option("--every", default=1, help="Ask only one question of so many, in the tables' order.")
def main(data: Path, results: Path, page: Path | None, only: str, every: int) -> None:
    found = [each for each in cases(data) if isinstance(each, Case)]
    asked = [each for each in found if only in each.name][::every]
    known = stored(results, Answer)
    console = Console(width=None if sys.stdout.isatty() else 220)
    for case in track(asked, console=Console(stderr=True)):
        if case.name not in known:
            known[case.name] = answer(case)
            store(results, known[case.name])
    answers = [known[case.name] for case in asked]
    table = Table(*HEADS)
    for row in table_rows(answers):
        table.add_row(*row)
    console.print(table)
    console.print(summary(answers))
    if page is not None:
        page.write_text(markdown(answers))


if __name__ == "__main__":
    main()

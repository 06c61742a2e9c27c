"""An explanation as the page that views show."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy

from autopar.cost_model.breakdown import Breakdown, Event
from autopar.cost_model.history import SHARE
from autopar.cost_model.items import COMPUTE, WorkItem
from autopar.cost_model.machines.origins import ORIGINS
from autopar.cost_model.symbols import symbol
from autopar.explanation.block import block_of
from autopar.explanation.candidate_rows import slower
from autopar.explanation.explanation import Explanation
from autopar.explanation.kinds import NOT_SEARCHED, waits
from autopar.explanation.launch import asked, launch
from autopar.explanation.nearness import words_of_gain
from autopar.explanation.owned import owner_sentences
from autopar.explanation.report import collectives, described
from autopar.explanation.what_would_change import Change
from autopar.ir import Graph, Tier, with_pipeline
from autopar.ir.note import kind_of
from autopar.search.request.notes import guessed_lines, unruled_lines
from autopar.units import counted, format_bytes, format_seconds
from autopar.views import BlockNode, Formula, Page, RooflinePoint

_ALIKE = 5e-4  # difference of two steps, as a part of one, that is not told of changes


def page_of(
    explanation: Explanation,
    title: str,
    saved: Path | None = None,
    *,
    has_document: bool = True,
    is_verbose: bool = False,
) -> Page:
    """Everything there is to show of a plan.

    Args:
        explanation: the plan with its costs.
        title: name of the model.
        saved: the file that the plan was saved in; None if it was not saved.
        has_document: whether the page comes with its JSON, which takes as long as the rest.
        is_verbose: whether notes also say which sizes no axis divides.
    """
    page = _page(explanation, title)
    page = dataclasses.replace(
        page,
        notes=tuple(note for note in page.notes if is_verbose or kind_of(note) != "undivided"),
        asked=asked(explanation, title),
        launch=(*_found_batch(explanation), *launch(explanation, saved)),
    )
    return dataclasses.replace(page, document=_document(explanation, page)) if has_document else page


def _found_batch(e: Explanation) -> Iterator[str]:
    """A comment with the batch of a step, where the user did not name it."""
    if e.batches and e.request is not None:
        yield f"# for steps of {e.request.batch} samples on all ranks, as --batch {e.request.batch} asks for"


def _page(explanation: Explanation, title: str) -> Page:
    hardware = explanation.cluster.hardware
    return Page(
        title=title,
        subtitle=_subtitle(explanation),
        figures=tuple(_figures(explanation)),
        memory=explanation.memory,
        memory_bound_bytes=explanation.bound_bytes,
        time=explanation.time,
        traffic=explanation.traffic,
        events=explanation.events(),
        trace=explanation.trace,
        simulation=explanation.simulation,
        stages=explanation.simulated.stages if explanation.simulated else (),
        candidates=explanation.candidates,
        batches=explanation.batches,
        roofline=tuple(_roofline(explanation)),
        peak_flops=hardware.flops_per_second(_itemsize(explanation.graph)),
        memory_bytes_per_second=hardware.memory_bytes_per_second,
        block=block_of(explanation),
        formulas=tuple(_formulas(explanation)),
        sensitivity=sensitivity_in_words(explanation),
        notes=(
            *explanation.batch_lines,
            *_kind_lines(explanation),
            *explanation.plan.notes,
            *_of_pipeline(explanation),
            *_of_owners(explanation),
            *words_of_gain(explanation.most_gained),
            *change_lines(explanation),
            *_caveats(explanation),
        ),
    )


def _of_pipeline(e: Explanation) -> Iterator[str]:
    """Sentences about the stages, and about which figures come from the simulation and which from the closed form."""
    run, closed = e.simulated, e.closed_form
    if run is not None:
        yield from run.sentences
        others = ", of other candidates" if e.setting is not None else ""
        yield (
            "Step, memory and stages come from the simulated schedule. The formulas, the sensitivities, the timeline "
            f"of one rank and the figures{others} come from the closed form, in which all stages are alike: "
            f"{format_seconds(closed.step_seconds)} and {format_bytes(closed.memory_bytes)}."
        )


def _of_owners(e: Explanation) -> Iterator[str]:
    """The ranks that run ops alone, and which figures take them as side by side."""
    if e.owned is not None:
        yield from owner_sentences(e.graph, e.plan, e.owned)
        yield (
            "Step and memory are computed with ranks that work at the same time. The formulas and sensitivities "
            f"take the ranks' work one after another: {format_seconds(e.closed_form.step_seconds)}."
        )


def sensitivity_in_words(e: Explanation) -> dict[str, float]:
    """Symbol, with the word for it where there is one -> relative change of the step per 1 % more."""
    return {e.symbol_in_words(name): value for name, value in e.sensitivity().items()}


def change_lines(e: Explanation) -> tuple[str, ...]:
    """Sentences about the changes of the cluster that would change the choice."""
    return tuple(change_line(e, c) for c in e.changes)


def _kind_lines(e: Explanation) -> tuple[str, ...]:
    """Sentences on who waits for whom where the cluster has several kinds of machines."""
    if e.kind_lines or not e.cluster.hardware.kinds:
        return e.kind_lines
    return (*waits(e), NOT_SEARCHED)


def change_line(e: Explanation, change: Change) -> str:
    """`With 141 GB of memory: at least 3.5 % faster, as dp=16 zero1, 4 micro-batches of 2.`"""
    chosen = e.setting.name if e.setting else ""
    now, same = e.step_seconds, change.same_seconds
    best = f"at least {slower(change.best_seconds, now, _ALIKE)}"
    if change.best == chosen:
        return f"With {change.what}: the same choice, {best}."
    is_news = abs(same / now - 1) >= _ALIKE  # nothing is said of what stays as it is
    else_ = f" (this plan: {slower(same, now, _ALIKE)})" if is_news else ""
    return f"With {change.what}: {best}, as {change.best}{else_}."


def _document(e: Explanation, page: Page) -> dict[str, Any]:
    """Everything the page shows, with units in the keys."""
    return {
        **e.to_json(),
        **described(e.plan, e.graph),
        "title": page.title,
        "subtitle": page.subtitle,
        "asked": dict(page.asked),
        "launch": list(page.launch),
        "notes": list(page.notes),
        "collectives": [dataclasses.asdict(each) for each in collectives(e.step)],
        "peak_flops_per_second": page.peak_flops,
        "memory_bytes_per_second": page.memory_bytes_per_second,
        "roofline": [each._asdict() for each in page.roofline],
        "block": [_node_document(each) for each in page.block],
        "events": [_event_document(each) for each in page.events],
    }


def _node_document(node: BlockNode) -> dict[str, Any]:
    layouts: Mapping[str, str] = dict(node.layouts)
    moved: Sequence[dict[str, Any]] = [each._asdict() for each in node.collectives]
    return {**node._asdict(), "layouts": layouts, "collectives": moved}


def _event_document(event: Event) -> dict[str, Any]:
    return {**dataclasses.asdict(event), "detail": dict(event.detail)}


def _subtitle(e: Explanation) -> str:
    stages = _stages_in_words(e)
    again = "".join(f", {words}" for words in e.plan.kept_words)
    batches = counted(int(e.run.micro_batches), "micro-batch")
    mesh = e.plan.world_mesh
    if e.plan.pipeline is None and e.run.stages > 1:
        mesh = with_pipeline(mesh, int(e.run.stages), 0)
    return f"{mesh.used or 'one rank'} on {e.place}{stages}, {batches}{again}, recipe {e.plan.recipe_in_use}"


def _stages_in_words(e: Explanation) -> str:
    """The schedule, and whether it is simulated."""
    if e.plan.pipeline is None:
        return ", 1f1b by its closed form" if e.run.stages > 1 else ""
    return f", {e.plan.pipeline.schedule} over {e.plan.pipeline.stages} stages"


def _figures(e: Explanation) -> Iterator[tuple[str, str]]:
    yield "step", format_seconds(e.step_seconds)
    if (spread := e.spread) is not None:
        low, high = (format_seconds(bound * e.step_seconds) for bound in (spread.low, spread.high))
        yield f"{100 * SHARE:.0f} % of such steps", f"{low} to {high} ({spread.runs} runs)"
    if e.tokens_per_second is not None:
        yield "tokens per second", f"{e.tokens_per_second:,.0f}"
    yield "model FLOPs utilization", f"{100 * e.mfu:.1f} %"
    yield "memory of a rank", f"{format_bytes(e.memory_bytes)} of {format_bytes(e.bound_bytes)}"
    for tier, size in e.stored_bytes.items():
        yield f"kept on the {tier}", f"{format_bytes(size)} of {_room(e, tier)}"
    yield "sent by a rank", f"{format_bytes(e.traffic.value)} a step"
    if e.simulation is not None:
        yield "pipeline bubble", f"{100 * e.simulation.bubble_fraction:.1f} % of the schedule"


def _room(e: Explanation, tier: Tier) -> str:
    room = e.cluster.hardware.storing(tier).memory_bytes
    return format_bytes(room) if room else "the same memory"


def _formulas(e: Explanation) -> Iterator[Formula]:
    """Every cost as the sum of its parts by name, and the largest parts as formulas."""
    e = e.closed_form  # what a simulation measures has no formula
    plain = _plain_symbols(e)
    for tree, shown in ((e.time, format_seconds), (e.memory, format_bytes), (e.traffic, format_bytes)):
        if tree.parts:
            yield Formula(tree.name, _named_sum(tree), shown(tree.value))
        for part in tree.parts[:_FORMULAS]:
            yield from _formula(part, shown, plain)


_FORMULAS = 5  # of the parts of every cost
_NAMED = 8  # parts of a sum that are named
_LONGEST = 150  # operations of a formula that is still read; longer ones are sums of their parts' names
_NODES = 6  # of a sympy tree for each operation, at most: a - b / c is Add(a, Mul(-1, b, Pow(c, -1)))


def _formula(
    part: Breakdown, shown: Callable[[float], str], plain: Mapping[sympy.Symbol, sympy.Expr]
) -> Iterator[Formula]:
    """A part's formula, or its parts by name and the formula of the largest of them."""
    if _is_read(part.expression):
        yield Formula(part.name, part.expression.xreplace(plain), shown(part.value))
    elif part.parts:
        yield Formula(part.name, _named_sum(part), shown(part.value))
        yield from _formula(part.parts[0], shown, plain)


def _is_read(expression: sympy.Expr) -> bool:
    """Whether a formula has few operations; those of a long one are not counted, which would take seconds."""
    nodes = sum(1 for _ in itertools.islice(sympy.preorder_traversal(expression), _NODES * _LONGEST + 1))
    return nodes <= _NODES * _LONGEST and int(sympy.count_ops(expression)) <= _LONGEST


def _named_sum(tree: Breakdown) -> sympy.Expr:
    """The parts by name, the smaller ones as one; savings are subtracted."""
    shown = tree.parts if len(tree.parts) <= _NAMED + 1 else tree.parts[:_NAMED]
    terms = [sympy.Symbol(part.name) * (1 if part.value > 0 else -1) for part in shown]
    if len(shown) < len(tree.parts):
        terms.append(sympy.Symbol(f"{len(tree.parts) - len(shown)} smaller ones"))
    return sympy.Add(*terms, evaluate=False)


def _plain_symbols(e: Explanation) -> dict[sympy.Symbol, sympy.Expr]:
    """Symbols that are 1 and cannot grow as 1, and sizes under the words that people have for them."""
    single = [name for name, size in e.plan.mesh.axes if size == 1]
    if e.run.stages == 1:
        single += ["stages", "chunks"]
    found: dict[sympy.Symbol, sympy.Expr] = {symbol(name): sympy.Integer(1) for name in single}
    for name in e.legend:
        word = e.word(name)
        if word and word != name:
            found[symbol(name)] = symbol(word.replace(" ", "_"))
    return found


def _roofline(e: Explanation) -> Iterator[RooflinePoint]:
    for item in e.step.items:
        if item.resource == COMPUTE and item.phase == "forward" and _works(item):
            seconds = float(item.seconds)
            yield RooflinePoint(
                item.name,
                float(item.flops) / float(item.traffic_bytes),
                float(item.flops) / seconds,
                float(item.count) * seconds,
            )


def _works(item: WorkItem) -> bool:
    return float(item.flops) > 0 and float(item.traffic_bytes) > 0 and float(item.seconds) > 0


def _itemsize(graph: Graph) -> int:
    return min((t.itemsize_bytes for t in graph.tensors.values() if t.needs_grad), default=4)


def _closed_form_stages(e: Explanation) -> str:
    stages, layers = int(e.run.stages), sum(stack.layers for stack in e.graph.stacks)
    share = f"{layers / stages:g} of {layers} layers" if layers else "an equal share"
    return (
        f"Each of the {stages} pipeline stages is assumed to have {share}; the first also has the ops before them, and "
        "the last the ops after them. They are priced by the closed form of 1F1B."
    )


def _origin_line(e: Explanation) -> Iterator[str]:
    """A sentence that says which figures of the machine are measured, published or scaled from other machines."""
    found: dict[str, list[str]] = {}
    for figure, kind in e.origins.items():
        found.setdefault(kind, []).append(figure)
    if "scaled" in found:
        said = "; ".join(f"{kind} are {', '.join(found[kind])}" for kind in ORIGINS if kind in found)
        yield f"Of {e.cluster.hardware.name.upper()}, {said}; 'autopar calibrate' measures them on your machine."


def _caveats(e: Explanation) -> tuple[str, ...]:
    notes = []
    if e.run.stages > 1 and e.simulated is None:
        notes.append(_closed_form_stages(e))
    notes += _origin_line(e)
    lines = (*unruled_lines(e.graph, e.plan, e.cluster.hardware), *guessed_lines(e.graph, e.plan))
    notes += [f"{line[0].upper()}{line[1:]}." for line in lines]
    if not e.fits:
        over = e.memory_bytes - e.bound_bytes
        notes.append(f"DOES NOT FIT: {format_bytes(over)} more than a rank has.")
    return tuple(notes)

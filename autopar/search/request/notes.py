"""The notes of a plan: what was chosen and why, in a few lines for people."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.analysis.skew import EXPERTS
from autopar.cost_model import Hardware, unruled
from autopar.cost_model.compute import FUSED_ATTENTION
from autopar.ir import (
    EXCHANGED,
    Choice,
    Graph,
    Labels,
    Op,
    ParameterPlan,
    Plan,
    R,
    S,
    State,
    local_shape,
    plain,
    split_counts,
)
from autopar.ir.note import Note
from autopar.ir.parameter_plan import PARAMETER_WORDS
from autopar.ir.share import Share
from autopar.pipeline.composed import StepCost
from autopar.search.request.recipe_rows import is_model
from autopar.search.request.recipes import format_recipe
from autopar.search.request.refusals import Refusal
from autopar.search.request.request import Request
from autopar.units import counted, format_bytes


def explain(
    graph: Graph, plan: Plan, cost: StepCost, *, bound_bytes: int, hardware: Hardware, descents_seconds: Sequence[float]
) -> tuple[str, ...]:
    """Notes on each axis's splits and why, on time and memory, on other local optima, and on ops without a rule."""
    axes = axis_lines(graph, plan)
    others = _others_line(cost, descents_seconds)
    lines = (*_reason_lines(graph, plan, cost), _time_line(cost, hardware), _memory_line(cost, bound_bytes))
    prices = (Note(line, "price") for line in lines)
    rules = (*unruled_lines(graph, plan, hardware), *guessed_lines(graph, plan))
    return (*axes, *repeated_lines(plan), *uneven_lines(graph, plan), *prices, *others, *rules)


def axis_lines(graph: Graph, plan: Plan) -> list[str]:
    """For every axis a line on the dims that it splits and how parameters are stored; a line on exchanges of rows."""
    lines = [_axis_line(graph, plan, axis) for axis, (_, size) in enumerate(plan.mesh.axes) if size > 1]
    return lines + (exchange_lines(graph, plan) if lines else [])


def exchange_lines(graph: Graph, plan: Plan) -> list[str]:
    """Lines on rows that go to their experts, whose price is a guess, and on keys and values that go round."""
    layers = [op for op in graph.ops if any(EXCHANGED in label for label in plan.ops[op.name])]
    rings = [op for op in layers if op.kind == FUSED_ATTENTION]
    experts = [op for op in layers if op.kind != FUSED_ATTENTION]
    found = []
    if experts:
        skew = max(op.choice(label).stretch for op in experts for label in plan.ops[op.name])
        used = "all experts were used equally (a guess)" if skew == 1 else f"the fullest had {skew:g} times its share"
        found.append(
            f"rows are sent to the ranks of their experts and back along {_exchanging(plan, experts)} in "
            f"{counted(_times(graph, experts), 'layer')}, priced as if {used}"
        )
    routed = [op for op in graph.ops if op.kind == EXPERTS]
    skew = max((choice.stretch for op in routed for choice in op.choices), default=1.0)
    if skew > 1 and all(op.choice(label).stretch == 1 for op in routed for label in plan.ops[op.name]):
        found.append(
            f"skew={skew:g} changes no price: no axis splits the experts, so each rank runs all of them on its own rows"
        )
    if rings:
        found.append(
            f"keys and values travel in a ring along {_exchanging(plan, rings)} in "
            f"{counted(_times(graph, rings), 'attention op')}, priced without overlap with compute"
        )
    return found


def _times(graph: Graph, ops: Sequence[Op]) -> int:
    """Number of such ops in the whole model, of which few layers may be captured."""
    return sum(graph.layer_count.get(op.name, 1) for op in ops)


def _exchanging(plan: Plan, ops: Sequence[Op]) -> str:
    """The axes along which some of these ops exchange rows."""
    labels = zip(plan.mesh.names, zip(*(plan.ops[op.name] for op in ops), strict=True), strict=True)
    return ", ".join(name for name, along in labels if any(EXCHANGED in label for label in along))


def _axis_line(graph: Graph, plan: Plan, axis: int) -> str:
    axis_name, size = plan.mesh.axes[axis]
    split = Counter(
        place_of(choice.factor or choice.label)
        for op in graph.ops
        if (choice := op.choice(plan.ops[op.name][axis])).splits
    )
    common = split.most_common()
    named = [f"{factor} ({counted(count, 'op')})" for factor, count in common[:_NAMED]]
    if rest := common[_NAMED:]:
        named.append(f"{counted(len(rest), 'other dim')} ({counted(sum(count for _, count in rest), 'op')})")
    factors = ", ".join(named)
    uses = _parameter_uses(graph, plan, axis)
    stages = Counter(_stage(how, uses[name], axis) for name, how in plan.parameters.items())
    stored = ", ".join(f"{count} {kind}" for kind, count in sorted(stages.items()))
    return f"{axis_name}={size} splits {factors or 'nothing'}; parameters: {stored or 'none'}"


_NAMED = 4  # dims that the line of an axis names


def head_factors(graph: Graph) -> dict[str, None]:
    """Names of the factors that are heads of attention: batch dims of a product of two activations."""
    weights = {*graph.parameters.values()}
    return {
        leaf.factor: None
        for op in graph.ops
        if not weights.intersection(op.operands)
        for work in op.work
        if work.is_product
        for leaf in work.batch
        if leaf.factor in graph.factors and is_model(graph.factors[leaf.factor].roles)
    }


def place_of(factor: str) -> str:
    """A factor for people: `batch`, or `dim 0 of layers.*.query.weight` for `layers.3.query.weight[0].0`."""
    return re.sub(r"(.*)\[(\d+)\](\.\d+)?", r"dim \2 of \1", any_layer(factor))


def any_layer(name: str) -> str:
    """The name with `*` in place of the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _parameter_uses(graph: Graph, plan: Plan, axis: int) -> dict[str, set[State]]:
    """Parameter name -> the states in which ops use the parameter along the axis."""
    name_of = {tensor: name for name, tensor in graph.parameters.items()}
    uses: dict[str, set[State]] = {name: set() for name in graph.parameters}
    for op in graph.ops:
        for position, operand in enumerate(op.operands):
            if operand in name_of:
                choice = op.choice(plan.ops[op.name][axis])
                uses[name_of[operand]].add(choice.operands[position])
    return uses


def _stage(how: ParameterPlan, uses: set[State], axis: int) -> str:
    if how.storage[axis].kind == "O":
        return "stored on one rank"
    stage = how.zero_stage(axis)
    if stage == 3:
        return "tensor-parallel" if uses <= {how.storage[axis]} else PARAMETER_WORDS[3]
    return PARAMETER_WORDS.get(stage, "replicated")


def _time_line(cost: StepCost, hardware: Hardware) -> str:
    return (
        f"predicted on {hardware.name}: {cost.seconds * 1e3:.3f} ms a step = "
        f"{cost.compute_seconds * 1e3:.3f} compute + {cost.conversion_seconds * 1e3:.3f} "
        f"activations moved + {cost.parameter_seconds * 1e3:.3f} parameters and gradients moved"
        f" + {cost.other_seconds * 1e3:.3f} optimizer and waiting"
    )


def _reason_lines(graph: Graph, plan: Plan, cost: StepCost) -> Iterator[str]:
    """For every axis of several ranks what it gains, the part of the arithmetic that it divides, and what it costs."""
    idle, seconds = idle_axes(plan), dict(cost.axis_seconds)
    for axis, (name, size) in enumerate(plan.mesh.axes):
        if name in idle:
            yield f"{name}={size} divides nothing: no faster plan was found that uses it, under recipe {plan.recipe}"
        elif size > 1:
            share = _divided(graph, plan, axis)
            sent = seconds.get(name, 0.0) * 1e3
            yield (
                f"{name}={size} divides {100 * share:.0f} % of the arithmetic by {size}, and communicates for "
                f"{sent:.3f} ms a step"
            )


def _divided(graph: Graph, plan: Plan, axis: int) -> float:
    """The part of the FLOPs of a forward that the ranks along an axis share."""
    flops = {op.name: op.flops * graph.layer_count.get(op.name, 1) for op in graph.ops}
    split = (flops[op.name] for op in graph.ops if op.choice(plan.ops[op.name][axis]).splits)
    return sum(split) / (sum(flops.values()) or 1)


def under_bound(notes: Sequence[str], cost: StepCost, before_bytes: int, bound_bytes: int) -> tuple[str, ...]:
    """Notes of `explain` for one bound on memory -> those for another, which names it beside what a plan takes."""
    said = _memory_line(cost, before_bytes)
    return tuple(Note(_memory_line(cost, bound_bytes), "price") if note == said else note for note in notes)


def _memory_line(cost: StepCost, bound_bytes: int) -> str:
    kinds = {
        "parameters": cost.parameter_bytes,
        "gradients": cost.gradient_bytes,
        "optimizer": cost.optimizer_bytes,
        "saved for backward": cost.saved_bytes,
        "buffers": cost.buffer_bytes,
        "transient": cost.transient_bytes,
        "reserved": cost.reserved_bytes,
    }
    parts = " + ".join(f"{format_bytes(size)} {kind}" for kind, size in kinds.items() if size)
    total, bound = format_bytes(cost.memory_bytes), format_bytes(bound_bytes)
    return f"{total} a rank, of {bound}: {parts or 'nothing'}"


def _others_line(cost: StepCost, descents_seconds: Sequence[float]) -> tuple[str, ...]:
    """A line on the other local optima, given the seconds of all of them; inf is one that does not fit."""
    others = sorted({f"{s * 1e3:.3f} ms" for s in descents_seconds if math.isfinite(s)})
    others = [each for each in others if each != f"{cost.seconds * 1e3:.3f} ms"]
    if not others:
        return ()
    return (f"best of {len(descents_seconds)} descents; others ended at {', '.join(others)}",)


def unruled_lines(graph: Graph, plan: Plan, hardware: Hardware) -> tuple[str, ...]:
    """A line on the ops without a rule, which run whole on every rank, with their cost; () if there are none."""
    found = unruled(graph, plan, hardware)
    if not found:
        return ()
    kinds = ", ".join(
        f"{each.kind} ({counted(each.count, 'call')}, {each.seconds * 1e3:.3f} ms, "
        f"{format_bytes(each.gathered_bytes)} gathered)"
        for each in found
    )
    return (
        "no rule covers these calls, so every rank runs them whole (cost estimated from the bytes read and "
        f"written): {kinds}",
    )


def guessed_lines(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """A line for every reason to doubt the rules of ops that a plan splits."""
    doubts: dict[str, Counter[str]] = {}
    for op in graph.ops:
        if op.guess and any(label not in "-~" for label in plan.ops[op.name]):
            doubts.setdefault(op.guess, Counter())[op.kind] += graph.layer_count.get(op.name, 1)
    return tuple(
        f"split by a guess, which 'autopar verify' checks on a batch ({guess}): "
        + ", ".join(f"{kind} ({counted(count, 'call')})" for kind, count in sorted(kinds.items()))
        for guess, kinds in sorted(doubts.items())
    )


def idle_axes(plan: Plan) -> list[str]:
    """Names of the axes inside a stage, of several ranks, whose ranks all do the same."""
    return [
        name
        for name in _repeated_axes(plan)
        if all(p.storage[plan.mesh.index(name)].kind not in "SO" for p in plan.parameters.values())
    ]


def _repeated_axes(plan: Plan) -> list[str]:
    """Names of the axes inside a stage, of several ranks, along which no op is split."""
    return [
        name
        for axis, (name, size) in enumerate(plan.mesh.axes)
        if size > 1 and all(labels[axis] in "-~" for labels in plan.ops.values())
    ]


def repeated_lines(plan: Plan) -> Iterator[Note]:
    """A line on every axis whose ranks store parts of the parameters, and all compute the whole batch."""
    idle = idle_axes(plan)
    for name in _repeated_axes(plan):
        if name not in idle:
            size = dict(plan.mesh.axes)[name]
            line = f"all {size} ranks along {name} compute the whole batch, and share only the memory of parameters"
            yield Note(line, "repeated")


_WAIT = 0.01  # smallest part of their time that ranks wait for the largest part of a dim that is worth a note


def uneven_lines(graph: Graph, plan: Plan) -> Iterator[Note]:
    """Lines on parts of different sizes, one for each kind of dim: the sizes, and how long ranks wait for the largest.

    Of a batch there is always one, of another dim where they wait for a hundredth of the time of its ops.
    """
    seen = set()
    for op in graph.ops:
        for choice, count in split_counts(op, plan.ops[op.name], plan.mesh):
            is_batch, what = choice.factor in graph.batch, place_of(choice.factor or choice.label)
            if choice.size % count == 0 or (is_batch or what) in seen:
                continue
            seen.add(is_batch or what)
            words, waits = _parts_line(plan, plan.ops[op.name], choice)
            of = "" if plan.micro_batches == 1 else " of a micro-batch"
            if is_batch:
                yield Note(f"of the {counted(choice.size, 'row')}{of} ranks have {words} of their time", "uneven")
            elif waits >= _WAIT:
                yield Note(f"of {what}, {choice.size}, ranks have {words} of the time of its ops", "uneven")


def _parts_line(plan: Plan, labels: Labels, choice: Choice) -> tuple[str, float]:
    """The sizes of the parts of a dim as words, and the part of the time that ranks wait for those with the largest."""
    layout = tuple(S(0) if plain(label) == choice.label else R for label in labels)
    (part,) = local_shape(((choice.size,),), layout, plan.mesh)
    assert isinstance(part, Share), plan.mesh
    sizes = [str(size or "none") for size in sorted({*part.by_rank}, reverse=True)]
    waits = 1 - sum(part.by_rank) / len(part.by_rank) / max(part.by_rank)
    return f"{', '.join(sizes[:-1])} or {sizes[-1]}, and wait for those with the most in {100 * waits:.1f} %", waits


def note_of_unasked_stages(request: Request, rows: int, refusals: Sequence[Refusal]) -> Note:
    """Says why a plan has pipeline stages under a recipe that names no schedule.

    Args:
        request: what the user asks for, with an open mesh.
        rows: number of samples of a step.
        refusals: errors of the meshes without stages; none where every such mesh was ruled out by its sizes.
    """
    reason = f"no mesh of {request.ranks} ranks splits a batch of {rows}."
    if refusals:
        mesh, error = refusals[0]
        reason = f"{mesh}: {error}"
    return Note(
        f"pipeline stages, which the recipe {format_recipe(request.recipe)} does not name, because there is no plan "
        f"without them: {reason}",
        "unasked",
    )

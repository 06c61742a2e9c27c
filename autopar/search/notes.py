"""What was chosen and why, in a few lines for people."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from autopar.cost_model import Cost, Hardware
from autopar.ir import Graph, ParameterPlan, Plan, State


def explain(
    graph: Graph,
    plan: Plan,
    cost: Cost,
    *,
    bound_bytes: int,
    hardware: Hardware,
    descents_seconds: Sequence[float],
) -> tuple[str, ...]:
    """Lines on what every axis splits, where time and memory go, and what else was found."""
    axes = [_axis_line(graph, plan, axis) for axis in range(len(plan.mesh.axes))]
    others = _others_line(cost, descents_seconds)
    prices = (_time_line(cost, hardware), _memory_line(cost, bound_bytes))
    return (*axes, *prices, *others, *_warnings(graph))


def _axis_line(graph: Graph, plan: Plan, axis: int) -> str:
    axis_name, size = plan.mesh.axes[axis]
    split = Counter(
        _any_layer(choice.factor or choice.label)
        for op in graph.ops
        if (choice := op.choice(plan.ops[op.name][axis])).splits
    )
    factors = ", ".join(f"{factor} ({count} ops)" for factor, count in split.most_common(6))
    uses = _parameter_uses(graph, plan, axis)
    stages = Counter(_stage(how, uses[name], axis) for name, how in plan.parameters.items())
    stored = ", ".join(f"{count} {kind}" for kind, count in sorted(stages.items()))
    return f"{axis_name}={size} splits {factors or 'nothing'}; parameters: {stored or 'none'}"


def _any_layer(name: str) -> str:
    """The name with its numbers starred, so that all layers are named alike."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _parameter_uses(graph: Graph, plan: Plan, axis: int) -> dict[str, set[State]]:
    """Parameter -> the states in which ops take it along the axis."""
    name_of = {tensor: name for name, tensor in graph.parameters.items()}
    uses: dict[str, set[State]] = {name: set() for name in graph.parameters}
    for op in graph.ops:
        for position, operand in enumerate(op.operands):
            if operand in name_of:
                choice = op.choice(plan.ops[op.name][axis])
                uses[name_of[operand]].add(choice.operands[position])
    return uses


def _stage(how: ParameterPlan, uses: set[State], axis: int) -> str:
    stage = how.zero_stage(axis)
    if stage == 3:
        return "used as stored" if uses <= {how.storage[axis]} else "ZeRO-3"
    return "replicated" if stage == 0 else f"ZeRO-{stage}"


def _time_line(cost: Cost, hardware: Hardware) -> str:
    return (
        f"predicted on {hardware.name}: {cost.seconds * 1e3:.3f} ms a step = "
        f"{cost.compute_seconds * 1e3:.3f} compute + {cost.conversion_seconds * 1e3:.3f} "
        f"activations moved + {cost.parameter_seconds * 1e3:.3f} parameters and gradients moved"
    )


def _memory_line(cost: Cost, bound_bytes: int) -> str:
    kinds = {
        "parameters": cost.parameter_bytes, "gradients": cost.gradient_bytes,
        "optimizer": cost.optimizer_bytes, "saved for backward": cost.saved_bytes,
        "buffers": cost.buffer_bytes,
    }  # fmt: skip
    parts = " + ".join(f"{format_bytes(size)} {kind}" for kind, size in kinds.items() if size)
    total, bound = format_bytes(cost.memory_bytes), format_bytes(bound_bytes)
    return f"{total} a rank, of {bound}: {parts or 'nothing'}"


def format_count(number: int, word: str) -> str:
    """`1 micro-batch`, `2 micro-batches`."""
    plural = f"{word}es" if word.endswith(("ch", "s", "x")) else f"{word}s"
    return f"{number} {word if number == 1 else plural}"


def format_bytes(size: int) -> str:
    """Bytes for people: 1.500 MB is 1,500,000 bytes."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3f} {unit}"
    return f"{size} bytes"


def _others_line(cost: Cost, descents_seconds: Sequence[float]) -> tuple[str, ...]:
    """The other local optima, if there are any; inf stands for one that does not fit."""
    others = sorted({f"{s * 1e3:.3f} ms" for s in descents_seconds if math.isfinite(s)})
    others = [each for each in others if each != f"{cost.seconds * 1e3:.3f} ms"]
    if not others:
        return ()
    return (f"best of {len(descents_seconds)} descents; others ended at {', '.join(others)}",)


def _warnings(graph: Graph) -> tuple[str, ...]:
    unruled = Counter(op.kind for op in graph.ops if op.operands and not op.has_rule)
    if not unruled:
        return ()
    kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(unruled.items()))
    return (f"run replicated for want of a rule: {kinds}",)

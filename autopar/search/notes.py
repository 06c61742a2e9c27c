"""What was chosen and why, in a few lines for people."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from autopar.cost_model import Cost, Hardware
from autopar.ir import Graph, ParameterPlan, Plan


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
    return (
        *axes, _time_line(cost, hardware), _memory_line(cost, bound_bytes), *others, *_warnings(graph),
    )  # fmt: skip


def _axis_line(graph: Graph, plan: Plan, axis: int) -> str:
    name, size = plan.mesh.axes[axis]
    split = Counter(
        _any_layer(choice.factor or choice.label)
        for op in graph.ops
        if (choice := op.choice(plan.ops[op.name][axis])).splits
    )
    factors = ", ".join(f"{factor} ({count} ops)" for factor, count in split.most_common(6))
    stages = Counter(_stage(graph, name, plan, axis) for name in plan.parameters)
    stored = ", ".join(f"{count} {kind}" for kind, count in sorted(stages.items()))
    return f"{name}={size} splits {factors or 'nothing'}; parameters: {stored or 'none'}"


def _any_layer(name: str) -> str:
    """The name with its numbers starred, so that all layers are named alike."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _stage(graph: Graph, name: str, plan: Plan, axis: int) -> str:
    how = plan.parameters[name]
    stage = how.zero_stage(axis)
    if stage != 3:
        return "replicated" if stage == 0 else f"ZeRO-{stage}"
    return "used as stored" if _as_stored(graph, name, how, plan, axis) else "ZeRO-3"


def _as_stored(graph: Graph, name: str, how: ParameterPlan, plan: Plan, axis: int) -> bool:
    """Whether every op takes the parameter split along the axis as it is stored: tensor parallel."""
    tensor = graph.parameters[name]
    return all(
        op.choice(plan.ops[op.name][axis]).operands[position] == how.storage[axis]
        for op in graph.ops
        for position, operand in enumerate(op.operands)
        if operand == tensor
    )


def _time_line(cost: Cost, hardware: Hardware) -> str:
    return (
        f"predicted on {hardware.name}: {cost.seconds * 1e3:.3f} ms a step = "
        f"{cost.compute_seconds * 1e3:.3f} compute + {cost.conversion_seconds * 1e3:.3f} activations "
        f"moved + {cost.parameter_seconds * 1e3:.3f} parameters and gradients moved"
    )


def _memory_line(cost: Cost, bound_bytes: int) -> str:
    kinds = {
        "parameters": cost.parameter_bytes, "gradients": cost.gradient_bytes,
        "optimizer": cost.optimizer_bytes, "saved for backward": cost.saved_bytes,
        "buffers": cost.buffer_bytes,
    }  # fmt: skip
    parts = " + ".join(f"{size / 1e9:.3f} {kind}" for kind, size in kinds.items() if size)
    return f"{cost.memory_bytes / 1e9:.3f} GB a rank of {bound_bytes / 1e9:.3f} = {parts or '0'}"


def _others_line(cost: Cost, descents_seconds: Sequence[float]) -> tuple[str, ...]:
    """The other local optima, if there are any; inf stands for one that does not fit."""
    others = sorted({f"{s * 1e3:.3f} ms" for s in descents_seconds if math.isfinite(s)})
    others = [each for each in others if each != f"{cost.seconds * 1e3:.3f} ms"]
    if not others:
        return ()
    return (f"best of {len(descents_seconds)} descents; others ended at {', '.join(others)}",)


def _warnings(graph: Graph) -> tuple[str, ...]:
    unruled = Counter(op.kind for op in graph.ops if not op.has_rule)
    if not unruled:
        return ()
    kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(unruled.items()))
    return (f"run replicated for want of a rule: {kinds}",)

"""The report for people: a plan as tables, folded over repeated blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.cost_model.items import COMPUTE, WorkItem
from autopar.cost_model.steps.step import Step
from autopar.ir import EXCHANGED, Graph, Mesh, Op, Plan, owner_of
from autopar.ir.layout import format_layout
from autopar.ir.op import result_layouts
from autopar.ir.parameter_plan import PARAMETER_WORDS
from autopar.search.request.notes import place_of
from autopar.units import counted, format_bytes, format_seconds
from autopar.views.terminal import Screen

_T = TypeVar("_T")

Words = Mapping[str, str]  # factor -> what people call it
NO_WORDS: Words = MappingProxyType({})
_NAME_WIDTH = 20  # columns that the name of a parameter has where the terminal is narrow
_OPS = "Ops (time of a step with what travels for each, before anything overlaps; accumulating gradients is of none)"
_WHOLE = "(run whole)"  # in place of the module, where nothing is split
ZERO_NAMES = {1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}


def explain(plan: Plan, graph: Graph, seconds: Mapping[str, float]) -> RenderableType:
    """A plan as a headline, what was chosen and why, and tables of parameters and ops; `seconds` by name of op."""
    return Group(
        headline(plan), *map(Text, plan.notes), Text(), parameter_table(plan, graph), op_table(plan, graph, seconds)
    )


def headline(plan: Plan) -> Text:
    """One line: mesh, recipe, schedule, micro-batches, model."""
    mesh = plan.world_mesh
    ranks = counted(mesh.ranks, "rank")
    batches = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    schedule = f", {plan.pipeline.schedule}" if plan.pipeline else ""
    again = "".join(f", {words}" for words in plan.kept_words)
    text = Text(f"Plan for {ranks} as {mesh}", style="bold")
    return text.append(
        f"  recipe {plan.recipe_in_use}{schedule}{batches}{again}, model {plan.fingerprint}", style="not bold dim"
    )


def as_text(renderable: RenderableType, *, width: int = 120) -> str:
    """A renderable as plain text without colours, for files and tests."""
    console = Screen(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def parameter_table(plan: Plan, graph: Graph) -> Table:
    """How parameters are stored, and how their gradients come back; one row for all blocks."""
    table = Table(title="Parameters", title_justify="left", show_edge=False, pad_edge=False)
    rows = list(_folded(_parameter_rows(plan, graph)))
    longest = max((len(name) for name, _, _ in rows), default=0)
    table.add_column("parameter", overflow="fold", min_width=min(longest, _NAME_WIDTH))
    for column in ("of", "shape", "stored", "ZeRO", "reduced per"):
        table.add_column(column, overflow="fold")
    for name, count, row in rows:
        table.add_row(name, _times(count), *row)
    return table


def _parameter_rows(plan: Plan, graph: Graph) -> Iterable[tuple[str, tuple[str, ...], int]]:
    for name, how in plan.parameters.items():
        shape = "x".join(str(n) for n in graph.tensors[graph.parameters[name]].shape) or "scalar"
        stored = how.stored_text(plan.mesh)
        in_graph = any(how.zero_stage(i) == 3 for i in range(len(plan.mesh.axes)))
        reduced = "micro-batch" if in_graph else how.reduce.replace("_", "-")
        reduced += ", by rows" * how.by_rows
        row = (shape, stored, _zero(plan, graph, name), reduced)
        yield name, row, graph.layer_count.get(name, 1)


def _zero(plan: Plan, graph: Graph, name: str) -> str:
    how = plan.parameters[name]
    found = {axis: how.zero_stage(i) for i, axis in enumerate(plan.mesh.names)}
    gathered = _gathered_axes(plan, graph, graph.parameters[name])
    shown = [(s, axis) for axis, s in found.items() if s in (1, 2) or (s == 3 and axis in gathered)]
    return ", ".join(f"{ZERO_NAMES[s]}@{axis}" for s, axis in shown) or "-"


def _gathered_axes(plan: Plan, graph: Graph, tensor: str) -> set[str]:
    """Axes along which some op takes a parameter whole; along the others it is used as stored."""
    return {
        axis
        for op in graph.ops
        for position, operand in enumerate(op.operands)
        if operand == tensor
        for axis, label in zip(plan.mesh.names, plan.ops[op.name], strict=True)
        if op.choice(label).operands[position].kind != "S"
    }


def axis_lines(plan: Plan, graph: Graph, words: Words = NO_WORDS) -> tuple[str, ...]:
    """A sentence for each axis of more than one rank: which dims it splits, and how parameters lie along it.

    At most the six most frequent dims are named. Ops and parameters are counted for the whole model, also
    where few of its layers were captured. `words` has names for factors.
    """
    return tuple(_axis_line(plan, graph, axis, words) for axis, size in enumerate(plan.mesh.sizes) if size > 1)


def _axis_line(plan: Plan, graph: Graph, axis: int, words: Words) -> str:
    name, size = plan.mesh.axes[axis]
    split: Counter[str] = Counter()
    for op in graph.ops:
        if not op.is_view and op.choice(plan.ops[op.name][axis]).splits:
            split[_split(op, plan.ops[op.name][axis], words)] += graph.layer_count.get(op.name, 1)
    stored: Counter[str] = Counter()
    for parameter in plan.parameters:
        stored[_kept(plan, graph, parameter, axis)] += graph.layer_count.get(parameter, 1)
    ops = ", ".join(f"{factor} ({counted(count, 'op')})" for factor, count in split.most_common(6))
    kept = ", ".join(f"{count} {how}" for how, count in stored.most_common())
    return f"{name}={size} splits {ops or 'no op'}; parameters: {kept}"


def _kept(plan: Plan, graph: Graph, name: str, axis: int) -> str:
    """How a parameter lies along an axis, in the words of ZeRO and Megatron."""
    if plan.parameters[name].storage[axis].kind == "O":
        return "stored on one rank"
    stage = plan.parameters[name].zero_stage(axis)
    if stage == 3 and plan.mesh.names[axis] not in _gathered_axes(plan, graph, graph.parameters[name]):
        return "tensor-parallel"
    return PARAMETER_WORDS.get(stage, "replicated")


def op_table(plan: Plan, graph: Graph, seconds: Mapping[str, float], words: Words = NO_WORDS) -> Table:
    """What every op splits along every axis, how its results lie, and its seconds of a step; views are left out."""
    table = Table(title=_OPS, title_justify="left", show_edge=False)
    for column in ("module", "op", "of", *(f"{name}={size}" for name, size in plan.mesh.axes), "result"):
        table.add_column(column, overflow="fold")
    table.add_column("time", justify="right")
    previous = ""
    lines = _op_lines(plan, graph, seconds, words)
    for (module, row), (kinds, count, taken) in sorted(lines.items(), key=lambda line: line[0][0] == _WHOLE):
        shown = "" if module == previous else module
        table.add_row(shown, ", ".join(dict.fromkeys(kinds)), _times(count), *row, format_seconds(taken))
        previous = module
    return table


def _op_lines(
    plan: Plan, graph: Graph, seconds: Mapping[str, float], words: Words
) -> dict[tuple[str, tuple[str, ...]], tuple[list[str], int, float]]:
    """Module and row -> the kinds of its ops that are split alike, their number and seconds, the layers folded."""
    found: dict[tuple[str, tuple[str, ...]], tuple[list[str], int, float]] = {}
    for op in graph.ops:
        if op.is_view or not op.has_rule:
            continue
        labels = plan.ops[op.name]
        split = tuple(_split(op, label, words) for label in labels)
        module = _WHOLE if set(split) == {"-"} else starred(op.module) or "(top)"
        result = next(iter(result_layouts(op, labels)), ())
        key = module, (*split, format_layout(result, plan.mesh))
        kinds, count, taken = found.get(key, ([], 0, 0.0))
        count += graph.layer_count.get(op.name, 1)
        found[key] = ([*kinds, op.kind.removeprefix("aten.")], count, taken + seconds.get(op.name, 0.0))
    return found


def _split(op: Op, label: str, words: Words = NO_WORDS) -> str:
    choice = op.choice(label)
    if choice.splits:
        name = words.get(choice.factor, "") or place_of(choice.factor)
        return f"{name} (rows exchanged)" if EXCHANGED in label else name
    if (owner := owner_of(label)) is not None:
        return f"rank {owner} alone"
    return {"-": "-", "~": "-"}.get(label, "partial sums")


def _times(count: int) -> str:
    return f"{count}x" if count > 1 else ""


@dataclass(frozen=True)
class CollectiveTotal:
    """The messages of one kind of a step, on one rank.

    Attributes:
        axis: name of the mesh axis.
        name: such as `all_gather`.
        carries: "activation", "parameter" or "gradient".
        phase: "forward", "backward", or "once" a step.
        tensors: what they move, the layers folded.
        count: number of tensors that they move in a step; those of small tensors share a bucket.
        traffic_bytes: bytes sent in a step.
        seconds: their duration in a step, if nothing hid them.
    """

    axis: str
    name: str
    carries: str
    phase: str
    tensors: tuple[str, ...]
    count: float
    traffic_bytes: float
    seconds: float


def collectives(step: Step) -> tuple[CollectiveTotal, ...]:
    """Where collectives stand in a step, those that take longest first."""
    found: dict[tuple[str, str, str, str], list[WorkItem]] = {}
    for item in step.items:
        if item.resource != COMPUTE and float(item.traffic_bytes) > 0:
            once = item.phase in ("gather", "reduce", "meet") and not item.every_micro_batch
            when = "backward" if item.phase == "reduce" else item.phase
            phase = "once" if once and item.phase != "meet" else when
            found.setdefault((item.resource, item.kind, item.carries, phase), []).append(item)
    made = [_collective(*key, items, step) for key, items in found.items()]
    return tuple(sorted(made, key=lambda c: (-c.seconds, c.axis, c.name, c.phase)))


def _collective(axis: str, name: str, carries: str, phase: str, items: list[WorkItem], step: Step) -> CollectiveTotal:
    counts = [_times_a_step(item, phase, step) for item in items]
    titles = dict.fromkeys(" ".join(item.name.split()[1:]) for item in items)
    pairs = list(zip(counts, items, strict=True))
    return CollectiveTotal(
        axis,
        name,
        carries,
        phase,
        tuple(titles),
        sum(counts),
        sum(count * float(item.traffic_bytes) for count, item in pairs),
        sum(count * float(item.seconds) for count, item in pairs),
    )


def _times_a_step(item: WorkItem, phase: str, step: Step) -> float:
    run = step.run
    batches = 1.0 if phase in ("once", "meet") else float(run.micro_batches)
    share = float(run.stages) if item.region == "layers" else 1.0
    return float(item.count) * batches * float(step.times(item)) / share


_WHEN = {"once": "once a step", "meet": "when replicas synchronise, a step's share"}


def collective_table(step: Step) -> Table:
    """A table of the collectives of a step: their places, and the cost of each kind."""
    title = "Collectives of a step (before anything hides them, or small tensors share a bucket)"
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in ("along", "collective", "of", "when", "tensors", "sent", "time"):
        right = column in ("tensors", "sent", "time")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for each in collectives(step):
        when = _WHEN.get(each.phase, each.phase)
        count = f"{each.count:,.0f}" if each.phase != "meet" else f"{each.count:,.3g}"
        table.add_row(
            each.axis,
            each.name,
            _moved(each),
            when,
            count,
            format_bytes(each.traffic_bytes),
            format_seconds(each.seconds),
        )
    return table


def _moved(each: CollectiveTotal) -> str:
    """`gradients`, or the few tensors by name."""
    kind = "activations" if each.carries == "activation" else f"{each.carries}s"
    if len(each.tensors) > 2:
        return kind
    return f"{kind}: {', '.join(each.tensors)}"


def used_axes(plan: Plan) -> Plan:
    """The plan without the axes of one rank, along which nothing is split; of one rank alone the first stays."""
    kept = [i for i, size in enumerate(plan.mesh.sizes) if size > 1] or [0]
    if len(kept) == len(plan.mesh.sizes):
        return plan

    def of(values: tuple[_T, ...]) -> tuple[_T, ...]:
        return tuple(values[i] for i in kept)

    parameters = {
        name: replace(how, storage=of(how.storage), resident=of(how.resident)) for name, how in plan.parameters.items()
    }
    axes = of(plan.mesh.axes)
    placement = tuple(name for name in plan.mesh.placed.names if name in dict(axes))
    return replace(
        plan,
        mesh=Mesh(axes, placement, plan.mesh.occupied),
        parameters=parameters,
        inputs={name: of(layout) for name, layout in plan.inputs.items()},
        ops={name: of(labels) for name, labels in plan.ops.items()},
    )


def starred(name: str) -> str:
    """A name with `*` in place of the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=[. ]|$)", "*", name)


def _folded(rows: Iterable[tuple[str, tuple[str, ...], int]]) -> Iterable[tuple[str, int, tuple[str, ...]]]:
    """Rows whose names differ only in a number between dots, and which say the same, once.

    With how many of them the whole model has.
    """
    counts: dict[tuple[str, tuple[str, ...]], int] = {}
    for name, row, count in rows:
        key = (starred(name), row)
        counts[key] = counts.get(key, 0) + count
    return [(name, count, row) for (name, row), count in counts.items()]


def described(plan: Plan, graph: Graph) -> Mapping[str, object]:
    """The shape and factors of every parameter, and the factor that every op splits along every axis."""
    tensors = {name: graph.tensors[t] for name, t in graph.parameters.items()}
    return {
        "parameters": {
            name: {"shape": list(t.shape), "factors": [list(dim) for dim in t.factors]} for name, t in tensors.items()
        },
        "splits": {
            op.name: {
                "op": f"{starred(op.module)} {op.kind.removeprefix('aten.')}".strip(),
                **dict(zip(plan.mesh.names, (_split(op, x) for x in plan.ops[op.name]), strict=True)),
            }
            for op in graph.ops
            if not op.is_view and op.has_rule
        },
    }

"""What people read: a plan as tables, folded over repeated blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir import Graph, Mesh, Op, Plan, format_layout

ZERO_NAMES = {1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}


def explain(plan: Plan, graph: Graph) -> RenderableType:
    """A plan as a headline, what was chosen and why, and tables of parameters and ops."""
    return Group(
        headline(plan),
        *map(Text, plan.notes),
        Text(),
        parameter_table(plan, graph),
        op_table(plan, graph),
    )


def headline(plan: Plan) -> Text:
    """One line: mesh, recipe, micro-batches, model."""
    ranks = f"{plan.mesh.size} rank{'s' * (plan.mesh.size > 1)}"
    batches = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    text = Text(f"Plan for {ranks} as {plan.mesh}", style="bold")
    return text.append(
        f"  recipe {plan.recipe}{batches}, model {plan.fingerprint}", style="not bold dim"
    )


def as_text(renderable: RenderableType, *, width: int = 120) -> str:
    """What a renderable looks like without colours, for files and tests."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def parameter_table(plan: Plan, graph: Graph) -> Table:
    """How parameters are stored, and how their gradients come back; one row for all blocks."""
    table = Table(title="Parameters", title_justify="left", show_edge=False)
    for column in ("parameter", "of", "shape", "stored", "ZeRO", "gradient reduced per"):
        table.add_column(column, overflow="fold")
    for name, count, row in _folded(_parameter_rows(plan, graph)):
        table.add_row(name, _times(count), *row)
    return table


def _parameter_rows(plan: Plan, graph: Graph) -> Iterable[tuple[str, tuple[str, ...]]]:
    for name, how in plan.parameters.items():
        shape = "x".join(str(n) for n in graph.tensors[graph.parameters[name]].shape) or "scalar"
        stored = format_layout(how.storage, plan.mesh)
        in_graph = any(how.zero_stage(i) == 3 for i in range(len(plan.mesh.axes)))
        reduced = "micro-batch" if in_graph else how.reduce.replace("_", "-")
        yield name, (shape, stored, _zero(plan, graph, name), reduced)


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


def op_table(plan: Plan, graph: Graph) -> Table:
    """What every op splits along every axis, by the names of the factors; views are left out."""
    table = Table(title="Ops", title_justify="left", show_edge=False)
    for column in ("module", "op", "of", *(f"{name}={size}" for name, size in plan.mesh.axes)):
        table.add_column(column, overflow="fold")
    previous = ""
    for key, count, row in _folded(_op_rows(plan, graph)):
        module, kind = key.rsplit(" ", 1)
        table.add_row("" if module == previous else module, kind, _times(count), *row)
        previous = module
    return table


def _op_rows(plan: Plan, graph: Graph) -> Iterable[tuple[str, tuple[str, ...]]]:
    for op in graph.ops:
        if not op.is_view and op.has_rule:
            labels = plan.ops[op.name]
            kind = op.kind.removeprefix("aten.")
            yield f"{op.module or '(top)'} {kind}", tuple(_split(op, label) for label in labels)


def _split(op: Op, label: str) -> str:
    choice = op.choice(label)
    return (
        _numbers_out(choice.factor)
        if choice.splits
        else {"-": "-", "~": "-"}.get(label, "partial sums")
    )


def _times(count: int) -> str:
    return f"{count}x" if count > 1 else ""


def _numbers_out(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=[. ]|$)", "*", name)


def _folded(
    rows: Iterable[tuple[str, tuple[str, ...]]],
) -> Iterable[tuple[str, int, tuple[str, ...]]]:
    """Rows whose names differ only in a number between dots, and which say the same, once."""
    counts: dict[tuple[str, tuple[str, ...]], int] = {}
    for name, row in rows:
        key = (_numbers_out(name), row)
        counts[key] = counts.get(key, 0) + 1
    return [(name, count, row) for (name, row), count in counts.items()]


@dataclass(frozen=True)
class Explanation:
    """A plan with the graph it was made for; prints as tables, in a terminal and as text."""

    plan: Plan
    graph: Graph

    def __rich__(self) -> RenderableType:
        return explain(self.plan, self.graph)

    def __str__(self) -> str:
        return as_text(self)

    def to_json(self) -> Mapping[str, object]:
        """The plan, and the shape and factors of every parameter."""
        tensors = {name: self.graph.tensors[t] for name, t in self.graph.parameters.items()}
        return {
            "plan": self.plan.to_json(),
            "parameters": {
                name: {"shape": list(t.shape), "factors": [list(dim) for dim in t.factors]}
                for name, t in tensors.items()
            },
        }


def mesh_of(text: str | None) -> Mesh | None:
    """The mesh that a command line names, None where it names none."""
    return None if text is None else Mesh.parse(text)

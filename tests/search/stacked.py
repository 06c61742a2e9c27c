"""Graphs of modules in a row, for tests of pipelines: what is cut, not what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir import Graph, Op, find_stacks
from tests.search.graphs import Builder


@dataclass(frozen=True)
class Sizes:
    """Sizes of a residual net: x -> x + relu(x A) B, between an embedding and a head."""

    batch: int = 8
    width: int = 16
    hidden: int = 32
    vocab: int = 64


def residual(layers: int, sizes: Sizes = Sizes(), *, tied: bool = False) -> Graph:
    """embed, layers.0 to layers.n - 1 with the residual sum outside of them, head and loss."""
    b = Builder(
        {"b": sizes.batch, "d": sizes.width, "f": sizes.hidden, "v": sizes.vocab},
        {"b": "batch", "d": "parameter normalized", "f": "parameter", "v": "parameter"},
        itemsize_bytes=4,
    )
    rows, labels = b.input("x", "b v"), b.input("labels", "b")
    table = b.parameter("embed.weight", "v d")
    modules = ["embed"]
    x = b.op("linear", "b v, v d -> b d", [rows, table], linear=[[0]])
    for i in range(layers):
        up = b.parameter(f"layers.{i}.up.weight", "f d")
        down = b.parameter(f"layers.{i}.down.weight", "d f")
        h = b.op("linear", "b d, f d -> b f", [x, up], linear=[[0]])
        h = b.op("relu", "b f -> b f", [h], saves=[], saves_result=True)
        y = b.op("linear", "b f, d f -> b d", [h, down], linear=[[0]])
        x = b.op("add", "b d, b d -> b d", [x, y], saves=[], linear=[[0, 1]])
        modules += [f"layers.{i}.up", f"layers.{i}", f"layers.{i}.down", ""]
    head = table if tied else b.parameter("head.weight", "v d")
    logits = b.op("linear", "b d, v d -> b v", [x, head], linear=[[0]])
    b.output(b.op("loss", "b v, b ->", [logits, labels]))
    return in_modules(b.graph(), [*modules, "head", ""])


def in_modules(graph: Graph, modules: Sequence[str]) -> Graph:
    """The graph with a module for every op, and the stacks that those make."""
    ops = [replace(op, module=module) for op, module in zip(graph.ops, modules, strict=True)]
    return replace(graph, ops=tuple(ops), stacks=find_stacks(ops))


def in_a_row(*rows: tuple[str, str]) -> Graph:
    """One op a row, each taking the one before: its module, and "w" if it has a parameter of its own.

    "m" makes a mask of an input alone, which the next op with a parameter takes too; "+" adds what came
    before the op before.
    """
    b = Builder({"b": 4, "d": 8}, {"b": "batch"})
    x, mask = b.input("x", "b d"), ""
    before = x
    for i, (_, what) in enumerate(rows):
        if what == "m":
            mask = b.op("mask", "b d -> b d", ["x"], saves=[])
        elif what == "w":
            also = [mask] if mask else []
            row = "b d, d d', b d -> b d'" if mask else "b d, d d' -> b d'"
            before, x = x, b.op("linear", row, [x, b.parameter(f"p{i}", "d d"), *also])
            mask = ""
        else:
            x = b.op("add", "b d, b d -> b d", [x, before], saves=[])
    b.output(x)
    return in_modules(b.graph(), [module for module, _ in rows])


def starts_by_module(graph: Graph, starts: Sequence[str]) -> list[str]:
    """The modules of the ops with which blocks begin."""
    by_name: dict[str, Op] = dict(graph.by_name)
    return [by_name[name].module for name in starts]

"""Faults to plant in the code: one small change of one line each, drawn by a seed."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite.probes import runs

# What a fault may be in, and the folders and files of the product that it lies in.
AREAS = {
    "rules": ("autopar/rules", "autopar/ops/call_kinds.py", "autopar/analysis"),
    "conversions": ("autopar/ir/conversion.py", "autopar/ir/layout.py", "autopar/ops", "autopar/proof/lockstep.py"),
    "passes": ("passes", "autopar/program"),
    "prices": ("cost_model", "autopar/pipeline"),
    "runtime": ("autopar/runtime",),
}

_REDUCTIONS = {"sum", "mean", "prod", "all_reduce", "reduce_scatter", "amax", "amin", "max", "min", "fsum"}
_WAITS = {"wait", "synchronize", "barrier", "wait_tensor"}
_SWAPPED = {ast.Sub: ast.Add, ast.Add: ast.Sub, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
_COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Fault:
    """A change of a file.

    Attributes:
        area: name of the area, a key of AREAS.
        kind: name of the change, a key of KINDS.
        path: path of the file below the repository's root.
        line: number of the changed line, from 1.
        start: offset in the line at which the old text starts, in characters.
        old: text that is replaced; it lies on one line.
        new: text in its place.
    """

    area: str
    kind: str
    path: str
    line: int
    start: int
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.start} {self.kind}: {self.old} -> {self.new}"

    def plant(self, root: Path) -> None:
        """Changes the file below `root`."""
        path = root / self.path
        lines = path.read_text().splitlines(keepends=True)
        line = lines[self.line - 1]
        assert line[self.start :].startswith(self.old), f"{self.name} is of another version"
        lines[self.line - 1] = line[: self.start] + self.new + line[self.start + len(self.old) :]
        path.write_text("".join(lines))


def drawn(root: Path, count: int, seed: int) -> list[Fault]:
    """`count` faults in functions, as many of each area and, within it, of each kind as there are.

    Args:
        root: folder of the repository.
        count: number of faults.
        seed: seed of the draw.
    """
    draw, found = random.Random(seed), list[Fault]()
    kinds_of = {area: _of_area(root, area) for area in AREAS}
    for number in range(count):
        kinds = kinds_of[list(AREAS)[number % len(AREAS)]]
        faults = kinds[draw.choice([kind for kind in KINDS if kinds.get(kind)])]
        found.append(faults.pop(draw.randrange(len(faults))))
    return found


def _of_area(root: Path, area: str) -> dict[str, list[Fault]]:
    kinds: dict[str, list[Fault]] = {}
    for path in _files(root, area):
        text = path.read_text()
        in_functions = {line for run in runs(text) for line in run}
        for fault in faults_of(text, area, str(path.relative_to(root))):
            if fault.line in in_functions:
                kinds.setdefault(fault.kind, []).append(fault)
    return kinds


def _files(root: Path, area: str) -> Iterator[Path]:
    for place in AREAS[area]:
        path = root / place
        yield from [path] if path.suffix else sorted(path.rglob("*.py"))


def faults_of(text: str, area: str, path: str) -> Iterator[Fault]:
    """All faults that can be planted in a module's text."""
    lines, tree = text.splitlines(), ast.parse(text)
    # Python 3.11 gives nodes inside of f-strings the places of other text.
    in_text = {id(n) for s in ast.walk(tree) if isinstance(s, ast.JoinedStr) for n in ast.walk(s)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr) or node.lineno != node.end_lineno or id(node) in in_text:
            continue
        # An offset of ast counts bytes.
        line = lines[node.lineno - 1].encode()
        start = len(line[: node.col_offset].decode())
        old = line[node.col_offset : node.end_col_offset].decode()
        for kind, change in KINDS.items():
            changed = change(node)
            if changed is not None:
                new = f"({ast.unparse(changed)})"
                yield Fault(area, kind, path, node.lineno, start, old, new)


def _dropped_reduction(node: ast.expr) -> ast.expr | None:
    """`x.sum(d)` and `all_reduce(x, ...)` -> `x`."""
    if not (isinstance(node, ast.Call) and _called(node) in _REDUCTIONS):
        return None
    if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name):
        return node.func.value
    return (
        node.args[0] if len(node.args) == 1 and not isinstance(node.args[0], ast.GeneratorExp | ast.Starred) else None
    )


def _swapped_operands(node: ast.expr) -> ast.expr | None:
    """`f(a, b)` -> `f(b, a)`, and `a - b` -> `b - a`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
        return ast.BinOp(node.right, node.op, node.left)
    if isinstance(node, ast.Call) and len(node.args) == 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        if _called(node) in {"isinstance", "getattr", "hasattr", "zip", "cast", "field"}:
            return None
        return ast.Call(node.func, node.args[::-1], node.keywords)
    return None


def _other_operator(node: ast.expr) -> ast.expr | None:
    """`a + b` -> `a - b`, and the like."""
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED and not _is_text(node):
        return ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right)
    return None


def _wrong_dim(node: ast.expr) -> ast.expr | None:
    """`x[0]` -> `x[-1]`, and `x.shape[i]` -> `x.shape[i - 1]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in (0, -1):
        return ast.Subscript(node.value, ast.Constant(-1 - node.slice.value), node.ctx)
    return None


def _off_by_one(node: ast.expr) -> ast.expr | None:
    """A number n -> n + 1."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return ast.Constant(node.value + 1)
    return None


def _other_comparison(node: ast.expr) -> ast.expr | None:
    """`a < b` -> `a <= b`, `a == b` -> `a != b`."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        ops = [_COMPARED[type(node.ops[0])](), *node.ops[1:]]
        return ast.Compare(node.left, ops, node.comparators)
    return None


def _negated(node: ast.expr) -> ast.expr | None:
    """`not x` -> `x`, and `a and b` -> `a or b`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    return None


def _skipped_wait(node: ast.expr) -> ast.expr | None:
    """`work.wait()` -> `None`."""
    return ast.Constant(None) if isinstance(node, ast.Call) and _called(node) in _WAITS else None


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(s, ast.JoinedStr) or isinstance(getattr(s, "value", 0), str) for s in sides)


KINDS: dict[str, Callable[[ast.expr], ast.expr | None]] = {
    "dropped reduction": _dropped_reduction,
    "swapped operands": _swapped_operands,
    "other operator": _other_operator,
    "wrong dim": _wrong_dim,
    "off by one": _off_by_one,
    "other comparison": _other_comparison,
    "negated": _negated,
    "skipped wait": _skipped_wait,
}

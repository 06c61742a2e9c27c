"""Plans that are broken on purpose, each by one fault in its program: `verify` must fail them all.

    OMP_NUM_THREADS=1 python benchmarks/parity/broken.py --plans 100 --markdown benchmarks/results/broken_plans.md

A plan is drawn at random and its program rewritten at one place, which is drawn too. The right program of the same plan
is compared first and must pass. A rewrite is left out if the program does not run, and if it still computes the same:
where every error is bit for bit that of the right program, or where all errors in float64 arithmetic are below 1e-12, a
thousandth of the bound (parts of the squares of a norm, say, that are only added up, in another order). The bias of
attention's keys is left alone: it has no effect.
"""

from __future__ import annotations

import copy
import operator
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import click
import torch
from rich.console import Console
from torch import fx

from autopar.ir import Mesh
from autopar.ops.collectives import Collective
from autopar.program.program import Program, build_program
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from autopar.proof.verdict import VerifyReport

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.zoo.models import build

aten = torch.ops.aten
MESHES = ("a=2", "a=2,b=2")
NAMES = ("llama", "gpt2", "bert", "t5", "mixtral")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STALE = 1e-3  # relative size of an update that a rank missed
ROUNDING = 1e-3  # share of verify's bound of 1e-9; right plans have errors of 1e-15 to 4e-13
Site = tuple[fx.Node, Callable[[fx.Node], None]]


# --- the faults: each finds its sites in a graph and says how to break one


def dropped_reductions(graph: fx.Graph) -> Iterator[Site]:
    """all_reduce(x) -> x; reduce_scatter(x) -> this rank's part of x."""
    for node in graph.nodes:
        if (call := Collective.of(node)) is None:
            continue
        if call.name == "all_reduce":
            yield node, lambda n: _replace(n, n.args[0])
        elif call.name == "reduce_scatter":
            yield node, _scatter_alone


def _scatter_alone(node: fx.Node) -> None:
    node.target = torch.ops.autopar.shard.default
    node.args = (*node.args[:-1], "all_gather")


def dropped_gradient_reductions(graph: fx.Graph) -> Iterator[Site]:
    """An op whose backward adds up over ranks -> the op that leaves each rank its own."""
    for node in graph.nodes:
        call = Collective.of(node)
        if call is not None and call.name == "vary" and call.backward == "all_reduce":
            yield node, lambda n: _replace(n, n.args[0])


def doubled_gradients(graph: fx.Graph) -> Iterator[Site]:
    """p -> 2 p - detach(p)."""
    for node in _parameters(graph):
        yield node, _double


def _double(node: fx.Node) -> None:
    _after(
        node,
        lambda g: g.call_function(
            aten.sub.Tensor,
            (g.call_function(aten.mul.Tensor, (node, 2)), g.call_function(aten.detach.default, (node,))),
        ),
    )


def wrong_offsets(graph: fx.Graph) -> Iterator[Site]:
    """The first row of a rank's part -> the next row; a mask -> the mask of the element before."""
    for node in graph.nodes:
        if node.target is aten.mul.Tensor and _is_size(node.args[1]):
            yield node, lambda n: _after(n, lambda g: g.call_function(aten.add.Tensor, (n, 1)))
        elif node.target in (aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor):
            yield (node, lambda n: _after(n, lambda g: g.call_function(aten.roll.default, (n, [1], [-1]))))


def stale_weights(graph: fx.Graph) -> Iterator[Site]:
    """p -> p on the first rank of an axis, and p (1 + 1e-3), with its gradient, on the others."""
    for node in _parameters(graph):
        yield node, _stale


def _stale(node: fx.Node) -> None:
    call = next(c for n in node.graph.nodes if (c := Collective.of(n)) is not None)

    def made(graph: fx.Graph) -> fx.Node:
        places = graph.call_function(aten.arange.default, (call.size,))
        shard = torch.ops.autopar.shard.default
        place = graph.call_function(shard, (places, [0], call.size, call.group, "all_gather"))
        zero = graph.call_function(aten.squeeze.dims, (place, [0]))
        share = graph.call_function(aten.mul.Tensor, (zero, STALE))
        value = graph.call_function(aten.detach.default, (node,))
        change = graph.call_function(aten.mul.Tensor, (value, share))
        return graph.call_function(aten.add.Tensor, (node, change))

    _after(node, made)


def wrong_shards(graph: fx.Graph) -> Iterator[Site]:
    """A rank's part of x -> its neighbour's part."""
    for node in graph.nodes:
        call = Collective.of(node)
        is_cut = call is not None and call.name == "shard"
        if is_cut and call is not None and "arange" not in str(call.x):
            yield node, _neighbour


def _neighbour(node: fx.Node) -> None:
    call = Collective.of(node)
    assert call is not None
    (dim,) = call.dims
    with node.graph.inserting_before(node):
        size = node.graph.call_function(aten.sym_size.int, (call.x, dim))
        part = node.graph.call_function(operator.floordiv, (size, call.size))
        rolled = node.graph.call_function(aten.roll.default, (call.x, [part], [dim]))
    node.args = (rolled, *node.args[1:])


def missing_scales(graph: fx.Graph) -> Iterator[Site]:
    """x times or divided by a number -> x."""
    for node in graph.nodes:
        if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            x, by = node.args[:2]
            if isinstance(x, fx.Node) and isinstance(by, (int, float)) and abs(by) != 1:
                yield node, lambda n: _replace(n, n.args[0])


def repeated_addends(graph: fx.Graph) -> Iterator[Site]:
    """A value that one rank adds to a sum -> a value that all ranks add."""
    for node in graph.nodes:
        call = Collective.of(node)
        if call is not None and call.name == "partial":
            yield node, lambda n: _replace(n, n.args[0])


FAULTS: Mapping[str, Callable[[fx.Graph], Iterator[Site]]] = {
    "a dropped reduction": dropped_reductions,
    "a dropped gradient reduction": dropped_gradient_reductions,
    "a doubled gradient": doubled_gradients,
    "a wrong offset": wrong_offsets,
    "a stale weight": stale_weights,
    "a wrong shard": wrong_shards,
    "a missing scale": missing_scales,
    "a repeated addend": repeated_addends,
}


def _parameters(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.find_nodes(op="placeholder"):
        if node.name.startswith("p_") and node.users:
            yield node


def _is_key_bias(node: fx.Node) -> bool:
    """Whether a node is the bias of attention's keys, or a conversion of it.

    The softmax over the keys removes any term that all keys share. So this bias has no effect on the result, whatever
    its value, and its gradient is zero.
    """
    while node.op != "placeholder" and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node.name.endswith(("key_bias", "k_proj_bias"))


def _is_size(x: object) -> bool:
    return isinstance(x, fx.Node) and x.target is aten.sym_size.int


def _replace(node: fx.Node, by: object) -> None:
    assert isinstance(by, fx.Node)
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _after(node: fx.Node, make: Callable[[fx.Graph], fx.Node]) -> None:
    """Puts what `make` makes of a node between the node and its users."""
    users = list(node.users)
    last = node if node.op != "placeholder" else list(node.graph.find_nodes(op="placeholder"))[-1]
    with node.graph.inserting_after(last):
        anchor = node.graph.call_function(aten.alias.default, (node,))
    with node.graph.inserting_before(anchor):
        made = make(node.graph)
    for user in users:
        user.replace_input_with(node, made)
    node.graph.erase_node(anchor)


# --- breaking and judging


def broken(program: Program, fault: str, draw: random.Random) -> Program | None:
    """The program with one fault, None where it has no place for it."""
    module = copy.deepcopy(program.module)
    sites = [site for site in FAULTS[fault](module.graph) if not _is_key_bias(site[0])]
    if not sites:
        return None
    node, rewrite = draw.choice(sites)
    rewrite(node)
    module.graph.lint()
    module.recompile()
    return replace(program, module=module)


def subject_of(name: str, dtype: torch.dtype) -> Subject:
    """A small architecture of the zoo in one element type."""
    model, args = build(name)
    return Subject.of(model.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in args))


def judged(subject: Subject, draw: random.Random) -> Iterator[tuple[str, VerifyReport]]:
    """Without end: a random plan, broken by every fault that it has a place for."""
    prepared = subject.prepared
    graph, fingerprint = prepared.analysis.graph, prepared.captured.fingerprint
    while True:
        mesh = Mesh.parse(draw.choice(MESHES))
        plan = random_plan(graph, mesh, seed=draw.randrange(10**6), fingerprint=fingerprint)
        program = build_program(prepared.captured, prepared.analysis, plan)
        right = subject.compare_program(program)
        assert right.passed, right
        for fault in FAULTS:
            wrong = broken(program, fault, draw)
            if wrong is None:
                continue
            try:
                report = subject.compare_program(wrong)
            except (IndexError, RuntimeError):
                continue  # it does not run, which nobody overlooks
            if _errors(report) != _errors(right) and not _is_rounding(report):
                yield fault, report


def _errors(report: VerifyReport) -> list[float]:
    return [verdict.error for verdict in report.verdicts]


def _is_rounding(report: VerifyReport) -> bool:
    """Whether the errors in float64 arithmetic are those of another order of additions."""
    return all(v.share <= ROUNDING for v in report.verdicts if v.arithmetic == "float64")


def markdown(table: Mapping[tuple[str, str], Counter[str]], plans: int) -> str:
    """The table as a page."""
    lines = [
        "# Plans that are broken on purpose",
        "",
        f"Random plans of {', '.join(NAMES)} on the meshes {'; '.join(MESHES)}, each broken at one place by one",
        "fault; every right plan passed before it was broken. Made by",
        f"`OMP_NUM_THREADS=1 python benchmarks/parity/broken.py --plans {plans} "
        "--markdown benchmarks/results/broken_plans.md`.",
        "",
        "| precision | fault | broken plans | failed | failed in float64 arithmetic | beyond the bound of rounding |",
        "|---|---|---|---|---|---|",
    ]
    for (dtype, fault), row in table.items():
        lines.append(f"| {dtype} | {fault} | {row['all']} | {row['failed']} | {row['exact']} | {row['own']} |")
    total = sum(table.values(), Counter[str]())
    lines.append(f"| all | | {total['all']} | {total['failed']} | {total['exact']} | {total['own']} |")
    return "\n".join(lines) + "\n"


@click.command(context_settings={"show_default": True})
@click.option("--plans", default=100, help="Broken plans of each precision.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the table there.")
def main(plans: int, path: Path | None) -> None:
    """Break plans and print each that is not failed; exit 1 if there is one."""
    console, table = Console(), dict[tuple[str, str], Counter[str]]()
    for dtype in DTYPES:
        for i, name in enumerate(NAMES):
            cases = judged(subject_of(name, DTYPES[dtype]), random.Random(f"{name} {dtype}"))
            for _ in range(plans * (i + 1) // len(NAMES) - plans * i // len(NAMES)):
                fault, report = next(cases)
                row = table.setdefault((dtype, fault), Counter())
                exact = any(v.arithmetic == "float64" for v in report.failures)
                own = any(v.arithmetic != "float64" for v in report.failures)
                row.update(all=1, failed=int(not report.passed), exact=int(exact), own=int(own))
                if report.passed:
                    console.print(f"{name} {dtype} {fault} is not failed:\n{report}")
            console.print(name, dtype, {k[1]: dict(v) for k, v in table.items() if k[0] == dtype})
    text = markdown(dict(sorted(table.items(), key=lambda x: x[0])), plans)
    console.print(text)
    if path is not None:
        path.write_text(text)
    sys.exit(0 if all(row["all"] == row["failed"] for row in table.values()) else 1)


if __name__ == "__main__":
    main()

"""The lower bound over all axes at once, against brute force over every joint plan of toy graphs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autopar.cost_model import Hardware
from autopar.cost_model.machines.software import AUTOPAR
from autopar.ir import Graph, Layout, Mesh, ParameterPlan, R, is_legal
from autopar.search.exact.assignment_parts import composed
from autopar.search.exact.decisions import Assignment
from autopar.search.exact.dual import least_seconds
from autopar.search.exact.problem import Problem
from autopar.search.exact.search import MeshSearch
from tests.search.graphs import Builder
from tests.search.toy import TOY
from tests.support.tables import often


def one_product(draw: random.Random) -> Graph:
    """x W, summed."""
    b = Builder({"b": draw.choice((6, 96)), "k": 1, "j": draw.choice((2, 3))}, itemsize_bytes=4)
    x, w = b.input("x", "b k!"), b.parameter("w", "j k!")
    y = b.op("linear", "b k!, j k! -> b j", [x, w])
    b.output(b.op("sum", "b j ->", [y], saves=[], linear=[[0]]))
    return b.graph()


def used_twice(draw: random.Random) -> Graph:
    """A parameter with two uses."""
    b = Builder({"b": draw.choice((6, 96)), "e": draw.choice((2, 3))}, itemsize_bytes=4)
    x, w = b.input("x", "b e"), b.parameter("w", "e")
    y = b.op("mul", "b e, e -> b e", [x, w])
    b.output(b.op("mul", "b e!, e! -> b e!", [y, w]))
    return b.graph()


def viewed(draw: random.Random) -> Graph:
    """A product, a view that has no decision of its own, and what saves it; its result is asked for whole."""
    b = Builder({"b": 6, "k": 1, "h": draw.choice((2, 3)), "e": 1}, itemsize_bytes=4)
    x, w = b.input("x", "b k!"), b.parameter("w", "(h e!) k!")
    y = b.op("linear", "b k!, (h e!) k! -> b (h e!)", [x, w])
    y = b.op("view", "b (h e!) -> b h e!", [y], view=True)
    b.output(b.op("square", "b h e! -> b h e!", [y]))
    return replace(b.graph(), whole_outputs=draw.random() < 0.5)


GRAPHS = (one_product, used_twice, viewed)
AXES = ({"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 2, "y": 2, "z": 2})


def machine(draw: random.Random) -> Hardware:
    """A toy machine, some of which hide messages or have a slow host."""
    hides, host_seconds = draw.choice((0.0, 0.6, 1.0)), draw.choice((0.0, 1e-8, 1e-6))
    flops = ((8, draw.choice((1e7, 1e8, 1e9))),)
    return replace(TOY, hides=hides, host_seconds=host_seconds, peak_flops=flops)


def problem_of(seed: int) -> Problem:
    """The `seed`-th problem: every graph on every mesh, on other machines."""
    draw = random.Random(seed)
    graph, axes = GRAPHS[seed % 3](draw), AXES[seed // 3 % 3]
    software = replace(AUTOPAR, runs_ahead=draw.random() < 0.5, hides_activations=draw.choice((0.0, 0.5)))
    batches, hardware = draw.choice((1, 3)), machine(draw)
    return MeshSearch.of(graph, Mesh.of(axes), hardware=hardware, micro_batches=batches, software=software).problem


def plans(problem: Problem) -> Iterator[Assignment]:
    """Every plan: all legal labels on all axes, all storages that serve all uses, all inputs."""
    mesh, graph = problem.mesh, problem.graph
    axes = range(len(mesh.axes))
    labels = []
    for op in problem.ops:
        every = itertools.product(*([choice.label for choice in op.choices] for _ in axes))
        labels.append([each for each in every if is_legal(graph, op, each, mesh)])
    for chosen in itertools.product(*labels):
        if any(problem.follow(index, chosen[made.index]) != chosen[index] for index, made in problem.collapsed.items()):
            continue  # a collapsed view takes its operand as it is produced
        needed = {
            index: [problem.layouts(c, chosen[c]).operands[at] for c, at in entry.consumers]
            for index, entry in enumerate(problem.entries)
            if entry.leaf
        }
        ways = {i: list(_ways(problem, i, needed[i])) for i in needed if problem.entries[i].leaf == "parameter"}
        inputs = {i: list(_inputs(needed[i], mesh)) for i in needed if problem.entries[i].leaf == "input"}
        for stored in itertools.product(*ways.values()):
            for taken in itertools.product(*inputs.values()):
                yield Assignment(chosen, dict(zip(ways, stored, strict=True)), dict(zip(inputs, taken, strict=True)))


def _ways(problem: Problem, index: int, needed: list[Layout]) -> Iterator[ParameterPlan]:
    states = [frozenset(layout[axis] for layout in needed) for axis in range(len(problem.mesh.axes))]
    return (how for how in problem.ways(index) if problem.serves(index, how.resident, states))


def _inputs(needed: list[Layout], mesh: Mesh) -> Iterator[Layout]:
    layouts = (tuple(state if state.kind == "S" else R for state in layout) for layout in needed)
    return iter(dict.fromkeys([(R,) * len(mesh.axes), *layouts]))


@pytest.mark.parametrize("seed", often(range(30), {3, 13, 16}))
def test_no_joint_plan_is_faster_than_the_bound(seed: int) -> None:
    problem = problem_of(seed)
    steps = [composed(problem, each) for each in plans(problem)]
    priced = sorted((float(step.peak_bytes()), float(step.seconds())) for step in steps)
    for bound_bytes in (None, *{size for size, _ in priced[:: max(1, len(priced) // 4)]}):
        best = min(seconds for size, seconds in priced if bound_bytes is None or size <= bound_bytes)
        found = least_seconds(problem, 2 * best, bound_bytes)
        assert found is not None
        assert found <= best, (bound_bytes, found / best)
        assert bound_bytes is not None or found > 0.9 * best  # on these machines; no bound at all would hold, too

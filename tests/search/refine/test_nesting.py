"""The order in which axes nest, chosen for each group of ops."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from autopar.cost_model import Hardware, find_hardware
from autopar.ir import Graph, Labels, Mesh, Plan, is_legal, nested_labels
from autopar.pipeline.composed import composed
from autopar.planning.planning import prepare_step
from autopar.search.candidates.outer import search_plan
from autopar.search.refine.nesting import NestingOfGroups, with_nesting
from autopar.search.refine.orders import in_mesh_order
from autopar.search.request.request import Request
from tests.support.llama import Llama

TWO_NODES = replace(find_hardware("h100"), devices_per_node=2)
ONE_NODE = replace(find_hardware("h100"), devices_per_node=4)
RECIPE = {"tp": "tp+sp", "tq": "tp+sp"}


@functools.cache
def graph() -> Graph:
    """One layer of a small Llama with four sequences of 512 tokens."""
    with torch.device("meta"):
        model = Llama(vocab=512, width=1024, inner=2048, heads=8, kv_heads=4, layers=1)
        tokens = torch.zeros(4, 512, dtype=torch.int64)
    return prepare_step(model, (tokens, tokens)).analysis.graph


@functools.cache
def found(hardware: Hardware) -> Plan:
    asked = Request(hardware, mesh=Mesh.of("tp=2,tq=2"), recipe=RECIPE, recompute="none")
    return search_plan(graph(), asked).best.plan


def seconds(plan: Plan, hardware: Hardware, ops: Mapping[str, Labels]) -> float:
    return composed(graph(), replace(plan, ops=dict(ops)), hardware).step_seconds


def test_half_of_a_message_goes_between_the_nodes() -> None:
    """Of partial sums over both axes tq, inside of a node, is reduced first, as its ranks then split the rows first."""
    plan = found(TWO_NODES)
    assert seconds(plan, TWO_NODES, plan.ops) < 0.999 * seconds(plan, TWO_NODES, in_mesh_order(plan).ops)
    turned = [name for name, labels in plan.ops.items() if labels != in_mesh_order(plan).ops[name]]
    assert turned and all("^1" in plan.ops[name][0] for name in turned)
    (note,) = (note for note in plan.notes if "split tensors over the axes in another order" in note)
    assert note.startswith(f"{len(turned)} ops ")


def test_even_links_change_nothing() -> None:
    plan = found(ONE_NODE)
    assert plan.ops == in_mesh_order(plan).ops


def test_the_plan_is_legal_and_reads_back() -> None:
    plan = found(TWO_NODES)
    assert all(is_legal(graph(), op, plan.ops[op.name], plan.mesh) for op in graph().ops)
    assert Plan.parse(str(plan)) == plan and Plan.from_json(plan.to_json()) == plan
    for how in plan.parameters.values():
        assert not any(state.depth for state in (*how.storage, *how.resident))


def test_no_other_orders_of_the_groups_take_less() -> None:
    """Every combination of orders of the groups by brute force."""
    plan = in_mesh_order(found(TWO_NODES))
    nesting = NestingOfGroups(graph(), plan, TWO_NODES)
    groups, tensors = nesting.groups, list(graph().tensors)
    assert 2 <= len(groups) <= 10
    chosen = dict(nesting.best())
    least = nesting.cost(tensors)
    for orders in itertools.product([(0, 1), (1, 0)], repeat=len(groups)):
        for group, order in zip(groups, orders, strict=True):
            nesting.ops |= {op.name: nested_labels(plan.ops[op.name], order) for op in group}
        assert nesting.cost(tensors) >= least * (1 - 1e-9), orders
    assert chosen != plan.ops


@pytest.mark.parametrize("hardware", [TWO_NODES, ONE_NODE], ids=["two nodes", "one node"])
def test_a_plan_never_becomes_slower(hardware: Hardware) -> None:
    plan = found(hardware)
    assert seconds(plan, hardware, plan.ops) <= seconds(plan, hardware, in_mesh_order(plan).ops)


def test_a_plan_is_turned_once() -> None:
    asked = Request(TWO_NODES, mesh=Mesh.of("tp=2,tq=2"), recipe=RECIPE, recompute="none")
    best = search_plan(graph(), asked).best
    assert with_nesting(best, asked).plan == best.plan

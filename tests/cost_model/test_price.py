"""Prices that can be checked by hand, and laws that no price may break."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from autopar.cost_model import (
    Hardware,
    Link,
    Sizes,
    collective_seconds,
    conversion_seconds,
    op_seconds,
    parameter_bytes,
)
from autopar.ir import Choice, Leaf, Mesh, Op, OwnCollective, P, ParameterPlan, Plan, R, S, Tensor, V
from autopar.ir.conversion import TRANSITIONS
from autopar.planning.planning import prepare_forward
from tests.search.graphs import Builder, mlp
from tests.support.price_oracle import own_seconds, price

MACHINE = Hardware(
    name="round numbers",
    peak_flops=((2, 1e12), (4, 1e11)),
    memory_bytes_per_second=1e10,
    memory_bytes=10**9,
    launch_seconds=0.0,
    devices_per_node=8,
    inside_node=Link(1e9, 1e-6),
    across_nodes=Link(1e8, 1e-5),
)
STATES = (R, V, S(0), S(1), P)
NAMES = sorted({name for transition in TRANSITIONS.values() for name in transition})


def seconds(name: str, before: int, after: int, ranks: int = 4) -> float:
    return collective_seconds(
        name, before_bytes=before, after_bytes=after, ranks=ranks, link=MACHINE.inside_node, hardware=MACHINE
    )


# Collectives


def test_a_ring_by_hand() -> None:
    """4 ranks, 1 GB whole: 3 hops of 1 us, and 3/4 GB over a link of 1 GB/s."""
    assert seconds("all_gather", 250_000_000, 10**9) == pytest.approx(3e-6 + 0.75)
    assert seconds("reduce_scatter", 10**9, 250_000_000) == pytest.approx(3e-6 + 0.75)
    assert seconds("all_reduce", 10**9, 10**9) == pytest.approx(2 * (3e-6 + 0.75))
    assert seconds("all_to_all", 10**9, 10**9) == pytest.approx(3e-6 + 0.75)


def test_a_server_by_hand() -> None:
    """Three other ranks each send 1 GB over a link of 1 GB/s and are answered with as much, one after another."""
    assert seconds("serve", 10**9, 10**9) == pytest.approx(6 * (1e-6 + 1))


def test_local_steps_by_hand() -> None:
    """Memory moves 10 GB/s: a slice of 0.25 GB is read and written, a pad writes the whole."""
    assert seconds("shard", 10**9, 250_000_000) == pytest.approx(0.05)
    assert seconds("pad", 250_000_000, 10**9) == pytest.approx(0.125)
    assert seconds("partial", 10**9, 10**9) == pytest.approx(0.2)
    assert seconds("vary", 10**9, 10**9) == 0.0


def test_all_reduce_costs_reduce_scatter_and_all_gather() -> None:
    for whole, ranks in itertools.product((1, 1000, 10**9), (2, 3, 8)):
        parts = seconds("reduce_scatter", whole, whole // ranks, ranks) + seconds(
            "all_gather", whole // ranks, whole, ranks
        )
        assert seconds("all_reduce", whole, whole, ranks) == parts


@pytest.mark.parametrize("name", NAMES)
def test_more_bytes_never_cost_less(name: str) -> None:
    costs = [seconds(name, size, size) for size in (0, 1, 100, 10**4, 10**8, 10**10)]
    assert costs == sorted(costs)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_pays_nothing(name: str) -> None:
    assert seconds(name, 10**9, 10**9, ranks=1) == 0.0


def test_an_unknown_collective_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no formula for the collective 'multicast'"):
        seconds("multicast", 1, 1)


def test_a_conversion_is_the_sum_of_its_steps() -> None:
    """S -> V gathers 1 GB forward and reduce-scatters it backward, if it has a gradient."""
    sizes = Sizes(Mesh.of({"x": 4}))
    tensor = Tensor("t", ((500,), (1_000_000,)), (("",), ("",)), 2, True)
    found = conversion_seconds(tensor, (S(0),), (V,), sizes=sizes, hardware=MACHINE)
    assert found == pytest.approx((3e-6 + 0.75, 3e-6 + 0.75))
    frozen = dataclasses.replace(tensor, needs_grad=False)
    found = conversion_seconds(frozen, (S(0),), (V,), sizes=sizes, hardware=MACHINE)
    assert found == pytest.approx((3e-6 + 0.75, 0.0))


def test_every_conversion_has_a_price_that_grows_with_the_tensor() -> None:
    sizes = Sizes(Mesh.of({"x": 2, "y": 2}))
    layouts = list(itertools.product(STATES, repeat=2))
    for source, target in itertools.product(layouts, layouts):
        costs = [
            sum(
                conversion_seconds(
                    Tensor("t", ((8,), (width,)), (("",), ("",)), 4, True),
                    source,
                    target,
                    sizes=sizes,
                    hardware=MACHINE,
                )
            )
            for width in (8, 64, 512)
        ]
        assert costs == sorted(costs)


# Ops


def test_a_matrix_product_by_hand() -> None:
    """1000 x 1000 x 1000 in 2 bytes: 2e9 FLOP at 1 TFLOP/s, 6 MB at 10 GB/s; backward twice."""
    b = Builder({"b": 1000, "k": 1000, "j": 1000})
    x = b.op("scale", "b k, k -> b k", [b.input("x", "b k"), b.parameter("s", "k")])
    b.op("linear", "b k, j k -> b j", [x, b.parameter("w", "j k")], linear=[[0]])
    graph, sizes = b.graph(), Sizes(Mesh.of({"x": 4}))

    def cost(label: str) -> tuple[float, float]:
        return op_seconds(graph.ops[1], (label,), graph.tensors, sizes=sizes, hardware=MACHINE)

    assert cost("-") == pytest.approx((2e-3, 4e-3))
    assert cost("b") == pytest.approx((0.5e-3, 1e-3))
    # an addition of a million elements: 4 MB in, 2 MB out, bound by memory, backward as forward
    scale = op_seconds(graph.ops[0], ("-",), graph.tensors, sizes=sizes, hardware=MACHINE)
    assert scale == pytest.approx((4.002e-4, 4.002e-4))


def test_parts_of_causal_attention_compute_every_score_of_their_rows() -> None:
    """4 queries and 4 keys: 1 + 2 + 3 + 4 = 10 scores of the whole, 2 rows of 4 for either half of the queries.

    Efficiencies count the square of 16 scores, masked or not, so that a half takes 8 / 10 of the whole; over
    two axes 4 / 10, in any order. Of 8 queries the last five see all of 4 keys: 6 + 5 * 4 = 26 scores, and a half has
    16.
    """

    def shares(queries: int) -> list[float]:
        tensors = torch.rand(8, 2, queries, 64), torch.rand(8, 2, 4, 64), torch.rand(8, 2, 4, 64)
        (op,) = (graph := prepare_forward(_Causal(), tensors).analysis.graph).ops
        quick = dataclasses.replace(MACHINE, memory_bytes_per_second=1e20)
        sizes = Sizes(Mesh.of({"x": 2, "y": 2}))
        split = next(c.label for c in op.choices if c.stretch > 1)
        some = (("-", "-"), ("-", "b0"), ("-", split))
        found = [
            op_seconds(op, labels, graph.tensors, sizes=sizes, hardware=quick).forward
            for labels in (*some, (split, split), (f"{split}^1", split))
        ]
        return [each / found[0] for each in found[1:]]

    assert shares(4) == pytest.approx([0.5, 8 / 10, 4 / 10, 4 / 10])
    assert shares(8) == pytest.approx([0.5, 16 / 26, 8 / 26, 8 / 26])


class _Causal(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_collectives_inside_an_op_by_hand() -> None:
    """1000 tokens of 4 bytes on each of 4 ranks: a gather of 16 kB and a sum of 4 kB, at 1 GB/s, 1 us a hop."""
    tokens = (Leaf("n", "tokens", 1000),)
    own = tuple(
        OwnCollective(frozenset("c"), name, back, 4, tokens)
        for name, back in (("all_gather", ""), ("all_reduce", "all_reduce"))
    )
    choices = tuple(Choice(label, (), (), int(label != "-")) for label in "-nc")
    op, sizes = (Op("loss", "loss", (), (), choices, collectives=own), Sizes(Mesh.of({"x": 4, "y": 2})))

    def cost(*labels: str) -> tuple[float, float]:
        return own_seconds(op, labels, sizes=sizes, hardware=MACHINE)

    reduced = 2 * (3e-6 + 0.75 * 4e-6)
    assert cost("c", "-") == pytest.approx((3e-6 + 0.75 * 16e-6 + reduced, reduced))
    # half of the tokens on a rank: messages of half the size, with all of the latency
    halved = 2 * (3e-6 + 0.75 * 2e-6)
    assert cost("c", "n") == pytest.approx((3e-6 + 0.75 * 8e-6 + halved, halved))
    assert cost("-", "n") == (0.0, 0.0)


def test_views_are_free_and_what_needs_no_gradient_has_no_backward() -> None:
    b = Builder({"b": 10, "k": 10})
    x = b.input("x", "b k")
    b.op("view", "b k -> k b", [x], view=True)
    b.op("cos", "b k -> b k", [x])
    graph, sizes = b.graph(), Sizes(Mesh.of({"x": 2}))
    costs = [op_seconds(op, ("-",), graph.tensors, sizes=sizes, hardware=MACHINE) for op in graph.ops]
    assert costs[0] == (0.0, 0.0)
    assert costs[1] == (pytest.approx(4e-8), 0.0)


# Memory


@pytest.mark.parametrize(
    ("plan", "per_parameter"),
    [  # bytes per float32 parameter on 4 ranks: copy + gradient + two states of AdamW
        (ParameterPlan((R,), (V,)), 4 + 4 + 8),
        (ParameterPlan((S(0),), (V,)), 4 + 4 + 8 / 4),
        (ParameterPlan((S(0),), (V,), "micro_batch"), 4 + 4 / 4 + 8 / 4),
        (ParameterPlan((S(0),), (S(0),)), 16 / 4),
    ],
)
def test_the_stages_of_zero(plan: ParameterPlan, per_parameter: float) -> None:
    tensor = Tensor("w", ((400,), (10,)), (("",), ("",)), 4, True)
    found = parameter_bytes(tensor, plan, Sizes(Mesh.of({"x": 4})))
    assert found.total == 4000 * per_parameter
    frozen = parameter_bytes(dataclasses.replace(tensor, needs_grad=False), plan, Sizes(Mesh.of({"x": 4})))
    assert found.parameter == frozen.total


def test_a_saved_value_is_counted_once_for_each_layout() -> None:
    """y is saved by two ops that see it whole and one that sees a half, through a view."""
    b = Builder({"b": 8, "k": 4}, itemsize_bytes=4)
    y = b.op("scale", "b k, k -> b k", [b.input("x", "b k"), b.parameter("s", "k")], saves=[])
    view = b.op("view", "b k -> k b", [y], view=True)
    names = [b.op("square", "b k -> b k", [y]), b.op("cube", "b k -> b k", [y])]
    names.append(b.op("sine", "k b -> k b", [view]))
    graph = b.graph()
    ops = {op.name: ("-",) for op in graph.ops} | {names[2]: ("b",)}
    plan = Plan(Mesh.of({"x": 2}), "", "auto", 1, {"s": ParameterPlan((R,), (R,))}, {"x": (R,)}, ops)
    # whole: 8 * 4 * 4 = 128, once for three names of the same memory; half: 64
    assert price(graph, plan, MACHINE).saved_bytes == 128 + 64


# Whole plans


def ddp(micro_batches: int, stage: str) -> Plan:
    graph = mlp()
    parameter = {
        "ddp": ParameterPlan((R,), (V,)),
        "zero1": ParameterPlan((S(0),), (V,)),
        "zero2": ParameterPlan((S(0),), (V,), "micro_batch"),
        "zero3": ParameterPlan((S(0),), (S(0),)),
    }[stage]
    ops = {op.name: ("b",) for op in graph.ops}
    return Plan(
        Mesh.of({"x": 4}), "", stage, micro_batches, dict.fromkeys(graph.parameters, parameter), {"x": (S(0),)}, ops
    )


def test_data_parallelism_by_hand() -> None:
    """Two matrices of 16 * 32 float32 = 2048 bytes, all-reduced: 6 hops, 3/2 of the bytes.

    They share a bucket of 25 MiB, and bear 2048 bytes' part of its latency.
    """
    each = 2 * (3e-6 * 2048 / (25 * 2**20) + 0.75 * 2048 / 1e9)
    cost = price(mlp(), ddp(1, "ddp"), MACHINE)
    assert cost.parameter_seconds == pytest.approx(2 * each)
    assert cost.conversion_seconds == pytest.approx(2 * (3e-6 + 0.75 * 4 / 1e9))  # the loss
    assert price(mlp(), ddp(5, "ddp"), MACHINE).parameter_seconds == pytest.approx(2 * each)
    assert price(mlp(), ddp(5, "zero1"), MACHINE).parameter_seconds == pytest.approx(2 * each)


def test_zero_2_and_3_by_hand() -> None:
    """With m micro-batches ZeRO-2 scatters m times; ZeRO-3 gathers 2m times and scatters m times."""
    half = 3e-6 + 0.75 * 2048 / 1e9  # an all-gather or a reduce-scatter of one matrix
    in_bucket = 3e-6 * 2048 / (25 * 2**20) + 0.75 * 2048 / 1e9
    for m in (1, 5):
        assert price(mlp(), ddp(m, "zero2"), MACHINE).parameter_seconds == pytest.approx(2 * (1 + m) * in_bucket)
        assert price(mlp(), ddp(m, "zero3"), MACHINE).parameter_seconds == pytest.approx(2 * 3 * m * half)


def test_ops_and_conversions_run_once_for_each_micro_batch() -> None:
    one, five = (price(mlp(), ddp(m, "ddp"), MACHINE) for m in (1, 5))
    assert five.compute_seconds == pytest.approx(5 * one.compute_seconds)
    assert five.conversion_seconds == pytest.approx(5 * one.conversion_seconds)


def test_an_op_without_labels_is_an_error() -> None:
    plan = ddp(1, "ddp")
    with pytest.raises(KeyError):
        price(mlp(layers=2), plan, MACHINE)


@pytest.mark.parametrize(("loss", "is_transient"), [("cross_entropy", True), ("nll_loss", False)])
def test_operands_of_a_cross_entropy_take_memory_while_it_runs(loss: str, is_transient: bool) -> None:
    """It keeps log-probabilities in place of the logits; nll_loss keeps its operands."""

    class Loss(nn.Module):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return getattr(nn.functional, loss)(x, target)

    prepared = prepare_forward(Loss(), (torch.randn(4, 3), torch.tensor([0, 1, 2, 0])))
    assert [op.transient for op in prepared.analysis.graph.ops] == [is_transient]

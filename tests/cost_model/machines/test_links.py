"""The links that axes of a mesh cross, by hand and by law."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import sympy

from autopar.cost_model import H100, HARDWARE, Hardware, Link, axis_link, collective_seconds
from autopar.cost_model.machines.links import ranks_in_node
from autopar.ir import Mesh

PLAIN = Hardware(
    name="round numbers",
    peak_flops=((2, 1e12),),
    memory_bytes_per_second=1e10,
    memory_bytes=10**9,
    launch_seconds=0.0,
    devices_per_node=8,
    inside_node=Link(1e9, 1e-6),
    across_nodes=Link(1e8, 1e-5),
)
WIRED = dataclasses.replace(PLAIN, inside_node=Link(7e9, 1e-6), wired_ranks=8)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
MACHINES = [*HARDWARE.values(), PLAIN, WIRED]
SIZES = (2, 3, 4, 6, 8, 12, 16, 32, 64, 72)
BYTES = (0, 1, 1000, 10**5, 10**6, 10**7, 10**8, 10**10)


def seconds(
    name: str, whole: float, ranks: int, link: Link, hardware: Hardware = PLAIN, bucketed: bool = False
) -> float:
    before = whole / ranks if name == "all_gather" else whole
    after = whole / ranks if name == "reduce_scatter" else whole
    return collective_seconds(
        name, before_bytes=before, after_bytes=after, ranks=ranks, link=link, hardware=hardware, bucketed=bucketed
    )


# By hand


def test_the_last_axes_lie_inside_a_node() -> None:
    mesh = Mesh.of({"dp": 4, "tp": 8})
    assert PLAIN.link(mesh, 1) == PLAIN.inside_node
    assert PLAIN.link(mesh, 0).bandwidth_bytes_per_second == 1e8


@pytest.mark.parametrize(
    ("stride", "size", "here"),
    [
        (1, 16, 8),  # two whole nodes
        (8, 4, 1),  # the same place of four nodes
        (4, 4, 2),  # two of each node
        (2, 8, 4),
        (1, 12, 4),  # 8 in one node, 4 in the next
        (3, 6, 1),  # 0 3 6 | 9 12 15, and 2 5 | 8 11 14 | 17, which has one alone
        (16, 4, 1),
        (5, 8, 1),
    ],
)
def test_ranks_of_a_group_in_the_node_that_has_fewest(stride: int, size: int, here: int) -> None:
    assert ranks_in_node(PLAIN, stride, size) == here
    assert axis_link(PLAIN, stride, size).bandwidth_bytes_per_second == pytest.approx(1e8 * here)


def test_the_fewest_are_never_more_than_counting_finds() -> None:
    """Blocks of stride * size ranks, laid side by side over many nodes of 8."""
    for stride, size in itertools.product(range(1, 17), range(2, 20)):
        if 8 % (stride * size) == 0:
            continue
        counted = min(
            sum(1 for rank in group if rank // 8 == node)
            for block in range(8)
            for group in ([(block * size + i) * stride + offset for i in range(size)] for offset in range(stride))
            for node in {rank // 8 for rank in group}
        )
        assert 1 <= ranks_in_node(PLAIN, stride, size) <= counted, (stride, size)


def test_a_step_of_the_ring_waits_for_its_slowest_hop() -> None:
    assert PLAIN.link(Mesh.of({"dp": 16}), 0).latency_seconds == 1e-5


def test_all_to_all_leaves_the_node_over_the_own_nic() -> None:
    """16 ranks in 2 nodes: 8 of 15 messages cross, at 0.1 GB/s; 15 GB in all take 80 s."""
    link = axis_link(PLAIN, 1, 16)
    assert seconds("all_to_all", 16e9, 16, link) == pytest.approx(15 * 1e-5 + 80)


def test_two_nodes_exchange_their_sums() -> None:
    """16 ranks in 2 nodes: each of 8 NICs sends its eighth of 1 GB once, at 0.1 GB/s."""
    link = axis_link(PLAIN, 1, 16)
    assert seconds("all_reduce", 1e9, 16, link) == pytest.approx(30e-5 + 2 * 15 / 16 / 1.0)
    slower = dataclasses.replace(PLAIN, inside_node=Link(1e10, 1e-6))
    link = axis_link(slower, 1, 16)
    assert seconds("all_reduce", 1e9, 16, link) == pytest.approx(30e-5 + 1e9 / 8e8)
    four = axis_link(slower, 1, 32)
    assert seconds("all_reduce", 1e9, 32, four) == pytest.approx(62e-5 + 2 * 31 / 32 * 1e9 / 8e8)


def test_wires_between_pairs() -> None:
    """7 wires of 1 GB/s: 2 ranks use one, 4 use three, 8 all of them; a switch gives them all."""
    found = [axis_link(WIRED, 1, n).bandwidth_bytes_per_second for n in (2, 4, 8)]
    assert found == pytest.approx([1e9, 3e9, 7e9])
    assert [axis_link(PLAIN, 1, n).bandwidth_bytes_per_second for n in (2, 4, 8)] == [1e9] * 3
    part = dataclasses.replace(WIRED, devices_per_node=4)  # h100x4 of a node of 8
    assert axis_link(part, 1, 4).bandwidth_bytes_per_second == pytest.approx(3e9)


def test_a_switch_adds_up_for_large_groups_only() -> None:
    assert [axis_link(H100, 1, n).reduce_gain for n in (2, 4, 8)] == [1.0, 1.0, 1.35]


def test_nvl72_is_one_node() -> None:
    gb200 = HARDWARE["gb200"]
    assert gb200.link(Mesh.of({"dp": 8, "tp": 8}), 0).latency_seconds < 1e-6
    assert gb200.link(Mesh.of({"dp": 18, "tp": 8}), 0).latency_seconds > 1e-6


def test_a_group_that_fits_but_does_not_divide_the_node() -> None:
    """6 ranks alone lie in a node of 8; of 2 groups of 6, the second lies across: 2 and 4."""
    assert PLAIN.link(Mesh.of({"x": 6}), 0) == PLAIN.inside_node
    assert PLAIN.link(Mesh.of({"y": 2, "x": 6}), 1).bandwidth_bytes_per_second == pytest.approx(2e8)


def test_a_long_message_fills_the_pipeline_a_short_one_pays_twice() -> None:
    """1 GB/s and 2 ms to fill: 1 MB takes 0.5 + 0.5 ms, 100 MB takes 50 + 2."""
    link = Link(1e9, 0.0, fill_seconds=2e-3)
    assert seconds("all_gather", 1e6, 2, link) == pytest.approx(1e-3)
    assert seconds("all_gather", 1e8, 2, link) == pytest.approx(52e-3)


def test_sending_to_one_other() -> None:
    link = Link(1e9, 1e-6, start_seconds=2e-6, send_gain=0.5)
    assert seconds("send", 1e9, 2, link) == pytest.approx(3e-6 + 2.0)


def test_published_measurements() -> None:
    """nccl-tests on 8 H100: all-reduce of 1 KB in 17 us and of 1 GB in 4.03 ms, all-gather in 2.72."""
    link = axis_link(H100, 1, 8)
    assert seconds("all_reduce", 1024, 8, link, H100) == pytest.approx(16.9e-6, rel=0.2)
    assert seconds("all_reduce", 2**30, 8, link, H100) == pytest.approx(4.03e-3, rel=0.05)
    assert seconds("all_gather", 2**30, 8, link, H100) == pytest.approx(2.72e-3, rel=0.05)


# Laws


@pytest.mark.parametrize("hardware", MACHINES, ids=lambda h: h.name)
def test_crossing_nodes_never_costs_less(hardware: Hardware) -> None:
    roomy = dataclasses.replace(hardware, devices_per_node=1024)
    for stride, size, name in itertools.product((1, 2, 3, 8, 16, 72), SIZES, COLLECTIVES):
        inside, crossing = axis_link(roomy, 1, size, 1024), axis_link(hardware, stride, size)
        for whole in BYTES:
            assert seconds(name, whole, size, crossing, hardware) >= 0.999999 * seconds(
                name, whole, size, inside, hardware
            ), (stride, size, name, whole)


@pytest.mark.parametrize("hardware", MACHINES, ids=lambda h: h.name)
@pytest.mark.parametrize("bucketed", [False, True])
def test_prices_are_positive_and_never_fall_with_bytes(hardware: Hardware, bucketed: bool) -> None:
    for stride, size, name in itertools.product((1, 2, 3, 8), SIZES, COLLECTIVES):
        link = axis_link(hardware, stride, size)
        costs = [seconds(name, b, size, link, hardware, bucketed) for b in BYTES]
        assert costs == sorted(costs) and costs[1] > 0


@pytest.mark.parametrize("hardware", MACHINES, ids=lambda h: h.name)
@pytest.mark.parametrize("bucketed", [False, True])
def test_an_all_reduce_lies_between_one_half_and_both(hardware: Hardware, bucketed: bool) -> None:
    for stride, size, whole in itertools.product((1, 2, 3, 8), SIZES, BYTES):
        link = axis_link(hardware, stride, size)
        scatter, gather, both = (
            seconds(name, whole, size, link, hardware, bucketed)
            for name in ("reduce_scatter", "all_gather", "all_reduce")
        )
        assert scatter * 0.999999 <= both <= (scatter + gather) * 1.000001, (stride, size, whole)


def test_names_of_axes_do_not_matter() -> None:
    for sizes in itertools.product((1, 2, 4, 8), repeat=3):
        one = Mesh(tuple(zip("abc", sizes, strict=True)))
        other = Mesh(tuple(zip(("pp", "zz", "tp"), sizes, strict=True)))
        assert [H100.link(one, i) for i in range(3)] == [H100.link(other, i) for i in range(3)]


def test_an_unknown_collective_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no formula for the collective 'multicast'"):
        seconds("multicast", 1, 2, PLAIN.inside_node)


# Arrays and symbols


@pytest.mark.parametrize("hardware", [H100, HARDWARE["mi300x"], HARDWARE["gb200"]])
def test_arrays_of_sizes_give_the_links_of_every_one(hardware: Hardware) -> None:
    pairs = [(s, n) for s, n in itertools.product((1, 2, 3, 4, 8, 16), (1, *SIZES))]
    strides, sizes = (np.array(column) for column in zip(*pairs, strict=True))
    links = axis_link(hardware, strides, sizes, strides * sizes)
    for i, (stride, size) in enumerate(pairs):
        single = axis_link(hardware, stride, size, stride * size)
        for name, value in vars(single).items():
            assert np.broadcast_to(getattr(links, name), len(pairs))[i] == pytest.approx(value)


def test_arrays_of_ranks_are_priced_at_once() -> None:
    sizes = np.array([1, 2, 8, 16])
    links = axis_link(H100, 1, sizes, sizes)
    found = collective_seconds("all_reduce", before_bytes=1e8, after_bytes=1e8, ranks=sizes, link=links, hardware=H100)
    single = [seconds("all_reduce", 1e8, n, axis_link(H100, 1, n, n), H100) for n in sizes.tolist()]
    assert found == pytest.approx(single)
    assert found[0] == 0.0


@pytest.mark.parametrize("name", COLLECTIVES)
def test_symbols_give_the_same_prices(name: str) -> None:
    symbols = {f.name: sympy.Symbol(f.name, positive=True) for f in dataclasses.fields(Link)}
    ranks, whole = sympy.symbols("ranks whole", positive=True)
    before = whole / ranks if name == "all_gather" else whole
    after = whole / ranks if name == "reduce_scatter" else whole
    formula = collective_seconds(
        name, before_bytes=before, after_bytes=after, ranks=ranks, link=Link(**symbols), hardware=H100
    )
    for stride, size, count in itertools.product((1, 8), (2, 8, 16), (10**4, 10**8)):
        link = axis_link(H100, stride, size)
        values = {symbols[k]: v for k, v in vars(link).items()} | {ranks: size, whole: count}
        expected = seconds(name, count, size, link, H100)
        assert float(formula.subs(values)) == pytest.approx(expected)
    if name != "send":
        one = {symbols[k]: v for k, v in vars(H100.inside_node).items()} | {ranks: 1, whole: 10**8}
        assert formula.subs(one) == 0

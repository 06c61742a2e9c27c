"""Prices of parameters that one rank owns, by hand."""

from __future__ import annotations

import math

import pytest

from autopar.cost_model.collectives import collective_seconds
from autopar.cost_model.owners import busiest_owner, owned_share
from autopar.cost_model.sizes import Sizes
from autopar.cost_model.traffic import sends, traffic_bytes
from autopar.ir import ANY, Mesh, O, R, S
from autopar.ir.conversion import TRANSITIONS
from autopar.search.candidates.outer import search_plan
from autopar.search.request.request import Request
from tests.search.stacked import Sizes as Widths
from tests.search.stacked import residual
from tests.search.toy import TOY

BYTES, RANKS = 1e9, 4


def seconds(name: str) -> float:
    link = TOY.link(Mesh.of({"x": RANKS}), 0)
    return collective_seconds(name, before_bytes=BYTES, after_bytes=BYTES, ranks=RANKS, link=link, hardware=TOY)


def test_every_conversion_has_a_price_and_a_volume() -> None:
    for pair in TRANSITIONS.values():
        for name in pair:
            assert seconds(name) >= 0.0
            assert (traffic_bytes(name, before_bytes=1, after_bytes=1, ranks=4) > 0) == sends(name)


def test_a_long_broadcast_takes_its_bytes_at_the_bandwidth_of_a_link() -> None:
    """As a pipeline along the ring (Chan et al. 2007); a scatter sends all but the owner's own part."""
    link = TOY.link(Mesh.of({"x": RANKS}), 0)
    whole = BYTES / link.bandwidth_bytes_per_second
    assert seconds("broadcast") == seconds("reduce") == pytest.approx(whole, rel=1e-2)
    assert seconds("scatter") == seconds("gather") == seconds("all_gather")
    assert seconds("scatter") == pytest.approx(0.75 * whole, rel=1e-2)
    assert seconds("keep") == 0.0 < seconds("fill")


def test_a_broadcast_and_a_reduce_send_what_an_all_reduce_does() -> None:
    """DataParallel's volume is that of DDP: (n - 1) / n P there and back, on average over the ranks."""
    sent = {
        name: traffic_bytes(name, before_bytes=BYTES, after_bytes=BYTES, ranks=RANKS)
        for name in ("broadcast", "reduce", "all_reduce")
    }
    assert sent["broadcast"] == sent["reduce"] == 0.75 * BYTES
    assert sent["broadcast"] + sent["reduce"] == sent["all_reduce"]


def test_messages_to_or_from_one_rank_count_as_their_mean() -> None:
    """Of four ranks one sends a whole tensor, or the owner three fourths of it, or three ranks a fourth each."""
    whole, part = BYTES, BYTES / RANKS
    for name, before, after, senders in (
        ("send", whole, whole, 1),
        ("scatter", whole, part, 3),
        ("gather", part, whole, 3),
    ):
        sent = traffic_bytes(name, before_bytes=before, after_bytes=after, ranks=RANKS)
        assert RANKS * sent == senders * min(before, after)


def test_shares() -> None:
    sizes = Sizes(Mesh.of({"x": 2, "y": 4}))
    assert owned_share((O(1), R), (1, 0), sizes) == 1
    assert owned_share((O(1), R), (0, 0), sizes) == 0
    assert owned_share((R, O(ANY)), (0, 0), sizes) == 0.25
    assert owned_share((O(0), O(3)), (0, 3), sizes) == 1 > owned_share((O(0), O(3)), (0, 2), sizes)
    assert owned_share((R, S(0)), (1, 1), sizes) == 1


GRAPH = residual(4, Widths(batch=8, width=64, hidden=128, vocab=64))


def planned(recipe: str, ranks: int = 4):
    return search_plan(GRAPH, Request(TOY, mesh={"dp": ranks}, recipe=recipe)).best


def test_the_memory_of_a_plan_is_that_of_its_fullest_rank() -> None:
    """One owner of all holds what ddp holds; spread over 4, less by what the others own."""
    whole, one, spread = (planned(recipe).price.peak_bytes for recipe in ("ddp", "data-parallel", "parameter-server"))
    assert one == whole
    parameters = GRAPH.parameters.values()
    stored = sum(GRAPH.tensors[each].itemsize_bytes * _elements(each) for each in parameters)
    assert whole - spread == pytest.approx(2 * stored * 3 / 4, rel=0.05)  # two moments of AdamW


def _elements(tensor: str) -> int:
    return math.prod(GRAPH.tensors[tensor].shape)


def test_the_busiest_owner_is_found() -> None:
    plan = planned("parameter-server").plan
    position = busiest_owner(GRAPH, plan.parameters, plan.mesh)
    owned = [0.0] * 4
    for name, how in plan.parameters.items():
        tensor = GRAPH.parameters[name]
        owned[how.storage[0].owner] += _elements(tensor)
    assert owned[position[0]] == max(owned) and min(owned) > 0


def test_auto_has_no_owners() -> None:
    plan = planned("auto").plan
    assert all(state.kind != "O" for how in plan.parameters.values() for state in how.storage)

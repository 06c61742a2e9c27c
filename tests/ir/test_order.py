"""The order of an asynchronous server as data: its text, what no run has, and how far replicas were ahead."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.ir.order import Order, ServerEvent

TEXT = "0+1 1+4 0= 1= 0+1 2! meet"


def test_an_order_is_text_and_back() -> None:
    order = Order.parse(3, TEXT)
    assert str(order) == TEXT and Order.parse(3, str(order)) == order
    assert order.events[1] == ServerEvent("push", 1, 4) and order.events[5] == ServerEvent("end", 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0+1 0-", "Cannot read '0-' in an order"),
        ("0+0", "Cannot read '0+0'"),
        ("0+1 3=", r"Word 2 of the order, '3=', does not belong to any of the 3 replicas"),
        ("0+1 0+1", "a replica must push and pull alternately"),
        ("0=", "a replica must push and pull alternately"),
        ("1! 1+1", "belongs to a replica that had ended before"),
    ],
)
def test_orders_that_no_run_has(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says.replace("+", r"\+")):
        Order.parse(3, text)


@pytest.mark.parametrize(
    ("text", "staleness"),
    [
        ("0+1 1+1 0= 1= 0+1 1+1 meet", 0),
        ("0+1 0= 0+1 0= 1+1 1= 0+1 meet", 2),
        ("0+1 0= 0+1 0= 0+1 meet", 0),  # replica 1 never pushes: nothing is missed
        ("1+1 0+1 1= 0= 1! 0+1 0= 0+1 meet", 0),
    ],
)
def test_how_far_a_replica_was_ahead(text: str, staleness: int) -> None:
    assert Order.parse(2, text).staleness == staleness

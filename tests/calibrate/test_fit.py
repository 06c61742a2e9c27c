"""Fits of curves made with known constants give these constants back."""

from dataclasses import replace

import pytest

from autopar.calibrate.fit import ProductFit, fit_link, fit_peak, fit_products, fit_two, message_seconds, minimise
from autopar.calibrate.measure import COLLECTIVES, Message, Product
from tests.calibrate.curves import LAUNCH_SECONDS, LINK, MEMORY_BYTES_PER_SECOND, messages, products

KNOWN = {"launch_seconds": LAUNCH_SECONDS, "memory_bytes_per_second": MEMORY_BYTES_PER_SECOND}


def test_a_message_costs_what_the_formula_says():
    # 4 ranks: 3 of 4 parts sent in 3 hops; an all-reduce does that twice; a send is one hop
    size = 2**20
    ring = 3 * 3e-6 + 3 / 4 * size / 25e9
    expected = {
        "all_gather": LAUNCH_SECONDS + ring,
        "reduce_scatter": LAUNCH_SECONDS + ring,
        "all_reduce": 2 * (LAUNCH_SECONDS + ring),
        "all_to_all": LAUNCH_SECONDS + 3 * 3e-6 + 3 / 4 * size / (0.5 * 25e9),
        "send": LAUNCH_SECONDS + 3e-6 + size / (0.25 * 25e9),
    }
    for name, seconds in expected.items():
        message = Message("inside_node", name, 4, size, 0.0)
        assert message_seconds(message, LINK, LAUNCH_SECONDS) == pytest.approx(seconds), name


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_link_is_recovered(ranks):
    fit = fit_link(messages(ranks), LAUNCH_SECONDS)
    assert fit.link.bandwidth_bytes_per_second == pytest.approx(25e9, rel=1e-6)
    assert fit.link.latency_seconds == pytest.approx(3e-6, rel=1e-6)
    assert fit.link.exchange_gain == pytest.approx(0.5, rel=1e-6)
    assert fit.link.send_gain == pytest.approx(0.25, rel=1e-6)
    assert set(fit.errors) == set(COLLECTIVES) and max(fit.errors.values()) < 1e-6


def test_a_point_that_was_disturbed_hardly_counts():
    disturbed = [replace(m, seconds=30 * m.seconds) if i == 7 else m for i, m in enumerate(messages(4))]
    link = fit_link(disturbed, LAUNCH_SECONDS).link
    assert link.bandwidth_bytes_per_second == pytest.approx(25e9, rel=0.05)
    assert link.latency_seconds == pytest.approx(3e-6, rel=0.05)


def test_a_link_is_positive_whatever_was_measured():
    same = [replace(m, seconds=1e-3) for m in messages(2)]
    falling = [replace(m, seconds=1 / m.bytes) for m in messages(2)]
    for measured in (same, falling):
        link = fit_link(measured, LAUNCH_SECONDS).link
        assert 0 < link.bandwidth_bytes_per_second < float("inf")
        assert link.latency_seconds >= 0


def test_two_constants_of_three_points():
    # 2 u + 3 v
    assert fit_two([1, 2, 0], [0, 1, 5], [2, 7, 15]) == pytest.approx((2, 3))
    # the best line falls, so the constant alone is left: the minimum of (a - 1)^2 + (a / 0.5 - 1)^2
    # is at a = (1 + 2) / (1 + 4) = 0.6
    assert fit_two([1, 1], [1, 2], [1, 0.5]) == pytest.approx((0.6, 0))


@pytest.mark.parametrize("half", [0.0, 20.0, 200.0])
def test_the_shape_curve_is_recovered(half):
    truth = ProductFit(8e14, 1.0, half, 0.0)
    measured = products(truth)
    fit = fit_products(measured, **KNOWN)
    assert fit.peak_flops * fit.efficiency == pytest.approx(8e14, rel=1e-6)
    assert fit.half_size == pytest.approx(half, rel=1e-6, abs=1e-6)
    assert fit.error < 1e-6


def test_the_efficiency_is_a_fraction_of_the_fastest_product():
    # nine products at 8e14 and an equal one at 1e15: the r of least squares of rate / r - 1 is
    # (9 * 0.64 + 1) / (9 * 0.8 + 1) = 6.76 / 8.2 of 1e15
    slow, fast = (Product("bfloat16", 4096, 4096, 4096, 2 * 4096**3 / r) for r in (8e14, 1e15))
    fit = fit_products([slow] * 9 + [fast], launch_seconds=0, memory_bytes_per_second=1e14)
    assert fit.peak_flops == pytest.approx(1e15)
    assert fit.efficiency == pytest.approx(6.76 / 8.2, rel=1e-6)
    assert fit.half_size < 1e-3  # one shape says nothing about shapes


def test_another_format_gets_a_peak_of_its_own():
    truth = ProductFit(1e15, 0.8, 50.0, 0.0)
    measured = products(replace(truth, peak_flops=6e13))
    assert fit_peak(measured, truth, launch_seconds=LAUNCH_SECONDS) == pytest.approx(6e13)


def test_the_peak_is_that_of_large_products():
    # a format whose small products are the faster ones, as float16 on processors without it
    fast, slow = Product("float16", 64, 64, 64, 1e-5), Product("float16", 512, 512, 512, 0.1)
    assert fast.flops / fast.seconds > slow.flops / slow.seconds
    peak = fit_peak([fast, slow], ProductFit(1e11, 1.0, 0.0, 0.0), launch_seconds=0)
    assert peak == pytest.approx(slow.flops / slow.seconds)


def test_a_minimum_is_found():
    assert minimise(lambda x: (x - 123.0) ** 2) == pytest.approx(123, rel=1e-6)
    assert minimise(lambda x: x) == 0.0

"""Fits of curves made with known constants give these constants back."""

from dataclasses import replace

import pytest

from autopar.calibrate.fit import (
    ProductFit,
    fit_link,
    fit_products,
    fit_two,
    message_seconds,
    minimise,
    peak_flops,
    product_seconds,
)
from autopar.calibrate.measure import COLLECTIVES, Message, Product
from autopar.cost_model import Link

LINK = Link(25e9, 3e-6, exchange_gain=0.5, send_gain=0.25)
LAUNCH = 4e-6
BANDWIDTH = 3e12
SHAPES = [(n, n, n) for n in (128, 256, 512, 1024, 2048, 4096)]
THIN = [(64, 4096, 4096), (4096, 64, 4096), (4096, 4096, 64)]


def messages(ranks, link=LINK, launch=LAUNCH):
    blank = [
        Message("inside_node", name, ranks, size * ranks, 0.0)
        for name in COLLECTIVES
        for size in (2**10, 2**14, 2**18, 2**22, 2**26)
    ]
    return [replace(m, seconds=message_seconds(m, link, launch)) for m in blank]


def products(fit, shapes, launch=LAUNCH):
    blank = [Product("bfloat16", *shape, 0.0) for shape in shapes]
    known = {"launch_seconds": launch, "memory_bytes_per_second": BANDWIDTH}
    return [replace(p, seconds=product_seconds(p, fit, **known)) for p in blank]


def test_a_message_costs_what_the_formula_says():
    # 4 ranks: 3 of 4 parts sent in 3 hops; an all-reduce does that twice; a send is one hop
    size = 2**20
    ring = 3 * 3e-6 + 3 / 4 * size / 25e9
    expected = {
        "all_gather": LAUNCH + ring,
        "reduce_scatter": LAUNCH + ring,
        "all_reduce": 2 * (LAUNCH + ring),
        "all_to_all": LAUNCH + 3 * 3e-6 + 3 / 4 * size / (0.5 * 25e9),
        "send": LAUNCH + 3e-6 + size / (0.25 * 25e9),
    }
    for name, seconds in expected.items():
        message = Message("inside_node", name, 4, size, 0.0)
        assert message_seconds(message, LINK, LAUNCH) == pytest.approx(seconds), name


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_link_is_recovered(ranks):
    fit = fit_link(messages(ranks), LAUNCH)
    assert fit.link.bandwidth_bytes_per_second == pytest.approx(25e9, rel=1e-6)
    assert fit.link.latency_seconds == pytest.approx(3e-6, rel=1e-6)
    assert fit.link.exchange_gain == pytest.approx(0.5, rel=1e-6)
    assert fit.link.send_gain == pytest.approx(0.25, rel=1e-6)
    assert set(fit.errors) == set(COLLECTIVES) and max(fit.errors.values()) < 1e-6


def test_a_point_that_was_disturbed_hardly_counts():
    disturbed = [replace(m, seconds=30 * m.seconds) if i == 7 else m for i, m in
                 enumerate(messages(4))]  # fmt: skip
    link = fit_link(disturbed, LAUNCH).link
    assert link.bandwidth_bytes_per_second == pytest.approx(25e9, rel=0.05)
    assert link.latency_seconds == pytest.approx(3e-6, rel=0.05)


def test_a_link_is_positive_whatever_was_measured():
    same = [replace(m, seconds=1e-3) for m in messages(2)]
    falling = [replace(m, seconds=1 / m.bytes) for m in messages(2)]
    for measured in (same, falling):
        link = fit_link(measured, LAUNCH).link
        assert 0 < link.bandwidth_bytes_per_second < float("inf")
        assert link.latency_seconds >= 0


def test_two_constants_of_three_points():
    # 2 u + 3 v
    assert fit_two([1, 2, 0], [0, 1, 5], [2, 7, 15]) == pytest.approx((2, 3))
    # the best line falls, so the constant alone is left: the minimum of (a - 1)^2 + (a / 0.5 - 1)^2
    # is at a = (1 + 2) / (1 + 4) = 0.6
    assert fit_two([1, 1], [1, 2], [1, 0.5]) == pytest.approx((0.6, 0))


@pytest.mark.parametrize("half", [0.0, 20.0, 200.0])
@pytest.mark.parametrize("efficiency", [0.6, 0.9])
def test_the_shape_curve_is_recovered(efficiency, half):
    truth = ProductFit(1e15, efficiency, half, 0.0)
    measured = products(truth, [*SHAPES, *THIN, (16384, 16384, 16384)])
    fit = fit_products(measured, launch_seconds=LAUNCH, memory_bytes_per_second=BANDWIDTH)
    best = max(p.flops / p.seconds for p in measured)
    assert fit.peak_flops == pytest.approx(best)
    assert fit.half_size == pytest.approx(half, rel=0.06, abs=2)
    predicted = [
        product_seconds(p, fit, launch_seconds=LAUNCH, memory_bytes_per_second=BANDWIDTH)
        for p in measured
    ]
    assert [p.seconds for p in measured] == pytest.approx(predicted, rel=0.08)


def test_the_shape_curve_is_exact_where_the_peak_is_reached():
    # efficiency 0.8 of a peak that one product without loss reaches
    truth = ProductFit(1e14, 0.8, 50.0, 0.0)
    measured = products(truth, SHAPES)
    largest = Product("bfloat16", 4096, 4096, 4096, 2 * 4096**3 / 1e14)
    assert peak_flops([*measured, largest]) == pytest.approx(1e14)
    scaled = [replace(p, m=p.m, seconds=p.seconds) for p in measured]
    fit = fit_products(scaled, launch_seconds=LAUNCH, memory_bytes_per_second=BANDWIDTH)
    assert fit.error < 0.02


def test_the_peak_is_that_of_large_products():
    # a format whose small products are the faster ones, as float16 on processors without it
    fast, slow = Product("float16", 64, 64, 64, 1e-5), Product("float16", 512, 512, 512, 0.1)
    assert fast.flops / fast.seconds > slow.flops / slow.seconds
    assert peak_flops([fast, slow]) == slow.flops / slow.seconds


def test_a_minimum_is_found():
    assert minimise(lambda x: (x - 123.0) ** 2) == pytest.approx(123, rel=1e-6)
    assert minimise(lambda x: x) == 0.0

import math

import pytest

from autopar import units
from autopar.errors import AutoparError


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 bytes"),
        (512.4, "512 bytes"),
        (999, "999 bytes"),
        (999.7, "1.00 kB"),
        (1_500_000, "1.50 MB"),
        (80e9, "80.0 GB"),
        (999.4e9, "999 GB"),
        (999.6e9, "1.00 TB"),
        (-2.5e9, "-2.50 GB"),
        (3.2e21, "3200 EB"),
        (math.inf, "inf B"),
    ],
)
def test_bytes(size, text):
    assert units.format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "size"), [("70GB", 70 * 10**9), (" 1.5 tb ", 1_500 * 10**9), ("70e9", 70 * 10**9), ("640 MB", 640 * 10**6)]
)
def test_sizes_are_read(text, size):
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "70", "-7GB", "70 GiB", "1.2.3GB", "1e999GB", "inf"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(AutoparError, match=f"'{text}' is not a size of a memory; write 70GB"):
        units.parse_bytes(text)


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (512, "512"), (21_400, "21.4 k"), (124_439_808, "124 M")])
def test_counts(count, text):
    assert units.format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (7.137, "7.14 s"),
        (0.0123, "12.3 ms"),
        (0.99951, "1.00 s"),
        (0.0009996, "1.00 ms"),
        (4.2e-6, "4.20 µs"),
        (3e-10, "0.300 ns"),
        (1234.5, "1234 s"),
        (-0.02, "-20.0 ms"),
        (math.inf, "inf s"),
    ],
)
def test_seconds(seconds, text):
    assert units.format_seconds(seconds) == text


def test_rates():
    assert units.format_flops(989.4e12) == "989 TFLOP/s"
    assert units.format_rate(3.35e12) == "3.35 TB/s"


def test_shares_never_hide_what_is_there():
    assert units.format_share(1, 8) == "12.5 %"
    assert units.format_share(1, 1e6) == "<0.1 %"
    assert units.format_share(0, 5) == "0.0 %"
    assert units.format_share(3, 0) == "0.0 %"


def test_changes_have_a_sign():
    assert units.format_change(0.0063) == "+0.630 %"
    assert units.format_change(-0.0082) == "-0.820 %"
    assert units.format_change(1e-9) == "0 %"

import pytest

from autopar.views import palette


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.1."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", [*palette.PALETTE, palette.REST], ids=lambda c: c.fill)
def test_text_on_a_colour_can_be_read(colour):
    assert contrast(colour.fill, colour.ink) >= 4.5


@pytest.mark.parametrize("colour", [*palette.PALETTE, palette.REST], ids=lambda c: c.fill)
def test_a_colour_stands_out_from_light_and_dark_pages(colour):
    assert contrast(colour.fill, "#ffffff") >= 2.0
    assert contrast(colour.fill, "#181c23") >= 2.0


def test_patterns_differ_where_there_is_no_colour():
    every = (*palette.PALETTE, palette.REST)
    assert len({c.glyph for c in every}) == len({c.ascii_glyph for c in every}) == len(every)
    assert all(c.ascii_glyph.isascii() for c in every)


def test_parts_that_name_an_axis_look_like_it():
    axes = palette.of_axes(["dp", "tp"])
    found = palette.with_axes(["compute", "along tp", "communication over dp", "bubble"], axes)
    assert found["compute"] == axes["compute"]
    assert found["along tp"] == axes["tp"] and found["communication over dp"] == axes["dp"]
    assert len(set(found.values())) == 4


def test_the_ninth_and_later_share_a_colour():
    found = palette.in_order(f"kind {i}" for i in range(12))
    assert [found[f"kind {i}"] for i in (8, 11)] == [palette.REST] * 2

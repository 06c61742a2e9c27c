"""The pictures of the site: drawn again they are the same bytes, they fit their cards, and their pages show them."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autopar.views.svg import text_width
from benchmarks.site import steps, tensors
from benchmarks.site.drawing import WIDTH
from benchmarks.site.pictures import FOLDER, PICTURES

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
LETTERS = {"small": 12.0, "strong": 13.0}  # sizes, in the units of a picture


@pytest.mark.parametrize("page", PICTURES)
def test_a_picture_drawn_again_is_the_same(page: str) -> None:
    assert PICTURES[page]() == (FOLDER / f"{page}.svg").read_text(encoding="utf-8")


def test_no_picture_is_left_over() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(PICTURES)


@pytest.mark.parametrize("page", PICTURES)
def test_its_page_shows_it_and_says_what_it_shows(page: str) -> None:
    shown = re.findall(rf"!\[(.+)\]\(pictures/{page}\.svg\)", (DOCS / f"{page}.md").read_text())
    title = ElementTree.parse(FOLDER / f"{page}.svg").findtext(f"{SVG}title")
    assert shown == [title]


def _ends(letters: ElementTree.Element) -> tuple[float, float]:
    """Where a line of text begins and ends, from left to right."""
    size = LETTERS.get(letters.get("class", ""), 13.0)
    width, x = text_width(letters.text or "", size), float(letters.get("x", "nan"))
    before = {"middle": width / 2, "end": width}.get(letters.get("text-anchor", "start"), 0.0)
    return x - before, x - before + width


@pytest.mark.parametrize("page", PICTURES)
def test_texts_lie_on_the_card(page: str) -> None:
    texts = [*ElementTree.parse(FOLDER / f"{page}.svg").iter(f"{SVG}text")]
    outside = [t.text for t in texts if _ends(t)[0] < 0 or _ends(t)[1] > WIDTH]
    assert texts and not outside


def test_the_cut_that_is_shown_is_the_best_of_all() -> None:
    # Embedding 1, nine layers of 3, head 8: 36 seconds over three stages, so none can stay below 12. Layers of 3
    # and a head of 8 allow no sum of 12 at the end (8, 11, 14) nor at the start (10, 13), hence 13, 12 and 11.
    assert [sum(part) for part in steps._parts(steps.balanced(3))] == [13, 12, 11]
    every = itertools.combinations(range(1, len(steps.BLOCKS)), 2)
    assert min(steps._slowest(cuts) for cuts in every) == 13


@pytest.mark.parametrize(
    ("recomputed", "kept"),
    [((), "xnhg"), (("gelu",), "xnh"), (("norm", "gelu"), "xh"), (steps.CHAIN, "x")],
)
def test_what_the_chain_keeps_is_the_table_of_the_page(
    recomputed: tuple[str, ...], kept: str
) -> None:
    stays = steps.kept(frozenset(recomputed))
    shown = [name for name, stay in zip(steps.TENSORS, stays, strict=True) if stay]
    assert "".join(shown) == kept


def test_free_lines_of_the_search_are_megatrons_and_data_parallelism() -> None:
    first, relu, last = (tensors._nodes(op) for op in tensors._captured().ops[:3])
    free = {
        (a, b, c)
        for a, b, c in itertools.product(first, relu, last)
        if tensors._is_free(tensors._conversions(first[a], relu[b]))
        and tensors._is_free(tensors._conversions(relu[b], last[c]))
    }
    assert ("by rows", "by rows", "by rows") in free
    assert ("by columns", "by columns", "by the sum") in free
    assert ("by columns", "by columns", "by columns") not in free


def test_the_knee_of_the_roof_is_the_one_that_is_said() -> None:
    knee = 989.4e12 / 3.35e12
    assert math.floor(knee) == 295 and "295 FLOPs per byte" in steps.cost_model()

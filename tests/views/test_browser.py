"""The page in a real browser: nothing complains, nothing overlaps, everything can be seen.

Needs Chromium (or Chrome) on the PATH. The page runs no script; a copy of it gets one that measures it,
and the browser prints the document that results.
"""

from __future__ import annotations

import html
import itertools
import json
import re
import subprocess
from collections import defaultdict

import pytest

from autopar.views import to_html
from autopar.views.palette import PALETTE
from tests.support.browser import BROWSER, REASON, dumping
from tests.views import sample

pytestmark = pytest.mark.skipif(BROWSER is None, reason=REASON)

PROBE = """
<script>
const found = {errors: [], boxes: {}};
window.addEventListener("error", event => found.errors.push(String(event.message)));
window.addEventListener("load", () => {
  const drawings = [...document.querySelectorAll("svg")];
  const box = element => {
    const r = element.getBoundingClientRect(), style = getComputedStyle(element);
    return {
      left: r.left, right: r.right, top: r.top, bottom: r.bottom, fill: style.fill, color: style.color,
      visible: style.visibility === "visible" && style.display !== "none",
      text: element.textContent.slice(0, 80), drawing: drawings.indexOf(element.closest("svg")),
    };
  };
  const chosen = {
    segments: "rect.segment", events: "rect.event", ops: "rect.op", chips: "rect.chip", dots: "circle.dot",
    sections: "section", tiles: ".tile", math: "math", texts: "svg text", swatches: ".swatch",
    body: "body", tags: "rect.tag", drawings: ".drawing", roof: ".roof", bounds: ".bound",
  };
  for (const [name, selector] of Object.entries(chosen))
    found.boxes[name] = [...document.querySelectorAll(selector)].map(box);
  found.width = document.documentElement.scrollWidth;
  found.background = getComputedStyle(document.body).backgroundColor;
  const result = document.createElement("pre");
  result.id = "probe";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
});
</script>
"""


def measure(folder, *, width: int = 1200, dark: bool = False) -> tuple[dict, str]:
    """What the probe found in the sample page, and what the browser's console said."""
    page = folder / "page.html"
    page.write_text(to_html(sample.page()).replace("</body>", PROBE + "</body>"), encoding="utf-8")
    options = (
        f"--window-size={width},1000",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=5000",
    )
    command = dumping(folder / "profile", page.as_uri(), *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    inside = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert inside is not None, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(inside[1])), done.stderr


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    return measure(tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="module")
def found(light):
    return light[0]["boxes"]


def test_the_console_is_silent(light):
    measured, said = light
    assert measured["errors"] == []
    assert "CONSOLE" not in said


def rows(boxes: list[dict]) -> list[list[dict]]:
    """Boxes of one height on the page, left to right."""
    by_top: dict[float, list[dict]] = defaultdict(list)
    for box in boxes:
        by_top[round(box["top"], 1)].append(box)
    return [sorted(row, key=lambda box: box["left"]) for row in by_top.values()]


@pytest.mark.parametrize("kind", ["segments", "events", "tags"])
def test_bars_do_not_overlap(found, kind):
    assert len(found[kind]) > 10
    for row in rows(found[kind]):
        for a, b in itertools.pairwise(row):
            assert a["right"] <= b["left"] + 0.05, (a, b)


def test_segments_lie_end_to_end_and_are_as_long_as_what_they_stand_for(found):
    memory = sample.memory()
    bar = rows(found["segments"])[0]
    assert len(bar) == len(memory.parts)
    scale = (bar[-1]["right"] - bar[0]["left"]) / memory.value
    for box, part in zip(bar, memory.parts, strict=True):
        assert box["right"] - box["left"] == pytest.approx(part.value * scale, abs=0.1)
    bound = found["bounds"][0]["left"]
    assert bound - bar[0]["left"] == pytest.approx(80e9 * scale, abs=2)


def overlap(a: dict, b: dict) -> bool:
    return (
        a["left"] < b["right"] - 0.5
        and b["left"] < a["right"] - 0.5
        and a["top"] < b["bottom"] - 0.5
        and b["top"] < a["bottom"] - 0.5
    )


def test_boxes_of_the_block_do_not_overlap(found):
    boxes = found["ops"] + found["chips"]
    assert len(found["ops"]) == sum(node.kind not in ("input", "output") for node in sample.block())
    # Seven weights are gathered, two gathers of x are shared by q, k, v and by gate, up; two scatters.
    assert len(found["chips"]) == 7 + 2 + 2
    for a, b in itertools.combinations(boxes, 2):
        assert not overlap(a, b), (a["text"], b["text"])


def test_texts_do_not_overlap(found):
    for a, b in itertools.combinations(found["texts"], 2):
        assert a["drawing"] != b["drawing"] or not overlap(a, b), (a["text"], b["text"])


@pytest.mark.parametrize("kind", ["sections", "tiles", "math", "swatches", "ops", "chips", "dots", "texts", "roof"])
def test_everything_is_visible(found, kind):
    assert found[kind]
    for box in found[kind]:
        thick = box["bottom"] - box["top"] + box["right"] - box["left"]
        assert box["visible"] and thick > 1, box


def test_fractions_are_typeset(found):
    """A fraction is higher than a line of text, or MathML is not drawn at all."""
    assert max(box["bottom"] - box["top"] for box in found["math"]) > 40


def test_ink_on_bars_is_that_of_the_palette(found):
    inks = {tuple(int(c.ink[i : i + 2], 16) for i in (1, 3, 5)) for c in PALETTE}
    written = [t for t in found["texts"] if t["text"].startswith("1  saved activations")]
    assert len(written) == 1
    assert tuple(map(int, re.findall(r"\d+", written[0]["fill"])[:3])) in inks


@pytest.mark.parametrize("width", [520, 1200])
def test_the_page_itself_never_scrolls_sideways(tmp_path, light, width):
    measured = light[0] if width == 1200 else measure(tmp_path, width=width)[0]
    assert measured["width"] <= width


def test_dark_follows_the_reader(tmp_path, light):
    measured, said = measure(tmp_path, dark=True)
    assert measured["background"] != light[0]["background"]
    assert measured["errors"] == [] and "CONSOLE" not in said
    small = next(t for t in measured["boxes"]["texts"] if t["text"].startswith("bound"))
    assert min(map(int, re.findall(r"\d+", small["fill"])[:3])) > 120  # letters are light

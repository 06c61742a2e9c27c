"""The site as `make docs` builds it: without a warning, and in a browser nothing is wider than the screen.

Needs mkdocs (the extra `docs`), and Chromium for what a reader sees.
"""

from __future__ import annotations

import functools
import html
import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import BROWSER, REASON, dumping

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed"),
]

# Opens every page in a frame of a given width. An element counts as too wide if it ends right of the screen and nothing
# around it scrolls; a picture counts as broken if it has no size.
PROBE = """<!DOCTYPE html><body><script>
const width = WIDTH, pages = PAGES, found = {};
const scrolls = (element, view) => /auto|scroll|hidden/.test(view.getComputedStyle(element).overflowX);
async function look(page) {
  const frame = document.createElement("iframe");
  Object.assign(frame, {width, height: 900, src: page});
  const loaded = new Promise(done => frame.onload = done);
  document.body.append(frame);
  await loaded;
  await new Promise(done => setTimeout(done, 300));
  const root = frame.contentDocument.documentElement, wide = [];
  for (const element of frame.contentDocument.querySelectorAll("article *")) {
    if (element.getBoundingClientRect().right <= root.clientWidth + 1) continue;
    let around = element.parentElement;
    while (around !== root && !scrolls(around, frame.contentWindow)) around = around.parentElement;
    if (around === root) wide.push(element.textContent.slice(0, 60));
  }
  const pictures = [...frame.contentDocument.querySelectorAll("article img")];
  const broken = pictures.filter(each => !each.naturalWidth).map(each => each.src);
  found[page] = {over: root.scrollWidth - root.clientWidth, wide, broken, pictures: pictures.length};
  frame.remove();
}
(async () => {
  for (const page of pages) await look(page);
  const result = document.createElement("pre");
  result.id = "probe";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
})();
</script></body>"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the site, and what mkdocs said."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout + done.stderr


def test_the_site_is_built_without_a_warning(built: tuple[Path, str]) -> None:
    folder, said = built
    assert "WARNING" not in said and "built in" in said
    assert (folder / "gallery" / "bert-large-a100x8.html").exists()


def test_reports_open_from_the_gallery(built: tuple[Path, str]) -> None:
    folder, _ = built
    page = (folder / "gallery" / "index.html").read_text()
    reports = re.findall(r'href="([^"/]+\.html)"', page)
    assert len(reports) >= 9 and all((folder / "gallery" / each).exists() for each in reports)


@pytest.fixture(scope="module")
def address(built: tuple[Path, str]) -> Iterator[str]:
    """Address of a server of the site, because frames of files cannot be looked into."""
    handler = functools.partial(_Silent, directory=str(built[0]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Writes no line for a request."""


@pytest.mark.skipif(BROWSER is None, reason=REASON)
@pytest.mark.parametrize("width", [390, 1200])
def test_no_page_is_wider_than_the_screen(built: tuple[Path, str], address: str, width: int, tmp_path: Path) -> None:
    pages = sorted(f"{path.parent.name}/" for path in built[0].glob("*/index.html"))
    probe = PROBE.replace("WIDTH", str(width)).replace("PAGES", json.dumps(pages))
    (built[0] / "probe.html").write_text(probe)
    options = ("--window-size=1400,1000", "--virtual-time-budget=120000")
    command = dumping(tmp_path / "profile", f"{address}/probe.html", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    inside = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert inside is not None, done.stderr[-2000:]
    found = json.loads(html.unescape(inside[1]))
    assert sorted(found) == pages and sum(each["pictures"] for each in found.values()) >= 32
    assert {page: each for page, each in found.items() if each["over"] or each["wide"] or each["broken"]} == {}

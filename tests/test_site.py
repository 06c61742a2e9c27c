"""The pages of docs/: every one is in the site's navigation, links lead somewhere, and the first script runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.accelerators import first_script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": (\w+\.md)$", navigation, re.M)
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))


def test_every_table_of_results_is_named_by_the_page_of_measurements() -> None:
    named = re.findall(r"`(\w+\.md)`", (DOCS / "verify.md").read_text())
    assert sorted(named) == [path.name for path in RESULTS]


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", words) for words in plain}


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *RESULTS], ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s#]*)(?:#([\w-]+))?\)", page.read_text())
    targets = [(page.parent / path if path else page, anchor) for path, anchor in links]
    missing = [str(target) for target, _ in targets if not target.exists()]
    lost = [
        f"{target}#{anchor}"
        for target, anchor in targets
        if anchor and target.exists() and anchor not in _anchors(target)
    ]
    assert not missing and not lost


QUESTIONS_FROM_DEEPSPEED = (
    "coming_from.md#where-is-my-ds_configjson",
    "coming_from.md#how-do-i-set-the-batch-micro-batches-and-accumulation",
    "coming_from.md#how-do-i-save-resume-and-get-one-fp32-state-dict",
    "coming_from.md#where-is-activation-checkpointing",
    "coming_from.md#how-do-i-launch-on-several-nodes-with-a-hostfile",
    "coming_from.md#how-do-i-use-a-pipeline-or-a-mixture-of-experts",
)


def _clicked(page: str) -> set[str]:
    """Where a link of a page leads, by the name of the page and its heading."""
    links = re.findall(r"\]\(([\w.]*(?:#[\w-]+)?)\)", (DOCS / page).read_text())
    return {page + link if link.startswith("#") else link for link in links}


@pytest.mark.parametrize("question", QUESTIONS_FROM_DEEPSPEED)
def test_a_question_from_deepspeed_is_answered_within_two_clicks(question: str) -> None:
    first = _clicked("index.md")
    second = {link for page in first if (DOCS / page).suffix == ".md" for link in _clicked(page)}
    page, anchor = question.split("#")
    assert question in first | second and anchor in _anchors(DOCS / page)


def test_the_script_of_the_first_page_trains(capsys: pytest.CaptureFixture[str]) -> None:
    exec(first_script(), {})
    printed = float(capsys.readouterr().out)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        inputs, labels = torch.randn(32, 64), torch.randint(8, (32,))
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert printed == pytest.approx(loss.item(), abs=2e-5)

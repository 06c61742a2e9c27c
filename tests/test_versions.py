"""The versions of torch: what is said of other ones, and that documents and the package say the same."""

import re
import tomllib
import warnings
from pathlib import Path

import pytest

from autopar import versions
from autopar.errors import AutoparError

ROOT = Path(__file__).parents[1]


def checked(monkeypatch: pytest.MonkeyPatch, found: str) -> list[str]:
    """The warnings of two checks with this torch installed."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: found)
    versions.check_torch.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        versions.check_torch()
        versions.check_torch()
    versions.check_torch.cache_clear()
    return [str(each.message) for each in said]


@pytest.mark.parametrize("found", ["2.11.0", "2.13.0+cpu", "2.15.3"])
def test_a_tested_torch_is_no_news(monkeypatch, found):
    assert checked(monkeypatch, found) == []


@pytest.mark.parametrize("found", ["2.16.0a0+git12", "3.0.1"])
def test_a_newer_torch_is_said_once_with_both_versions(monkeypatch, found):
    monkeypatch.delenv("RANK", raising=False)
    (said,) = checked(monkeypatch, found)
    assert found in said and "2.11 to 2.15" in said and "pip install 'torch<2.16'" in said


def test_a_newer_torch_is_said_by_the_first_rank_alone(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert checked(monkeypatch, "3.0.1") == []


def test_an_older_torch_is_refused_with_what_to_do(monkeypatch):
    with pytest.raises(AutoparError, match=r"needs torch 2\.11 or newer, but torch 2") as found:
        checked(monkeypatch, "2.9.1")
    versions.check_torch.cache_clear()
    assert "pip install 'torch>=2.11'" in str(found.value)


def test_the_package_and_the_table_of_versions_say_the_same():
    oldest, newest = (".".join(map(str, each)) for each in (versions.OLDEST_TORCH, versions.NEWEST_TORCH))
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={oldest}" in needed
    page = (ROOT / "docs" / "start.md").read_text()
    rows = dict(re.findall(r"^\| (torch|highspy) \| ([\d. to]+) \|", page, re.MULTILINE))
    assert rows["torch"] == f"{oldest} to {newest}"
    (solver,) = (each for each in needed if each.startswith("highspy"))
    assert solver == f"highspy>={rows['highspy'].split()[0]}"

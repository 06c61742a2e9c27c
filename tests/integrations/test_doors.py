"""The doors name the extra that brings a missing framework, and the core imports none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import autopar.integrations


def test_a_missing_framework_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "autopar.integrations.trl", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'autopar\[trl\]'"):
        _ = autopar.integrations.AutoparSFTTrainer


def test_an_unknown_door_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = autopar.integrations.Nothing


def test_the_room_imports_a_framework_at_its_first_use() -> None:
    code = "import autopar.integrations, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    frameworks = {"accelerate", "transformers", "lightning", "trl", "peft"}
    assert not frameworks & set(found.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("module", ["transformers", "peft", "trl"])
def test_a_module_imported_by_its_own_name_shows_nothing(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import autopar.integrations.{module}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")

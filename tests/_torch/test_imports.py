"""What torchao logs while it is imported, and is not a failure, is not shown; other messages are."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
from torch.utils import _pytree

from autopar import _torch

LIBRARY = "Failed to load _C_mxfp8.so: Could not load this library"
ENUM = "%s is an Enum subclass and is now natively supported by torch.compile"


def test_libraries_for_other_devices_and_needless_registrations_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    torchao, registry = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    with _torch.quiet_torchao():
        torchao.warning(LIBRARY)
        torchao.warning("Skipping import of cpp extensions")
        registry.warning(ENUM, "Preference")
    torchao.warning(LIBRARY)
    assert caplog.messages == ["Skipping import of cpp extensions", LIBRARY]


def test_these_are_the_messages_of_the_installed_packages() -> None:
    spec = importlib.util.find_spec("torchao")
    if spec is None or spec.origin is None:
        pytest.skip("torchao is not installed")
    assert 'f"Failed to load {file}: ' in Path(spec.origin).read_text()
    assert ENUM.removesuffix("torch.compile") in Path(_pytree.__file__).read_text()
    assert _pytree.log.name == "torch.utils._pytree"

"""A replaced attribute is back after its context; messages of torchao that tell of no failure are not shown."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
from torch.utils import _pytree

from autopar import _torch

LIBRARY = "Failed to load _C_mxfp8.so: Could not load this library"
ENUM = "%s is an Enum subclass and is now natively supported by torch.compile"


class Base:
    def name(self) -> str:
        return "base"


class Holder(Base):
    kind = "own"


def test_attributes_are_as_they_were_after_an_error_also_those_of_a_base_and_new_ones() -> None:
    before = dict(vars(Holder))
    with pytest.raises(ZeroDivisionError), _torch.replaced(Holder, kind="other", name=lambda self: "new", more=1):
        assert (Holder.kind, Holder().name(), vars(Holder)["more"]) == ("other", "new", 1)
        raise ZeroDivisionError
    assert dict(vars(Holder)) == before and Holder().name() == "base"


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

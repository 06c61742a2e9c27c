"""The fixture of tests about stored captures."""

import sys

import pytest

from tests.support.starts import Starts


@pytest.fixture
def starts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files are edited within a second
    yield Starts(tmp_path)
    for name in ("helper", "written"):
        sys.modules.pop(name, None)

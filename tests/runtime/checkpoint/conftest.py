"""A checkpoint that every test may change."""

from pathlib import Path

import pytest

from autopar.runtime.checkpoint.checkpoint import save_checkpoint
from tests.runtime.checkpoint.saves import adamw, make, train


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of `make()` after three steps."""
    model = make()
    optimizer = adamw(model)
    train(model, optimizer)
    save_checkpoint(tmp_path / "c", model, optimizer, step=3)
    return tmp_path / "c"

"""Every example in a docstring gives the result that stands beside it, and every public function has one."""

import doctest
import importlib
from pathlib import Path

import pytest

import autopar

PACKAGE = Path(autopar.__file__).parent


def _with_examples() -> list[str]:
    files = [p for top in PACKAGE.iterdir() if top.is_dir() for p in top.rglob("*.py")]
    files = [p for p in [*files, *PACKAGE.glob("*.py")] if ">>> " in p.read_text()]
    names = (".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in files)
    return sorted(name.removesuffix(".__init__") for name in names)


@pytest.mark.parametrize("name", _with_examples())
def test_examples_give_what_they_say(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted and not found.failed


def test_every_public_function_has_an_example() -> None:
    public = [getattr(autopar, name) for name in autopar.__all__ if name != "checkpoint"]
    public += [autopar.checkpoint.save_checkpoint, autopar.checkpoint.load_checkpoint]
    functions = [f for f in public if not isinstance(f, type)]
    assert len(functions) == 11
    assert not [f.__name__ for f in functions if ">>> " not in (f.__doc__ or "")]

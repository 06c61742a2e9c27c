"""The glossary of docs/design.md: each term is defined by one module."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import autopar

PACKAGE = Path(autopar.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "design.md").read_text()
ROWS = re.findall(r"^\| (.+) \| .+ \| `([\w.]+)` \|$", PAGE, re.M)


def _names(path: Path) -> Iterator[str]:
    """The classes and values that a module defines."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _defined() -> dict[str, set[str]]:
    """Name -> the modules that define it."""
    found = defaultdict[str, set[str]](set)
    tops = [p for p in PACKAGE.iterdir() if p.is_dir()]
    for path in [*PACKAGE.glob("*.py"), *(p for top in tops for p in top.rglob("*.py"))]:
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for name in _names(path):
            found[name].add(module)
    return found


def test_each_term_is_defined_by_one_module() -> None:
    defined = _defined()
    wrong = []
    for term, home in ROWS:
        module, _, name = home.rpartition(".")
        others = defined[name] - {module}
        if module not in defined[name] or (others and name[0].isupper() and not name.isupper()):
            wrong.append(f"{term}: {home}, and {name} is defined by {sorted(defined[name])}")
    assert not wrong, "\n".join(wrong)


def test_each_term_stands_once() -> None:
    terms, homes = zip(*ROWS, strict=True)
    assert len(ROWS) >= 60
    assert len({*terms}) == len(terms) and len({*homes}) == len(homes)

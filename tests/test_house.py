"""The house: which room imports which, as docs/design.md says, and how prose and tests are written."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar

PACKAGE = Path(autopar.__file__).parent
ROOT = Path(__file__).parents[1]

# A room imports itself and what stands before it.
ORDER = """
    errors < options < units < versions < _torch < ir < ops < rules < capture < analysis < cost_model < pipeline
    < search < passes < program < planning < runtime < checkpoint < proof < views < models < explanation < backend
    < calibrate < api < integrations < cli < __init__ < __main__
"""
ROOMS = ORDER.replace("<", " ").split()


def _modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    files = [p for top in PACKAGE.iterdir() if top.is_dir() for p in top.rglob("*.py")]
    found = {}
    for path in [*files, *PACKAGE.glob("*.py")]:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module of the package, kept until the tests of this file end."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    _nodes.cache_clear()


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports from the package, also inside functions."""
    for node in _nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autopar":
            yield from ((node.lineno, f"{node.module}.{a.name}") for a in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.startswith("autopar."))


def _room(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


def test_no_room_imports_upwards() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {imported}"
        for name, path in _modules().items()
        for line, imported in _imports(path)
        if ROOMS.index(_room(imported)) > ROOMS.index(_room(name))
    ]
    assert not wrong, "\n".join(sorted(wrong))


def _folders_in_order(room: Path) -> list[str]:
    """Folders of a room in the order in which its docstring names them: `a < b < c`; none where it names none."""
    names = re.findall(
        r"^    (\w+(?:\s+<\s+\w+)+)", ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or "", re.M
    )
    return re.split(r"\s+<\s+", names[0]) if names else []


def test_no_folder_of_a_room_imports_to_its_right() -> None:
    wrong, ordered = [], set()
    for name, path in _modules().items():
        if name.count(".") < 3:
            continue
        room = name.split(".")[1]
        if not (order := _folders_in_order(PACKAGE / room)):
            continue
        ordered.add(room)
        own = order.index(name.split(".")[2])
        for line, imported in _imports(path):
            parts = imported.split(".")
            if parts[1] == room and len(parts) > 3 and order.index(parts[2]) > own:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {imported}")
    assert ordered == {"runtime", "search"}
    assert not wrong, "\n".join(sorted(wrong))


def test_a_reader_sees_at_most_25_names_in_a_folder() -> None:
    found = Counter(path.parent for path in _modules().values() if path.name != "__init__.py")
    full = {str(f.relative_to(PACKAGE)): count for f, count in found.items() if count > 25}
    assert not full


def test_no_module_imports_itself_through_others() -> None:
    modules = _modules()
    needs = {}
    for name, path in modules.items():
        imported = [i if i in modules else i.rpartition(".")[0] for _, i in _imports(path)]
        needs[name] = set(imported) - {name}
    while ready := [name for name, below in needs.items() if not below & needs.keys()]:
        for name in ready:
            del needs[name]
    assert not needs, f"these stand on a cycle, or import one that does: {sorted(needs)}"


def _imported_by(code: str) -> set[str]:
    """Names of all modules that a new interpreter has after running this code."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_the_runtime_loads_no_solver() -> None:
    runtime = sorted(name for name in _modules() if name.startswith("autopar.runtime"))
    loaded = _imported_by("\n".join(f"import {name}" for name in runtime))
    assert "torch" in loaded
    assert not loaded & {"highspy", "autopar.search", "autopar.planning", "autopar.api"}


def test_importing_autopar_loads_nothing_heavy() -> None:
    loaded = _imported_by("import autopar")
    assert "autopar.ir" in loaded
    assert not loaded & {"torch", "sympy", "highspy", "networkx", "scipy", "rich", "transformers"}


def _private_names(path: Path) -> Iterator[str]:
    """Names of torch that begin with an underscore, but for operators of `torch.ops.aten`."""
    for node in _nodes(path):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            if node.attr in {"_schema", "_cdata", "_spec", "_local_tensor", "_orig_mod"}:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} {names[0]}"
        for name in names:
            is_torch = name.startswith(("torch.", "dist.")) and not name.startswith("torch.ops.aten.")
            if is_torch and any(re.match(r"_[^_]", part) for part in name.split(".")):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} {name}"


def test_private_names_of_torch_stay_in_their_room() -> None:
    outside = [path for name, path in _modules().items() if _room(name) != "_torch"]
    inside = [path for name, path in _modules().items() if _room(name) == "_torch"]
    assert any(list(_private_names(path)) for path in inside)
    found = [name for path in outside for name in _private_names(path)]
    assert not found, "\n".join(found)


def test_no_class_name_is_used_twice() -> None:
    used = Counter(node.name for path in _modules().values() for node in _nodes(path) if isinstance(node, ast.ClassDef))
    assert not {name for name, count in used.items() if count > 1}


def _described(path: Path) -> Iterator[str]:
    """Every line under `Args:` or `Attributes:` that opens the description of a name."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text())):
        doc = (ast.get_docstring(node) or "") if isinstance(node, documented) else ""
        for section in re.findall(r"^(?:Args|Attributes):\n((?:(?: {4}.*)?\n?)*)", doc, re.M):
            yield from re.findall(r"^ {4}(\S.*)", section, re.M)


def test_what_a_name_means_is_a_noun_phrase() -> None:
    written = ("autopar", "benchmarks", "examples", "tests")
    paths = [path for folder in written for path in (ROOT / folder).rglob("*.py")]
    lines = [(path, line) for path in paths for line in _described(path)]
    assert len(lines) > 1200
    relative = re.compile(r"[^:]+: (of|that|those|which|in|into|up to)\b")
    found = [f"{p.relative_to(ROOT)}: {line}" for p, line in lines if relative.match(line)]
    assert not found, "\n".join(found)


def _shows_what_it_checks(test: ast.AST) -> bool:
    """Whether a test has an `assert`, or expects an error or a warning, in its own body."""
    expected = {"pytest.raises", "pytest.warns", "torch.testing.assert_close"}
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and ast.unparse(node.func) in expected)
        for node in ast.walk(test)
    )


def test_every_test_shows_what_it_asserts() -> None:
    tests = [
        (path, node)
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(tests) > 1000
    hidden = [f"{p.name}:{test.lineno} {test.name}" for p, test in tests if not _shows_what_it_checks(test)]
    assert not hidden, "\n".join(hidden)

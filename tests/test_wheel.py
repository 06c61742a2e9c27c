"""The wheel and the source distribution: all of the package is in them, and they run without the checkout."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from tests.support.accelerators import first_script

ROOT = Path(__file__).parents[1]
KINDS = {".py", ".toml", ".csv", ".html", ".css", ".js", ".svg"}  # of files that the package reads
SOURCES = ("autopar", "passes", "cost_model", "pyproject.toml", "README.md", "LICENSE")

EXAMPLE = """

def example():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    return model, (torch.randn(8, 64), torch.randint(8, (8,))), torch.nn.functional.cross_entropy
"""


def python(*words: str, folder: Path, path: str = "") -> str:
    """Runs Python in a folder, where it finds the modules of `path` first; returns what it prints."""
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_sources(folder: Path) -> Path:
    """A copy of what is packaged, as a build leaves files beside it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def built(kind: str, source: Path, target: Path) -> Path:
    """The wheel, or the sdist, of a source tree, by the build backend of pyproject.toml and without network."""
    target.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    python("-c", code, folder=source)
    (made,) = target.iterdir()
    return made


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def wheel() -> Path:
    """The wheel of this checkout."""
    top = Path(folder().name)
    (top / "source").mkdir()
    return built("wheel", copy_sources(top / "source"), top / "wheel")


def packed(path: Path) -> set[str]:
    """Names of the package's files in a wheel."""
    return {name for name in zipfile.ZipFile(path).namelist() if name.startswith("autopar/")}


def test_the_wheel_has_every_file_of_the_package_and_nothing_else() -> None:
    package = {
        str(Path(top, name).relative_to(ROOT))
        for top, _, names in os.walk(ROOT / "autopar", followlinks=True)
        for name in names
        if Path(name).suffix in KINDS
    }
    assert {name for name in package if name.startswith(("autopar/passes/", "autopar/cost_model/"))}
    assert packed(wheel()) == package


@pytest.mark.slow
def test_the_source_distribution_makes_the_same_wheel(tmp_path: Path) -> None:
    wheel()
    archive = built("sdist", Path(folder().name) / "source", tmp_path / "sdist")
    shutil.unpack_archive(archive, tmp_path / "source")
    (source,) = (tmp_path / "source").iterdir()
    assert packed(built("wheel", source, tmp_path / "wheel")) == packed(wheel())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_installed_wheel_explains_trains_and_verifies_without_the_checkout(tmp_path: Path) -> None:
    place, work = str(tmp_path / "installed"), tmp_path / "work"
    work.mkdir()
    options = ("--no-deps", "--no-index", "--no-compile", "--quiet", "--target", place)
    python("-m", "pip", "install", *options, str(wheel()), folder=work)
    # The script trains when it is started, and not when its function is imported.
    (work / "train.py").write_text(first_script())
    (work / "model.py").write_text(f"import torch\n{EXAMPLE}")

    run = functools.partial(python, folder=work, path=place)
    assert run("-c", "import autopar; print(autopar.__file__)").startswith(place)
    assert "on h100x2x1" in run("-m", "autopar", "explain", "gpt2", "--ranks", "2", "--batch", "4")
    # Both ranks print the same loss, and their lines may run into one another.
    losses = "".join(run("-m", "autopar", "run", "train.py", "--ranks", "2").split())
    assert losses and losses == 2 * losses[: len(losses) // 2]
    assert "PASSED" in run("-m", "autopar", "verify", "model:example", "--mesh", "dp=2")

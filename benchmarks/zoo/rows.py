"""What came of each architecture of the zoo: a line of JSON, with the code that gave it."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import stored
from benchmarks.zoo.libraries import distributions

# name -> (mesh, recipe, micro-batches)
SEARCHED: Mapping[str, tuple[dict[str, int], str, int]] = {
    "dp=2": ({"dp": 2}, "ddp", 1),
    "tp=2": ({"tp": 2}, "tp", 1),
    "dp=2 tp=2": ({"dp": 2, "tp": 2}, "dp:ddp,tp:tp", 1),
    "zero3": ({"dp": 2}, "zero3", 1),
    "pp=2": ({"pp": 2}, "auto", 4),
}
RANDOM = "random"
PLANS = (*SEARCHED, RANDOM)
SPLIT_BY_BACKEND = ("dp=2", "tp=2")
PASSED = "passed"
BEYOND = "beyond the tolerance"
WIDE = "passed with float64 in place of float32"


@dataclass
class Row:
    """The results of one architecture.

    Attributes:
        name: its model type, or `diffusers:` and its class.
        version: `code_version` of what examined it.
        model: class and inputs.
        kind: text, vision, audio.
        dtype: type of its weights.
        parameters: number of entries of its parameters.
        stopped: the reason why it was not built or captured, "" if it was.
        differs: the way in which torch.export's own program differs from the model, "" if it does not.
        note: the parts that were left out or added so that it runs.
        stage: the last thing that was begun: build, capture, a plan, or done.
        plans: plan -> `passed` or why not.
        backend: plan -> `passed` or why not, of what is not captured, through torch.compile on two ranks.
        worst: the largest error of all plans relative to its bound.
        worst_tensor: the tensor that has this error, in words.
        seconds: duration of the whole examination.
    """

    name: str
    version: str = ""
    model: str = ""
    kind: str = ""
    dtype: str = ""
    parameters: int = 0
    stopped: str = ""
    differs: str = ""
    note: str = ""
    stage: str = "build"
    plans: dict[str, str] = field(default_factory=dict)
    backend: dict[str, str] = field(default_factory=dict)
    worst: float = 0.0
    worst_tensor: str = ""
    seconds: float = 0.0

    @property
    def built(self) -> bool:
        return bool(self.model)

    @property
    def captured(self) -> bool:
        return not (self.stopped or self.differs) and self.stage not in ("build", "capture")

    @property
    def passed(self) -> bool:
        return self.captured and all(self.plans.get(plan) in (PASSED, WIDE) for plan in PLANS)

    @property
    def run_by_backend(self) -> bool:
        return bool(self.backend) and all(x.startswith(PASSED) for x in self.backend.values())


# Files that say nothing of how an architecture is examined.
UNRELATED = ("run.py", "page.py", "verdicts.py")


def code_version() -> str:
    """A hash of autopar, of what examines, and of the versions of torch and of the libraries of models."""
    return stored.code_version(
        "autopar",
        "passes",
        "cost_model",
        "benchmarks/zoo",
        but=lambda path: path.parent.name == "zoo" and path.name in UNRELATED,
        also=str(packages_used()),
    )


def packages_used() -> dict[str, str]:
    """Package -> its version, of those that are installed."""
    found = {}
    for name in ("torch", "transformers", "diffusers", *distributions()):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(row: Row, path: Path) -> None:
    """In one move; see `stored.write_whole`."""
    stored.write_whole(asdict(row), path)


def append(row: Row, path: Path) -> None:
    with path.open("a") as lines:
        lines.write(json.dumps(asdict(row)) + "\n")


def read(path: Path, version: str | None = None) -> dict[str, Row]:
    """The rows so far, of one version of the code or of any; of one examined twice the last counts.

    A line that an interrupted run left half is passed over, and with it its architecture.
    """
    rows = [_row(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row.name: row for row in rows if row is not None and version in (None, row.version)}


def _row(line: str) -> Row | None:
    try:
        return Row(**json.loads(line))
    except json.JSONDecodeError:
        return None

"""Plans that were searched, kept in a folder for the next start of a script.

A plan is stored as JSON under a hash of all that the search depends on: the graph with its sizes, the request with the
machine, where parameters lie already, and the code that searches. So a plan is found again only for the same question.
A plan from the folder is checked like one that a user gives; a damaged file, or one of another user, is not used.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.ir import Plan
from autopar.ir.files import parse_json
from autopar.planning.cache_files import read_cached, write_cached
from autopar.planning.planning import Prepared, why_not_again
from autopar.search.request.request import Request

log = logging.getLogger("autopar")

_PLAIN = (str, int, float, bool, type(None))
_SEARCHERS = ("highspy", "numpy", "sympy")


@dataclasses.dataclass(frozen=True)
class StoredPlans:
    """A folder of searched plans.

    Attributes:
        folder: folder of the files, made when the first plan is stored; None to store nothing.
    """

    folder: Path | None

    def plan(self, search: Callable[..., Plan], prepared: Prepared, request: Request, **options: Any) -> Plan:
        """The stored plan for a question, or else `search(prepared, request, **options)`, which is then stored.

        Args:
            search: function that searches a plan, such as `make_plan`.
            prepared: the model.
            request: what is asked of the plan.
            options: further arguments of `search`; they are a part of the question.
        """
        searched = functools.partial(search, prepared, request, **options)
        if self.folder is None:
            return searched()
        question = (*_model(prepared), request, options)
        try:
            key = hashlib.sha256(text_of(question).encode()).hexdigest()
        except TypeError as error:
            log.info("The plan is not stored. %s", error)
            return searched()
        path = self.folder / f"{key}.json"
        found = self._read(path, prepared)
        if found is None:
            found = searched()
            self._write(path, found)
        return found

    def _read(self, path: Path, prepared: Prepared) -> Plan | None:
        """The plan in a file; None, with a line in the log, for a file that cannot be used."""
        try:
            plan = Plan.from_json(parse_json(read_cached(path)))
            wrong = why_not_again(plan, prepared)
            if wrong or plan.fingerprint != prepared.captured.fingerprint:
                raise PlanError(wrong or "it is a plan of another model")
        except FileNotFoundError:
            return None
        except (PlanError, OSError, ValueError) as error:
            log.info("The stored plan %s is not used; a plan is searched again: %s", path, error)
            return None
        log.info("The plan was stored by an earlier start (%s).", path)
        return plan

    def _write(self, path: Path, plan: Plan) -> None:
        """Stores a plan; a line in the log where that is not possible."""
        document = plan.to_json()
        if Plan.from_json(document) != plan:  # it would not be the same at the next start
            log.info("The plan is not stored, because its JSON would lose a part of it.")
            return
        try:
            write_cached(json.dumps(document, indent=1), path)
        except OSError as error:
            log.warning("The plan is not stored in %s: %s.", path.parent, error.strerror)


def _model(prepared: Prepared) -> tuple[object, ...]:
    """All that a search reads from the model, and a hash of the code that searches."""
    captured = prepared.captured
    said = (captured.is_step, captured.training, captured.has_loss_fn, captured.has_more)
    tables = (captured.tied, captured.frozen, captured.mutated, captured.forms, captured.inputs)
    formats = {name: str(dtype) for name, dtype in captured.stored.items()}
    graph = prepared.analysis.graph
    found = (captured.fingerprint, *said, *tables, formats, str(captured.out_spec), graph)
    return (code_version(), *found)


@functools.cache
def code_version() -> tuple[str, ...]:
    """Versions of the libraries that a search uses, and a hash of autopar's files, which change between versions."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for room in (package, package / "passes", package / "cost_model"):  # rglob follows no links
        for path in sorted(room.rglob("*.py")):
            digest.update(path.read_bytes())
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _SEARCHERS]
    return (digest.hexdigest(), f"torch {torch.__version__}", *versions)


def text_of(value: object) -> str:
    """A value as text that is the same in every process. Raises TypeError for a value without such a text."""
    lines: list[str] = []
    _add_lines(value, lines.append)
    return "\n".join(lines)


def _add_lines(value: object, add: Callable[[str], None]) -> None:
    """Adds the lines of a value's text one by one, since a question has tens of thousands."""
    if isinstance(value, _PLAIN):
        add(f"{type(value).__name__} {value!r}")
    elif dataclasses.is_dataclass(value):
        add(f"({type(value).__name__}")
        for field in dataclasses.fields(value):
            add(field.name)
            _add_lines(getattr(value, field.name), add)
        add(")")
    elif isinstance(value, Mapping):
        _add_many("mapping", [part for item in value.items() for part in item], add)
    elif isinstance(value, (set, frozenset)):
        _add_many("set", sorted(map(text_of, value)), add)
    elif isinstance(value, Sequence):
        _add_many("sequence", value, add)
    else:
        raise TypeError(f"A {type(value).__name__} cannot be written as text that is the same in every process.")


def _add_many(kind: str, values: Sequence[object], add: Callable[[str], None]) -> None:
    add(f"[{kind} {len(values)}")
    for value in values:
        _add_lines(value, add)
    add("]")

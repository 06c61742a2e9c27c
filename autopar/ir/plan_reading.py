"""Readers of the parts of a plan, from its JSON and from the lines of its text."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any, get_args

from autopar.errors import AutoparError, PlanError
from autopar.ir.choice import Labels
from autopar.ir.files import check_keys, is_count, parse_json, read_text
from autopar.ir.meeting import Meeting
from autopar.ir.mesh import PIPELINE_AXIS, Mesh
from autopar.ir.note import NOTE_KINDS, Note, kind_of
from autopar.ir.parameter_plan import ParameterPlan, Reduction
from autopar.ir.pipeline import Pipeline, pipeline_position
from autopar.ir.precision import MixedPrecision
from autopar.ir.recompute import Recompute, Selection, parse_recompute
from autopar.ir.tier import parse_place

VERSION = 1
# The fields of a plan's JSON: those of every plan, and those that only some have.
FIELDS = ("version", "mesh", "model", "recipe", "micro_batches", "parameters", "inputs", "ops", "notes")
OPTIONAL_FIELDS = (
    "replicas",
    "pipeline",
    "recompute",
    "saved",
    "precision",
    "decomposed",
    "overlap",
    "buckets",
    "tiles",
    "shapes",
    "dtypes",
    "digest",
)
SCALAR = "scalar"
REMARK = "  # "  # what follows it in the line of an op is for people
_BY_ROWS = " by rows"
_DTYPE = re.compile(r"bool|(?:u?int|b?float|complex)\d\w*")


def read_document(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file.

    Raises PlanError if it is another file, or no such JSON as `parse_json` reads.
    """
    try:
        return parse_json(read_text(path))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(
            f"{path} is not a whole JSON file ({error}); was it cut short? Copy it again, or save the plan again "
            "(explanation.plan.save(path), or autopar explain --save)."
        ) from None
    except ValueError as error:
        raise PlanError(f"{path} is damaged: {error}.") from None
    except OSError as error:
        raise PlanError(f"Cannot read the plan {path}: {error.strerror}.") from None


def check_fields(document: Mapping[str, Any]) -> None:
    """Raises PlanError for a field that is missing or that no plan has, and for fields that do not fit their digest.

    A plan that a person writes needs no digest.
    """
    try:
        check_keys(document, FIELDS, OPTIONAL_FIELDS)
    except ValueError as error:
        raise PlanError(f"The plan is incomplete or damaged: {error}.") from None
    fields = {key: value for key, value in document.items() if key != "digest"}
    if "digest" in document and document["digest"] != digest_of(fields):
        raise PlanError(
            f"The plan is not as it was saved: its fields have the digest {digest_of(fields)}, but it gives "
            f"{document['digest']!r}. If you changed it, remove the field 'digest'; otherwise copy or save it again."
        )


def digest_of(fields: Mapping[str, Any]) -> str:
    """A hash of the fields of a plan's JSON, which shows that a file was changed after it was saved."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def with_digest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan's JSON and their digest, as they are saved."""
    return {**fields, "digest": digest_of(fields)}


def wrong_version(found: object) -> PlanError:
    return PlanError(
        f"The plan is of version {found}, but this autopar reads version {VERSION}; "
        "make the plan again, or use the autopar that wrote it."
    )


def check_one_line(text: object) -> None:
    if not isinstance(text, str):
        raise PlanError(f"The names, model and recipe of a plan are text, not {text!r}.")
    if "\n" in text or "\r" in text:
        raise PlanError(f"{text!r} in a plan has a line break, but the text of a plan has one fact per line.")


def read_count(text: str, number: int = 5, what: str = "micro-batches") -> int:
    if not is_count(text):
        raise PlanError(f"Cannot read {text!r} in line {number} of the plan; write a whole number of {what}.")
    return int(text)


def read_notes(notes: object) -> tuple[str, ...]:
    if not isinstance(notes, list):
        raise PlanError(f"The notes of a plan are a list of texts, not {notes!r}.")
    return tuple(map(_note, notes))


def _note(note: object) -> str:
    """Reads one note from its JSON: a text, or `{kind: text}` for a note with a kind."""
    if isinstance(note, str):
        return note
    if isinstance(note, dict) and len(note) == 1:
        ((kind, text),) = note.items()
        if kind in NOTE_KINDS and isinstance(text, str):
            return Note(text, kind)
    raise PlanError(f"A note of a plan is a text, or a text by one of {', '.join(NOTE_KINDS[1:])}, not {note!r}.")


def note_word(note: str) -> str:
    """First word of a note's line: `note`, or `note(price)` for a note of the kind "price"."""
    return f"note({kind})" if (kind := kind_of(note)) else "note"


def read_meeting(fields: object, mesh: Mesh) -> Meeting | None:
    if fields is None:
        return None
    if not isinstance(fields, list) or len(fields) != 2 or not all(isinstance(x, str) for x in fields):
        raise PlanError(f"The replicas of a plan are an axis and a text such as 'every 4 steps local', not {fields!r}.")
    axis, text = fields
    if axis != mesh.placed.names[0]:
        raise PlanError(
            f"The plan has replicas along {axis!r}, but the replicas must be the first axis of its mesh {mesh}."
        )
    return Meeting.parse(axis, mesh.placed.sizes[0], text)


def read_pipeline(fields: object, mesh: Mesh) -> Pipeline | None:
    if fields is None and PIPELINE_AXIS not in mesh.names:
        return None
    if not isinstance(fields, list) or len(fields) != 2 or PIPELINE_AXIS not in mesh.names:
        raise PlanError(
            f"The plan has the mesh {mesh} and the pipeline {fields!r}; an axis {PIPELINE_AXIS} needs a schedule and "
            "the ops at which stages begin."
        )
    schedule, cuts = fields
    ranks = dict(mesh.axes)[PIPELINE_AXIS]
    return Pipeline(ranks, schedule, tuple(cuts.split()), pipeline_position(mesh))


def read_parameter(fields: object, name: str, mesh: Mesh, meeting: Meeting | None) -> ParameterPlan:
    if not isinstance(fields, list) or len(fields) != 3:
        raise PlanError(
            f"Parameter {name} has {fields!r}, but needs three parts: its storage layout, its "
            "resident layout, and step or micro_batch."
        )
    storage, resident, reduce = fields
    if meeting is not None and f"@{meeting.axis}" in f"{storage} {resident}":
        raise PlanError(
            f"Parameter {name} is stored in {storage} | {resident}, but {meeting.axis} is the axis of "
            f"{meeting.replicas} replicas, whose values differ for {meeting.steps} steps: none of them can hold a part "
            f"for another. Leave @{meeting.axis} out, or split along another axis."
        )
    when = reduce.removesuffix(_BY_ROWS)
    if when not in get_args(Reduction):
        raise PlanError(f"A gradient is reduced once per step or micro_batch, not per {reduce!r}.")
    (stored, tier), (used, nearer) = parse_place(storage, mesh), parse_place(resident, mesh)
    return ParameterPlan(stored, used, when, tier, nearer, by_rows=when != reduce)


def format_reduction(when: str, *, by_rows: bool) -> str:
    """The third part of a parameter's line: `step`, `micro_batch`, or one of them followed by `by rows`."""
    return when + _BY_ROWS * by_rows


def read_recompute(value: Any) -> Recompute:
    return Selection.of(value) if isinstance(value, dict) else value


def read_precision(text: object) -> MixedPrecision | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise PlanError(f"The precision of a plan is a text such as bfloat16, not {text!r}.")
    try:
        return MixedPrecision.parse(text)
    except AutoparError as error:
        raise PlanError(f"The plan is damaged: {error}") from error


def read_shapes(document: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(document, dict):
        raise PlanError(f"The shapes of a plan are lists of sizes by name, not {document!r}.")
    for name, sizes in document.items():
        if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
            raise PlanError(f"The shape of {name} is a list of whole numbers, not {sizes!r}.")
    return {name: tuple(sizes) for name, sizes in document.items()}


def read_dtypes(document: object, shapes: Mapping[str, object]) -> dict[str, str]:
    """The dtypes of a plan, which only tensors with a shape have."""
    if not isinstance(document, dict):
        raise PlanError(f"The dtypes of a plan are texts by name, not {document!r}.")
    for name, dtype in document.items():
        if name not in shapes or not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
            raise PlanError(f"The dtype of {name} must be a text such as float32, given with its shape, not {dtype!r}.")
    return dict(document)


def read_labels(text: str, name: str, mesh: Mesh) -> Labels:
    labels = tuple(text.split())
    if len(labels) != len(mesh.axes):
        raise PlanError(f"Op {name} has {len(labels)} labels for the {len(mesh.axes)} axes of {mesh}.")
    return labels


def _sizes(text: str, number: int) -> list[int]:
    """Reads the sizes of a shape, written as `8 64`, or `scalar` for no dims."""
    words = [] if text == SCALAR else text.split(" ")
    if not all(map(is_count, words)):
        raise PlanError(f"Cannot read the shape {text!r} in line {number} of the plan; write 8 64.")
    return [int(word) for word in words]


def _once(word: str, number: int, document: dict[str, Any]) -> None:
    if word in document:
        raise PlanError(f"Line {number} of the plan gives {word} again.")


def read_line(line: str, number: int, document: dict[str, Any]) -> None:
    word, _, rest = line.partition(" ")
    if word == "note" or word.startswith("note("):
        kind = word.removeprefix("note").strip("()")
        document["notes"].append({kind: rest} if kind else rest)
        return
    if word in ("overlap", "buckets", "tiles"):
        _once(word, number, document)
        document[word] = read_count(rest, number, "micro-batches" if word == "overlap" else "bytes")
        return
    if word in ("pipeline", "recompute", "precision", "decomposed"):
        _once(word, number, document)
        schedule, _, cuts = rest.partition(":")
        value = parse_recompute(rest) if word == "recompute" else rest
        document[word] = [schedule, cuts] if word == "pipeline" else value
        return
    if word == "op":
        rest = rest.partition(REMARK)[0].rstrip()
    name, colon, value = rest.rpartition(": ")  # a name may have ": ", a value never has
    if not colon or word not in ("parameter", "saved", "input", "op", "shape", "replicas"):
        raise PlanError(f"Cannot read line {number} of the plan: {line!r}.")
    if word == "shape":
        sizes, _, dtype = value.rpartition(" ")
        if _DTYPE.fullmatch(dtype):
            document.setdefault("dtypes", {})[name] = dtype
            value = sizes
        if name in document.setdefault("shapes", {}):
            raise PlanError(f"Line {number} of the plan gives shape {name} again: {line!r}.")
        document["shapes"][name] = _sizes(value, number)
        return
    if word == "replicas":
        _once(word, number, document)
        document[word] = [name, value]
        return
    field_name = word if word == "saved" else word + "s"
    if name in document.setdefault(field_name, {}):
        raise PlanError(f"Line {number} of the plan gives {word} {name} again: {line!r}.")
    document[field_name][name] = value.split(" | ") if word == "parameter" else value

"""A plan: how one captured model is parallelized on one mesh, as data.

`str(plan)` is the text of a plan, and `Plan.parse` reads it. Each line states one fact (this listing explains them in
the right column):

    autopar plan 1
    mesh dp=2,tp=2
    model 5be0c1...                                   fingerprint of the captured graph
    recipe dp:zero3,tp:tp
    micro-batches 1
    replicas far: every 10 steps diloco momentum=0.9 rate=0.7
                                                      axis along which replicas lie, how often and by which rule
                                                      they meet, or the owner of an asynchronous server's
                                                      parameters and the bound on staleness; see `autopar.ir.meeting`
    pipeline 1f1b: linear_4 linear_8                  schedule, and the first op of every stage but the first
    recompute 3 blocks                                blocks that backward recomputes, `full` for all of them; or
                                                      ops by block, {"layers.*": ["mlp.act/gelu"]}
    precision bfloat16 reduce=float32                 mixed-precision policy, see `MixedPrecision`
    decomposed tp                                     axes along which a product is computed in pieces while the
                                                      all-gather before it or the reduce-scatter after it sends them
    overlap 2                                         micro-batches whose ops take turns, so that the collectives of
                                                      each travel while another computes
    buckets 104857600                                 bytes of a bucket, in which parameters and gradients travel
    tiles 1073741824                                  bytes of logits that a loss computes at a time
    parameter mlp.up.weight: S(1)@dp S(0)@tp | S(1)@dp S(0)@tp | step
                                                      storage | resident | when gradients are reduced
    saved layers.*.input: S(1)@tp                     layout in which a tensor is saved from forward to backward;
                                                      see below
    parameter mlp.down.weight: S(0)@dp host | S(0)@dp | step
                                                      a storage in the host's memory, see `autopar.ir.tier`; the
                                                      resident layout may name a tier, too
    parameter mlp.down.bias: O(1)@dp | V@dp | step    a storage on rank 1 of dp alone, which updates the parameter
    parameter embed.weight: O(1)@dp | V@dp | step by rows
                                                      the same; only rows of the gradient that are not zero are sent
    input tokens: S(0)@dp                             layout of an input
    op linear_1: b j                                  label of the op's choice on every mesh axis; `@1` for an op that
                                                      rank 1 of the axis runs alone
    op add_3: t^1 t                                   the same; of axes with one label the second is the major one here,
                                                      see `autopar.ir.choice.nested_labels`
    shape input tokens: 8 64                          whole shape with which the plan was made
    note ...                                          what was chosen and why
    note(price) ...                                   a note of the kind "price", see `autopar.ir.note`

Where a plan was made for a model in this process, every line of an op ends in a remark, which `Plan.parse` skips: its
seconds in a step, and the layouts of its operands and results, `op linear_1: b j  #  41 µs  S(0)@dp, R -> S(0)@dp`.

Between steps a parameter lies in its *storage* layout (as a DTensor). Once per step it is converted to its
*resident* layout, and inside the graph from there to the layout that each op takes. ZeRO's stages (Rajbhandari et
al. 2020, section 5) are choices of these two layouts, see `zero_stage`.

The optimizer updates a parameter, and keeps its states, where the storage lies. A storage in the host's memory is
copied to the device at the start of each step (ZeRO-Offload, Ren et al. 2021). If the resident layout is in the
host's memory, too, the parameter is copied to the device for each use, in forward and again in backward
(ZeRO-Infinity, Rajbhandari et al. 2021).

The layout of a `saved` line has only states S. Its name begins with the path of a block, in which `*` stands for
any number; a line with the exact path overrides a pattern. The rest of the name says which tensor of the block is
meant (`autopar.ir.saved`):

    .input            first activation that enters the block; `.input#2` is the second, in the order of first use
    .mlp.act/gelu     result of this op
    .mlp.up/linear<0  first operand of this op, after its conversion for the op

With pipeline stages the mesh in the text has the axis `pp`. Layouts and labels leave it out: they are those of the
mesh of one stage, which is the same for all stages. The axis of replicas is left out in the same way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

from autopar.errors import LayoutError, MeshError, PlanError
from autopar.ir.choice import Labels
from autopar.ir.features import Feature, check_features
from autopar.ir.files import save_text
from autopar.ir.layout import Layout, format_layout, parse_layout
from autopar.ir.meeting import SERVER, Meeting, mesh_of_all, mesh_of_replica
from autopar.ir.mesh import Mesh
from autopar.ir.note import Note, kind_of
from autopar.ir.parameter_plan import ParameterPlan
from autopar.ir.pipeline import Pipeline, with_pipeline, without_pipeline
from autopar.ir.plan_reading import (
    REMARK,
    SCALAR,
    VERSION,
    check_fields,
    check_one_line,
    format_reduction,
    note_word,
    read_count,
    read_document,
    read_dtypes,
    read_labels,
    read_line,
    read_meeting,
    read_notes,
    read_parameter,
    read_pipeline,
    read_precision,
    read_recompute,
    read_shapes,
    with_digest,
    wrong_version,
)
from autopar.ir.precision import MixedPrecision
from autopar.ir.recompute import Recompute, check_recompute, format_recompute, recompute_json, words_of_recompute
from autopar.ir.saved import SavedLayout, parse_saved, words_of_saved
from autopar.ir.tier import format_place
from autopar.units import counted, format_bytes

_REMARK_COLUMN = 60  # longer lines of ops push their remarks to the right


def _check_size(subject: str, size: int | None, default: str) -> None:
    """Raises PlanError for a size that is no number of bytes."""
    if size is not None and (type(size) is not int or size < 1):
        raise PlanError(
            f"{subject} of a plan is a whole number of bytes such as 26214400, not {size!r}; leave it out for "
            f"{default}."
        )


def recipe_in_use(recipe: str, mesh: Mesh) -> str:
    """A recipe for people: without axes of one rank, along which every recipe does nothing.

    >>> recipe_in_use("dp:zero3,tp:tp+sp", Mesh.of({"dp": 8, "tp": 1}))
    'dp:zero3'
    """
    parts, sizes = recipe.split(","), dict(mesh.axes)
    used = [part for part in parts if ":" not in part or sizes.get(part.partition(":")[0], 1) > 1]
    return ",".join(used or parts[:1])


@dataclass(frozen=True)
class Plan:
    """All choices for one captured model on one mesh.

    Attributes:
        mesh: mesh of one pipeline stage of one replica: the mesh of all ranks without the axes of both.
        fingerprint: hash of the captured graph that the plan was made for.
        recipe: text of the recipe (the user's constraints) under which the plan was searched.
        micro_batches: number of micro-batches into which a step cuts its batch.
        parameters: parameter name -> its layouts.
        inputs: input name -> its layout.
        ops: op name -> label of the op's choice on every axis.
        notes: sentences for people about what was chosen and why.
        pipeline: stages of the model; None for a single stage.
        recompute: blocks of every stage, or ops of every block, that backward recomputes; see `autopar.ir.recompute`.
        saved: name of a tensor that autograd saves -> its layout until backward; see `autopar.ir.saved`.
        precision: mixed-precision policy of the captured graph; None where ops use parameters in their stored dtype.
        shapes: global shapes of inputs and parameters, by keys such as `input tokens` and `parameter up.weight`. Errors
            about a plan for another model compare them. Empty where the plan does not record shapes.
        dtypes: names such as `float32` of the dtypes in which these inputs and parameters are stored, by the same keys.
        meeting: replicas that synchronise every K steps; None where all ranks train one model synchronously.
        decomposed: axes along which all-gathers before products, and reduce-scatters after them, run piece by piece
            while the products are computed; see `autopar.ops.decomposed`.
        overlap_batches: number of micro-batches that run at a time and take turns (`autopar.passes.overlap_batches`).
        bucket_bytes: bytes of a bucket: parameters that are gathered, or gradients that are reduced, by one collective;
            None for the usual size of this mesh (`autopar.cost_model.buckets`).
        loss_tile_bytes: bytes of logits on a rank that a loss computes at a time, and again in backward
            (`autopar.rules.linear_loss`); None for all at once.
        remarks: function from a plan to remarks about its ops, by name, which `str` prints for people; None for none.
            It is no part of the plan: equal plans may have different remarks, and files have none.

    Raises PlanError for a field that no plan can have, such as an axis that the mesh does not have.
    """

    mesh: Mesh
    fingerprint: str
    recipe: str
    micro_batches: int
    parameters: Mapping[str, ParameterPlan]
    inputs: Mapping[str, Layout]
    ops: Mapping[str, Labels]
    notes: tuple[str, ...] = ()
    pipeline: Pipeline | None = None
    recompute: Recompute = "none"
    precision: MixedPrecision | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    saved: Mapping[str, SavedLayout] = field(default_factory=dict)
    meeting: Meeting | None = None
    decomposed: tuple[str, ...] = ()
    overlap_batches: int = 1
    bucket_bytes: int | None = None
    loss_tile_bytes: int | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    remarks: Callable[[Plan], Mapping[str, str]] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_recompute(self.recompute)
        self._check_decomposed()
        if type(self.micro_batches) is not int:  # a bool is an int to isinstance
            raise PlanError(
                f"The number of micro-batches of a plan is a whole number such as 1, not {self.micro_batches!r}."
            )
        if self.micro_batches < 1:
            raise PlanError(f"A plan needs at least one micro-batch, not {self.micro_batches}.")
        self._check_overlap()
        _check_size("A bucket", self.bucket_bytes, "the usual size")
        _check_size("A tile", self.loss_tile_bytes, "a loss without tiles")
        check_features("The plan has", self.features, PlanError)
        for text in (
            self.fingerprint,
            self.recipe,
            *self.parameters,
            *self.inputs,
            *self.ops,
            *self.shapes,
            *self.saved,
        ):
            check_one_line(text)
        notes = tuple(Note(" ".join(note.splitlines()), kind_of(note)) for note in self.notes)
        object.__setattr__(self, "notes", notes)  # a note is a line of the text

    def _check_decomposed(self) -> None:
        """Raises PlanError for an axis of decomposed collectives that the mesh of a stage does not have once."""
        for axis in self.decomposed:
            if axis not in self.mesh.names or self.decomposed.count(axis) > 1:
                raise PlanError(
                    f"The plan decomposes collectives along {' '.join(self.decomposed)}, but its stages have the axes "
                    f"{', '.join(self.mesh.names)}: name each of these at most once."
                )

    def _check_overlap(self) -> None:
        """Raises PlanError for micro-batches at a time that do not make up a step."""
        count = self.overlap_batches
        if type(count) is int and count == 1:
            return
        if type(count) is not int or count < 1 or self.micro_batches % count:
            raise PlanError(
                f"The plan runs {count!r} micro-batches at a time, but a step has {self.micro_batches}, which is not a "
                "multiple of that; for example, 2 of 4 can run at the same time."
            )

    @property
    def features(self) -> dict[Feature, str]:
        """The features that may not go together with others, in words; ops that one rank runs are not looked for."""
        pipeline, meeting = self.pipeline, self.meeting
        far = [name for name, how in self.parameters.items() if how.tier != "device"]
        replicas = meeting and f"{meeting.replicas} replicas along {meeting.axis}"
        is_served = meeting is not None and meeting.rule == SERVER
        found = {
            Feature.REPLICAS: replicas,
            Feature.SERVED_REPLICAS: is_served and f"{replicas} with an asynchronous server",
            Feature.WIDE_REPLICAS: self.mesh.size > 1 and f"the mesh {self.mesh} in each of them",
            Feature.STAGES: pipeline and f"a pipeline of {pipeline.stages} stages",
            Feature.VERSIONS: pipeline and pipeline.update_every and f"the schedule {pipeline.schedule}",
            Feature.OFF_DEVICE: far and f"{counted(len(far), 'parameter')} outside the device, such as {far[0]}",
            Feature.RECOMPUTED: (self.recompute != "none" and "recomputed blocks")
            or (self.loss_tile_bytes and "a loss that is recomputed in tiles"),
            Feature.SLICES: self.saved and "tensors saved in slices or on the host",
            Feature.DECOMPOSED: self.decomposed and f"collectives in pieces along {' '.join(self.decomposed)}",
            Feature.OVERLAP: self.overlap_batches > 1 and f"{self.overlap_batches} micro-batches at a time",
            Feature.PRECISION: self.precision and f"the precision {self.precision}",
        }
        return {feature: str(words) for feature, words in found.items() if words}

    def __hash__(self) -> int:
        return hash(self._bare)

    @cached_property
    def _bare(self) -> str:
        """The text without remarks."""
        return "\n".join(self._lines({}))

    @property
    def kept_words(self) -> tuple[str, ...]:
        """Clauses for reports: what is recomputed in backward, and what is kept in slices or on the host until it."""
        stages = self.pipeline.stages if self.pipeline else 1
        size = self.loss_tile_bytes
        tiles = "" if size is None else f"the loss in tiles of {format_bytes(size)} of logits, recomputed in backward"
        said = (words_of_recompute(self.recompute, stages), words_of_saved(self.saved, self.mesh), tiles)
        return tuple(words for words in said if words)

    @property
    def world_mesh(self) -> Mesh:
        """The mesh of all ranks, which includes the axes of the pipeline and of replicas."""
        mesh = self.replica_mesh
        return mesh if self.meeting is None else mesh_of_all(mesh, self.meeting)

    @property
    def recipe_in_use(self) -> str:
        """The recipe for people, see `recipe_in_use`."""
        return recipe_in_use(self.recipe, self.world_mesh)

    @property
    def replica_mesh(self) -> Mesh:
        """The mesh of all ranks of one replica, which includes the axis of the pipeline."""
        if self.pipeline is None:
            return self.mesh
        return with_pipeline(self.mesh, self.pipeline.ranks, self.pipeline.position)

    def __str__(self) -> str:
        return "\n".join(self._lines({} if self.remarks is None else self.remarks(self))) + "\n"

    def _repr_html_(self) -> str:
        """HTML of the plan for a notebook: mesh, recipe and notes, and a collapsed list of all lines."""
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        chosen = f"{self.world_mesh}, recipe {self.recipe}, micro-batches {self.micro_batches}"
        text = str(self)
        return (
            f"<b>autopar plan</b> {escape(chosen)}<ul>{notes}</ul>"
            f"<details><summary>all {text.count(chr(10))} lines</summary><pre>{escape(text)}</pre></details>"
        )

    def _lines(self, remarks: Mapping[str, str]) -> list[str]:
        fields = self.to_json()
        lines = [
            f"autopar plan {VERSION}",
            f"mesh {fields['mesh']}",
            f"model {self.fingerprint}",
            f"recipe {self.recipe}",
            f"micro-batches {self.micro_batches}",
        ]
        lines += [f"{word} {': '.join(fields[word])}" for word in ("replicas", "pipeline") if word in fields]
        if self.recompute != "none":
            lines.append(f"recompute {format_recompute(self.recompute)}")
        lines += [f"{w} {fields[w]}" for w in ("precision", "decomposed", "overlap", "buckets", "tiles") if w in fields]
        lines += [f"parameter {name}: {' | '.join(parts)}" for name, parts in fields["parameters"].items()]
        lines += [f"saved {name}: {how}" for name, how in fields.get("saved", {}).items()]
        lines += [f"input {name}: {layout}" for name, layout in fields["inputs"].items()]
        ops = {name: f"op {name}: {labels}" for name, labels in fields["ops"].items()}
        width = min(_REMARK_COLUMN, max(map(len, ops.values()), default=0))
        lines += [
            f"{op:{width}}{REMARK}{remarks[name].rstrip()}" if name in remarks else op for name, op in ops.items()
        ]
        lines += [
            f"shape {name}: {' '.join(map(str, shape)) or SCALAR} {self.dtypes.get(name, '')}".rstrip()
            for name, shape in self.shapes.items()
        ]
        return lines + [f"{note_word(note)} {note}" for note in self.notes]

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Reads the text of a plan, the inverse of `str`. Raises PlanError naming the line."""
        # `splitlines` would also split at other characters that names may have, such as a form feed.
        lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
        head = [line.partition(" ") for line in lines[:5]]
        if [word for word, _, _ in head] != ["autopar", "mesh", "model", "recipe", "micro-batches"]:
            raise PlanError(
                "This is not the text of a plan: its first five lines should begin with autopar, mesh, model, recipe "
                f"and micro-batches, but begin with {[w for w, _, _ in head]}."
            )
        if head[0][2] != f"plan {VERSION}":
            raise wrong_version(head[0][2].removeprefix("plan "))
        document: dict[str, Any] = {
            "version": VERSION,
            "mesh": head[1][2],
            "model": head[2][2],
            "recipe": head[3][2],
            "micro_batches": read_count(head[4][2]),
            "parameters": {},
            "inputs": {},
            "ops": {},
            "notes": [],
        }
        for number, line in enumerate(lines[5:], start=6):
            read_line(line, number, document)
        return cls.from_json(document)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; the inverse of `from_json`."""
        return {
            "version": VERSION,
            "mesh": str(self.world_mesh),
            "model": self.fingerprint,
            "recipe": self.recipe,
            "micro_batches": self.micro_batches,
            **self._optional_json(),
            "parameters": {name: self._parameter_fields(p) for name, p in self.parameters.items()},
            "inputs": {name: format_layout(layout, self.mesh) for name, layout in self.inputs.items()},
            "ops": {name: " ".join(labels) for name, labels in self.ops.items()},
            "notes": [{kind: str(note)} if (kind := kind_of(note)) else str(note) for note in self.notes],
        }

    def _parameter_fields(self, how: ParameterPlan) -> list[str]:
        """The three parts of a parameter's line."""
        stored = format_place(how.storage, how.tier, self.mesh)
        used = format_place(how.resident, how.resident_tier, self.mesh)
        return [stored, used, format_reduction(how.reduce, by_rows=how.by_rows)]

    def _optional_json(self) -> dict[str, Any]:
        """JSON fields that only some plans have, such as replicas, stages, recomputation and saved layouts."""
        fields = {
            "replicas": self.meeting and [self.meeting.axis, str(self.meeting)],
            "pipeline": self.pipeline and [self.pipeline.schedule, " ".join(self.pipeline.cuts)],
            "recompute": None if self.recompute == "none" else recompute_json(self.recompute),
            "saved": {name: how.text(self.mesh) for name, how in self.saved.items()} or None,
            "precision": self.precision and str(self.precision),
            "decomposed": " ".join(self.decomposed) or None,
            "overlap": self.overlap_batches if self.overlap_batches > 1 else None,
            "buckets": self.bucket_bytes,
            "tiles": self.loss_tile_bytes,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()} or None,
            "dtypes": dict(self.dtypes) or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_json(cls, document: Any) -> Plan:
        """Makes a plan from JSON values, the inverse of `to_json`.

        Raises PlanError for another version, and for a field that is missing, unknown, or cannot be read.
        """
        if not isinstance(document, dict) or "version" not in document:
            raise PlanError("This is not a plan: it has no field 'version'.")
        if document["version"] != VERSION:
            raise wrong_version(document["version"])
        check_fields(document)
        try:
            everyone = Mesh.parse(document["mesh"])
            meeting = read_meeting(document.get("replicas"), everyone)
            whole = mesh_of_replica(everyone, meeting.axis) if meeting else everyone
            mesh = without_pipeline(whole)
            return cls(
                mesh=mesh,
                fingerprint=document["model"],
                recipe=document["recipe"],
                micro_batches=document["micro_batches"],
                parameters={
                    name: read_parameter(fields, name, mesh, meeting) for name, fields in document["parameters"].items()
                },
                inputs={k: parse_layout(v, mesh) for k, v in document["inputs"].items()},
                ops={name: read_labels(text, name, mesh) for name, text in document["ops"].items()},
                notes=read_notes(document["notes"]),
                pipeline=read_pipeline(document.get("pipeline"), whole),
                recompute=read_recompute(document.get("recompute", "none")),
                precision=read_precision(document.get("precision")),
                shapes=read_shapes(document.get("shapes", {})),
                dtypes=read_dtypes(document.get("dtypes", {}), document.get("shapes", {})),
                saved=parse_saved(document.get("saved", {}), mesh),
                meeting=meeting,
                decomposed=tuple(document.get("decomposed", "").split()),
                overlap_batches=document.get("overlap", 1),
                bucket_bytes=document.get("buckets"),
                loss_tile_bytes=document.get("tiles"),
            )
        except (TypeError, AttributeError) as error:
            raise PlanError(f"The plan is damaged: {error}.") from error
        except (LayoutError, MeshError) as error:
            raise PlanError(f"The plan is damaged: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, with a digest of its fields. The file is replaced in one move, so that a crash
        leaves the old one.

        Raises AutoparError where that is not possible, for a device, say.
        """
        save_text(json.dumps(with_digest(self.to_json()), indent=1) + "\n", path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote. Raises PlanError with the file and the fault."""
        document = read_document(path)
        try:
            return cls.from_json(document)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

import contextlib
import dataclasses
import json
import pickle
import random

import pytest

from autopar.errors import PlanError
from autopar.ir import Mesh, ParameterPlan, Pipeline, Plan, R, S, V
from autopar.ir.note import Note, kind_of
from autopar.ir.recompute import Selection, parse_wish

PLAN = Plan(
    mesh=Mesh.of({"dp": 2, "tp": 2}),
    fingerprint="5be0c1",
    recipe="dp:zero3,tp:tp",
    micro_batches=2,
    parameters={"up.weight": ParameterPlan((S(1), S(0)), (V, S(0)), "micro_batch")},
    inputs={"tokens": (S(0), R)},
    ops={"linear_1": ("b0", "j")},
    notes=("dp splits batch",),
)

TEXT = """\
autopar plan 1
mesh dp=2,tp=2
model 5be0c1
recipe dp:zero3,tp:tp
micro-batches 2
parameter up.weight: S(1)@dp S(0)@tp | V@dp S(0)@tp | micro_batch
input tokens: S(0)@dp
op linear_1: b0 j
note dp splits batch
"""


def test_text_and_back():
    assert str(PLAN) == TEXT
    assert Plan.parse(TEXT) == PLAN
    assert hash(Plan.parse(TEXT)) == hash(PLAN)


def test_shapes_are_lines_of_their_own():
    plan = dataclasses.replace(PLAN, shapes={"input tokens": (8, 64), "parameter scale": ()})
    text = TEXT.replace("note ", "shape input tokens: 8 64\nshape parameter scale: scalar\nnote ")
    assert str(plan) == text and Plan.parse(text) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    with pytest.raises(PlanError, match="Cannot read the shape '8 x' in line 9"):
        Plan.parse(text.replace("8 64", "8 x"))


def test_dtypes_are_words_of_the_lines_of_shapes():
    shapes = {"input tokens": (8, 64), "parameter scale": (), "parameter up": (4,)}
    dtypes = {"input tokens": "int64", "parameter scale": "bfloat16"}
    plan = dataclasses.replace(PLAN, shapes=shapes, dtypes=dtypes)
    text = str(plan)
    assert "\nshape input tokens: 8 64 int64\nshape parameter scale: scalar bfloat16\n" in text
    assert Plan.parse(text) == plan == Plan.from_json(json.loads(json.dumps(plan.to_json())))
    for wrong in ({"input tokens": "wide"}, {"input other": "int64"}, {"input tokens": 64}):
        with pytest.raises(PlanError, match=f"dtype of {next(iter(wrong))} must be a text such as"):
            Plan.from_json(plan.to_json() | {"dtypes": wrong})


def test_micro_batches_that_take_turns_are_a_line():
    plan = dataclasses.replace(PLAN, micro_batches=4, overlap_batches=2)
    text = str(plan)
    assert "\noverlap 2\n" in text and Plan.parse(text) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    for wrong in ("overlap 3", "overlap two"):
        with pytest.raises(PlanError, match=r"not a multiple of that|write a whole number"):
            Plan.parse(text.replace("overlap 2", wrong))
    with pytest.raises(PlanError, match="gives overlap again"):
        Plan.parse(text.replace("overlap 2", "overlap 2\noverlap 2"))
    with pytest.raises(PlanError, match=r"runs 1\.0 micro-batches at a time"):
        dataclasses.replace(plan, overlap_batches=1.0)


def test_decomposed_axes_are_a_line():
    plan = dataclasses.replace(PLAN, decomposed=("tp",))
    text = TEXT.replace("parameter ", "decomposed tp\nparameter ")
    assert str(plan) == text and Plan.parse(text) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    with pytest.raises(PlanError, match="decomposes collectives along pp, but its stages have the axes dp, tp"):
        Plan.parse(text.replace("decomposed tp", "decomposed pp"))


def test_notes_keep_their_kind():
    price = Note("41.2 ms a step: (all of it)", "price")
    plan = dataclasses.replace(PLAN, notes=("dp splits batch", price))
    assert str(plan).endswith("note dp splits batch\nnote(price) 41.2 ms a step: (all of it)\n")
    for again in (Plan.parse(str(plan)), Plan.from_json(json.loads(json.dumps(plan.to_json())))):
        assert again == plan and [kind_of(note) for note in again.notes] == ["", "price"]
    assert pickle.loads(pickle.dumps(price)).kind == "price"
    with pytest.raises(
        PlanError,
        match="by one of axes, price, stages, unasked, runner-up, tiers, replicas, owners, versions, decomposed, "
        "overlap, buckets, micro-batches, undivided, repeated, uneven, guess, not",
    ):
        Plan.from_json({**PLAN.to_json(), "notes": [{"joke": "x"}]})


def test_json_and_back(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert json.loads(path.read_text())["version"] == 1


def test_a_saved_plan_that_was_changed_since_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text().replace('"micro_batches": 2', '"micro_batches": 3'))
    with pytest.raises(PlanError, match=r"not as it was saved.*remove the field 'digest'"):
        Plan.load(path)


def test_a_plan_that_a_person_changed_needs_no_digest(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    document = json.loads(path.read_text()) | {"micro_batches": 3}
    del document["digest"]
    path.write_text(json.dumps(document))
    assert Plan.load(path).micro_batches == 3


def test_a_flipped_bit_of_a_saved_plan_is_found_or_changes_nothing(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    saved, bits = path.read_bytes(), random.Random(5)
    for bit in bits.sample(range(8 * len(saved)), 200):
        content = bytearray(saved)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        with contextlib.suppress(PlanError):
            assert Plan.load(path) == PLAN, bit


def test_a_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.recipe = "ddp"


def test_zero_stages_are_read_off_the_layouts():
    stages = {
        0: ParameterPlan((R,), (V,)),
        1: ParameterPlan((S(0),), (V,), "step"),
        2: ParameterPlan((S(0),), (V,), "micro_batch"),
        3: ParameterPlan((S(0),), (S(0),)),
    }
    assert {stage: plan.zero_stage(0) for stage, plan in stages.items()} == {i: i for i in range(4)}


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(PlanError, match=r"plan.json is not a whole JSON file .*cut short"):
        Plan.load(path)


def test_a_name_that_stands_twice_is_refused_and_named(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text().replace('"version"', '"recipe": "tp",\n "version"', 1))
    with pytest.raises(PlanError, match=r"plan.json is damaged: 'recipe' occurs 2 times"):
        Plan.load(path)


def test_another_version_is_named():
    with pytest.raises(PlanError, match="of version 2, but this autopar reads version 1"):
        Plan.parse(TEXT.replace("plan 1", "plan 2"))
    with pytest.raises(PlanError, match="of version 7"):
        Plan.from_json(PLAN.to_json() | {"version": 7})


def test_a_missing_part_is_named():
    document = PLAN.to_json()
    del document["inputs"]
    with pytest.raises(PlanError, match="has no field 'inputs'"):
        Plan.from_json(document)


@pytest.mark.parametrize(
    ("name", "meant"), [("recompte", "recompute"), ("precison", "precision"), ("Replicas", "replicas")]
)
def test_an_unknown_field_is_refused_with_the_nearest_name(name, meant, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN.to_json() | {name: "full"}))
    says = rf"plan.json: The plan is .*field '{name}' \(did you mean {meant}"
    with pytest.raises(PlanError, match=says):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("op linear_1: b0 j", "op linear_1: b0", "Op linear_1 has 1 labels for the 2 axes"),
        ("input tokens", "inputs tokens", "Cannot read line 7 of the plan"),
        ("S(0)@dp\n", "S(0)@pp\n", "has no axis 'pp'"),
        ("| micro_batch", "| sometimes", "not per 'sometimes'"),
        (" | micro_batch", "", "Parameter up.weight has .* needs three parts"),
        ("micro-batches 2", "micro-batches x", "Cannot read 'x' in line 5"),
        ("micro-batches 2", "micro-batches 0", "at least one micro-batch, not 0"),
        ("S(0)@dp\n", "S(0)@dp R@dp\n", r"two states for the axis dp, S\(0\) and R"),
        ("note", "op linear_1: - -\nnote", "Line 9 of the plan gives op linear_1 again"),
        ("note", "shape a: 1\nshape a: 2\nnote", "Line 10 of the plan gives shape a again"),
        ("note", "input tokens: R\nnote", "Line 9 of the plan gives input tokens again"),
        ("note", "parameter up.weight: R | R | step\nnote", "gives parameter up.weight again"),
    ],
)
def test_damage_is_named(old, new, says):
    with pytest.raises(PlanError, match=says):
        Plan.parse(TEXT.replace(old, new))


@pytest.mark.parametrize("count", [True, 1.0, "2", None])
def test_micro_batches_are_a_whole_number(count):
    with pytest.raises(PlanError, match=f"whole number such as 1, not {count!r}"):
        Plan.from_json(PLAN.to_json() | {"micro_batches": count})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("parameters", {"w": ["R", "R"]}, "Parameter w has .* needs three parts"),
        ("parameters", {"w": "RRR"}, "Parameter w has 'RRR'"),
        ("notes", "one", "notes of a plan are a list of texts, not 'one'"),
        ("recipe", None, "are text, not None"),
        ("ops", {"a\nb": "- -"}, "has a line break"),
    ],
)
def test_damaged_json_is_named(field, value, says):
    with pytest.raises(PlanError, match=says):
        Plan.from_json(PLAN.to_json() | {field: value})


@pytest.mark.parametrize("name", ["a: b", "a: R | R | step", "form\x0cfeed", "line\u2028end", " "])
def test_unusual_names_read_back(name):
    plan = dataclasses.replace(
        PLAN, parameters={name: PLAN.parameters["up.weight"]}, inputs={name: (R, R)}, ops={name: ("-", "-")}
    )
    assert Plan.parse(str(plan)) == plan


def test_a_note_is_one_line():
    plan = dataclasses.replace(PLAN, notes=("first\nsecond", "op x: y\r\nz"))
    assert plan.notes == ("first second", "op x: y z")
    assert Plan.parse(str(plan)) == plan


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(PlanError, match="No such file"):
        Plan.load(tmp_path / "none.json")


STAGED = dataclasses.replace(
    PLAN, micro_batches=4, recompute="full", pipeline=Pipeline(2, "interleaved", ("a", "b", "c"), 1)
)

STAGED_TEXT = """\
autopar plan 1
mesh dp=2,pp=2,tp=2
model 5be0c1
recipe dp:zero3,tp:tp
micro-batches 4
pipeline interleaved: a b c
recompute full
parameter up.weight: S(1)@dp S(0)@tp | V@dp S(0)@tp | micro_batch
input tokens: S(0)@dp
op linear_1: b0 j
note dp splits batch
"""


def test_stages_are_text_and_back():
    assert str(STAGED) == STAGED_TEXT
    assert Plan.parse(STAGED_TEXT) == STAGED
    assert Plan.parse(STAGED_TEXT).mesh == PLAN.mesh  # layouts are on the mesh of a stage
    assert Plan.parse(STAGED_TEXT).world_mesh == Mesh.of({"dp": 2, "pp": 2, "tp": 2})


def test_stages_are_json_and_back(tmp_path):
    STAGED.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == STAGED
    document = STAGED.to_json()
    assert (document["pipeline"], document["recompute"]) == (["interleaved", "a b c"], "full")
    assert not {"pipeline", "recompute"} & PLAN.to_json().keys()


def test_selected_ops_are_text_and_json_and_back():
    blocks = {"layers.*": ["mlp.act/gelu", "attn/matmul#2", "attn/linear<0"], "layers.0": []}
    plan = dataclasses.replace(PLAN, recompute=Selection.of(blocks))
    assert f"\nrecompute {json.dumps(blocks)}\n" in str(plan)
    assert Plan.parse(str(plan)) == plan == Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert plan.to_json()["recompute"] == blocks
    assert plan.recompute.names("layers.3") == set(blocks["layers.*"])
    assert plan.recompute.names("layers.0") == plan.recompute.names("head") == set()


@pytest.mark.parametrize("wrong", ["{", '{"layers.*": "gelu"}', '{"layers.*": [1]}'])
def test_damaged_selections_are_named(wrong):
    with pytest.raises(PlanError, match="ps to recompute"):
        parse_wish(wrong)


@pytest.mark.parametrize("wrong", ["some", "0", "-1", "3.x", "\u0660.\u0665"])
def test_a_text_that_is_no_wish_lists_what_may_be_asked(wrong):
    with pytest.raises(PlanError, match=f"no recompute='?{wrong}'?: it is 'none', .*'offloaded'"):
        parse_wish(wrong)


@pytest.mark.parametrize(("recompute", "text"), [(1, "1 block"), (3, "3 blocks"), ("full", "full")])
def test_recomputed_blocks_are_text_and_json_and_back(recompute, text):
    plan = dataclasses.replace(PLAN, recompute=recompute)
    assert f"\nrecompute {text}\n" in str(plan)
    assert Plan.parse(str(plan)) == plan == Plan.from_json(plan.to_json())
    assert plan.to_json()["recompute"] == recompute
    assert parse_wish("0.5") == 0.5 and parse_wish("3") == 3 and parse_wish("none") == "none"


@pytest.mark.parametrize("order", ["pp,tp,dp", "tp,pp,dp", "tp,dp,pp"])
def test_stages_lie_where_their_axis_is_placed_whatever_the_order(order):
    text = STAGED_TEXT.replace("dp=2,pp=2,tp=2", f"pp=2,dp=2,tp=2 order {order}")
    assert str(Plan.parse(text).world_mesh) == "pp=2,dp=2,tp=2 order pp,tp,dp"


def test_a_mesh_of_stages_alone():
    plan = Plan(Mesh.of({"dp": 1}), "f", "", 2, {}, {}, {}, pipeline=Pipeline(2, "gpipe", ("a",)))
    assert "mesh pp=2,dp=1\n" in str(plan)
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse(str(plan).replace("pp=2,dp=1", "pp=2")) == plan


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("dp=2,pp=2,tp=2", "dp=2,tp=2", r"has the mesh dp=2,tp=2 and the pipeline \['interleaved'"),
        ("pipeline interleaved: a b c\n", "", "pp=2,tp=2 and the pipeline None; an axis pp needs"),
        ("interleaved", "fifo", "There is no schedule 'fifo'; there are gpipe, 1f1b"),
        ("a b c", "a b", "2 cuts make 3 stages, but 2 pipeline ranks take a multiple of 2"),
        ("interleaved", "1f1b", "schedule 1f1b takes 2 stages on 2 pipeline ranks, .* has 4"),
        ("interleaved: a b c", "zbv: a", "schedule zbv takes 4 stages on 2 pipeline ranks, .* has 2"),
        ("recompute full", "recompute some", "none, full, or a whole number of blocks such as 3, not 'some'"),
        ("recompute full", "recompute 0 blocks", "a whole number of blocks such as 3, not 0"),
        ("note", "recompute none\nnote", "Line 11 of the plan gives recompute again"),
        ("note", "pipeline gpipe: a\nnote", "Line 11 of the plan gives pipeline again"),
        ("S(0)@dp\n", "S(0)@pp\n", "has no axis 'pp'"),
    ],
)
def test_damaged_stages_are_named(old, new, says):
    with pytest.raises(PlanError, match=says):
        Plan.parse(STAGED_TEXT.replace(old, new))


@pytest.mark.parametrize("fields", ["gpipe", ["gpipe"], {"gpipe": "a"}, ["gpipe", 3], [1, "a"]])
def test_stages_of_damaged_json_are_named(fields):
    with pytest.raises(PlanError):
        Plan.from_json(STAGED.to_json() | {"pipeline": fields})


def test_a_notebook_shows_the_notes_and_folds_the_lines_away():
    shown = dataclasses.replace(PLAN, notes=("batch < 8",))._repr_html_()
    head, _, folded = shown.partition("<details>")
    assert "dp=2,tp=2" in head and "<li>batch &lt; 8</li>" in head and "up.weight" not in head
    assert "parameter up.weight: S(1)@dp" in folded


def test_people_see_the_recipes_of_axes_with_several_ranks():
    def in_use(recipe, mesh):
        plan = Plan(
            mesh=Mesh.parse(mesh), fingerprint="", recipe=recipe, micro_batches=1, parameters={}, inputs={}, ops={}
        )
        assert f"recipe {recipe}" in str(plan)
        return plan.recipe_in_use

    assert in_use("dp:zero3,tp:tp", "dp=4,tp=1") == "dp:zero3"
    assert in_use("dp:zero3,tp:tp", "dp=2,tp=2") == "dp:zero3,tp:tp"
    assert in_use("dp:zero3,tp:tp", "dp=1,tp=1") == "dp:zero3"
    assert in_use("zero3", "dp=4,tp=1") == "zero3"

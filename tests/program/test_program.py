"""A plan is checked against the captured model before it is carried out."""

import dataclasses
import time

import pytest
import torch
from torch import nn

from autopar.analysis.factors import analyze
from autopar.capture.export import capture_step
from autopar.errors import PlanError
from autopar.ir import WHOLE, Mesh, O, P, ParameterPlan, Plan, R, S, V
from autopar.ir.share import on
from autopar.passes import clean_up
from autopar.program.checks import check_plan
from autopar.program.program import build_program


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False)
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).sum()


def captured_model(model):
    captured = capture_step(model, (torch.zeros(6, 4),), {}, None)
    clean_up(captured.module)
    return captured, analyze(captured)


@pytest.fixture(scope="module")
def mlp():
    return captured_model(MLP())


def unsplit(model, mesh):
    captured, analysis = model
    graph, whole = analysis.graph, (R,) * len(mesh.axes)
    return Plan(
        mesh,
        captured.fingerprint,
        "",
        1,
        {name: ParameterPlan(whole, whole) for name in graph.parameters},
        dict.fromkeys(graph.inputs, whole),
        {op.name: ("-",) * len(mesh.axes) for op in graph.ops},
    )


def changed(plan, field, **entries):
    return dataclasses.replace(plan, **{field: {**getattr(plan, field), **entries}})


def refusal(model, plan):
    """The message of the PlanError that a plan meets."""
    with pytest.raises(PlanError) as error:
        build_program(*model, plan)
    return str(error.value)


def test_a_plan_of_the_model_is_carried_out(mlp):
    for size in (2, 3, 4):
        assert build_program(*mlp, unsplit(mlp, Mesh.of({"tp": size}))).is_step


def test_another_fingerprint(mlp):
    plan = dataclasses.replace(unsplit(mlp, Mesh.of({"tp": 2})), fingerprint="5be0c1")
    message = refusal(mlp, plan)
    assert "fingerprint 5be0c1" in message and "Make a plan for this model" in message


def test_the_first_difference_is_named(mlp):
    """A shape before an op; parameters and inputs that one of both lacks before either."""
    plan = dataclasses.replace(unsplit(mlp, Mesh.of({"tp": 2})), fingerprint="5be0c1")
    own = mlp[1].graph.edge_shapes
    width = own["parameter up.weight"][0]
    assert own["input x"] == (6, 4) and own["parameter up.weight"] == (width, 4)
    batch = changed(dataclasses.replace(plan, shapes=own), "shapes", **{"input x": (3, 4)})
    assert "its input x has the shape [6, 4], but the plan takes [3, 4]. Make" in refusal(mlp, batch)
    parts = dataclasses.replace(batch, micro_batches=2)
    assert "the plan takes [3, 4] in each of 2 micro-batches" in refusal(mlp, parts)
    narrow = changed(batch, "shapes", **{"input x": (6, 4), "parameter up.weight": (1, 4)})
    told = f"its parameter up.weight has the shape [{width}, 4], but the plan takes [1, 4]"
    assert told in refusal(mlp, narrow)
    dtypes = mlp[0].edge_dtypes
    same = dataclasses.replace(plan, shapes=own, dtypes=dtypes)
    double = changed(same, "dtypes", **{"parameter up.weight": "float64"})
    told = f"its parameter up.weight has the dtype {dtypes['parameter up.weight']}, but the plan takes float64"
    assert told in refusal(mlp, double)
    first, *others = plan.ops
    other = dataclasses.replace(plan, ops={"gelu": plan.ops[first], **plan.ops})
    assert f"where the plan has gelu, it runs {first}" in refusal(mlp, other)
    fewer = dataclasses.replace(plan, ops={name: plan.ops[name] for name in (first, *others[:-1])})
    assert f"where the plan has no further op, it runs {others[-1]}" in refusal(mlp, fewer)
    assert "an op has different arguments, or a tensor a different dtype" in refusal(mlp, plan)


@pytest.mark.parametrize(
    ("field", "what", "name"),
    [("ops", "op", "relu"), ("parameters", "parameter", "up.weight"), ("inputs", "input", "x")],
)
def test_missing_and_unknown_entries(mlp, field, what, name):
    plan = unsplit(mlp, Mesh.of({"tp": 2}))
    less = {k: v for k, v in getattr(plan, field).items() if k != name}
    assert f"it has no {what} {name}" in refusal(mlp, dataclasses.replace(plan, **{field: less}))
    more = changed(plan, field, other=getattr(plan, field)[name])
    message = refusal(mlp, more)
    assert f"the model has no {what} other" in message and name in message


@pytest.mark.parametrize(
    ("size", "labels", "says"),
    [
        (2, ("z",), ("op linear (aten.linear) has the label 'z' on tp", "its choices are -, ")),
        (2, ("-", "-"), ("op linear has 2 labels for the 1 axes of tp=2",)),
        (4, ("j",), ("op linear (aten.linear) has the labels j", "tp=4", "j of size 6")),
        (2, ("j^1",), ("has the labels j^1, but this nesting of axes is written j.",)),
        (2, ("j^x",), ("has the labels j^x, but this nesting of axes is written j.",)),
    ],
)
def test_labels_that_an_op_has_not(mlp, size, labels, says):
    plan = changed(unsplit(mlp, Mesh.of({"tp": size})), "ops", linear=labels)
    message = refusal(mlp, plan)
    assert all(text in message for text in says)


@pytest.mark.parametrize(
    ("storage", "resident", "says"),
    [
        (S(5), R, "storage of parameter up.weight is S(5)@tp, and its dims are 0 to 1"),
        (S(0, 5), R, "is S(0.5)@tp, and dim 0 has the factors 0 to 0, of sizes (6,)"),
        (R, S(0, WHOLE), "is S(0.*)@tp and its storage R, but tp does not divide its dims, of factors ((6,), (4,))"),
        (S(0, WHOLE), O(1), "is O(1)@tp and its storage S(0.*)@tp, but tp does not divide"),
        (V, V, "storage of parameter up.weight is V@tp, and it can be R, S or O"),
        (P, R, "storage of parameter up.weight is P@tp, and it can be R, S or O"),
        (R, P, "resident layout of parameter up.weight is P@tp, and it can be R, S, V or O"),
        (S(1), S(7), "resident layout of parameter up.weight is S(7)@tp"),
    ],
)
def test_layouts_that_a_parameter_cannot_take(mlp, storage, resident, says):
    lies = {"up.weight": ParameterPlan((storage,), (resident,))}
    assert says in refusal(mlp, changed(unsplit(mlp, Mesh.of({"tp": 4})), "parameters", **lies))


def test_a_gradient_is_reduced_when_it_can_be(mlp):
    lies = {"up.weight": ParameterPlan((R,), (R,), "sometimes")}
    plan = changed(unsplit(mlp, Mesh.of({"tp": 2})), "parameters", **lies)
    message = refusal(mlp, plan)
    assert "parameter up.weight is reduced per 'sometimes'" in message
    assert "step or micro_batch" in message


@pytest.mark.parametrize(
    ("size", "layout", "says"),
    [
        (4, (P,), "the input x is P@tp"),
        (4, (S(2),), "the input x is S(2)@tp, and its dims are 0 to 1"),
        (3, (S(1),), "the input x is S(1)@tp, but the mesh tp=3 does not divide"),
        (4, (R, R), "the input x has 2 states for the 1 axes of tp=4"),
    ],
)
def test_layouts_that_an_input_cannot_take(mlp, size, layout, says):
    assert says in refusal(mlp, changed(unsplit(mlp, Mesh.of({"tp": size})), "inputs", x=layout))


def test_a_batch_may_lie_in_parts_of_different_sizes(mlp):
    plan = changed(unsplit(mlp, Mesh.of({"dp": 4})), "inputs", x=(S(0),))
    assert [on(build_program(*mlp, plan).input_parts[0], rank) for rank in range(4)] == [(2, 4), (2, 4), (2, 4), (0, 4)]


def test_the_check_is_cheap():
    deep = captured_model(nn.Sequential(*[MLPBlock() for _ in range(200)], Sum()))
    plan = unsplit(deep, Mesh.of({"dp": 2, "tp": 2}))
    begin = time.perf_counter()
    check_plan(*deep, plan)
    assert time.perf_counter() - begin < 1.0  # of 400 ops; it takes a small part of that


class MLPBlock(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return torch.relu(super().forward(x))


class Sum(nn.Module):
    def forward(self, x):
        return x.sum()

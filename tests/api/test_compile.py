"""`autopar.compile` on one rank, and the errors that a person meets."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import machine, planner
from autopar.capture.export import capture_step
from autopar.planning.planning import make_plan
from tests.runtime.models import MLP, make, mean_square


def compiled(**kwargs: object) -> autopar.CompiledModule:
    model, batch, _ = make("mlp")
    return autopar.compile(model, loss_fn=mean_square, example_inputs=batch, **kwargs)  # type: ignore[arg-type]


def batch() -> tuple[Tensor, ...]:
    return make("mlp")[1]


def test_one_rank_needs_no_process_group() -> None:
    model, (x, y), _ = make("mlp")
    reference, _, _ = make("mlp")
    made = autopar.compile(model, loss_fn=mean_square)
    loss = made.step(x, y)
    expected = mean_square(reference(x), y)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(made.up.weight.grad, reference.up.weight.grad)
    assert made.plan.mesh == autopar.Mesh.of({"dp": 1})
    assert torch.equal(made(x), model(x))


def test_a_random_plan_on_one_rank() -> None:
    model, (x, y), _ = make("gpt")
    report = autopar.verify(model, (x, y), mesh={"a": 2, "b": 2}, plan="random", seed=3, loss_fn=make("gpt")[2])  # type: ignore[arg-type]
    assert report.passed, report


def test_the_original_is_reached_through_the_compiled() -> None:
    made = compiled()
    assert made.original.up is made.up
    made.eval()
    assert not made.original.training and not made.up.training
    made.note = "kept"
    assert made.original.note == "kept"


def test_there_is_no_plan_before_the_first_call() -> None:
    made = autopar.compile(MLP(), loss_fn=mean_square)
    with pytest.raises(autopar.PlanError, match="made at the first call"):
        _ = made.plan
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = made.nothing


def test_the_explanation_prints() -> None:
    text = str(compiled().explain())
    assert text.startswith("Plan for 1 rank as dp=1")
    assert "up.weight" in text


@pytest.mark.parametrize("asked", [{"schedule": "1f1b"}, {"recipe": "1f1b"}, {"recipe": "pp:auto,dp:ddp"}], ids=str)
def test_wishes_for_stages_on_one_rank(asked: dict[str, str]) -> None:
    """A mesh that was searched need not have the axis that the wish is about."""
    made = compiled(**asked)
    assert made.plan.pipeline is None
    made.step(*batch())
    assert str(made.explain()).startswith("Plan for 1 rank as dp=1")
    assert made.explain().what_if(search=True, flops=2.0).plan.mesh == made.plan.mesh


def test_chunks_that_no_schedule_takes() -> None:
    with pytest.raises(autopar.SearchError, match="chunks=2 on 1 pipeline rank; name a schedule"):
        compiled(chunks=2)


def test_a_world_of_another_size() -> None:
    with pytest.raises(autopar.MeshError, match=r"mesh dp=2,tp=2 has 4 ranks, but 1 run here"):
        compiled(mesh={"dp": 2, "tp": 2})


def test_a_single_stage_is_no_pipeline() -> None:
    assert compiled(mesh={"pp": 1}).plan.pipeline is None


def test_a_schedule_takes_an_axis_for_stages() -> None:
    with pytest.raises(autopar.MeshError, match="the mesh dp=1 has no axis 'pp': add one, such as pp=2"):
        compiled(mesh={"dp": 1}, schedule="1f1b")


def test_a_plan_is_loaded_from_its_file(tmp_path: Path) -> None:
    plan = compiled().plan
    plan.save(tmp_path / "plan.json")
    assert compiled(plan=tmp_path / "plan.json").plan == plan


def test_a_plan_of_another_model() -> None:
    plan = compiled().plan
    model = nn.Linear(8, 8).double()
    with pytest.raises(autopar.PlanError, match=r"it has no parameter down\.bias"):
        autopar.compile(model, loss_fn=mean_square, plan=plan, example_inputs=batch())


def test_a_plan_for_another_mesh() -> None:
    plan = compiled().plan
    with pytest.raises(autopar.MeshError, match="made for the mesh dp=1, but the mesh given is tp=1"):
        compiled(plan=plan, mesh={"tp": 1})


def test_a_truncated_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    compiled().plan.save(path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(autopar.PlanError, match=r"plan.json is not a whole JSON file .* cut short"):
        compiled(plan=path)


def test_a_plan_of_an_unknown_version(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    document = compiled().plan.to_json()
    path.write_text(json.dumps({**document, "version": 99}))
    with pytest.raises(autopar.PlanError, match="version 99, but this autopar reads version 1"):
        compiled(plan=path)


def test_micro_batches_of_a_plan() -> None:
    plan = compiled(micro_batches=2).plan
    assert compiled(plan=plan).step(*batch()).item() > 0
    with pytest.raises(
        autopar.AutoparError, match="The plan has micro_batches=2, and compile was given micro_batches=4"
    ):
        compiled(plan=plan, micro_batches=4)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"recipe": "zero3", "memory_bytes": "1GB"}, "recipe='zero3', memory_bytes='1GB' would have no effect"),
        ({"pins": {"0.weight": "dp"}, "stages": 2}, "leave out stages=, pins=, or plan= to search"),
        ({"offload": True, "without": "dp", "inside_node": "dp"}, "inside_node='dp', offload=True, without='dp'"),
    ],
)
def test_wishes_for_a_search_are_refused_beside_a_plan(wishes: dict[str, object], words: str) -> None:
    with pytest.raises(autopar.AutoparError, match=words):
        compiled(plan=compiled().plan, **wishes)


@pytest.mark.parametrize("recipe", ["zero3", "fsdp", {"dp": "zero3"}, " dp: fsdp", {"dp": "auto"}])
def test_a_recipe_beside_its_own_plan_is_taken_however_it_is_written(recipe: Any) -> None:
    plan = compiled(recipe=recipe).plan
    assert compiled(plan=plan, recipe=recipe).plan == plan


def test_wishes_of_another_plan_are_refused() -> None:
    plan = compiled().plan
    assert compiled(plan=plan, recompute="none").plan == plan
    with pytest.raises(autopar.AutoparError, match=r"has recompute='none', .* given recompute=2"):
        compiled(plan=plan, recompute=2)
    with pytest.raises(autopar.AutoparError, match=r"has schedule=None, .* given schedule='1f1b'"):
        compiled(plan=plan, schedule="1f1b")


def test_training_follows_inference_mode() -> None:
    for run in (lambda made: made(batch()[0]), lambda made: made.step(*batch())):
        made = autopar.compile(MLP().double(), loss_fn=mean_square)
        with torch.inference_mode():
            run(made)
        made.step(*batch())
        torch.optim.SGD(made.parameters(), lr=0.1).step()
        assert not any(p.is_inference() for p in made.parameters())


def test_a_recipe_that_there_is_not_is_told_at_once() -> None:
    with pytest.raises(autopar.RecipeError, match="There is no recipe 'zero4'"):
        autopar.compile(MLP(), recipe="zero4")


def test_a_compiled_model_and_a_loss_that_is_none_are_told_at_once() -> None:
    with pytest.raises(autopar.AutoparError, match="compiled already"):
        autopar.compile(autopar.compile(MLP()))
    with pytest.raises(autopar.AutoparError, match="loss_fn='ce' is no function"):
        autopar.compile(MLP(), loss_fn="ce")


@pytest.mark.parametrize("function", [autopar.compile, autopar.explain, autopar.verify])
def test_a_misspelt_argument_is_told_with_the_one_that_is_meant(function: Any) -> None:
    with pytest.raises(TypeError, match=r"no argument 'recpie' \(did you mean recipe"):
        function(MLP(), recpie="ddp")


@pytest.mark.parametrize(
    "loss_fn", [mean_square, nn.MSELoss(), lambda y, target, weight: (weight * (y - target)).sum()]
)
def test_a_batch_without_its_target(loss_fn: Any) -> None:
    made = autopar.compile(MLP().double(), loss_fn=loss_fn)
    with pytest.raises(autopar.StepError, match=r"asks for .*target.*, but none was given"):
        made.step(batch()[0])


def test_no_loss_function() -> None:
    made = autopar.compile(MLP().double())
    with pytest.raises(autopar.StepError, match="Pass loss_fn"):
        made.step(batch()[0])


def test_a_loss_that_is_no_scalar() -> None:
    made = autopar.compile(MLP().double(), loss_fn=lambda y, target: (y - target) ** 2)
    with pytest.raises(autopar.StepError, match=r"returns tensors of shapes \[\[8, 8\]\]; `step` needs one scalar"):
        made.step(*batch())


def test_a_meta_module_without_a_way_to_initialise() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Bare())
    made = autopar.compile(model, loss_fn=mean_square)
    with pytest.raises(autopar.CaptureError, match=r"Module 1 \(Bare\) .* no reset_parameters"):
        made.step(*(x.float() for x in batch()))


def test_compiling_leaves_a_model_that_was_verified_first() -> None:
    model, inputs, _ = make("mlp")
    assert autopar.verify(model, inputs, mesh={"dp": 2}, loss_fn=mean_square).passed
    assert autopar.compile(model, loss_fn=mean_square).step(*inputs).item() > 0


def test_the_public_names_are_these() -> None:
    assert sorted(autopar.__all__) == [
        "AutoparError",
        "CaptureError",
        "CompiledModule",
        "LayoutError",
        "LossScaling",
        "Mesh",
        "MeshError",
        "MixedPrecision",
        "ParameterPlan",
        "PeerError",
        "Plan",
        "PlanError",
        "RecipeError",
        "SearchError",
        "StepError",
        "VerifyReport",
        "checkpoint",
        "compile",
        "explain",
        "find_nan",
        "launch",
        "register_form",
        "register_rule",
        "replay",
        "shard_",
        "verify",
    ]


def test_an_open_number_of_micro_batches_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is captured again for the micro-batch alone, and keeps the plan of the whole batch."""
    captures: list[int] = []
    searches: list[int] = []

    def capture(model: nn.Module, args: tuple[Tensor, ...], *rest: object) -> object:
        captures.append(len(args[0]))
        return capture_step(model, args, *rest)  # type: ignore[arg-type]

    def search(*given: object, **options: object) -> autopar.Plan:
        searches.append(1)
        return replace(make_plan(*given, **options), micro_batches=2)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "capture_step", capture)
    made = compiled()
    assert captures == [8] and made.plan.micro_batches == 1
    monkeypatch.setattr(planner, "make_plan", search)
    captures.clear()
    made = compiled()
    assert captures == [8, 4] and len(searches) == 1 and made.plan.micro_batches == 2
    model, (x, y), _ = make("mlp")
    loss = mean_square(model(x), y)
    loss.backward()
    assert made.step(x, y).item() == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(made.up.weight.grad, model.up.weight.grad)


def test_the_log_says_where_the_price_is_a_guess(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on several nodes are not measured."""
    monkeypatch.setattr(machine, "measured_at_start", lambda hardware, folder: hardware)
    with caplog.at_level(logging.INFO, logger="autopar"):
        compiled().step(*batch())
    assert any("a rank on cpu-gloo, a guess: nothing here was measured; on cpu" in text for text in caplog.messages)


def test_the_log_says_what_was_chosen_and_then_what_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="autopar"):
        made = compiled(hardware="cpu-gloo")
        for _ in range(20):
            made.step(*batch())
    chosen = [text for text in caplog.messages if text.startswith("nothing is split; recipe auto")]
    measured = [text for text in caplog.messages if text.startswith("measured ")]
    assert len(chosen) == 1 and chosen[0].endswith("a rank on cpu-gloo; on cpu")
    assert len(measured) == 1 and "a step (median of 10), predicted" in measured[0]


class TwoRows(nn.Module):
    """Has the number of rows of a micro-batch in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).reshape(2)


def test_a_model_that_runs_on_micro_batches_alone() -> None:
    torch.manual_seed(0)
    model, (x, y) = TwoRows(), (torch.randn(4, 3), torch.randn(4))
    halves = zip(x.split(2), y.split(2), strict=True)
    expected = sum(nn.functional.mse_loss(model(a), b) for a, b in halves) / 2
    compiled = autopar.compile(model, loss_fn=nn.functional.mse_loss, micro_batches=2)
    with pytest.warns(UserWarning, match="a micro-batch but not on the whole batch"):
        loss = compiled.step(x, y)
    assert loss.item() == pytest.approx(float(expected), rel=1e-6)


def test_a_second_start_takes_the_stored_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(cache=tmp_path)

    def search(*given: object, **options: object) -> autopar.Plan:
        raise AssertionError("the plan was searched again")

    monkeypatch.setattr(planner, "make_plan", search)
    second = compiled(cache=tmp_path)
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    third = compiled()
    assert str(first.plan) == str(second.plan) == str(third.plan)
    with pytest.raises(AssertionError, match="searched again"):
        compiled(cache=tmp_path, memory_bytes=10**10)

"""A report states the question, and ends with what launches the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.api.announcing import start_line
from autopar.cost_model.items import MIXED_FLOAT32_GRADIENTS
from autopar.cost_model.machines.cluster import find_cluster
from autopar.explanation.advice import Question
from autopar.explanation.explanation import Explanation
from autopar.explanation.launch import asked, launch, settings
from autopar.explanation.pages import page_of
from autopar.ir import Graph, Pipeline, R, Stack
from autopar.ir.recompute import Selection
from autopar.search.request.notes import idle_axes
from autopar.search.request.request import Request
from autopar.views import to_html
from tests.support.llama import Llama


@pytest.fixture(scope="module")
def explained() -> Explanation:
    with torch.device("meta"):
        model = Llama(vocab=512, width=64, inner=128, heads=8, kv_heads=4, layers=2)
        tokens = torch.zeros(16, 32, dtype=torch.int64)
    return autopar.explain(
        model, (tokens, tokens), mesh={"dp": 16}, cluster="h100x8x2", recipe="zero1", micro_batches=2
    )


def test_the_question_is_stated(explained: Explanation) -> None:
    said = dict(asked(explained, "llama"))
    assert said["model"] == "llama"
    assert said["batch"] == "32 samples, 2 micro-batches of 16 on all ranks"
    assert said["sequence"] == "32 tokens"
    assert said["cluster"] == "h100x8x2, 16 ranks"
    assert said["memory bound"] == "80.7 GB a rank: 84.9 GB less 5 % headroom"
    assert said["constraints"] == "--mesh dp=16, --micro-batches 2, --recipe zero1"
    exact = replace(explained, request=explained.request.but(memory_bytes=10**10))
    assert dict(asked(replace(exact, memory_bound_bytes=10**10), "llama"))["memory bound"] == ("10.0 GB a rank")


def test_images_have_no_sequence() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4, 4), torch.nn.Flatten(1))
        batch = torch.zeros(8, 3, 16, 16), torch.zeros(8, 128)
    found = autopar.explain(model, batch, loss_fn=torch.nn.functional.mse_loss, mesh={"dp": 2}, cluster="h100x2")
    assert "sequence" not in dict(asked(found, "patches"))


def test_the_last_lines_launch_the_plan(explained: Explanation) -> None:
    save, call, command = launch(explained)
    assert save == "# autopar explain ... --save plan.json writes the plan"
    assert call == 'model = autopar.compile(model, plan="plan.json")'
    assert command == ("torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py")
    call, command = launch(explained, Path("runs/a.json"))
    assert call == 'model = autopar.compile(model, plan="runs/a.json")'
    call = launch(explained.but(has_loss_fn=True))[1]
    assert call == 'model = autopar.compile(model, loss_fn=loss_fn, plan="plan.json")'
    few = replace(explained, plan=replace(explained.plan, mesh=autopar.Mesh.of({"dp": 4})))
    assert launch(few)[-1] == "torchrun --standalone --nproc-per-node 4 train.py"


@pytest.fixture
def many(explained: Explanation) -> Explanation:
    """The same plan, as if it were of a model with twelve layers of which two were captured."""
    graph = replace(explained.graph, stacks=(Stack("layers", 12, 2),))
    found = replace(explained, graph=graph)
    assert found.graph.layer_count, "one captured layer stands for several"
    return found


def test_a_plan_of_few_captured_layers_is_launched_by_its_settings(many: Explanation) -> None:
    again, call, _ = launch(many)
    assert again.startswith("# this call searches the layouts again; --save plan.json saves them")
    assert call == (
        'model = autopar.compile(model, mesh={"dp": 16}, recipe="zero1", micro_batches=2, recompute="none")'
    )


def test_a_long_call_has_a_line_for_each_argument(many: Explanation) -> None:
    """Piped lines are broken at 140 characters, which may be inside of a string."""
    run = replace(many.run, training_state=MIXED_FLOAT32_GRADIENTS)
    _, *lines, _ = launch(replace(many, run=run))
    assert lines[0] == "model = autopar.compile(" and lines[-1] == ")"
    assert '    training_state="adamw gradients=4 masters=4",' in lines
    hidden = many.request.but(without=frozenset({"recompute"}), pins=dict.fromkeys("abcdefghi", "tp"))
    notes = [line for line in launch(replace(many, request=hidden)) if "--" in line][:-1]
    assert len(notes) > 2 and all(n.startswith("# ") and len(n) <= 100 for n in notes)


def test_settings_have_the_bound_and_the_training_state_of_the_search(many: Explanation) -> None:
    """Without them `compile` would find room for another plan than the one that was shown."""
    run = replace(many.run, training_state=MIXED_FLOAT32_GRADIENTS)
    asked = many.request.but(memory_bytes=7 * 10**10, pins={"*.up.weight": "S(0)@dp"})
    given = settings(replace(many, run=run, request=asked))
    assert given["training_state"] == "adamw gradients=4 masters=4"
    assert given["memory_bytes"] == 7 * 10**10 and given["pins"] == {"*.up.weight": "S(0)@dp"}
    assert settings(replace(many, request=many.request.but(headroom=0.1)))["headroom"] == 0.1


def test_single_ops_that_are_recomputed_are_left_to_compile(many: Explanation) -> None:
    chosen = Selection.of({"layers.*": ["mlp.act/gelu"]})
    assert "recompute" not in settings(replace(many, plan=replace(many.plan, recompute=chosen)))


def test_settings_have_the_schedule_and_the_chunks_of_a_pipeline(many: Explanation) -> None:
    stages = Pipeline(2, "interleaved", ("a", "b", "c"))
    given = settings(replace(many, plan=replace(many.plan, pipeline=stages)))
    assert (given["mesh"]["pp"], given["schedule"], given["chunks"]) == (2, "interleaved", 2)
    named = replace(many.plan, pipeline=stages, recipe="pp:interleaved,dp:zero1")
    assert "schedule" not in settings(replace(many, plan=named))


def test_what_the_call_does_not_say_stands_above_it(many: Explanation) -> None:
    asked = many.request.but(pins={"layers.*": "dp"}, without=frozenset({"zero3", "recompute"}))
    comment, again, *_ = launch(replace(many, request=asked))
    assert comment == "# compile has no argument for --pin layers.*=dp"
    assert settings(replace(many, request=asked))["without"] == "zero3"
    assert "--save plan.json saves them" in again
    host = {name: replace(how, tier="host") for name, how in many.plan.parameters.items()}
    count = sum(many.graph.layer_count.get(name, 1) for name in host)
    for recipe, decides in (("auto", True), ("dp:zero1", True), ("dp:zero-offload", False)):
        stored = replace(many.plan, recipe=recipe, parameters=host)
        first = launch(replace(many, plan=stored))[0]
        assert (f"which parameters the host stores (here {count})" in first) == decides, recipe


def test_a_plan_with_files_is_launched_with_a_folder(explained: Explanation) -> None:
    plan = explained.plan
    far = {name: replace(how, tier="nvme") for name, how in plan.parameters.items()}
    call = launch(replace(explained, plan=replace(plan, parameters=far)))[1]
    assert call == ('model = autopar.compile(model, plan="plan.json", nvme="/a/folder/on/the/disk")')


def test_the_page_shows_both(explained: Explanation) -> None:
    page = page_of(explained, "llama")
    html = to_html(page)
    assert "32 samples, 2 micro-batches of 16 on all ranks" in html and "torchrun --nnodes 2" in html
    assert page.document["asked"] == dict(page.asked)
    assert page.document["launch"] == list(page.launch)


def test_a_precision_is_honoured_for_presets() -> None:
    """Parameters lie in float32 and are used in bfloat16; gradients take what the policy says."""

    def formats(precision: str | None) -> tuple[int, int, int]:
        request = Request.on(find_cluster("h100x4"), precision=precision)
        _, graph = Question("gpt2", request, seq=16).captured(1)
        return _formats(graph)

    assert formats(None) == (2, 2, 2)
    assert formats("bf16") == (2, 4, 4)
    assert formats("bf16 reduce=bf16") == (2, 4, 2)


def _formats(graph: Graph) -> tuple[int, int, int]:
    """Bytes of an element of the first parameter in use, at rest, and of its gradient."""
    tensor = graph.tensors[next(iter(graph.parameters.values()))]
    return tensor.itemsize_bytes, tensor.at_rest.itemsize_bytes, tensor.gradient.itemsize_bytes


def test_the_start_is_one_line(explained: Explanation) -> None:
    plan, request = explained.plan, explained.request
    assert not idle_axes(plan)
    assert start_line(plan, request, False, (0.0415, 9.8e9)) == (
        "dp=16; recipe zero1; 2 micro-batches: predicted 41.5 ms a step and 9.80 GB of 80.7 GB a rank on h100"
    )
    whole = {name: replace(how, storage=(R,)) for name, how in plan.parameters.items()}
    idle = replace(plan, parameters=whole, ops=dict.fromkeys(plan.ops, ("-",)))
    assert idle_axes(idle) == ["dp"]
    assert start_line(idle, request, False, (1.0, 1e9)).startswith(
        "nothing is split; dp left idle, because that was found fastest; recipe='ddp' uses it anyway; "
    )
    assert "as the given plan has it" in start_line(idle, request, True, (1.0, 1e9))

"""Replicas that synchronise every K steps: real ranks train as plain PyTorch does with the same delays."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.export import run_with_loss
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import Batch, make
from tests.runtime.training import difference, full_state
from tests.support.delayed import train_replicas
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess

STEPS = 20


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD or AdamW; eps well above the noise of gradients that are zero but for rounding."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6)


def batches(name: str, count: int = STEPS) -> list[Batch]:
    """Another batch for every step."""
    _, batch, _ = make(name)
    return [tuple(x.roll(i, -1) for x in batch) for i in range(count)]


@captured_once()
def trained(
    name: str, mesh: dict[str, int], recipe: Any, optimizer: str, count: int = STEPS, **options: Any
) -> dict[str, Any]:
    """Losses and parameters of this rank's replica after the meeting that is then due."""
    model, _, loss_fn = make(name)
    made = autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=recipe, **options)  # type: ignore[arg-type]
    steps = optimizer_of(optimizer, made)
    losses = []
    for each in batches(name, count):
        losses.append(made.step(*each).item())
        steps.step()
        steps.zero_grad()
    if made._meetings is not None and made._meetings.is_due:
        made.meet()
    return {"losses": losses, **full_state(made.original)}


def expected(name: str, replicas: int, recipe: str, optimizer: str, count: int = STEPS) -> list[dict[str, Any]]:
    """The same of every replica, in plain PyTorch."""
    model, _, loss_fn = make(name)
    rule, _, steps = recipe.partition(":")
    found, losses = train_replicas(
        model,
        batches(name, count),
        lambda m, part: run_with_loss(m, part, {}, loss_fn),  # type: ignore[arg-type]
        lambda m: optimizer_of(optimizer, m),
        replicas=replicas,
        steps=int(steps),
        rule=rule,
    )
    return [{"losses": own, **full_state(m)} for m, own in zip(found, losses, strict=True)]


OPTIMIZERS = "sgd", "adamw"


@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    often(
        itertools.product(("local:1", "local:4", "geo:4", "diloco:4"), OPTIMIZERS),
        [("local:1", "sgd"), ("local:4", "adamw"), ("geo:4", "sgd"), ("diloco:4", "adamw")],
    ),
)
def test_two_replicas_train_as_plain_ones_do(two_ranks: Ranks, recipe: str, optimizer: str) -> None:
    results = two_ranks.run(trained, "mlp", {"dp": 2}, recipe, optimizer)
    reference = expected("mlp", 2, recipe, optimizer)
    assert [difference(x, y) < 1e-9 for x, y in zip(results, reference, strict=True)] == [True] * 2


def test_meeting_after_every_step_of_sgd_is_data_parallelism(four_ranks: Ranks) -> None:
    alone = four_ranks.run(trained, "mlp", {"dp": 4}, "local:1", "sgd")
    together = four_ranks.run(trained, "mlp", {"dp": 4}, "ddp", "sgd")
    for found, whole in zip(alone, together, strict=True):
        found.pop("losses"), whole.pop("losses")  # a replica's is of its own rows
        assert difference(found, whole) < 1e-12


@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    often(itertools.product(("local:4", "geo:4", "diloco:4"), OPTIMIZERS), [("geo:4", "adamw"), ("diloco:4", "sgd")]),
)
def test_four_replicas(four_ranks: Ranks, recipe: str, optimizer: str) -> None:
    results = four_ranks.run(trained, "mlp", {"dp": 4}, recipe, optimizer)
    reference = expected("mlp", 4, recipe, optimizer)
    assert [difference(x, y) < 1e-9 for x, y in zip(results, reference, strict=True)] == [True] * 4


@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [
        ({"far": 2, "dp": 2}, {"far": "diloco:3", "dp": "zero3"}),
        pytest.param({"far": 2, "dp": 2}, {"far": "geo:3", "dp": "zero1"}, marks=pytest.mark.slow),
        pytest.param({"far": 2, "dp": 2}, {"far": "diloco:3", "dp": "data-parallel"}, marks=pytest.mark.slow),
        ({"dp": 2, "tp": 2}, {"dp": "local:3", "tp": "tp"}),
    ],
    ids=str,
)
def test_replicas_of_several_ranks(four_ranks: Ranks, mesh: dict[str, int], recipe: dict[str, str]) -> None:
    results = four_ranks.run(_gpt, mesh, recipe)
    ways = expected("gpt", 2, recipe[next(iter(mesh))], "adamw", 7)
    reference = [ways[0], ways[0], ways[1], ways[1]]
    assert [difference(x, y) < 1e-9 for x, y in zip(results, reference, strict=True)] == [True] * 4


def _gpt(mesh: dict[str, int], recipe: dict[str, str]) -> dict[str, Any]:
    return trained("gpt", mesh, recipe, "adamw", 7, micro_batches=2)


@captured_once()
def by_plan(line: str) -> dict[str, Any]:
    """Parameters after six steps by a plan whose line of replicas was edited."""
    model, batch, loss_fn = make("mlp")
    part = tuple(x[:4] for x in batch)  # a micro-batch of both replicas
    plan = autopar.explain(model, part, mesh={"dp": 2}, recipe="diloco:3", loss_fn=loss_fn, micro_batches=2).plan
    text = str(plan).replace("every 3 steps diloco momentum=0.9 rate=0.7", line)
    assert line in text
    made = autopar.compile(model, loss_fn=loss_fn, plan=autopar.Plan.parse(text))
    _run(made, optimizer_of("sgd", made), batches("mlp", 6))
    made.meet()
    return full_state(made.original)


def test_an_outer_optimizer_of_rate_one_without_momentum_takes_the_mean(two_ranks: Ranks) -> None:
    steps = two_ranks.run(by_plan, "every 3 steps diloco momentum=0.0 rate=1.0")
    mean = two_ranks.run(by_plan, "every 3 steps local")
    assert difference(steps[0], mean[0]) < 1e-12


def test_running_statistics_are_averaged(two_ranks: Ranks) -> None:
    results = two_ranks.run(trained, "normed", {"dp": 2}, "local:3", "sgd", 6)
    reference = expected("normed", 2, "local:3", "sgd", 6)
    assert [difference(x, y) < 1e-9 for x, y in zip(results, reference, strict=True)] == [True] * 2


@captured_once()
def of_own_rows(mesh: dict[str, int], recipe: Any) -> dict[str, Any]:
    """What a rank gets that gives rows of its own."""
    model, _, loss_fn = make("mlp")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=recipe, batch="local")  # type: ignore[arg-type]
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = [tuple(x.chunk(ranks)[rank] for x in batch) for batch in batches("mlp", 6)]
    _run(made, optimizer_of("sgd", made), own)
    made.meet()
    return full_state(made.original)


def test_ranks_may_give_rows_of_their_own(four_ranks: Ranks) -> None:
    """Under tensor parallelism the rows of a replica's ranks are gathered, and of no others."""
    (reference, _) = expected("mlp", 2, "geo:3", "sgd", 6)
    reference.pop("losses")
    for found in four_ranks.run(of_own_rows, {"dp": 2, "tp": 2}, {"dp": "geo:3", "tp": "tp"}):
        assert difference(found, reference) < 1e-9


def mean_product(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (y * t).mean()


@captured_once()
def seen() -> dict[str, Any]:
    """The rank's replica between meetings: masks of dropout, evaluation, and what is refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.ones(8, 4)
    made = autopar.compile(model, loss_fn=mean_product, mesh={"dp": 2}, recipe="local:4")
    made.step(x, x)
    mask = model[0].bias.grad.clone()
    with pytest.raises(autopar.StepError, match=r"train with model\.step"):
        made(x)
    with torch.no_grad():
        evaluated = made.eval()(x)
    assert torch.equal(evaluated, torch.nn.functional.linear(x, model[0].weight, model[0].bias))
    with pytest.raises(autopar.StepError, match="A batch of 3 rows cannot be divided among 2 replicas"):
        made.train().step(x[:3], x[:3])
    return {"mask": mask, "rows": len(evaluated)}


def test_replicas_draw_their_own_masks_and_evaluate_all_rows(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(seen)
    assert not torch.equal(first["mask"], second["mask"])
    assert (first["rows"], second["rows"]) == (8, 8)


@captured_once()
def frozen_between(recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter that was frozen after two of four steps, before and after the meeting."""
    made, steps = _built({"dp": 2}, recipe)
    _run(made, steps, batches("mlp", 2))
    made.original.get_parameter("up.weight").requires_grad_(False)
    _run(made, steps, batches("mlp", 2))
    before = full_state(made.original)["up.weight"]
    made.meet()
    return before, full_state(made.original)["up.weight"]


@pytest.mark.parametrize("recipe", often(["local:4", "geo:4"], ["geo:4"]))
def test_what_was_trained_before_it_was_frozen_is_met(two_ranks: Ranks, recipe: str) -> None:
    (first, common), (second, other) = two_ranks.run(frozen_between, recipe)
    assert not torch.equal(first, second) and torch.equal(common, other)
    assert difference({"x": common}, {"x": (first + second) / 2}) < 1e-12


# --- checkpoints


def _run(model: autopar.CompiledModule, optimizer: torch.optim.Optimizer, own: list[Batch]) -> None:
    for each in own:
        model.step(*each)
        optimizer.step()
        optimizer.zero_grad()


@captured_once()
def resumed(folder: str, mesh: dict[str, int], recipe: Any) -> tuple[dict[str, Any], ...]:
    """State after 12 steps at once, and after 8 steps, a checkpoint, and 4 more of a new model."""

    every = batches("mlp", 12)
    whole, steps = _built(mesh, recipe)
    _run(whole, steps, every[:8])
    autopar.checkpoint.save_checkpoint(folder, whole, steps, number=8)
    _run(whole, steps, every[8:])
    again, steps = _built(mesh, recipe)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.mul_(0.5)
    assert autopar.checkpoint.load_checkpoint(folder, again, steps) == {"number": 8}
    _run(again, steps, every[8:])
    return full_state(whole.original), full_state(again.original)


def _built(mesh: dict[str, int], recipe: Any) -> tuple[autopar.CompiledModule, torch.optim.Optimizer]:
    model, batch, loss_fn = make("mlp")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=recipe, example_inputs=batch, micro_batches=1)  # type: ignore[arg-type]
    return made, optimizer_of("adamw", made)


@pytest.mark.parametrize("recipe", often(["local:4", "geo:4", "diloco:4"], ["geo:4", "diloco:4"]))
def test_a_run_goes_on_from_a_checkpoint(two_ranks: Ranks, tmp_path: Any, recipe: str) -> None:
    for whole, again in two_ranks.run(resumed, str(tmp_path / "saved"), {"dp": 2}, recipe):
        assert difference(again, whole) == 0


def test_a_run_of_sharded_replicas_goes_on_from_a_checkpoint(four_ranks: Ranks, tmp_path: Any) -> None:
    mesh, recipe = {"far": 2, "dp": 2}, {"far": "diloco:4", "dp": "zero3"}
    for whole, again in four_ranks.run(resumed, str(tmp_path / "saved"), mesh, recipe):
        assert difference(again, whole) == 0


@captured_once()
def saved_and_read(folder: str) -> tuple[dict[str, Any], ...]:
    """Parameters of a meeting; of their checkpoint under data parallelism and in a plain module; of their export."""
    made, steps = _built({"dp": 2}, "geo:4")
    _run(made, steps, batches("mlp", 8))
    autopar.checkpoint.save_checkpoint(f"{folder}/saved", made, steps)
    made.export(f"{folder}/weights")
    together, steps = _built({"dp": 2}, "ddp")
    plain, from_export = make("mlp")[0], _built({"dp": 2}, "zero3")[0]
    autopar.checkpoint.load_checkpoint(f"{folder}/saved", together, steps)
    autopar.checkpoint.load_checkpoint(f"{folder}/saved", plain)
    from_export.load_weights(f"{folder}/weights")
    assert steps.state_dict()["state"][0]["step"] == 8
    return tuple(full_state(m) for m in (made, together, plain, from_export))


def test_another_plan_takes_the_parameters_of_the_meeting(two_ranks: Ranks, tmp_path: Any) -> None:
    results = two_ranks.run(saved_and_read, str(tmp_path))
    for met, *read in results:
        assert [difference(each, met) for each in read] == [0] * 3
        assert difference(met, results[0][0]) == 0


@captured_once()
def between_meetings(folder: str) -> list[str]:
    """What a checkpoint, weights and a state dict say two steps after a meeting."""
    made, steps = _built({"dp": 2}, "local:4")
    _run(made, steps, batches("mlp", 6))
    said = []
    for act in (
        lambda: autopar.checkpoint.save_checkpoint(folder, made, steps),
        lambda: made.export(folder),
        made.state_dict,
    ):
        with pytest.raises(autopar.StepError) as caught:
            act()
        said.append(str(caught.value))
    made.meet()
    autopar.checkpoint.save_checkpoint(folder, made, steps)
    return said


def test_replicas_that_differ_are_not_saved(two_ranks: Ranks, tmp_path: Any) -> None:
    (said, others) = two_ranks.run(between_meetings, str(tmp_path / "saved"))
    assert said == others
    assert said[0] == (
        "Saving a checkpoint needs replicas that are alike, but 2 of 4 steps were done since those along dp "
        "synchronised. Do it after a multiple of 4 steps, or synchronise them earlier: model.meet(), on every rank."
    )
    assert [text.split(" needs")[0] for text in said[1:]] == ["Exporting weights", "A state dict"]


def test_the_remedy_of_a_meeting_that_is_due_is_to_hold_it() -> None:
    made, _ = _built({"dp": 1}, "local:1")
    made.step(*batches("mlp", 1)[0])
    with pytest.raises(autopar.StepError) as caught:
        made.state_dict()
    assert "They will synchronise when the next step begins" in str(caught.value) and "multiple" not in str(
        caught.value
    )
    made.meet()
    assert made.state_dict()


# --- bytes and memory


@captured_once()
def sent(recipe: str, count: int) -> float:
    """Bytes that a rank gives to collectives in a step, as the profiler sees them, over so many steps and a meeting."""
    made, steps = _built({"dp": 2}, recipe)
    made.step(*batches("mlp", 1)[0])
    made.meet()
    with torch.profiler.profile(record_shapes=True) as profile:
        _run(made, steps, batches("mlp", count))
        made.meet()
    shapes = [shape for event in profile.events() if event.name.startswith("gloo:") for shape in event.input_shapes]
    return sum(_elements(shape) for shape in shapes) * 8 / count


def _elements(shape: Any) -> int:
    """Elements of an argument that is a tensor or a list of tensors."""
    if shape and isinstance(shape[0], (list, tuple)):
        return sum(_elements(each) for each in shape)
    return torch.Size(shape).numel() if shape else 0


PARAMETER_BYTES = 8 * (8 * 32 + 32 + 32 * 8 + 8)


@pytest.mark.parametrize("recipe", ["local:4", "geo:4", "diloco:4"])
def test_replicas_send_their_parameters_once_in_so_many_steps(two_ranks: Ranks, recipe: str) -> None:
    assert two_ranks.run(sent, recipe, 4) == [PARAMETER_BYTES / 4] * 2


def test_data_parallelism_sends_as_much_in_every_step(two_ranks: Ranks) -> None:
    loss_bytes = 8
    assert two_ranks.run(sent, "ddp", 4) == [PARAMETER_BYTES + loss_bytes] * 2


@captured_once()
def kept(mesh: dict[str, int], recipe: Any) -> tuple[int, float]:
    """Bytes that a rank keeps for meetings after one, and what was priced for them."""
    model, batch, loss_fn = make("mlp")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=recipe, example_inputs=batch, micro_batches=1)  # type: ignore[arg-type]
    _run(made, optimizer_of("sgd", made), batches("mlp", 1))
    made.meet()
    meetings = made._meetings
    assert meetings is not None
    parts = made.explain().memory.part("optimizer").parts  # type: ignore[attr-defined]
    priced = sum(part.value for part in parts if "kept for meetings" in part.name)
    return meetings.kept_bytes, priced


@pytest.mark.parametrize(("recipe", "copies"), [("local:4", 0), ("geo:4", 1), ("diloco:4", 2)])
def test_what_meetings_keep_is_priced(two_ranks: Ranks, recipe: str, copies: int) -> None:
    assert two_ranks.run(kept, {"dp": 2}, recipe) == [(copies * PARAMETER_BYTES,) * 2] * 2


def test_replicas_in_shards_keep_shards(four_ranks: Ranks) -> None:
    found = four_ranks.run(kept, {"far": 2, "dp": 2}, {"far": "diloco:4", "dp": "zero3"})
    assert found == [(2 * PARAMETER_BYTES // 2,) * 2] * 4


def test_the_owner_of_all_parameters_keeps_all_that_meetings_need(four_ranks: Ranks) -> None:
    found = four_ranks.run(kept, {"far": 2, "dp": 2}, {"far": "diloco:4", "dp": "data-parallel"})
    most = 2 * PARAMETER_BYTES  # which is priced for the fullest rank
    assert found == [(most, most), (0, most)] * 2

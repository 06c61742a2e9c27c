"""What a user meets: optimizers made early, inputs of either shape, buffers, ties, modes, meta models."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

import autopar
from autopar.errors import CaptureError
from autopar.proof.verdict import nan_last
from tests.runtime.models import MLP, Normed, Tied, make, mean_square
from tests.runtime.ranks import Ranks, equal_on_all
from tests.runtime.training import difference, full_state, single, train
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess

DP = {"dp": 2}


def compile_mlp(
    recipe: str = "zero3", **kwargs: Any
) -> tuple[autopar.CompiledModule, tuple[Tensor, ...]]:
    model, batch, _ = make("mlp")
    return autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe, **kwargs), batch


# --- optimizers


def early_optimizers(recipe: str) -> list[float]:
    """Losses with an optimizer made before `compile`, and one made between it and the first step."""
    losses = []
    for before in (True, False):
        model, batch, _ = make("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if before else None
        made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe)
        optimizer = optimizer or torch.optim.AdamW(made.parameters(), lr=1e-2)
        for _ in range(3):
            losses.append(made.step(*batch).item())
            optimizer.step()
            optimizer.zero_grad()
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
            id(p) for p in made.parameters()
        }
    return losses


@pytest.mark.parametrize("recipe", often(["ddp", "zero1", "zero3"], ["zero1", "zero3"]))
def test_optimizers_made_before_the_first_step_are_right(two_ranks: Ranks, recipe: str) -> None:
    losses = equal_on_all(two_ranks.run(early_optimizers, recipe))
    model, batch, _ = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for _ in range(3):
        loss = mean_square(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected * 2, rel=1e-9)


# --- inputs


def local_inputs(micro_batches: int) -> tuple[float, float]:
    """The loss of a global batch, and of the same given as each rank's part."""
    made, (x, y) = compile_mlp("ddp", micro_batches=micro_batches)
    whole = made.step(x, y).item()
    rank = dist.get_rank()
    return whole, made.step(x.chunk(2)[rank], y.chunk(2)[rank]).item()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_rank_may_give_its_own_part(two_ranks: Ranks, micro_batches: int) -> None:
    whole, parts = equal_on_all(two_ranks.run(local_inputs, micro_batches))
    assert parts == pytest.approx(whole, rel=1e-12)


def indivisible_batch() -> str:
    made, (x, y) = compile_mlp("ddp", micro_batches=3)
    try:
        made.step(x, y)
    except autopar.StepError as error:
        return str(error)
    return "no error"


def test_micro_batches_that_do_not_divide_are_named(two_ranks: Ranks) -> None:
    message = equal_on_all(two_ranks.run(indivisible_batch))
    assert "shape [8, 8], and 3 micro-batches do not divide its first dim" in message


class Scaled(nn.Module):
    """Takes a dict, a keyword and a number, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, batch: dict[str, Tensor], *, scale: float, shift: Tensor) -> dict[str, Any]:
        y = self.linear(batch["x"]) * scale + shift
        return {"loss": F.mse_loss(y, batch["y"]), "outputs": [y, None]}


def scaled_loss(result: dict[str, Any]) -> Tensor:
    return result["loss"]


def trees() -> tuple[float, float, list[str]]:
    torch.manual_seed(0)
    model = Scaled()
    batch = {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 8).double()}
    shift = torch.randn(8, 8).double()
    expected = model(batch, scale=2.0, shift=shift)["loss"].item()
    made = autopar.compile(model, loss_fn=scaled_loss, mesh=DP, recipe="ddp")
    loss = made.step(batch, shift=shift, scale=2.0).item()
    result = made(batch, scale=2.0, shift=shift)
    return loss, expected, [*result, str(result["outputs"][1])]


def test_trees_keywords_and_numbers(two_ranks: Ranks) -> None:
    for loss, expected, keys in two_ranks.run(trees):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert keys == ["loss", "outputs", "None"]


class Times(nn.Module):
    """Multiplies by a number in the number's own way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: Tensor, by: float) -> Tensor:
        return self.linear(x) * (10 if by is True else 20 if isinstance(by, int) else 30)


def equal_numbers() -> list[float]:
    torch.manual_seed(0)
    made = autopar.compile(Times(), mesh=DP, recipe="ddp")
    x = torch.randn(8, 8).double()
    with torch.no_grad():
        results = [made(x, by) for by in (1, 1.0, True, 1)]
    return [(r.sum() / results[0].sum()).item() for r in results]


def test_equal_numbers_of_other_types_are_other_programs(two_ranks: Ranks) -> None:
    for found in two_ranks.run(equal_numbers):
        assert found == pytest.approx([1, 1.5, 0.5, 1])


def inputs_with_gradients() -> tuple[list[str], bool]:
    """What is said of inputs that require gradients, and whether no_grad allows them."""
    made, (x, y) = compile_mlp("ddp")
    messages = []
    for call in (lambda: made(x.requires_grad_()), lambda: made.step(x.requires_grad_(), y)):
        try:
            call()
        except autopar.StepError as error:
            messages.append(str(error))
    with torch.no_grad():
        return messages, not made(x).requires_grad


def test_inputs_take_no_gradients(two_ranks: Ranks) -> None:
    messages, allowed = equal_on_all(two_ranks.run(inputs_with_gradients))
    assert len(messages) == 2
    assert all("Input 'x' requires a gradient" in m for m in messages)
    assert all("gradients flow to parameters only" in m for m in messages)
    assert allowed


# --- state


def names_and_kinds(recipe: str) -> tuple[list[str], list[str], set[str], bool]:
    made, batch = compile_mlp(recipe)
    made.step(*batch)
    state = made.state_dict()
    kinds = {type(p).__name__ for p in made.parameters()}
    other, _ = compile_mlp(recipe)
    other.step(*batch)
    changed = {k: v * 2 for k, v in state.items()}
    other.load_state_dict(changed)
    loaded = full_state(other)
    same = all(torch.equal(loaded[k], v.full_tensor()) for k, v in changed.items())
    return list(state), [n for n, _ in made.named_parameters()], kinds, same


@pytest.mark.parametrize("recipe", ["zero1", "zero3"])
def test_names_are_the_models_own(two_ranks: Ranks, recipe: str) -> None:
    own = list(MLP().state_dict())
    for names, parameters, kinds, loads in two_ranks.run(names_and_kinds, recipe):
        assert names == parameters == own
        assert kinds == {"DTensor"}
        assert loads


def first_rank_differs() -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    model = MLP().double()
    _, batch, _ = make("mlp")
    torch.manual_seed(0)
    made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe="zero3")
    made.step(*batch)
    return full_state(made)


def test_all_ranks_begin_with_the_first_ones_values(two_ranks: Ranks) -> None:
    torch.manual_seed(0)
    expected = MLP().double().state_dict()
    for found in two_ranks.run(first_rank_differs):
        assert difference(found, dict(expected)) == 0


def tied_parameters() -> tuple[bool, int, int]:
    model, batch, loss_fn = make("tied")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=DP, recipe="zero3")  # type: ignore[arg-type]
    made.step(*batch)
    same = made.head.weight is made.embedding.weight
    return same, len(list(made.parameters())), len(made.state_dict())


def test_tied_parameters_stay_one(two_ranks: Ranks) -> None:
    assert equal_on_all(two_ranks.run(tied_parameters)) == (True, len(list(Tied().parameters())), 4)


# --- modes


def normed_modes() -> tuple[dict[str, Any], float, float]:
    """Training with batch norm, then the result of the running statistics, here and in one process."""
    model, batch, loss_fn = make("normed")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=DP, recipe="ddp", outputs="dtensor")  # type: ignore[arg-type]
    found = train(made, made.step, batch)
    reference = Normed().double()
    reference.load_state_dict(full_state(made))
    made.eval()
    reference.eval()
    assert not made.first.training
    with torch.no_grad():
        output = made(batch[0])
        worst = (output.full_tensor() - reference(batch[0])).abs().max().item()
    unchanged = difference(full_state(made), dict(reference.state_dict()))
    return found, worst, unchanged


def test_batch_norm_trains_and_evaluates(two_ranks: Ranks) -> None:
    expected = single("normed")
    for found, worst, unchanged in two_ranks.run(normed_modes):
        assert difference(found, expected) < 1e-9
        assert worst < 1e-12
        assert unchanged == 0


def forward_gradients(recipe: str) -> list[float]:
    """The difference of gradients when the user runs backward on the forward's result."""
    model, (x, y), _ = make("mlp")
    reference, _, _ = make("mlp")
    mean_square(reference(x), y).backward()
    made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe, outputs="dtensor")
    made.step(x, y)  # the forward then has its own program, on the same parameters
    made.zero_grad()
    output = made(x)
    assert isinstance(output, DTensor)
    mean_square(output.full_tensor(), y).backward()
    grads = {n: p.grad.full_tensor() for n, p in made.named_parameters()}  # type: ignore[union-attr]
    return [(grads[n] - p.grad).abs().max().item() for n, p in reference.named_parameters()]  # type: ignore[operator]


@pytest.mark.parametrize("recipe", often(["ddp", "zero1", "zero3", "tp"], ["zero3", "tp"]))
def test_forward_is_differentiable(two_ranks: Ranks, recipe: str) -> None:
    for found in two_ranks.run(forward_gradients, recipe):
        assert max(found, key=nan_last) < 1e-12


class Cached(nn.Module):
    """A sum over all rows of time so far, as a cache of keys and values has them."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows = self.map(x) if past is None else torch.cat([past, self.map(x)], 1)
        return rows.sum(1), rows


def fed_back() -> tuple[list[float], str, str]:
    """Distances of two calls that take what the first gave, of whole batches and of parts; what is refused."""
    torch.manual_seed(0)
    reference, x, rank = Cached().double(), torch.randn(4, 2, 4).double(), dist.get_rank()
    made = autopar.compile(copy.deepcopy(reference), mesh=DP, recipe="ddp", outputs="dtensor")
    with torch.no_grad():
        past = made(x)[1]
        want = reference(x, reference(x)[1])[0]
        whole, part = made(x, past)[0], made(x[2 * rank : 2 * rank + 2], past)[0]
        found = [(y.full_tensor() - want).abs().max().item() for y in (whole, part)]
        with pytest.raises(autopar.CaptureError) as mixed:
            made(x[:, :1] + rank, past.to_local()[:, :1])
    with pytest.raises(autopar.StepError) as attached:
        made(x, made(x)[1])
    return found, str(mixed.value), str(attached.value)


def test_dtensors_may_be_given_back(two_ranks: Ranks) -> None:
    for found, mixed, attached in two_ranks.run(fed_back):
        assert max(found, key=nan_last) < 1e-12
        assert "[4, 1, 4], [2, 1, 4] were taken for this rank's parts of [8, 1, 4], [4, 1" in mixed
        assert "'past' requires a gradient" in attached


def accumulated() -> float:
    """Two steps without zero_grad in between add up."""
    made, batch = compile_mlp("zero2", micro_batches=2)
    made.step(*batch)
    once = {n: p.grad.full_tensor().clone() for n, p in made.named_parameters()}  # type: ignore[union-attr]
    made.step(*batch)
    gaps = [p.grad.full_tensor() - 2 * once[n] for n, p in made.named_parameters()]  # type: ignore[union-attr]
    return max((gap.abs().max().item() for gap in gaps), key=nan_last)


def test_gradients_accumulate_over_steps(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(accumulated), key=nan_last) < 1e-12


# --- models without weights


def meta_model(recipe: str, use_init: bool) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Normed()
    _, batch, loss_fn = make("normed", torch.float32)
    init_fn = constant if use_init else None
    made = autopar.compile(
        model,
        loss_fn=loss_fn,
        mesh=DP,
        recipe=recipe,
        init_fn=init_fn,
        seed=7,  # type: ignore[arg-type]
    )
    made.step(*batch)
    assert not any(x.is_meta for x in [*made.parameters(), *made.buffers()])
    return full_state(made)


def constant(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()


def test_meta_models_are_materialised_by_their_modules(two_ranks: Ranks) -> None:
    (first, second), (sharded, _) = (two_ranks.run(meta_model, r, False) for r in ("ddp", "zero3"))
    assert difference(first, second) == difference(first, sharded) == 0
    torch.manual_seed(7)
    assert torch.equal(first["linear.weight"], nn.Linear(8, 8).weight)


def test_init_fn_takes_their_place(two_ranks: Ranks) -> None:
    for found in two_ranks.run(meta_model, "zero3", True):
        assert found["linear.weight"].eq(0.5).all()


# --- several programs


def dropped(recipe: str) -> tuple[list[float], bool]:
    """Losses with dropout, and whether the gathered states of both ranks agree afterwards."""
    torch.manual_seed(3 + dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8)).double()
    _, batch, _ = make("mlp")
    made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe)
    losses = [made.step(*batch).item() for _ in range(3)]
    return losses, len(set(losses)) == 3


@pytest.mark.parametrize("recipe", ["ddp", "tp"])
def test_dropout_draws_anew_and_alike(two_ranks: Ranks, recipe: str) -> None:
    _, varies = equal_on_all(two_ranks.run(dropped, recipe))
    assert varies


def other_shapes() -> list[tuple[int, ...]]:
    made, (x, y) = compile_mlp("zero3")
    made.step(x, y)
    made.prepare(x[:4], y[:4])
    made.step(x[:4], y[:4])
    with torch.no_grad():
        return [tuple(made(x[:n]).shape) for n in (8, 4, 2)]


def test_forwards_and_prepared_steps_of_other_shapes(two_ranks: Ranks) -> None:
    found = equal_on_all(two_ranks.run(other_shapes))
    assert [shape[1] for shape in found] == [8, 8, 8]


# --- parameters that take no part


class Partly(nn.Module):
    """One layer is frozen, and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(torch.relu(self.used(self.frozen(x))))


def partly(recipe: str) -> tuple[dict[str, Any], dict[str, bool]]:
    torch.manual_seed(0)
    model = Partly().double()
    made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe, micro_batches=2)
    found = train(made, made.step, make("mlp")[1])
    made.step(*make("mlp")[1])
    return found, {name: p.grad is None for name, p in made.named_parameters()}


@pytest.mark.parametrize("recipe", often(["zero1", "zero2", "zero3"], ["zero2", "zero3"]))
def test_frozen_and_unused_parameters_get_no_gradient(two_ranks: Ranks, recipe: str) -> None:
    torch.manual_seed(0)
    reference = Partly().double()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mean_square(reference(x), y)
        loss.backward()
        return loss.detach()

    expected = train(reference, step, make("mlp")[1])
    for found, without in two_ranks.run(partly, recipe):
        assert difference(found, expected) < 1e-9
        assert without == {name: not name.startswith("used") for name in without}


def unfrozen(recipe: str, local: bool) -> list[list[bool]]:
    """Whether gradients are right with a weight frozen, then free, then frozen again."""
    (model, (x, y), _), (reference, _, _) = make("mlp"), make("mlp")
    model.up.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe, micro_batches=2)
    found = []
    for free in (False, True, False):
        for each in (made, reference):
            each.up.weight.requires_grad_(free)
            each.zero_grad()
        mean_square(reference(x), y).backward()
        part = dist.get_rank() if local and free else None  # the first call tells the global shape
        made.step(*(b if part is None else b.chunk(2)[part] for b in (x, y)))
        found.append(
            [same_gradient(p, made.get_parameter(n)) for n, p in reference.named_parameters()]
        )
    return found


def same_gradient(expected: Tensor, found: Tensor) -> bool:
    if expected.grad is None or found.grad is None:
        return expected.grad is found.grad
    return torch.allclose(found.grad.full_tensor(), expected.grad, rtol=1e-9)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("recipe", "local"),
    often(
        [
            *itertools.product(("ddp", "zero1", "zero2", "zero3"), (False, True)),
            ("tp", False),  # where every rank takes the whole batch
        ],
        {("ddp", False), ("zero1", True), ("zero2", False), ("zero3", True), ("tp", False)},
    ),
)
def test_parameters_freeze_and_unfreeze(two_ranks: Ranks, recipe: str, local: bool) -> None:
    assert all(all(step) for found in two_ranks.run(unfrozen, recipe, local) for step in found)


# --- the model itself


def called_itself(recipe: str) -> tuple[str, bool]:
    """What is said where the original module is called, and whether what computes goes on computing."""
    made, batch = compile_mlp(recipe)
    x = batch[0]
    made.step(*batch)
    replicated = made.original(DTensor.from_local(x, made._settings.device_mesh)).full_tensor()
    with pytest.raises(autopar.StepError) as error:
        made.original(x)
    swapped = torch.func.functional_call(made.original, full_state(made), (x,))
    with implicit_replication():
        mixed = made.original(x).full_tensor()
    works = all(torch.allclose(each, replicated) for each in (swapped, mixed))
    return str(error.value), works


@pytest.mark.parametrize("recipe", ["ddp", "zero3"])
def test_the_model_itself_says_why_it_cannot_be_called(two_ranks: Ranks, recipe: str) -> None:
    message, works = equal_on_all(two_ranks.run(called_itself, recipe))
    assert message.startswith("The MLP that was compiled was called itself, with plain tensors")
    assert "Call the compiled module, or its step." in message and works


# --- hooks


def hooked(early: bool) -> str:
    """What a step of a model with hooks raises, which are made before `compile` or after."""
    model, batch, _ = make("mlp")
    if not early:
        model = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe="zero3")
    model.up.weight.register_hook(lambda grad: grad)  # type: ignore[union-attr, operator]
    model.up.bias.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[union-attr, operator]
    model.down.register_full_backward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    if early:
        model = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe="zero3")
    assert isinstance(model, autopar.CompiledModule)
    with pytest.raises(CaptureError) as caught:
        model.step(*batch)
    return str(caught.value)


@pytest.mark.parametrize("early", [True, False])
def test_backward_hooks_are_refused_by_owner_and_line(two_ranks: Ranks, early: bool) -> None:
    message = equal_on_all(two_ranks.run(hooked, early))
    line = rf"\({re.escape(__file__)}:\d+\)"
    owners = ["parameter 'up.weight'", "parameter 'up.bias'", "module 'down'"]
    assert re.search(", ".join(f"{owner} {line}" for owner in owners), message)
    assert "between `step` and the optimizer's" in message


# --- checkpoints


def saved(folder: str, recipe: str, load: bool) -> dict[str, Any]:
    """Trains three steps, and saves; or loads what was saved."""
    made, batch = compile_mlp(recipe)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    for _ in range(1 if load else 3):
        made.step(*batch)
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": made.state_dict(), "optimizer": get_optimizer_state_dict(made, optimizer)}
    if not load:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(made, optimizer, state["optimizer"])
    loss = made.step(*batch).item()
    optimizer.step()
    return {"loss": loss, **full_state(made)}


@pytest.mark.parametrize(("first", "second"), [("zero1", "zero3"), ("zero3", "ddp")])
def test_a_checkpoint_goes_on_under_another_recipe(
    two_ranks: Ranks, tmp_path: Path, first: str, second: str
) -> None:
    expected = two_ranks.run(saved, str(tmp_path / "c"), first, False)[0]
    for found in two_ranks.run(saved, str(tmp_path / "c"), second, True):
        assert difference(found, expected) < 1e-9


def evaluated(recipe: str) -> tuple[float, float, bool]:
    """A loss under no_grad, the loss of the step after it, and whether gradients were left between."""
    model, batch, loss_fn = make("gpt")
    made = autopar.compile(model, loss_fn=loss_fn, mesh={"dp": 2}, recipe=recipe, micro_batches=2)
    made.step(*batch)
    made.zero_grad()
    with torch.no_grad():
        alone = made.step(*batch).item()
    left = any(p.grad is not None for p in made.parameters())
    return alone, made.step(*batch).item(), left


@pytest.mark.parametrize(
    "recipe", often(["ddp", "zero1", "zero2", "zero3", "tp+sp"], ["ddp", "zero3", "tp+sp"])
)
def test_a_step_without_grad_is_an_evaluation(two_ranks: Ranks, recipe: str) -> None:
    for alone, stepped, left in two_ranks.run(evaluated, recipe):
        assert alone == pytest.approx(stepped, rel=1e-12)
        assert not left

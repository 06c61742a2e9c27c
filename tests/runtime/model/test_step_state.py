"""The state of a compiled module: names, ties, optimizers made early, meta models, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import autopar
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.runtime.models import MLP, Normed, Tied, make, mean_square
from tests.runtime.training import DP, compile_mlp, difference, full_state
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess


# --- optimizers


@captured_once()
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
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in made.parameters()}
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


# --- state


@captured_once()
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


@captured_once()
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


# --- gradients before the first step


@captured_once()
def gradients_with_earlier_ones(options: dict[str, Any]) -> list[dict[str, float]]:
    """Gradients of the first step less those of a plain one, by what was there before: all ones, or nothing."""
    _, batch, loss_fn = make("mlp")
    found = []
    for kind in ("before", "after", "cleared", "cleared by an early optimizer"):
        plain, model = make("mlp")[0], make("mlp")[0]
        loss_fn(plain(batch[0]), batch[1]).backward()  # type: ignore[operator]
        early = torch.optim.SGD(model.parameters()) if "early" in kind else None
        if kind != "after":
            set_ones(model)
        made = autopar.compile(model, loss_fn=loss_fn, **options)  # type: ignore[arg-type]
        if kind == "after":
            set_ones(made)
        elif kind == "cleared":
            made.zero_grad()
        elif early is not None:
            early.zero_grad()
        made.step(*batch)
        own = dict(plain.named_parameters())
        left = [p.grad.full_tensor() - own[n].grad for n, p in made.named_parameters()]  # type: ignore[union-attr]
        found.append({"least": min(x.min().item() for x in left), "most": max(x.max().item() for x in left)})
    return found


def set_ones(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def gradient_of_one_rank() -> str:
    made, batch = compile_mlp("ddp")
    if dist.get_rank() == 1:
        set_ones(made)
    with pytest.raises(autopar.StepError) as refused:
        made.step(*batch)
    return str(refused.value)


def test_the_first_step_adds_to_gradients_that_are_there(two_ranks: Ranks) -> None:
    for options in ({"mesh": DP, "recipe": "zero3"}, {"mesh": {"pp": 2}}):
        for found in two_ranks.run(gradients_with_earlier_ones, options):
            for gaps, expected in zip(found, (1, 1, 0, 0), strict=True):
                assert gaps == pytest.approx({"least": expected, "most": expected}, abs=1e-12)
    message = equal_on_all(two_ranks.run(gradient_of_one_rank))
    assert "has another gradient on rank 1 than on rank 0" in message


# --- models without weights


@captured_once()
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


@captured_once()
def loaded_before_the_first_step(options: dict[str, Any]) -> list[float]:
    """How far loaded values are from what the first step finds: copied, assigned, given by the first rank alone."""
    _, batch, loss_fn = make("normed", torch.float32)
    given = {name: torch.full_like(x, 2) for name, x in Normed().state_dict().items()}
    gaps = []
    for assign, from_all in ((False, True), (True, True), (False, False)):
        with torch.device("meta"):
            model = Normed()
        made = autopar.compile(model, loss_fn=loss_fn, init_fn=constant, **options)  # type: ignore[arg-type]
        if from_all or dist.get_rank() == 0:
            made.load_state_dict(given, assign=assign)
        with torch.no_grad():
            made.eval().step(*batch)
        gaps.append(max((x - given[name]).abs().max().item() for name, x in full_state(made).items()))
    return gaps


def loaded_in_part() -> tuple[dict[str, Tensor], str]:
    """The state of a meta-device model of which one tensor was loaded; the error of an entry without values."""
    _, batch, loss_fn = make("normed", torch.float32)
    with torch.device("meta"):
        model = Normed()
    made = autopar.compile(model, loss_fn=loss_fn, mesh=DP, recipe="ddp", init_fn=constant)  # type: ignore[arg-type]
    with pytest.raises(autopar.StepError) as refused:
        made.load_state_dict({"first.weight": torch.empty(8, device="meta")}, strict=False)
    made.load_state_dict({"first.weight": torch.arange(8.0)}, strict=False)
    with torch.no_grad():
        made.eval().step(*batch)
    return full_state(made), str(refused.value)


def test_a_state_dict_is_loaded_into_a_meta_model_before_the_first_step(two_ranks: Ranks) -> None:
    for options in ({"mesh": DP, "recipe": "zero3"}, {"mesh": {"pp": 2}}):
        assert two_ranks.run(loaded_before_the_first_step, options) == [[0, 0, 0]] * 2
    for state, refused in two_ranks.run(loaded_in_part):
        assert state["first.weight"].equal(torch.arange(8.0))
        assert state["first.bias"].eq(0.5).all() and state["linear.weight"].eq(0.5).all()
        assert refused.startswith("load_state_dict gave no values to first.weight (and 0 more)")


# --- checkpoints


@captured_once()
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
def test_a_checkpoint_goes_on_under_another_recipe(two_ranks: Ranks, tmp_path: Path, first: str, second: str) -> None:
    expected = two_ranks.run(saved, str(tmp_path / "c"), first, False)[0]
    for found in two_ranks.run(saved, str(tmp_path / "c"), second, True):
        assert difference(found, expected) < 1e-9

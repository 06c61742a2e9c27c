"""`autopar.shard_`: an ordinary script whose parameters, gradients and optimizer states lie in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autopar
from autopar.errors import CaptureError, MeshError, RecipeError
from tests.runtime import scripts
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import difference, full_state

TWO = {"dp": 2, "tp": 2}


def _full(found: dict[str, Any]) -> dict[str, Any]:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}


def _run(names: list[str], recipe: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What scripts give whose models are sharded first."""
    found = []

    def compile(model: nn.Module) -> Any:
        autopar.shard_(model, recipe, mesh=options["mesh"])
        return torch.compile(model, backend="autopar", options=options)

    for name in names:
        torch.compiler.reset()
        found.append(_full(scripts.run(name, compile)))
    return found


def _distances(results: list[list[dict[str, Any]]], names: list[str]) -> dict[str, float]:
    """Script -> the largest difference of a rank from one device."""
    distances = {}
    for i, name in enumerate(names):
        expected = scripts.run(name)
        distances[name] = max(difference(each[i], expected) for each in results)
    return distances


@pytest.mark.multiprocess
def test_scripts_on_two_ranks(two_ranks: Ranks) -> None:
    names = ["batch_norm", "graph_break", "inference", "tied"]
    names += ["gradient_penalty", "complex_weight", "inner_gradient"]
    options = {"mesh": {"dp": 2}, "recipe": "ddp"}
    distances = _distances(two_ranks.run(_run, names, "zero3", options), names)
    assert max(distances.values()) < 1e-9, distances


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["graph_break", pytest.param("loss_outside", marks=pytest.mark.slow)])
def test_scripts_on_two_axes(four_ranks: Ranks, name: str) -> None:
    names = [name]
    options = {"mesh": TWO, "recipe": {"dp": "ddp", "tp": "tp"}}
    found = four_ranks.run(_run, names, {"dp": "zero3", "tp": "zero3"}, options)
    distances = _distances(found, names)
    assert max(distances.values()) < 1e-9, distances


class _Model(nn.Module):
    """24 numbers that two ranks cut, 3 that they do not, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)
        self.odd = nn.Parameter(torch.ones(3))
        self.down.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))).sum(1, keepdim=True) * self.odd).square().mean()


def _trained(model: nn.Module, call: Callable[[Tensor], Tensor], optimizer: Any) -> list[float]:
    losses = []
    for _ in range(3):
        loss = call(torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _model() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = _Model().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _numel(x: Any) -> int:
    return x.to_local().numel() if isinstance(x, DTensor) else x.numel()


def _loaded(model: nn.Module, trained: dict[str, Any]) -> Iterator[bool]:
    """Whether whole parameters, as one device saves them, are cut where they are loaded."""
    for assign in (False, True):
        whole = {name: x + 1 + assign for name, x in trained.items()}
        placements = [x.placements for x in model.parameters()]
        model.load_state_dict(whole, assign=assign)
        yield [x.placements for x in model.parameters()] == placements
        yield all(torch.equal(x, whole[name]) for name, x in full_state(model).items())


def _in_shards(folder: str) -> dict[str, Any]:
    """An optimizer made before, what is held between steps, and a checkpoint that is loaded whole."""
    torch.compiler.reset()
    model, optimizer = _model()
    autopar.shard_(model)
    compiled = torch.compile(model, backend="autopar", options={"recipe": "ddp"})
    losses = _trained(model, compiled, optimizer)
    parameters = dict(model.named_parameters())
    gradients = {n: x.grad for n, x in parameters.items() if x.grad is not None}
    state = [x for each in optimizer.state.values() for x in each.values() if x.dim()]
    autopar.checkpoint.save_checkpoint(folder, compiled, optimizer)  # by the names of the model
    plain, _ = _model()
    autopar.checkpoint.load_checkpoint(folder, plain)
    with torch.no_grad():
        x = torch.ones(2, 4, dtype=torch.float64)
        same = torch.allclose(model(x), plain(x), atol=1e-12)  # uncompiled, too
    trained = full_state(model)
    return {
        "losses": losses,
        "state": trained,
        "loaded": [*_loaded(model, trained)],
        "placements": {name: x.placements for name, x in parameters.items()},
        "held": sum(map(_numel, parameters.values())),
        "moments": sum(map(_numel, state)),
        "gradients": {name: (g.placements, _numel(g)) for name, g in gradients.items()},
        "plain": same and torch.equal(trained["odd"], plain.odd),
    }


@pytest.mark.multiprocess
def test_only_shards_are_held_between_steps(two_ranks: Ranks, tmp_path: Path) -> None:
    model, optimizer = _model()
    losses = _trained(model, model, optimizer)
    for found in two_ranks.run(_in_shards, str(tmp_path / "checkpoint")):
        assert difference({"losses": found["losses"]}, {"losses": losses}) < 1e-9
        assert difference(found["state"], full_state(model)) < 1e-9
        assert found["placements"] == {"up.weight": (Shard(0),), "down.weight": (Shard(0),), "odd": (Replicate(),)}
        assert found["held"] == (16 + 8) // 2 + 3
        assert found["moments"] == 2 * (16 // 2 + 3)  # of what is trained
        assert found["gradients"] == {"up.weight": ((Shard(0),), 8), "odd": ((Replicate(),), 3)}
        assert found["plain"] and found["loaded"] == [True] * 4


class _Reading(nn.Module):
    """Reads a weight of another module, in a block that backward runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        block = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        return block(lambda x: F.linear(x, self.up.weight).square(), x).mean()


def _one_weight(is_split: bool, is_compiled: bool) -> dict[str, Tensor]:
    """What a script that names one weight gets: its norm and clipped gradient, and the loss after it was filled."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = autopar.shard_(_Reading().double()) if is_split else _Reading().double()
    compiled = partial(torch.compile, backend="autopar", options={"mesh": {"dp": 2}})
    call = compiled(model) if is_compiled else model
    x = torch.arange(16, dtype=torch.float64).view(4, 4)
    call(x).backward()
    weight = model.up.weight
    norm = torch.nn.utils.clip_grad_norm_(weight, 0.1)
    found = {"norm": norm, "gradient": weight.grad.clone()}
    torch.nn.init.constant_(weight, 0.5)
    return {n: v.detach() for n, v in _full({**found, "filled": call(x)}).items()}


@pytest.mark.multiprocess
def test_a_weight_that_a_script_names_is_the_parameter(two_ranks: Ranks) -> None:
    plain = _one_weight(False, False)
    # the rows of x sum to 6, 22, 38, 54
    assert plain["norm"] > 1 and plain["filled"] == (3**2 + 11**2 + 19**2 + 27**2) / 4
    for is_compiled in (False, True):
        for found in two_ranks.run(_one_weight, True, is_compiled):
            assert difference(found, plain) < 1e-9


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _of_a_plan() -> dict[str, Any]:
    torch.manual_seed(0)
    model = _Residual().double()
    x = torch.ones(4, 8, dtype=torch.float64)
    expected = model(x)
    autopar.shard_(model, "tp", mesh={"tp": 2}, example_inputs=x)
    torch.compiler.reset()
    options = {"mesh": {"tp": 2}, "recipe": "tp"}
    found = torch.compile(model, backend="autopar", options=options)(x)
    return {
        "difference": (found - expected).abs().max().item(),
        "placements": [p.placements for p in model.parameters()],
    }


@pytest.mark.multiprocess
def test_tensor_parallel_layouts_come_from_a_plan(two_ranks: Ranks) -> None:
    for found in two_ranks.run(_of_a_plan):
        assert found["difference"] < 1e-12
        # Columns, then rows; the last bias is added to a sum over ranks.
        assert found["placements"][::2] == [(Shard(0),), (Shard(1),)]


def _refused() -> list[str]:
    messages = []

    def note(error: type[Exception], *args: Any, **kwargs: Any) -> None:
        with pytest.raises(error) as caught:
            autopar.shard_(*args, **kwargs)
        messages.append(str(caught.value))

    model = nn.Linear(4, 4)
    torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    note(MeshError, model, mesh={"dp": 3})
    note(RecipeError, model, "tp")
    note(CaptureError, nn.LSTM(4, 4))
    note(CaptureError, nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)))
    note(CaptureError, autopar.shard_(model))
    other = torch.compile(model, backend="autopar", options={"mesh": {"data": 2}})
    with pytest.raises(Exception, match="cut the parameters over the mesh dp=2, but the backend is"):
        other(torch.ones(2, 4))
    return messages


@pytest.mark.multiprocess
def test_what_cannot_be_sharded_is_named(two_ranks: Ranks) -> None:
    for mesh, recipe, module, changed, again in two_ranks.run(_refused):
        assert "The mesh dp=3 has 3 ranks, but 2 run here" in mesh
        assert "recipe tp shards parameters depend on what the model computes" in recipe
        assert "(LSTM) holds parameter weight_ih_l0 in its attribute '_flat_weights' too" in module
        assert "The forward changes the parameter 0.weight in place; do that outside" in changed
        assert "weight is a DTensor already" in again

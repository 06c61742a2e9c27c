"""Parameters and gradients of a model whose stages lie on several ranks, as a user sees them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpt import loss_fn
from torch import Tensor, nn

import autopar
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.runtime.models import make, mean_square
from tests.runtime.pipeline.staged_runs import compiled, gradients, held, tied_gpt, together, worst
from tests.support.peak import PeakBytes
from tests.support.staged import captured_once, plan_for
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess


# --- state


@captured_once()
def states() -> tuple[list[str], list[str], float]:
    """Entries before and after the first step; how far a loaded state is from what was given."""
    model, batch, loss = make("normed")
    made = compiled(model, batch, loss, ranks=2)
    before = list(made.state_dict())
    made.step(*batch)
    state = made.state_dict()
    doubled = {k: getattr(v, "full_tensor", lambda v=v: v)() * 2 for k, v in state.items()}
    made.load_state_dict({k: v * 2 for k, v in state.items()})
    loaded = {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in made.state_dict().items()}
    return before, list(state), worst(loaded, doubled)


def test_the_state_dict_of_every_rank_is_the_models(two_ranks: Ranks) -> None:
    own = list(make("normed")[0].state_dict())
    assert two_ranks.run(states) == [(own, own, 0.0)] * 2


@captured_once()
def missing_entries() -> tuple[str, list[str]]:
    model, batch, loss = make("mlp")
    made = compiled(model, batch, loss)
    made.step(*batch)
    own = made.state_dict()
    own.pop("up.weight" if dist.get_rank() == 0 else "down.weight")
    try:
        made.load_state_dict(own)
    except RuntimeError as error:
        message = str(error)
    return message, list(made.load_state_dict(own, strict=False).missing_keys)


def test_a_missing_entry_of_this_ranks_is_named(two_ranks: Ranks) -> None:
    for name, (message, missing) in zip(["up.weight", "down.weight"], two_ranks.run(missing_entries), strict=True):
        assert f'Missing key(s) in state_dict: "{name}"' in message
        assert missing == [name]


@captured_once()
def early_optimizer() -> tuple[list[float], list[str]]:
    model, batch, loss = make("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made = compiled(model, batch, loss)
    losses = []
    for _ in range(3):
        losses.append(made.step(*batch).item())
        optimizer.step()
        optimizer.zero_grad()
    names = {id(p): n for n, p in made.named_parameters()}
    return losses, [names[id(p)] for g in optimizer.param_groups for p in g["params"]]


def test_an_optimizer_made_before_holds_all_parameters(two_ranks: Ranks) -> None:
    model, batch, loss = make("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for _ in range(3):
        value = loss(model(batch[0]), batch[1])  # type: ignore[operator]
        value.backward()
        expected.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    results = two_ranks.run(early_optimizer)
    for losses, names in results:
        assert names == [name for name, _ in model.named_parameters()]
        assert losses == pytest.approx(expected, rel=1e-9)


# --- gradients


@captured_once()
def frozen(schedule: str) -> dict[str, Tensor]:
    """The first stage has nothing to train, and one weight behind it has not either."""
    model, batch, loss = make("gpt")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("token", "position", "blocks.0", "norm")))
    made = compiled(model, batch, loss, schedule=schedule)
    made.step(*batch)
    return gradients(made)


@pytest.mark.parametrize("schedule", often(["1f1b", "zb"], ["zb"]))
def test_frozen_parameters_get_no_gradient(two_ranks: Ranks, schedule: str) -> None:
    model, batch, loss = make("gpt")
    loss(model(batch[0]), batch[1]).backward()  # type: ignore[operator]
    expected = gradients(model)
    found = together(two_ranks.run(frozen, schedule))
    assert found.keys() == {n for n in expected if n.startswith(("blocks.1", "head"))}
    assert worst(found, expected) < 1e-12


@captured_once()
def accumulated(schedule: str) -> float:
    model, batch, loss = make("gpt")
    made = compiled(model, batch, loss, schedule=schedule)
    made.step(*batch)
    once = gradients(made)
    made.step(*batch)
    return worst(gradients(made), {n: 2 * g for n, g in once.items()})


@pytest.mark.parametrize("schedule", often(["1f1b", "dualpipev"], ["dualpipev"]))
def test_gradients_add_up_over_steps(two_ranks: Ranks, schedule: str) -> None:
    assert max(two_ranks.run(accumulated, schedule)) < 1e-12


@captured_once()
def norms() -> list[float]:
    model, batch = tied_gpt()
    made = compiled(model, batch, loss_fn, mesh={"dp": 2}, recipe="zero3")
    found = []
    for norm_type in (2.0, 1.0, float("inf")):
        made.zero_grad()
        made.step(*batch)
        found.append(made.clip_grad_norm_(0.1, norm_type).item())
    return found


def test_the_norm_is_that_of_the_whole_model(four_ranks: Ranks) -> None:
    """Stages, shards of them, and a matrix that two stages hold."""
    model, batch = tied_gpt()
    expected = []
    for norm_type in (2.0, 1.0, float("inf")):
        model.zero_grad()
        loss_fn(model(batch[0]), batch[1]).backward()
        expected.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type).item())
    assert equal_on_all(four_ranks.run(norms)) == pytest.approx(expected, rel=1e-9)


# --- models without weights


def layers(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))


def materialised() -> tuple[float, float, bool]:
    """Bytes over those of one layer: at the most while placing, and held; whether all is filled."""
    width, batch = 128, (torch.randn(4, 128), torch.randn(4, 128))
    with torch.device("meta"):
        model = layers(width)
    plan = plan_for(layers(width), batch, mean_square, "1f1b", 4, 4)
    with PeakBytes() as bytes_:
        made = autopar.compile(model, loss_fn=mean_square, plan=plan)
        made.prepare(*batch)
    held_bytes = sum(made.get_parameter(name).nbytes for name in held(made))
    return (
        bytes_.most / (4 * width**2),
        held_bytes / (4 * width**2),
        all(p.full_tensor().std() > 0 for p in made.parameters()),  # type: ignore[attr-defined]
    )


def test_a_stage_is_all_that_a_rank_materialises(four_ranks: Ranks) -> None:
    """Two of eight layers, once as their modules fill them and once as they are kept."""
    for most, layers_held, filled in four_ranks.run(materialised):
        assert (layers_held, filled) == (2, True)
        assert most < 4.5, most

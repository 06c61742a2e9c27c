"""Pipeline stages on real ranks: what a user meets, against one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, GPTConfig, loss_fn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import _torch
from autopar.ir import SCHEDULES, Pipeline
from autopar.proof.verdict import nan_last
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.runtime.models import Batch, make, mean_square
from tests.runtime.training import difference, single, train
from tests.support.peak import PeakBytes
from tests.support.staged import captured_once, plan_for, prepared_once, with_stages
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess


def compiled(
    model: nn.Module,
    batch: Batch,
    loss: Any,
    *,
    schedule: str = "1f1b",
    ranks: int = 2,
    micro_batches: int = 4,
    mesh: dict[str, int] | None = None,
    recipe: Any = "auto",
) -> autopar.CompiledModule:
    plan = plan_for(model, batch, loss, schedule, ranks, micro_batches, mesh, recipe)
    return autopar.compile(model, loss_fn=loss, plan=plan)


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks have, as one has it."""
    found: dict[str, Any] = {}
    for part in parts:
        found |= part
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            g = parameter.grad
            found[name] = (g.full_tensor() if isinstance(g, DTensor) else g).clone()
    return found


def held(model: nn.Module) -> list[str]:
    """The parameters that this rank has."""
    return [name for name, p in model.named_parameters() if not _torch.is_elsewhere(p)]


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() <= expected.keys()
    return max(((found[n] - expected[n]).abs().max().item() for n in found), key=nan_last)


# --- schedules


@captured_once()
def trained(name: str, schedule: str, ranks: int, mesh: Any, recipe: Any) -> dict[str, Any]:
    model, batch, loss = make(name)
    made = compiled(model, batch, loss, schedule=schedule, ranks=ranks, mesh=mesh, recipe=recipe)
    return train(made, made.step, batch)


def distance(parts: list[dict[str, Any]], name: str) -> float:
    """The largest difference from one process, of every rank with its own losses and parameters."""
    return distance_of(parts, single(name))


def distance_of(parts: list[dict[str, Any]], expected: dict[str, Any]) -> float:
    whole = together(parts)
    return max(difference({key: (whole | part)[key] for key in expected}, expected) for part in parts)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(two_ranks: Ranks, schedule: str) -> None:
    assert distance(two_ranks.run(trained, "gpt", schedule, 2, None, "auto"), "gpt") < 1e-9


@pytest.mark.parametrize(
    ("schedule", "mesh", "recipe"),
    [
        pytest.param("1f1b", {"dp": 2}, "zero1", marks=pytest.mark.slow),
        pytest.param("interleaved", {"dp": 2}, "zero2", marks=pytest.mark.slow),
        ("zb", {"dp": 2}, "zero3"),
        ("interleaved", {"dp": 2}, "parameter-server"),
        pytest.param("zbv", {"tp": 2}, "tp", marks=pytest.mark.slow),
        ("dualpipev", {"tp": 2}, "tp+sp"),
    ],
)
def test_schedules_with_other_axes(four_ranks: Ranks, schedule: str, mesh: dict[str, int], recipe: str) -> None:
    assert distance(four_ranks.run(trained, "gpt", schedule, 2, mesh, recipe), "gpt") < 1e-9


# --- values without gradients between stages


class Choosing(nn.Module):
    """Hands whole numbers, booleans and a float without gradient from the first stage to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        place, seen, other = h.argmax(-1), h > 0.1, h.detach() * 2
        h = self.b(h).tanh() * seen
        y = self.c(h).tanh() + other
        return y * (1 + nn.functional.one_hot(place, 8))


def sum_of_squares(y: Tensor) -> Tensor:
    return (y * y).sum()


def choosing() -> tuple[Choosing, Batch]:
    torch.manual_seed(0)
    return Choosing(), (torch.randn(8, 8, dtype=torch.float64),)


@captured_once()
def trained_choosing(schedule: str, cuts: tuple[str, ...]) -> dict[str, Any]:
    model, batch = choosing()
    prepared = prepared_once(model, (batch[0][:2],), sum_of_squares)
    plan = with_stages(prepared, Pipeline(2, schedule, cuts), 4)
    made = autopar.compile(model, loss_fn=sum_of_squares, plan=plan)
    return train(made, made.step, batch)


@pytest.mark.parametrize(("schedule", "cuts"), [("1f1b", ("tanh",)), ("zbv", ("relu", "tanh", "tanh_1"))])
def test_values_without_gradients_pass_stages(two_ranks: Ranks, schedule: str, cuts: tuple[str, ...]) -> None:
    model, batch = choosing()

    def step(x: Tensor) -> Tensor:
        loss = sum_of_squares(model(x))
        loss.backward()
        return loss

    found = two_ranks.run(trained_choosing, schedule, cuts)
    assert distance_of(found, train(model, step, batch)) < 1e-9


# --- tied parameters


def tied_gpt() -> tuple[nn.Module, Batch]:
    model = GPT(GPTConfig(seq_len=8, layers=2, heads=4, width=16)).double()
    model.head.weight = model.token_embedding.weight
    tokens = torch.arange(64).reshape(8, 8) * 7 % 256
    return model, (tokens, tokens.roll(1, 1))


@captured_once()
def train_tied(
    schedule: str, ranks: int, mesh: dict[str, int] | None = None, recipe: str = "auto"
) -> tuple[dict[str, Any], list[str]]:
    model, batch = tied_gpt()
    made = compiled(model, batch, loss_fn, schedule=schedule, ranks=ranks, mesh=mesh, recipe=recipe)
    found = train(made, made.step, batch)
    return found, held(made)


def single_tied() -> dict[str, Any]:
    model, batch = tied_gpt()

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        return loss.detach()

    return train(model, step, batch)


@pytest.mark.parametrize(("schedule", "ranks"), often([("1f1b", 2), ("zbv", 2), ("1f1b", 4)], [("zbv", 2)]))
def test_a_tied_matrix_is_the_same_on_both_of_its_stages(
    two_ranks: Ranks, four_ranks: Ranks, schedule: str, ranks: int
) -> None:
    """Trained with AdamW and clipping, whose norm counts it once."""
    results = (two_ranks if ranks == 2 else four_ranks).run(train_tied, schedule, ranks)
    expected = single_tied()
    holders = [i for i, (_, names) in enumerate(results) if "token_embedding.weight" in names]
    assert holders == ([0] if schedule == "zbv" else [0, ranks - 1])
    assert distance_of([found for found, _ in results], expected) < 1e-9


def test_the_owner_of_a_tied_matrix_is_one_rank_of_each_of_its_stages(four_ranks: Ranks) -> None:
    results = four_ranks.run(train_tied, "1f1b", 2, {"dp": 2}, "parameter-server")
    assert distance_of([found for found, _ in results], single_tied()) < 1e-9


# --- without a step


@captured_once()
def forwards() -> tuple[bool, float]:
    model, batch, loss = make("gpt")
    reference, _, _ = make("gpt")
    made = compiled(model, batch, loss)
    made.step(*batch)
    with torch.no_grad():
        results = [made(batch[0]) for _ in range(2)]
        expected = reference(batch[0])
    return torch.equal(*results), (results[0] - expected).abs().max().item()


def test_a_forward_gives_its_result_to_all_ranks(two_ranks: Ranks) -> None:
    for same, error in two_ranks.run(forwards):
        assert same and error < 1e-12


@captured_once()
def losses_outside(schedule: str, mesh: Any, recipe: Any) -> tuple[float, float, str]:
    """Distances of gradients from one process: of two backwards of one result, and of some by `autograd.grad`."""
    model, (tokens, targets), _ = make("gpt")
    reference, _, _ = make("gpt")
    made = compiled(model, (tokens, targets), loss_fn, schedule=schedule, mesh=mesh, recipe=recipe)
    made.step(tokens, targets)
    made.zero_grad()
    for each in (reference, made):
        logits = each(tokens)
        logits.square().mean().backward(retain_graph=True)
        loss_fn(logits, targets).backward()
    far = worst(gradients(made), gradients(reference))
    own = dict(made.named_parameters())
    found = torch.autograd.grad(loss_fn(made(tokens), targets), list(own.values()))
    once = torch.autograd.grad(
        loss_fn(reference(tokens), targets), [dict(reference.named_parameters())[n] for n in own]
    )
    pairs = zip((x.full_tensor() for x in found), once, strict=True)
    with pytest.raises(autopar.StepError) as caught:
        torch.autograd.grad(made(tokens).sum(), list(own.values()), create_graph=True)
    return far, max((a - b).abs().max().item() for a, b in pairs), str(caught.value)


@pytest.mark.parametrize("schedule", often(["1f1b", "interleaved", "zbv"], ["interleaved"]))
def test_a_loss_outside_of_the_model_goes_back_through_the_stages(two_ranks: Ranks, schedule: str) -> None:
    for far, apart, message in two_ranks.run(losses_outside, schedule, None, "auto"):
        assert max(far, apart) < 1e-12
        assert message.startswith("A derivative of a gradient was asked for")


def test_a_loss_outside_of_stages_that_are_sharded(four_ranks: Ranks) -> None:
    for far, apart, _ in four_ranks.run(losses_outside, "interleaved", {"dp": 2}, "zero3"):
        assert max(far, apart) < 1e-12


class TwoHeads(nn.Module):
    """Two results; the second needs the first stage, and one of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8).double() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x).relu()
        y = self.b(h).tanh()
        return self.c(y.detach()), self.d(y)


@captured_once()
def of_one_head() -> tuple[float, float]:
    """Distances of the gradients of each result alone; a parameter without a gradient has none."""
    torch.manual_seed(0)
    reference, x = TwoHeads(), torch.randn(8, 8, dtype=torch.float64)
    model = TwoHeads()
    model.load_state_dict(reference.state_dict())
    made = autopar.compile(model, mesh={"pp": 2})
    found = []
    for number in range(2):
        for each in (reference, made):
            each.zero_grad()
            each(x)[number].square().mean().backward()
        want = {n: g for n, g in gradients(reference).items() if n in held(made)}
        own = {n: p.grad.to_local() for n in held(made) if (p := made.get_parameter(n)).grad is not None}  # type: ignore[operator]
        assert own.keys() == want.keys()
        found.append(worst(own, want) if want else 0.0)
    return found[0], found[1]


def test_only_what_a_loss_needs_has_a_gradient_behind_stages(two_ranks: Ranks) -> None:
    for found in two_ranks.run(of_one_head):
        assert max(found) < 1e-12


@captured_once()
def tied_outside() -> str:
    model, (tokens, targets) = tied_gpt()
    made = compiled(model, (tokens, targets), loss_fn)
    made.step(tokens, targets)
    with pytest.raises(autopar.StepError) as caught:
        made(tokens)
    return str(caught.value)


def test_a_loss_outside_of_stages_that_share_a_parameter_is_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(tied_outside):
        assert "Several pipeline stages use the parameter token_embedding.weight" in message


@captured_once()
def losses_of_evaluation(schedule: str) -> tuple[list[float], bool, float]:
    """The loss without a backward before, between and behind steps; what is left in `.grad`."""
    model, batch, loss = make("gpt")
    made = compiled(model, batch, loss, schedule=schedule)
    with torch.no_grad():
        losses = [made.step(*batch).item()]
    none = not gradients(made)
    losses.append(made.step(*batch).item())
    once = gradients(made)
    with torch.no_grad():
        losses.append(made.step(*batch).item())
    return losses, none, worst(gradients(made), once)


@pytest.mark.parametrize("schedule", often(["1f1b", "interleaved", "zbv"], ["interleaved", "zbv"]))
def test_a_step_under_no_grad_is_the_loss_alone(two_ranks: Ranks, schedule: str) -> None:
    model, batch, loss = make("gpt")
    expected = loss(model(batch[0]), batch[1]).item()  # type: ignore[operator]
    for losses, none, changed in two_ranks.run(losses_of_evaluation, schedule):
        assert losses == pytest.approx([expected] * 3, rel=1e-12)
        assert none and changed == 0


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


# --- random numbers


class Dropped(nn.Module):
    """Multiplies by two vectors of ones with a dropout between: their gradients are the mask's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.first, 0.5, self.training) * self.second


def total(y: Tensor) -> Tensor:
    return y.sum()


def dropped_plan(x: Tensor, schedule: str, cut: str) -> autopar.Plan:
    prepared = prepared_once(Dropped(), (x[:2],), total)
    return with_stages(prepared, Pipeline(2, schedule, (cut,)), 4)


@captured_once()
def masks(schedule: str, cut: str) -> list[tuple[float, Tensor]]:
    """The loss and this rank's gradient of three steps."""
    model, x = Dropped(), torch.ones(8, 64)
    made = autopar.compile(model, loss_fn=total, plan=dropped_plan(x, schedule, cut))
    found = []
    for _ in range(3):
        made.zero_grad()
        value = made.step(x).item()
        (name,) = held(made)
        found.append((value, gradients(made)[name]))
    return found


@pytest.mark.parametrize(
    ("schedule", "cut"),
    often(
        [(schedule, cut) for schedule in ("gpipe", "1f1b") for cut in ("native_dropout", "mul_1")],
        [("gpipe", "mul_1"), ("1f1b", "native_dropout")],
    ),
)
def test_both_sides_of_a_cut_see_one_mask(two_ranks: Ranks, schedule: str, cut: str) -> None:
    first, second = two_ranks.run(masks, schedule, cut)
    for (loss, g), (other_loss, other_g) in zip(first, second, strict=True):
        assert loss == other_loss == pytest.approx(g.sum().item(), rel=1e-6)
        assert torch.equal(g, other_g)
        assert 0.5 < g.mean() / 8 < 1.5  # the sum over 8 rows, whose halves are kept and doubled
    assert not torch.equal(first[0][1], first[1][1])


# --- modes, layouts of inputs and results, the place of the axis


@captured_once()
def modes() -> tuple[float, float, bool]:
    """The loss with dropout and without, and whether the forward without it is the model's."""
    model, x = Dropped(), torch.ones(8, 64)
    made = autopar.compile(model, loss_fn=total, plan=dropped_plan(x, "1f1b", "mul_1"))
    trained = made.step(x).item()
    made.eval()
    with torch.no_grad():
        evaluated, results = made.step(x).item(), made(x)
    return trained, evaluated, torch.equal(results, torch.ones(8, 64))


def test_another_mode_is_another_program_on_the_same_stages(two_ranks: Ranks) -> None:
    trained, evaluated, same = equal_on_all(two_ranks.run(modes))
    assert trained != evaluated == 512 and same  # 8 rows of 64 ones


@captured_once()
def inner_axis() -> tuple[dict[str, Any], float, float]:
    """Stages along the second axis, the batch in parts, the result as a DTensor."""
    model, batch = tied_gpt()
    plan = plan_for(model, batch, loss_fn, "1f1b", 2, 4, {"dp": 2}, "zero1")
    assert plan.pipeline is not None
    plan = replace(plan, pipeline=replace(plan.pipeline, position=1))
    made = autopar.compile(model, loss_fn=loss_fn, plan=plan, outputs="dtensor")
    place = dist.get_rank() // 2
    with torch.no_grad():
        whole = made.step(*batch).item()
        part = made.step(*(x.chunk(2)[place] for x in batch)).item()
        result = made(batch[0]).full_tensor()
    error = (result - tied_gpt()[0](batch[0])).abs().max().item()
    return train(made, made.step, batch), abs(whole - part), error


def test_stages_along_the_inner_axis(four_ranks: Ranks) -> None:
    results = four_ranks.run(inner_axis)
    expected = single_tied()
    whole = together([found for found, _, _ in results])
    for found, parts, error in results:
        assert difference({key: (whole | found)[key] for key in expected}, expected) < 1e-9
        assert parts < 1e-12 and error < 1e-12


# --- what is refused


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except autopar.AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@captured_once()
def refusals() -> list[str]:
    model, batch, loss = make("gpt")
    made = compiled(model, batch, loss)
    made.step(*batch)
    few, one = make("gpt")[0], make("gpt")[0]
    return [
        message_of(lambda: compiled(few, batch, loss, micro_batches=1).step(*batch)),
        message_of(lambda: autopar.compile(one, loss_fn=loss, plan=made.plan, micro_batches=2)),
        message_of(lambda: autopar.compile(one, loss_fn=loss, plan=made.plan, mesh={"dp": 2})),
    ]


def test_refusals_have_their_numbers(two_ranks: Ranks) -> None:
    few, count, mesh = equal_on_all(two_ranks.run(refusals))
    assert few.startswith("PlanError: The schedule 1f1b takes at least as many micro-batches as")
    assert "The plan has micro_batches=4, and compile was given micro_batches=2" in count
    assert mesh == ("MeshError: The plan was made for the mesh pp=2,dp=1, but the mesh given is dp=2.")

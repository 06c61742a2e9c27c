"""Replicas that exchange with an asynchronous server: real ranks train as plain PyTorch does in the recorded order."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.ir.order import Order
from tests.runtime.gloo_ranks import CONTEXT, Ranks, join
from tests.runtime.models import make, mean_square
from tests.runtime.replicas.test_meetings import PARAMETER_BYTES, batches, expected, optimizer_of
from tests.runtime.training import difference, full_state
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

STEPS = 20


def run(model: autopar.CompiledModule, optimizer: torch.optim.Optimizer, own: Any, pause: float = 0.0) -> None:
    """Steps with pauses of random lengths, up to so many seconds, which mix up the order of the ranks."""
    pauses = random.Random(dist.get_rank())
    for each in own:
        model.step(*each)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pauses.random() * pause)


@captured_once()
def trained(
    recipe: str, optimizer: str, name: str = "mlp", count: int = STEPS, pause: float = 0.0
) -> tuple[str, dict[str, Any]]:
    """The order of the exchanges, and this rank's parameters after a meeting."""
    model, _, loss_fn = make(name)
    mesh = {"dp": dist.get_world_size()}
    made = autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=recipe)  # type: ignore[arg-type]
    run(made, optimizer_of(optimizer, made), batches(name, count), pause)
    return str(made.meet()), full_state(made.original)


def replayed(order: str, replicas: int, optimizer: str, name: str, count: int) -> dict[str, Any]:
    """The same in plain PyTorch, in one process."""
    model, _, loss_fn = make(name)
    found = autopar.replay(
        model,
        batches(name, count),
        order,
        replicas=replicas,
        loss_fn=loss_fn,  # type: ignore[arg-type]
        optimizer_of=lambda own: optimizer_of(optimizer, own),
    )
    return full_state(found[0])


def test_without_staleness_sgd_is_data_parallelism(four_ranks: Ranks) -> None:
    results = four_ranks.run(trained, "async-server:0", "sgd", "mlp", STEPS, 0.01)
    ((order, reference), *_) = four_ranks.run(trained, "ddp", "sgd")
    assert order == "None"
    assert [difference(found, reference) < 1e-12 for _, found in results] == [True] * 4


def test_without_staleness_it_is_a_meeting_after_every_step(two_ranks: Ranks) -> None:
    reference = expected("mlp", 2, "geo:1", "adamw")[0]
    reference.pop("losses")
    for _, found in two_ranks.run(trained, "async-server:0", "adamw"):
        assert difference(found, reference) < 1e-9


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_replay_gives_what_four_ranks_had(four_ranks: Ranks, staleness: int, optimizer: str) -> None:
    results = four_ranks.run(trained, f"async-server:{staleness}", optimizer, "mlp", STEPS, 0.01)
    ((order, _), *_) = results
    read = Order.parse(4, order)
    assert read.staleness <= staleness and (read.staleness > 0) == (staleness > 0)
    assert sum(event.steps for event in read.events) == 4 * STEPS
    reference = replayed(order, 4, optimizer, "mlp", STEPS)
    assert [difference(found, reference) < 1e-9 for _, found in results] == [True] * 4


def test_running_statistics_are_exchanged(two_ranks: Ranks) -> None:
    results = two_ranks.run(trained, "async-server:1", "sgd", "normed", 6, 0.02)
    reference = replayed(results[0][0], 2, "sgd", "normed", 6)
    for _, found in results:
        assert difference(found, reference) < 1e-9


@captured_once()
def in_half_precision(kind: torch.dtype) -> tuple[str, dict[str, Any], int]:
    """Order, parameters of 16 bits after ten steps, and bytes that this rank has sent."""
    model, _, loss_fn = make("mlp")
    made = autopar.compile(model.to(kind), loss_fn=loss_fn, mesh={"dp": dist.get_world_size()}, recipe="async-server:1")  # type: ignore[arg-type]
    run(made, optimizer_of("sgd", made), of_kind(kind), 0.02)
    order = made.meet()
    return str(order), full_state(made.original), made._meetings.sent_bytes  # type: ignore[union-attr]


def of_kind(kind: torch.dtype) -> list[Any]:
    return [tuple(x.to(kind) for x in each) for each in batches("mlp", 10)]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_parameters_of_half_precision_are_replayed_to_the_bit(two_ranks: Ranks, kind: torch.dtype) -> None:
    """Messages have 16 bits, and the owner's sums 32."""
    results = two_ranks.run(in_half_precision, kind)
    model, _, loss_fn = make("mlp")
    reference = autopar.replay(
        model.to(kind),
        of_kind(kind),
        results[0][0],
        replicas=2,
        loss_fn=loss_fn,
        optimizer_of=lambda own: optimizer_of("sgd", own),
    )
    for _, found, sent in results:
        assert difference(found, full_state(reference[0])) == 0
        assert all(x.dtype == kind for x in found.values())
        assert 0 < sent < 1.01 * (10 + 1) * PARAMETER_BYTES / 4 + 1000  # a fourth of float64


@captured_once()
def by_plan(line: str) -> tuple[str, dict[str, Any]]:
    """The same after seven steps by a plan whose line of replicas was edited."""
    model, batch, loss_fn = make("mlp")
    plan = autopar.explain(model, batch, mesh={"dp": 2}, recipe="async-server:0", loss_fn=loss_fn).plan  # type: ignore[arg-type]
    text = str(plan).replace("every 1 step async-server owner=O(0) staleness=0", line)
    assert line in text
    made = autopar.compile(model, loss_fn=loss_fn, plan=autopar.Plan.parse(text))  # type: ignore[arg-type]
    run(made, optimizer_of("adamw", made), batches("mlp", 7))
    return str(made.meet()), full_state(made.original)


def test_another_rank_may_own_and_exchanges_be_rarer(two_ranks: Ranks) -> None:
    results = two_ranks.run(by_plan, "every 3 steps async-server owner=O(1) staleness=1")
    order = results[0][0]
    assert sorted(word for word in order.split() if "+" in word) == ["0+1", "0+3", "0+3", "1+1", "1+3", "1+3"]
    reference = replayed(order, 2, "adamw", "mlp", 7)
    assert [difference(found, reference) < 1e-9 for _, found in results] == [True] * 2


# --- checkpoints and memory


@captured_once()
def resumed(folder: str) -> tuple[dict[str, Any], ...]:
    """State after 6 steps, their checkpoint in a new model, and what says a state dict between meetings."""
    (made, steps), (again, others) = _built(), _built()
    run(made, steps, batches("mlp", 6))
    with pytest.raises(autopar.StepError, match=r"Call model\.meet\(\) before, on every rank"):
        made.state_dict()
    autopar.checkpoint.save_checkpoint(folder, made, steps, number=6)
    run(again, others, batches("mlp", 2))
    again.meet()
    assert autopar.checkpoint.load_checkpoint(folder, again, others) == {"number": 6}
    found = full_state(made.original), full_state(again.original)
    run(again, others, batches("mlp", 3))
    again.meet()
    return (*found, full_state(again.original))


def _built() -> tuple[autopar.CompiledModule, torch.optim.Optimizer]:
    model, batch, loss_fn = make("mlp")
    made = autopar.compile(model, loss_fn=loss_fn, mesh={"dp": 2}, recipe="async-server:1", example_inputs=batch)  # type: ignore[arg-type]
    return made, optimizer_of("adamw", made)


def test_a_run_goes_on_from_a_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    results = two_ranks.run(resumed, str(tmp_path / "saved"))
    for saved, read, after in results:
        assert difference(read, saved) == 0
        assert difference(after, results[0][2]) == 0 < difference(after, saved)


@captured_once()
def kept() -> tuple[int, int, float]:
    """Bytes that a rank sends for an exchange, what it keeps, and what was priced."""
    made, steps = _built()
    run(made, steps, batches("mlp", 2))
    dist.barrier()  # the owner's thread answers whenever the other rank asks
    meetings = made._meetings
    parts = made.explain().memory.part("optimizer").parts  # type: ignore[attr-defined]
    priced = sum(part.value for part in parts if "kept for meetings" in part.name)
    return meetings.sent_bytes, meetings.kept_bytes, priced  # type: ignore[union-attr]


def test_what_an_exchange_sends_and_keeps_is_priced(two_ranks: Ranks) -> None:
    """The owner keeps its base, the common parameters and two messages; the other its base and a message."""
    (owner_sent, owner_kept, priced), (sent, own, _) = two_ranks.run(kept)
    assert (owner_kept, own, priced) == (4 * PARAMETER_BYTES, 2 * PARAMETER_BYTES, 4 * PARAMETER_BYTES)
    assert 0 <= sent - PARAMETER_BYTES < 64 and 0 <= owner_sent - PARAMETER_BYTES < 64


class Words(nn.Module):
    """A table of 500 rows, of which a batch looks up few."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(500, 4), nn.Linear(4, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words))


def words() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(3)
    given = [(torch.randint(500, (4, 2)), torch.ones(4, 2, 1).double()) for _ in range(6)]
    return Words().double(), given


@captured_once()
def looked_up() -> tuple[str, dict[str, Any], int]:
    """Order, parameters, and bytes that this rank has sent in six exchanges by SGD."""
    model, given = words()
    made = autopar.compile(model, loss_fn=mean_square, mesh={"dp": 2}, recipe="async-server:1")
    run(made, torch.optim.SGD(made.parameters(), lr=0.1), given)
    order = made.meet()
    return str(order), full_state(made.original), made._meetings.sent_bytes  # type: ignore[union-attr]


def test_rows_of_an_embedding_that_no_batch_looked_up_are_not_sent(two_ranks: Ranks) -> None:
    """A push has at most 4 of 500 rows; an answer those of both replicas, over up to two exchanges."""
    model, given = words()
    results = two_ranks.run(looked_up)
    reference = autopar.replay(
        model,
        given,
        results[0][0],
        replicas=2,
        loss_fn=mean_square,
        optimizer_of=lambda own: torch.optim.SGD(own.parameters(), lr=0.1),
    )
    for _, found, sent in results:
        assert difference(found, full_state(reference[0])) < 1e-9
        assert 0 < sent < 0.05 * 6 * 500 * 4 * 8 + 1000


@captured_once()
def frozen() -> tuple[bool, bool]:
    """Whether parameters that were frozen after two steps stayed, and the others went on."""
    made, steps = _built()
    run(made, steps, batches("mlp", 2))
    made.meet()
    before = full_state(made.original)
    made.original.get_parameter("up.weight").requires_grad_(False)
    run(made, steps, batches("mlp", 2))
    made.meet()
    after = full_state(made.original)
    return torch.equal(before["up.weight"], after["up.weight"]), torch.equal(before["up.bias"], after["up.bias"])


def test_a_parameter_that_is_frozen_stays(two_ranks: Ranks) -> None:
    assert two_ranks.run(frozen) == [(True, False)] * 2


@captured_once()
def frozen_between() -> torch.Tensor:
    """A parameter after a meeting, which was frozen two steps before, and was trained until then."""
    made, steps = _built()
    run(made, steps, batches("mlp", 2))
    made.original.get_parameter("up.weight").requires_grad_(False)
    run(made, steps, batches("mlp", 2))
    made.meet()
    return full_state(made.original)["up.weight"]


def test_what_was_trained_before_it_was_frozen_is_common(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(frozen_between)
    assert torch.equal(first, second)


@captured_once()
def changed_by_hand() -> tuple[float, float]:
    """How far a parameter is from that of the last meeting, before and after another, where only rank 1 changed it."""
    made, steps = _built()
    run(made, steps, batches("mlp", 2))
    made.meet()
    before, x = full_state(made.original), made.original.get_parameter("up.weight")
    with torch.no_grad():
        x.add_(dist.get_rank())
    apart = difference(full_state(made.original), before)
    made.meet()
    return apart, difference(full_state(made.original), before)


def test_a_meeting_undoes_a_change_without_a_step(two_ranks: Ranks) -> None:
    (_, first), (apart, second) = two_ranks.run(changed_by_hand)
    assert first == second == 0 < apart


@captured_once()
def frozen_on_one() -> str:
    """What a rank says where it trains other parameters than the others."""
    model, batch, loss_fn = make("mlp")
    model.get_parameter("up.weight").requires_grad_(dist.get_rank() == 0)
    with pytest.raises(autopar.MeshError) as caught:
        autopar.compile(model, loss_fn=loss_fn, mesh={"dp": 2}, recipe="async-server:1", example_inputs=batch)  # type: ignore[arg-type]
    return str(caught.value)


def test_ranks_that_train_other_parameters_are_told_so(two_ranks: Ranks) -> None:
    for said in two_ranks.run(frozen_on_one):
        assert "Rank 1 differs from rank 0" in said and "up.weight without a gradient" in said


# --- ranks that fail

RANKS, BOUND_SECONDS = 3, 60


def work(rank: int, folder: str, accident: str) -> None:
    """Six steps, of which rank 2 meets with an accident after the third; writes what the rank then knows."""
    join(rank, RANKS, f"{folder}/store")
    torch.manual_seed(0)
    model = nn.Linear(12, 12).double()
    made = autopar.compile(
        model,
        loss_fn=mean_square,
        mesh={"dp": RANKS},
        recipe="async-server:1",
        timeout_seconds=5 if accident == "hangs" else BOUND_SECONDS,
    )
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    given = given_batches()
    run(made, optimizer, given[:3])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL if accident == "dies" else signal.SIGSTOP)
    try:
        run(made, optimizer, given[3:])
        order = made.meet()
        torch.save((str(order), full_state(made.original)), f"{folder}/{rank}")
    except autopar.PeerError as error:
        torch.save(str(error), f"{folder}/{rank}")
    os._exit(0)


def given_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (6, 2, 6, 12)
    return [(x, y) for x, y in torch.randn(shape, generator=generator, dtype=torch.float64)]


def after(accident: str, folder: Path) -> list[Any]:
    """What ranks 0 and 1 wrote."""
    processes = [CONTEXT.Process(target=work, args=(rank, str(folder), accident)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes[:2]:
        process.join(BOUND_SECONDS)
    for process in processes:
        process.kill()
        process.join(10)
    return [torch.load(folder / str(rank)) for rank in range(2)]


def test_the_others_go_on_without_a_rank_that_died(tmp_path: Path) -> None:
    (order, found), (_, other) = after("dies", tmp_path)
    assert "2!" in order.split()
    torch.manual_seed(0)
    reference = autopar.replay(
        nn.Linear(12, 12).double(),
        given_batches(),
        order,
        replicas=RANKS,
        loss_fn=mean_square,
        optimizer_of=lambda own: torch.optim.SGD(own.parameters(), lr=0.1),
    )
    assert difference(found, full_state(reference[0])) < 1e-9 and difference(found, other) == 0


def test_a_rank_that_hangs_is_named_within_the_time(tmp_path: Path) -> None:
    for said in after("hangs", tmp_path):
        assert "waited 5 s for replica 2, which has pushed" in said


@captured_once()
def without_owner() -> str:
    """What the second rank says where the first leaves before the others."""
    made, steps = _built()
    run(made, steps, batches("mlp", 2))
    dist.barrier()
    if dist.get_rank() == 0:
        del made
        gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        return ""
    with pytest.raises(autopar.PeerError) as caught:
        run(made, steps, batches("mlp", 2))
    return str(caught.value)


def test_an_owner_that_leaves_first_is_an_error(two_ranks: Ranks) -> None:
    _, said = two_ranks.run(without_owner)
    assert said.startswith("An exchange with the server along dp broke: rank 0, which has the common parameters, died")
    assert "Call model.meet() on every rank after the last step" in said

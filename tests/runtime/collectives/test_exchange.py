"""Rows that change hands for their experts, on real ranks: nothing is dropped, whatever the routing is."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.backend import graphs
from autopar.errors import AutoparError
from autopar.ops.collectives import group_name
from autopar.ops.exchange import EXCHANGES, combined, dispatched, table_of
from tests.runtime.gloo_ranks import Ranks
from tests.support.experts import Integers, Routed, routes
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

ROWS, WIDTH = 16, 8
# rows that each of two ranks sends to the two experts of each: uneven, one expert gets everything, nothing at all
TABLES = {
    "uneven": [[3, 0, 1, 2], [0, 5, 2, 0]],
    "lone": [[0, 0, 0, 4], [0, 0, 0, 3]],
    "none": [[0, 0, 0, 0], [1, 0, 0, 0]],
}


def differing() -> list[str]:
    """The tables for which the kernels differ from the definition, forward or backward."""
    rank, group = dist.get_rank(), group_name(dist.group.WORLD)  # type: ignore[arg-type]
    torch.manual_seed(0)  # so that every rank has the tensors of all
    found = []
    for name, lines in TABLES.items():
        sent = torch.tensor(lines).view(2, 2, 2)
        counts = [torch.stack([sent[i], sent[:, i]]).view(2, -1) for i in range(2)]
        tables = [table_of(each, 2) for each in counts]
        ranks = [torch.randn(sum(line), 3, dtype=torch.float64) for line in lines]
        x = ranks[rank].clone().requires_grad_()
        y = torch.ops.autopar.dispatch(x, [], 2, group, "combine", counts[rank])
        arrived = [dispatched(ranks, tables, i) for i in range(2)]
        grads = [torch.randn_like(each) for each in arrived]
        y.backward(grads[rank])
        same = torch.equal(y, arrived[rank])
        same &= torch.equal(x.grad, combined(grads, tables, rank))  # type: ignore[arg-type]
        back = torch.ops.autopar.combine(y.detach(), [], 2, group, "dispatch", counts[rank])
        same &= torch.equal(back, ranks[rank])  # there and back, nothing is lost
        found += [] if same else [name]
    return found


def test_rows_come_back_and_gradients_take_the_same_way(two_ranks: Ranks) -> None:
    assert two_ranks.run(differing) == [[], []]


def nowhere() -> str:
    """What is said of a row that no expert has."""
    group = group_name(dist.group.WORLD)  # type: ignore[arg-type]
    with pytest.raises(AutoparError) as error:
        torch.ops.autopar.dispatch(torch.ones(3, 2), [], 2, group, "combine", torch.ones(2, 2, dtype=torch.int32))
    return str(error.value)


def test_a_row_without_an_expert_is_an_error_before_anything_is_sent(two_ranks: Ranks) -> None:
    said = "dispatch: 2 of 3 rows have an expert from 0 to 1, but all must."
    assert all(message.startswith(said) for message in two_ranks.run(nowhere))


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def subject(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Routed, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Routed().to(dtype), (torch.randn(ROWS, WIDTH, dtype=dtype), routes(kind, ROWS))


@captured_once()
def trained(kind: str, mesh: dict[str, int], recipe: Any, **options: Any) -> dict[str, Tensor]:
    """The loss, and every gradient whole."""
    model, batch = subject(kind)
    made = autopar.compile(model, loss_fn=square, mesh=mesh, recipe=recipe, **options)
    found = gradients(made, batch)
    label = next(x for name, x in made.plan.ops.items() if "experts" in name)
    assert any(">" in x for x in label), label
    return found


def gradients(made: autopar.CompiledModule, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The loss of a step, and every gradient whole."""
    found = {"loss": made.step(*batch).detach()}
    return found | {n: p.grad.full_tensor() for n, p in made.named_parameters()}  # type: ignore[union-attr]


def alone(kind: str) -> dict[str, Tensor]:
    """The same without autopar."""
    model, batch = subject(kind)
    loss = square(model(*batch))
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}  # type: ignore[misc]


def far(ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> list[str]:
    """What is not the same on every rank as on one device, but for rounding in float64."""
    assert all(set(found) == set(expected) for found in ranks)
    return [
        name
        for found in ranks
        for name, x in expected.items()
        if not torch.allclose(found[name], x, rtol=1e-12, atol=1e-14)
    ]


@pytest.mark.parametrize("kind", ["even", "skewed", "lone"])
def test_two_ranks_drop_nothing(two_ranks: Ranks, kind: str) -> None:
    """`lone` sends every row to one expert of the last rank: the first has nothing to run."""
    assert far(two_ranks.run(trained, kind, {"ep": 2}, "ep"), alone(kind)) == []


def test_all_else_is_compiled(two_ranks: Ranks) -> None:
    """How many rows there are is another number in every step, which no compiled code depends on."""
    found = two_ranks.run(compiled_twice)
    assert far([both["skewed"] for both, _ in found], alone("skewed")) == []
    assert far([both["even"] for both, _ in found], alone("even")) == []
    assert all(first == second > 0 for _, (first, second) in found)


@captured_once()
def compiled_twice() -> tuple[dict[str, dict[str, Tensor]], tuple[int, int]]:
    """The results of two routings, and how many regions were compiled after each."""
    model, batch = subject("even")
    made = autopar.compile(
        model, example_inputs=batch, loss_fn=square, mesh={"ep": 2}, recipe="ep", executor="aot_eager"
    )
    found, compiled = {}, []
    for kind in ("even", "skewed"):
        made.zero_grad()
        found[kind] = gradients(made, subject(kind)[1])
        compiled.append(made._settings.executor.compiled)
    return found, (compiled[0], compiled[1])


@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [
        ({"ep": 4}, "ep"),
        ({"dp": 2, "ep": 2}, {"dp": "zero3", "ep": "ep"}),
        ({"a": 2, "b": 2}, "ep"),
        ({"ep": 2, "tp": 2}, {"ep": "ep", "tp": "tp"}),
    ],
    ids=["ep", "dp x ep", "ep x ep", "ep x tp"],
)
def test_four_ranks_drop_nothing(four_ranks: Ranks, mesh: dict[str, int], recipe: Any) -> None:
    """Alone, beside data and tensor parallelism, and along two axes one after the other."""
    assert far(four_ranks.run(trained, "skewed", mesh, recipe), alone("skewed")) == []


def of_integers(kind: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Every number is a small integer, so that sums are exact, in whatever order they are made."""
    torch.manual_seed(0)
    rows = torch.randint(-2, 3, (ROWS, WIDTH)).double()
    return Integers().double(), (rows, routes(kind, ROWS))


def half_square(y: Tensor) -> Tensor:
    return y.square().sum() / 2


@captured_once()
def trained_exactly(kind: str, mesh: dict[str, int], recipe: Any) -> dict[str, Tensor]:
    model, batch = of_integers(kind)
    return gradients(autopar.compile(model, loss_fn=half_square, mesh=mesh, recipe=recipe), batch)


@pytest.mark.parametrize("kind", ["skewed", "lone"])
def test_dropless_equals_one_device_to_the_bit(two_ranks: Ranks, kind: str) -> None:
    """One expert gets every row, and one gets none, whose gradient is zero."""
    model, batch = of_integers(kind)
    loss = half_square(model(*batch))
    loss.backward()
    expected = {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}
    assert not expected["up"][2].any() and expected["up"][3].any()
    for found in two_ranks.run(trained_exactly, kind, {"ep": 2}, "ep"):
        assert [n for n, x in expected.items() if not torch.equal(found[n], x)] == []  # type: ignore[arg-type]


class Stacked(nn.Module):
    """Two layers whose rows go to the same experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, ids)
        return x


def stacked() -> tuple[Stacked, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Stacked().double(), subject("skewed")[1]


@captured_once()
def staged(schedule: str, recompute: str) -> dict[str, Tensor]:
    """The loss, and the gradients of this rank's stage."""
    model, batch = stacked()
    made = autopar.compile(
        model,
        loss_fn=square,
        mesh={"pp": 2, "ep": 2},
        recipe={"pp": schedule, "ep": "ep"},
        micro_batches=2,
        recompute=recompute,
    )
    found = gradients(made, batch)
    layers = [x for name, x in made.plan.ops.items() if "experts" in name]
    assert len(layers) == 2 and all(">" in x[-1] for x in layers), layers
    return found


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "full"), ("zb", "none")])
def test_stages_drop_nothing(four_ranks: Ranks, schedule: str, recompute: str) -> None:
    """Recomputed, rows are sent once more; in zero-bubble order gradients of weights wait."""
    model, batch = stacked()
    loss = square(model(*batch))
    loss.backward()
    expected = {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}
    for found in four_ranks.run(staged, schedule, recompute):
        own = {name: x for name, x in expected.items() if name in found}
        assert len(own) > 7 and far([found], own) == []  # type: ignore[arg-type]


class Sent(TorchDispatchMode):
    """Bytes of a rank's rows that leave it in `dispatch` and `combine`, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("autopar::")
        if name in EXCHANGES:
            x, _, size, _, _, counts = args
            table = table_of(counts, size)[EXCHANGES.index(name)]
            rank = dist.get_rank() % size
            away = int(table.sum() - table[rank].sum())
            self.bytes[name] += away * x[:1].nbytes
        return func(*args, **(kwargs or {}))


@captured_once()
def sent_and_priced(mesh: dict[str, int]) -> tuple[dict[str, int], dict[str, float]]:
    """What a step sends, as counted and as the price has it."""
    model, batch = subject("even")
    made = autopar.compile(
        model,
        example_inputs=batch,
        loss_fn=square,
        mesh=mesh,
        recipe={axis: "ep" if axis == "ep" else "ddp" for axis in mesh},
    )
    made.step(*batch)
    with Sent() as sent:
        made.step(*batch)
    priced: Counter[str] = Counter()
    for item in made.explain().step.items:
        if item.kind in EXCHANGES:
            priced[item.kind] += item.count * item.traffic_bytes
    return dict(sent.bytes), dict(priced)


@pytest.mark.parametrize("mesh", [{"ep": 4}, {"dp": 2, "ep": 2}])
def test_evenly_used_experts_send_what_is_priced(four_ranks: Ranks, mesh: dict[str, int]) -> None:
    """k tokens d (n - 1) / n numbers each way, forward and backward; and a number for every row, its weight."""
    ranks, slots, number = mesh["ep"], 2, 8
    tokens = ROWS // 4  # of a rank
    rows, weights = (slots * tokens * d * (ranks - 1) / ranks * number for d in (WIDTH, 1))
    expected = {"dispatch": 2 * rows + weights, "combine": 2 * rows + weights}
    for sent, priced in four_ranks.run(sent_and_priced, mesh):
        assert sent == expected
        assert priced == expected


def behind_torch_compile() -> tuple[dict[str, Tensor], list[str]]:
    """The loss and the gradients of a model that torch.compile runs, and what the backend says of it."""
    torch.compiler.reset()
    model, batch = subject("skewed")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    graphs.log.addHandler(handler)
    graphs.log.setLevel(logging.INFO)
    try:
        options = {"mesh": {"ep": 2}, "recipe": "ep"}
        loss = square(torch.compile(model, backend="autopar", options=options)(*batch))
    finally:
        graphs.log.removeHandler(handler)
        graphs.log.setLevel(logging.NOTSET)
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}, said  # type: ignore[dict-item]


def test_a_model_behind_torch_compile_drops_nothing(two_ranks: Ranks) -> None:
    (first, said), (second, _) = two_ranks.run(behind_torch_compile)
    assert far([first, second], alone("skewed")) == []
    assert "1 combine, 2 dispatch" in said[0]  # rows, and their weights


@captured_once()
def first_nan() -> tuple[str, str, str, int]:
    """The first NaN of a step in which what an expert of the last rank makes is too large."""
    model, batch = subject("skewed")
    made = autopar.compile(model, example_inputs=batch, loss_fn=square, mesh={"ep": 2}, recipe="ep")
    with torch.no_grad():
        for name, x in made.named_parameters():
            if name == "up" and dist.get_rank() == 1:
                x.to_local()[-1] = 1e308  # type: ignore[attr-defined]
    found = autopar.find_nan(made, *batch)
    assert found is not None
    return found.what, found.op, found.phase, found.rank


def test_find_nan_names_the_op_and_the_rank_of_an_expert(two_ranks: Ranks) -> None:
    expected = ("NaN", "aten.silu.default", "forward", 1)  # of an infinity below zero
    assert two_ranks.run(first_nan) == [expected] * 2

"""Batches of several shapes: an uneven last one, other lengths, whole or as each rank's part."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.proof.verdict import nan_last
from autopar.runtime.model import program_cache
from autopar.runtime.ranks.comparison import Comparison
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.support.staged import captured_once, plan_for

pytestmark = pytest.mark.multiprocess

Shape = tuple[int, int]
Batch = Sequence[Tensor]


class Reader(nn.Module):
    """Tokens of any length, a table of positions, and layers that take a mask or none."""

    def __init__(self, width: int = 8, vocabulary: int = 16, layers: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x if mask is None else x * mask[..., None])


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets)


def reader(layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return Reader(layers=layers).double()


def tokens(shape: Shape, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 16, shape, generator=generator)
    return x, x.roll(1, 1)


def whole(x: Tensor) -> Tensor:
    return x


def rows(x: Tensor) -> Tensor:
    """This rank's half of the rows."""
    return x.chunk(2)[dist.get_rank()]


def distance(
    made: autopar.CompiledModule,
    reference: nn.Module,
    batch: Batch,
    *mask: Tensor,
    part: Callable[[Tensor], Tensor] = whole,
) -> float:
    """The largest difference of the loss and of any gradient from those of one device."""
    for each in (made, reference):
        each.zero_grad()
    expected = cross_entropy(reference(batch[0], *mask), batch[1])
    expected.backward()
    given = (batch[0], *mask, batch[1])
    worst = (made.step(*map(part, given)) - expected).abs().item()
    expected_of = dict(reference.named_parameters())
    for name, parameter in made.named_parameters():
        g = parameter.grad
        found = g.full_tensor() if isinstance(g, DTensor) else g
        worst = max(worst, (found - expected_of[name].grad).abs().max().item(), key=nan_last)  # type: ignore[operator, union-attr]
    return worst


Found = tuple[float, list[str], int]


@captured_once()
def several(shapes: Sequence[Shape], settings: dict[str, Any], part: Callable[[Tensor], Tensor] = whole) -> Found:
    """The worst distance over batches of these shapes, what was warned of, and how many programs were made.

    The first batch is whole, the others are given as `part` has them.
    """
    settings = dict(settings)
    stages = settings.pop("stages", None)
    layers = 2 if stages else 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if stages:
            settings["plan"] = plan_for(reader(layers), tokens(shapes[0]), cross_entropy, *stages)
        made = autopar.compile(reader(layers), loss_fn=cross_entropy, **settings)
        worst = [
            distance(made, reader(layers), tokens(shape, i), part=part if i else whole)
            for i, shape in enumerate(shapes)
        ]
    return max(worst, key=nan_last), [str(w.message) for w in caught], len(made._kept.ready[True])


def all_of(tasks: Sequence[tuple[Any, ...]]) -> list[Found]:
    return [several(*task) for task in tasks]


DP, TP = {"dp": 2}, {"tp": 2}
UNEVEN: list[Shape] = [(8, 8), (3, 8), (8, 4), (8, 8)]
TASKS: dict[str, tuple[Any, ...]] = {
    "ddp": (UNEVEN, {"mesh": DP, "recipe": "ddp"}),
    "zero3": ([(8, 8), (3, 8), (6, 8)], {"mesh": DP, "recipe": "zero3", "micro_batches": 2}),
    "tp+sp": ([(8, 8), (8, 4), (3, 5)], {"mesh": TP, "recipe": "tp+sp"}),
    "parts": ([(8, 8), (6, 8), (8, 4)], {"mesh": DP, "recipe": "zero1", "micro_batches": 2}, rows),
    "1f1b": ([(8, 8), (6, 4), (1, 8)], {"stages": ("1f1b", 2, 4)}),
}


def test_other_shapes_give_what_one_device_gives(two_ranks: Ranks) -> None:
    results = two_ranks.run(all_of, list(TASKS.values()))
    for found in results:
        assert all(worst < 1e-12 for worst, _, _ in found), found
    first = dict(zip(TASKS, results[0], strict=True))
    made = {name: len(set(task[0])) for name, task in TASKS.items()}
    assert {name: count for name, (_, _, count) in first.items()} == made
    words = "can be cut into 1 micro-batch, which the schedule 1f1b does not take; it is run by gpipe"
    assert any(words in said for said in first["1f1b"][1]), first["1f1b"]
    assert not first["zero3"][1], "micro-batches of 2 and 1 rows need no other number"
    assert not any("cannot be split" in said for said in first["ddp"][1]), first["ddp"]
    assert not first["parts"][1][1:], "parts go on as they were"


def test_stages_on_a_mesh_of_their_own(four_ranks: Ranks) -> None:
    stages = ("1f1b", 2, 4, {"dp": 2}, "zero1")
    for worst, _, count in four_ranks.run(several, [(16, 4), (12, 4)], {"stages": stages}):
        assert worst < 1e-12
        assert count == 2


# --- whole, or part


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, targets) * targets.numel()


def halves() -> list[float]:
    """Losses of a sum over a whole batch of half the rows, which has the shape of a part, and of parts of it."""
    made = autopar.compile(reader(), loss_fn=summed, mesh=DP, recipe="ddp")
    small, large = tokens((4, 8), 1), tokens((8, 8), 2)
    losses = [made.step(*tokens((8, 8))), made.step(*small), made.step(*map(rows, large))]
    losses += [made.step(*small), made.step(*map(rows, large)), made.step(*large)]
    model = reader()
    expected = [summed(model(x), y) for x, y in (tokens((8, 8)), small, large, small, large, large)]
    return [(a - b).abs().item() for a, b in zip(losses, expected, strict=True)]


def coming_and_going() -> float:
    """The worst distance with a mask, without, and with None in its place, whole and as parts."""
    made = autopar.compile(reader(), loss_fn=cross_entropy, mesh=DP, recipe="zero3")
    mask = torch.rand(8, 8, generator=torch.Generator().manual_seed(1)).double()
    batch, reference = tokens((8, 8)), reader()
    found = [distance(made, reference, batch), distance(made, reference, batch, mask)]
    found += [distance(made, reference, batch, part=rows)]
    less = [x[:6] for x in (*batch, mask)]
    found.append(distance(made, reference, less[:2], less[2], part=rows))
    loss, keyword = made.step(*batch, mask=None), made.step(*map(rows, batch), mask=rows(mask))
    found.append((loss - cross_entropy(reference(batch[0]), batch[1])).abs().item())
    found.append((keyword - cross_entropy(reference(batch[0], mask), batch[1])).abs().item())
    return max(found, key=nan_last)


@captured_once()
def judged() -> tuple[list[float], float]:
    return halves(), coming_and_going()


def test_a_shape_is_that_of_a_whole_or_of_a_part(two_ranks: Ranks) -> None:
    for differences, worst in two_ranks.run(judged):
        assert max(differences) < 1e-9
        assert worst < 1e-12


# --- what ranks say to each other


def disagreeing() -> tuple[str, str]:
    """What is said of other shapes on one rank, and of a rank that does not come."""
    rank, said = dist.get_rank(), []
    made = autopar.compile(reader(), loss_fn=cross_entropy, mesh=DP, recipe="ddp")
    made.step(*tokens((8, 8)))
    with pytest.raises(autopar.StepError) as shapes:
        made.step(*tokens((5 + rank, 8)))
    alone = Comparison(timeout_seconds=1.0)
    assert alone.gather(str(rank), "Why.") == ["0", "1"]
    with pytest.raises(autopar.StepError, match=r"rank 0: Batch 0\. Do\.; rank 1: Batch 1\. Do\."):
        alone.gather("{}", f"Batch {rank}.", "Do.", kind=("shapes", "numbers")[rank])
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(autopar.StepError) as missing:
            alone.gather("", "Why.", "What to do.")
        said.append(str(missing.value))
        assert time.monotonic() - begin < 30
    dist.barrier()
    return str(shapes.value), "".join(said)


def test_ranks_that_disagree_are_named(two_ranks: Ranks) -> None:
    (first, missing), (second, _) = two_ranks.run(disagreeing)
    assert first == second
    assert "rank 0 [5, 8], [5, 8]; rank 1 [6, 8], [6, 8]" in first
    assert "DistributedSampler(..., drop_last=True)" in first
    assert missing.startswith("Why. Ranks [1] did not come within 1 s")
    assert missing.endswith("What to do.")


def drifting() -> int:
    """The number of the step at which it is said that from the fourth batch on every rank has values of its own.

    Before each step all ranks evaluate one batch, and the first rank one more by itself.
    """
    rank = dist.get_rank()
    made = autopar.compile(reader(), loss_fn=cross_entropy, mesh=DP, recipe="ddp", outputs="local")
    for step in range(1, 9):
        for _ in range(0 if step == 1 else 2 - rank):
            made(tokens((8, 8))[0])
        seed = step if step < 4 else 8 * step + rank
        try:
            made.step(*tokens((8, 8), seed))
        except autopar.StepError as error:
            assert "different values in a batch of the shapes [8, 8], [8, 8]" in str(error)
            return step
    return 0


def test_ranks_whose_batches_drift_apart_are_told_soon(two_ranks: Ranks) -> None:
    """Steps 1, 2, 3, 5 and 9 are compared: the first, and then numbers 1, 2, 4 and 8 of its shape."""
    assert two_ranks.run(drifting) == [5, 5]


def bounded() -> tuple[int, list[str], float, bool]:
    """With room for two programs: how many are kept, what is said, the distance, and that planning is alike."""
    kept, program_cache.KEPT_PROGRAMS = program_cache.KEPT_PROGRAMS, 2
    try:
        made = autopar.compile(reader(), loss_fn=cross_entropy, mesh=DP, recipe="ddp")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shapes = [(2, 2), (2, 3), (2, 2), (2, 4), (2, 2)]
            found = [distance(made, reader(), tokens(shape)) for shape in shapes]
        ready = made._kept.ready[True]
        plans = {str(sorted(r.bound.program.plan.ops.items())) for r in ready}
        last = ready[-1].shapes[0] == (2, 2)
    finally:
        program_cache.KEPT_PROGRAMS = kept
    return len(ready), [str(w.message) for w in caught], max(found), last and len(plans) == 1


def test_programs_are_bounded_and_planned_once(two_ranks: Ranks) -> None:
    count, said, worst, alike = equal_on_all(
        [(n, [text for text in s if "programs so far" not in text], w, a) for n, s, w, a in two_ranks.run(bounded)]
    )
    assert (count, said, alike) == (2, [], True)
    assert worst < 1e-12


class _Odd(nn.Module):
    """A complex parameter in shards, and sparse buffers, of which training reads one and keeps it for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4).to(torch.complex64))
        self.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)
        self.register_buffer("edges", torch.ones(4, 4).to_sparse_csr(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.edges, (x.to(torch.complex64) @ self.weight).abs().square().T).sum()


@captured_once()
def of_no_rows() -> tuple[list[float], bool, str]:
    """Losses of a batch and of one without rows, whether the sparse buffer stayed, and the error of forwards."""
    made = autopar.compile(_Odd(), mesh={"dp": 2}, recipe="zero3")
    losses = [made.step(x).item() for x in (torch.ones(4, 4), torch.ones(0, 4))]
    outside = autopar.compile(nn.Linear(4, 1), mesh={"dp": 2}, recipe="ddp")
    outside(torch.ones(4, 4)).mean().backward()
    with pytest.raises(autopar.StepError, match="different values in a batch") as found:
        outside(torch.full((4, 4), float(dist.get_rank()))).mean().backward()
    return losses, torch.equal(made.heads.to_dense(), torch.eye(4)), str(found.value)


def test_no_rows_sparse_buffers_and_complex_shards_are_as_in_one_process(two_ranks: Ranks) -> None:
    expected = [_Odd()(x).item() for x in (torch.ones(4, 4), torch.ones(0, 4))]
    for losses, is_sparse, refused in two_ranks.run(of_no_rows):
        assert losses == pytest.approx(expected) and is_sparse
        assert 'batch="local"' in refused

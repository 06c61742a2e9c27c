"""Collectives in pieces beside their products, on real ranks: order, bytes, and what training comes to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import autopar
from autopar import _torch
from autopar.errors import AutoparError
from autopar.ops import decomposed
from autopar.ops.collectives import group_name
from autopar.ops.decomposed import gather_products, product_scatter
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make
from tests.runtime.training import compiled, difference, drawn, single, train
from tests.support.peak import PeakBytes
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess

TP = {"tp": 4}


@pytest.mark.parametrize(
    ("mesh", "recipe", "options"),
    [
        pytest.param(TP, "tp+sp", {}, marks=pytest.mark.slow),
        (TP, "tp+sp", {"recompute": "full"}),
        (TP, "tp+sp", {"executor": "aot_eager"}),
        ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tp+sp"}, {"micro_batches": 2}),
        ({"pp": 2, "tp": 2}, {"pp": "zb", "tp": "tp+sp"}, {"micro_batches": 2}),
    ],
    ids=["tp", "recomputed", "compiled", "dp x tp", "pp x tp"],
)
def test_ranks_train_as_one_process(
    four_ranks: Ranks, mesh: dict[str, int], recipe: Any, options: dict[str, Any]
) -> None:
    expected = single("gpt")
    found: dict[str, Any] = {}
    for each in four_ranks.run(trained, mesh, recipe, options):
        found |= each
    assert difference({key: found[key] for key in expected}, expected) < 1e-9


def trained(mesh: dict[str, int], recipe: Any, options: dict[str, Any]) -> dict[str, Any]:
    return compiled("gpt", mesh, recipe, decompose="tp", **options)


def test_panels_train_as_one_process(four_ranks: Ranks) -> None:
    """SUMMA over 2 x 2 ranks: operands arrive in panels, forward and again in backward."""
    expected = single("mlp")
    for found, again in four_ranks.run(with_panels):
        assert again > 0
        assert difference(found, expected) < 1e-9


def with_panels() -> tuple[dict[str, Any], int]:
    """What the recipe 2d gets in pieces along x, and the number of operands that were gathered a second time."""
    count = 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return gathers_again(*args)

    gathers_again = decomposed._again
    with mock.patch.object(decomposed, "_again", counted):
        found = compiled("mlp", {"x": 2, "y": 2}, {"x,y": "2d"}, decompose="x")  # type: ignore[arg-type]
    return found, count


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gathered_products_are_those_of_the_gathered_operand(four_ranks: Ranks, dim: int, again: bool) -> None:
    """Along rows and along features; forward, and the gradients of operand, weights and bias."""
    for error, kept_bytes in four_ranks.run(gathered_in_pieces, dim, again):
        assert error < 1e-12
        assert kept_bytes == (1 if again else 4) * 4 * 8 * 12 * 8 // 4


def gathered_in_pieces(dim: int, again: bool) -> tuple[float, int]:
    """The largest difference from the whole operand's products, and the bytes of it that are kept for backward."""
    rank, group = dist.get_rank(), group_name(dist.group.WORLD)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(0)
    whole, v, w = (
        torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 8, 12), (5, 12), (3, 12))
    )
    b = torch.randn(3, generator=draw, dtype=torch.float64, requires_grad=True)
    expected = F.linear(whole, v).square().sum() * (rank + 1) + F.linear(whole, w, b).sin().sum()
    of_whole = torch.autograd.grad(expected, (whole, v, w, b))
    dist.all_reduce(of_whole[0])  # the gradients of all ranks for the operand are added up and scattered
    x = whole.detach().chunk(4, dim)[rank].contiguous().requires_grad_()
    sizes: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        sizes.append(0 if saved.data_ptr() in (v.data_ptr(), w.data_ptr()) else saved.nbytes)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        first, second = gather_products(x, [v, w], [None, b], dim, 4, group, again)
    found = first.square().sum() * (rank + 1) + second.sin().sum()
    of_x, *others = torch.autograd.grad(found, (x, v, w, b))
    pairs = zip((of_x, *others), (of_whole[0].chunk(4, dim)[rank], *of_whole[1:]), strict=True)
    errors = [float((a - e).abs().max()) for a, e in pairs] + [float((found - expected).abs())]
    return max(errors), sum(sizes)


def test_a_rank_has_two_panels_at_most(four_ranks: Ranks) -> None:
    """Of an operand of 4 pieces of 64 x 256 numbers: that which is multiplied, and the next, beside its own."""
    piece, weight = 64 * 256 * 8, 8 * 1024 * 8
    small = 64 * 8 * 8 * 3  # results of 8 columns: the sum, a product, and the sum's copy
    for most in four_ranks.run(most_bytes):
        assert 3 * piece + weight <= most <= 3 * piece + weight + small


def most_bytes() -> int:
    """The most bytes that a product by panels holds at a time, its operands included."""
    x, weight = torch.ones(64, 256, dtype=torch.float64), torch.ones(8, 1024, dtype=torch.float64)
    with PeakBytes() as found:
        gather_products(x, [weight], [None], 1, 4, group_name(dist.group.WORLD), True)  # type: ignore[arg-type]
    return found.most


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_scattered_products_are_the_parts_of_their_sum(four_ranks: Ranks, dim: int) -> None:
    """Along rows and along columns; forward, and the gradients of operand, weight and bias."""
    assert max(four_ranks.run(scattered_in_pieces, dim)) < 1e-12


def scattered_in_pieces(dim: int) -> float:
    """The largest difference of a rank's part, and of its gradients, from those of the sum of all ranks' products."""
    rank, group = dist.get_rank(), group_name(dist.group.WORLD)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(0)
    xs, ws, bs = (
        [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(4)]
        for shape in ((4, 8, 6), (12, 6), (12,))
    )
    whole = sum(map(F.linear, xs, ws, bs), start=torch.zeros(()))
    own = (xs[rank], ws[rank], bs[rank])
    expected = torch.autograd.grad(whole.square().sum(), own)  # every rank's loss is that of its part
    part = product_scatter(*own, dim, 4, group)
    found = torch.autograd.grad(part.square().sum(), own)
    pairs = [*zip(found, expected, strict=True), (part, whole.chunk(4, dim)[rank])]
    return max(float((a - e).abs().max()) for a, e in pairs)


@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    often(
        [("gpt", {"a": 4}, 3), ("gpt", {"a": 2, "b": 2}, 0), ("tied", {"a": 2, "b": 2}, 3)],
        [("gpt", {"a": 4}, 3), ("tied", {"a": 2, "b": 2}, 3)],
    ),
)
def test_random_plans(four_ranks: Ranks, name: str, mesh: dict[str, int], seed: int) -> None:
    results = four_ranks.run(randomly, name, mesh, seed)
    assert sum(count for _, _, count in results) > 0
    expected = single(name, micro_batches=results[0][1])
    assert all(difference(found, expected) < 1e-9 for found, _, _ in results)


@captured_once()
def randomly(name: str, mesh: dict[str, int], seed: int) -> tuple[dict[str, Any], int, int]:
    """What a plan drawn at random gets with all axes decomposed, its micro-batches, and the number of pieces sent."""
    model, batch, loss_fn = make(name)
    plan = drawn(name, mesh, seed, lone_ops=False)
    plan = replace(plan, decomposed=plan.mesh.names)
    made = autopar.compile(model, loss_fn=loss_fn, plan=plan)  # type: ignore[arg-type]
    with mock.patch.object(_torch, "start_exchange_rows", wraps=_torch.start_exchange_rows) as sends:
        return train(made, made.step, batch), plan.micro_batches, sends.call_count


def test_products_are_computed_while_pieces_travel(four_ranks: Ranks) -> None:
    """A piece travels during every product but the last of a gather, and the first of a scatter."""
    gathering = ["send", "product", *["wait", "send", "product"] * 2, "wait", "product"]
    scattering = ["product", "send"] * 3 + ["product"] + ["wait"] * 3
    assert four_ranks.run(order) == [(gathering, scattering)] * 4


def order() -> tuple[list[str], list[str]]:
    """The order of sends, waits and products in the forward of both calls."""
    events: list[str] = []
    start, linear = _torch.start_exchange_rows, F.linear

    def send(*args: Any) -> Any:
        events.append("send")
        wait = start(*args)
        return lambda: (events.append("wait"), wait())[1]

    def product(*args: Any) -> Tensor:
        events.append("product")
        return linear(*args)

    x, weight, group = torch.ones(2, 4, 3), torch.ones(5, 3), group_name(dist.group.WORLD)  # type: ignore[arg-type]
    with mock.patch.object(_torch, "start_exchange_rows", send), mock.patch.object(F, "linear", product):
        gather_products(x, [weight], [None], 1, 4, group)
        gathering, events[:] = list(events), []
        product_scatter(x, weight, None, 1, 4, group)
    return gathering, events


def test_pieces_carry_no_more_bytes_than_the_collectives(four_ranks: Ranks) -> None:
    """Of 4 ranks each sends its piece of 8 numbers to 3 others, forward and backward."""
    assert four_ranks.run(sent_numbers) == [(3 * 8, 3 * 8)] * 4


def sent_numbers() -> tuple[int, int]:
    """Numbers that a rank sends in forward, and in backward."""
    sizes: list[int] = []
    start = _torch.start_exchange_rows

    def send(x: Tensor, *others: Any) -> Any:
        sizes.append(x.numel())
        return start(x, *others)

    x, weight = torch.ones(4, 2, requires_grad=True), torch.ones(3, 2)
    with mock.patch.object(_torch, "start_exchange_rows", send):
        (y,) = gather_products(x, [weight], [None], 0, 4, group_name(dist.group.WORLD))  # type: ignore[arg-type]
        forward = sum(sizes)
        y.sum().backward()
    return forward, sum(sizes) - forward


def test_rows_are_kept_for_trained_weights_alone_and_summed_as_one_product_is(two_ranks: Ranks) -> None:
    for frozen, trained, error in two_ranks.run(kept_and_summed):
        assert (frozen, trained) == (0, 4 * 2 * 2)  # the gathered rows in bfloat16
        assert error < 2**-8  # one rounding to bfloat16


def kept_and_summed() -> tuple[int, int, float]:
    """Bytes of rows that backward of a gather keeps, and the error of a weight's gradient in bfloat16."""
    group = group_name(dist.group.WORLD)  # type: ignore[arg-type]
    kept = []
    for is_trained in (False, True):
        x = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=is_trained)
        sizes: list[int] = []

        def pack(saved: Tensor, own: Tensor = weight, sizes: list[int] = sizes) -> Tensor:
            sizes.append(0 if saved.data_ptr() == own.data_ptr() else saved.nbytes)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            gather_products(x, [weight], [None], 0, 2, group)
        kept.append(sum(sizes))
    x, weight = torch.ones(4, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    weight.requires_grad_()
    grad = torch.tensor([[1.0], [2**-7]], dtype=torch.bfloat16)[dist.get_rank()].expand(2, 1)
    product_scatter(x, weight, None, 0, 2, group).backward(grad.contiguous())
    assert weight.grad is not None
    exact = 2 * (1 + 2**-7)
    return kept[0], kept[1], abs(float(weight.grad) / exact - 1)


def test_a_second_derivative_is_refused(two_ranks: Ranks) -> None:
    assert all("leave out decompose=" in message for message in two_ranks.run(refused))


def refused() -> str:
    x, weight = torch.ones(4, 2, requires_grad=True), torch.ones(3, 2)
    (y,) = gather_products(x, [weight], [None], 0, 2, group_name(dist.group.WORLD))  # type: ignore[arg-type]
    with pytest.raises(AutoparError) as found:
        torch.autograd.grad(y.sum(), x, create_graph=True)
    return str(found.value)

"""All-gathers before products and reduce-scatters after them, piece by piece while the products are computed.

    all_gather(x), linear, linear, ...  ->  gather_products     the products of a rank's rows begin when they arrive
    linear, reduce_scatter              ->  product_scatter     the rows of a rank are sent when they are computed

A piece is what one rank has of the rows that the collective gathers or scatters. Every rank sends each piece to the
rank that needs it, in the order of the distance between them, and computes while pieces travel (Wang et al. 2022,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", section 5). They
send around a ring; here a piece goes to its rank at once, so that no rank has to pass on what it received while it
computes.

Backward of either is the other with the gradient: the products with the weight are decomposed the same way, and the
gradients of weights are computed while the pieces travel. Backward keeps what the unchanged graph keeps: the gathered
`x` where a weight is trained, or the operand of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar import _torch
from autopar.errors import AutoparError
from autopar.ops.attention_block import wide
from autopar.ops.collectives import naming_failures

Wait = Callable[[], Tensor]


class Pieces(NamedTuple):
    """The pieces of a tensor along one dim, one for each rank of a group.

    Attributes:
        dim: dimension along which the pieces lie.
        size: number of ranks in the group.
        group: c10d name of the process group.
    """

    dim: int
    size: int
    group: str

    @property
    def rank(self) -> int:
        """Position of this rank in the group, which is the number of its own piece."""
        return _torch.resolve_group(self.group).rank()

    def of(self, x: Tensor, number: int) -> Tensor:
        """The piece of a whole tensor with this number."""
        width = x.shape[self.dim] // self.size
        return x.narrow(self.dim, number * width, width)

    def start(self, piece: Tensor, distance: int) -> Wait:
        """Sends a piece to the rank this far ahead; the result waits for the piece of the rank this far behind."""
        sent, received = [0] * self.size, [0] * self.size
        sent[(self.rank + distance) % self.size] = piece.numel()
        received[(self.rank - distance) % self.size] = piece.numel()
        message, shape = piece.contiguous().view(-1), piece.shape
        with naming_failures("a decomposed collective", self.group):
            coming = _torch.start_exchange_rows(message, sent, received, self.group)

        def wait() -> Tensor:
            with naming_failures("a decomposed collective", self.group):
                return coming().view(shape)

        return wait

    def gathered(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The pieces of all ranks with their numbers: at once the rank's own, the others when they have arrived.

        One is under way at a time: several would share the link, and the first of them would arrive later.
        """
        wait = self.start(own, 1)
        yield self.rank, own
        for distance in range(1, self.size):
            piece = wait()
            if distance + 1 < self.size:
                wait = self.start(own, distance + 1)
            yield (self.rank - distance) % self.size, piece

    def scattered(self, make: Callable[[int], Tensor]) -> Wait:
        """Makes every piece and sends it to its rank; the result waits for the sum of the pieces of this rank.

        The sum is taken in the order of the ranks, whatever arrives first.

        Args:
            make: computes this rank's part of the piece with a number.
        """
        coming: dict[int, Wait] = {}
        for distance in range(1, self.size):
            piece = make((self.rank + distance) % self.size)
            coming[(self.rank - distance) % self.size] = self.start(piece, distance)
        own = make(self.rank)
        coming[self.rank] = lambda: own

        def wait() -> Tensor:
            total = coming[0]() + coming[1]()
            for number in range(2, self.size):
                total += coming[number]()
            return total

        return wait


def gather_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    size: int,
    group: str,
) -> tuple[Tensor, ...]:
    """`linear(gathered, weight, bias)` of every weight, where `gathered` is `x` of all ranks along `dim`.

    Args:
        x: local tensor of shape (..., in_features).
        weights: tensors of shape (out_features, in_features).
        biases: tensors of shape (out_features,); None for no bias.
        dim: dimension of `x`, not the last one, that all ranks together have whole.
        size: number of ranks in the group.
        group: c10d name of the process group.

    Raises AutoparError in a derivative of a gradient, PeerError if another rank fails.
    """
    found: tuple[Tensor, ...] = _GatherProducts.apply(
        Pieces(dim, size, group), len(weights), x, *weights, *biases
    )
    return found


def product_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, size: int, group: str
) -> Tensor:
    """This rank's part along `dim` of the sum over all ranks of their `linear(x, weight, bias)`.

    Args:
        x: local tensor of shape (..., in_features).
        weight: tensor of shape (out_features, in_features).
        bias: tensor of shape (out_features,); None for no bias. The biases of all ranks are added up.
        dim: dimension of `x`, not the last one, of which each rank gets its part.
        size: number of ranks in the group.
        group: c10d name of the process group.

    Raises AutoparError in a derivative of a gradient, PeerError if another rank fails.
    """
    found: Tensor = _ProductScatter.apply(Pieces(dim, size, group), x, weight, bias)
    return found


class _GatherProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: Pieces, count: int, x: Tensor, *others: Tensor | None) -> Any:
        weights, biases = others[:count], others[count:]
        parts: dict[int, Tensor] = {}
        results: dict[int, list[Tensor]] = {}
        for number, part in pieces.gathered(x):
            parts[number] = part
            results[number] = [F.linear(part, w, b) for w, b in zip(weights, biases, strict=True)]  # type: ignore[arg-type]
        ranks = range(pieces.size)
        whole = torch.cat([parts[i] for i in ranks], pieces.dim)
        ctx.pieces = pieces
        trained = any(ctx.needs_input_grad[3 : 3 + count])
        ctx.save_for_backward(whole if trained else None, *weights)
        ctx.set_materialize_grads(False)
        return tuple(torch.cat([results[i][j] for i in ranks], pieces.dim) for j in range(count))

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _refuse_second_derivative()
        whole, *weights = ctx.saved_tensors
        pieces: Pieces = ctx.pieces
        pairs = [(g, w) for g, w in zip(grads, weights, strict=True) if g is not None]
        needs_x, *needs = ctx.needs_input_grad[2:]

        def part(number: int) -> Tensor:
            first, *rest = (pieces.of(g, number) @ w for g, w in pairs)
            return sum(rest, start=first)

        wait = pieces.scattered(part) if needs_x and pairs else None
        of_weights, of_biases = needs[: len(weights)], needs[len(weights) :]
        found = [
            _of_weight(g, whole) if g is not None and n else None
            for g, n in zip(grads, of_weights, strict=True)
        ]
        sums = [
            _of_bias(g) if g is not None and n else None
            for g, n in zip(grads, of_biases, strict=True)
        ]
        return None, None, wait() if wait else None, *found, *sums


class _ProductScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: Pieces, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.pieces = pieces
        ctx.save_for_backward(x, weight)
        return pieces.scattered(lambda number: F.linear(pieces.of(x, number), weight, bias))()

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _refuse_second_derivative()
        x, weight = ctx.saved_tensors
        pieces: Pieces = ctx.pieces
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        of_x = torch.empty_like(x) if needs_x else None
        # Sums over pieces would be rounded once a piece in a 16-bit format.
        exact = wide(weight.dtype)
        of_weight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        of_bias = weight.new_zeros(weight.shape[0], dtype=exact) if needs_bias else None
        for number, part in pieces.gathered(grad):
            if of_x is not None:
                pieces.of(of_x, number).copy_(part @ weight)
            if of_weight is not None:
                of_weight += _of_weight(part, pieces.of(x, number))
            if of_bias is not None:
                of_bias += _of_bias(part)
        sums = (None if x is None else x.to(weight.dtype) for x in (of_weight, of_bias))
        return None, of_x, *sums


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _of_bias(grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).sum(0)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise AutoparError(
            "A derivative is taken of a gradient (a backward with create_graph=True), and a decomposed collective has "
            "none: leave out decompose=, or the plan's line `decomposed`."
        )

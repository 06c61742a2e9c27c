"""All-gathers before products and reduce-scatters after them, piece by piece while the products are computed.

    all_gather(x), linear, linear, ...  ->  gather_products     the product of a rank's piece begins when it arrives
    linear, reduce_scatter              ->  product_scatter     the piece of a rank is sent when it is computed

A piece is what one rank has of the tensor that the collective gathers or scatters. Every rank sends each piece to the
rank that needs it, in the order of the distance between them, and computes while pieces travel (Wang et al. 2022,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", section 5). They
send around a ring; here a piece goes to its rank at once, so that no rank has to pass on what it received while it
computes.

A product y = x w^T has three factors: rows (in x and y), features (in x and w) and columns (in w and y). Whichever of
them is in pieces, a piece of the product takes the pieces of the tensors that have the factor, and the whole of the
other. Pieces of the result that has the factor lie side by side; those of a result without it are added up:

    gathered rows       y[i] = x[i] w^T
    gathered features   y = sum over i of x[i] w[:, i]^T
    scattered rows      y[i] = x[i] w^T
    scattered columns   y[i] = x w[i]^T

The second is a product by panels, as SUMMA takes it (van de Geijn and Watts 1997): a panel x[i] arrives, is used and is
dropped, so that a rank never has the whole of x.

Backward of either is the other with the gradient: the products with the weight are decomposed the same way, and the
gradients of weights are computed while the pieces travel. Backward keeps the gathered `x` where a weight is trained,
or only this rank's piece of it, of which it gathers the others again; or the operand of the product.
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

        One is under way at a time: several would share the link, and the first of them would arrive later. It has
        memory of its own, so that a caller who drops each piece after its use has two at most.
        """
        wait = self.start(own, 1)
        yield self.rank, own
        for distance in range(1, self.size):
            piece = wait()
            if distance + 1 < self.size:
                wait = self.start(own, distance + 1)
            yield (self.rank - distance) % self.size, piece
            del piece

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


class Cut(NamedTuple):
    """A product y = x w^T in pieces along one of its factors; see the module.

    Attributes:
        pieces: the pieces along the factor of x or of y.
        factor: "rows", "features" or "columns".
    """

    pieces: Pieces
    factor: str

    def x(self, x: Tensor, number: int) -> Tensor:
        """The part of x that goes into the piece of the product with a number."""
        return x if self.factor == "columns" else self.pieces.of(x, number)

    def weight(self, weight: Tensor, number: int) -> Tensor:
        """The part of the weight that goes into this piece."""
        if self.factor == "rows":
            return weight
        return self.pieces._replace(dim=int(self.factor == "features")).of(weight, number)

    def y(self, y: Tensor, number: int) -> Tensor:
        """The part of the gradient of y that belongs to this piece."""
        return y if self.factor == "features" else self.pieces.of(y, number)

    def bias(self, bias: Tensor, number: int) -> Tensor:
        """The part of the bias that goes into this piece."""
        return self.pieces._replace(dim=0).of(bias, number) if self.factor == "columns" else bias

    def product(self, part: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
        """The piece of a product with a number, from the piece of x.

        Where pieces are added up, that of this rank alone has the bias.
        """
        is_added = self.factor != "features" or number == self.pieces.rank
        own = None if bias is None or not is_added else self.bias(bias, number)
        return F.linear(part, self.weight(weight, number), own)

    def result(self, of: str) -> _Result:
        """An empty result "x", "weight", "bias" or "y"."""
        has = {"rows": ("x", "y"), "features": ("x", "weight"), "columns": ("weight", "bias", "y")}[self.factor]
        if of not in has:
            return _Result(None)
        own = {"weight": int(self.factor == "features"), "bias": 0}
        return _Result(self.pieces._replace(dim=own.get(of, self.pieces.dim)))


class _Result:
    """A result of products that come in pieces: side by side along its pieces, or added up where it has none.

    Sums are taken in at least 32 bits: those of a 16-bit format would be rounded once a piece.
    """

    def __init__(self, pieces: Pieces | None) -> None:
        self._pieces = pieces
        self._total: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def add(self, number: int, piece: Tensor) -> None:
        """Adds the piece with a number."""
        self._dtype = piece.dtype
        if self._pieces is None:
            exact = piece.to(wide(piece.dtype))
            self._total = exact if self._total is None else self._total.add_(exact)
            return
        if self._total is None:
            shape = list(piece.shape)
            shape[self._pieces.dim] *= self._pieces.size
            self._total = piece.new_empty(shape)
        self._pieces.of(self._total, number).copy_(piece)

    def whole(self) -> Tensor:
        """The result, when all pieces have been added."""
        assert self._total is not None, "a product has at least one piece"
        return self._total.to(self._dtype)


def gather_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    size: int,
    group: str,
    again: bool = False,
) -> tuple[Tensor, ...]:
    """`linear(gathered, weight, bias)` of every weight, where `gathered` is `x` of all ranks along `dim`.

    Args:
        x: local tensor of shape (..., in_features), of two dims or more; along the last dim a part of the features.
        weights: tensors of shape (out_features, in_features).
        biases: tensors of shape (out_features,); None for no bias.
        dim: dimension of `x` that all ranks together have whole.
        size: number of ranks in the group.
        group: c10d name of the process group.
        again: whether backward keeps `x` alone, and gathers the rest again while it computes the gradients of weights.

    Raises AutoparError in a derivative of a gradient, PeerError if another rank fails.
    """
    cut = Cut(Pieces(dim, size, group), "features" if dim == x.ndim - 1 else "rows")
    found: tuple[Tensor, ...] = _GatherProducts.apply(cut, again, len(weights), x, *weights, *biases)
    return found


def product_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, size: int, group: str) -> Tensor:
    """This rank's part along `dim` of the sum over all ranks of their `linear(x, weight, bias)`.

    Args:
        x: local tensor of shape (..., in_features), of two dims or more.
        weight: tensor of shape (out_features, in_features).
        bias: tensor of shape (out_features,); None for no bias. The biases of all ranks are added up.
        dim: dimension of the product of which each rank gets its part.
        size: number of ranks in the group.
        group: c10d name of the process group.

    Raises AutoparError in a derivative of a gradient, PeerError if another rank fails.
    """
    cut = Cut(Pieces(dim, size, group), "columns" if dim == x.ndim - 1 else "rows")
    found: Tensor = _ProductScatter.apply(cut, x, weight, bias)
    return found


class _GatherProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cut: Cut, again: bool, count: int, x: Tensor, *others: Tensor | None) -> Any:
        weights, biases = others[:count], others[count:]
        trained = any(ctx.needs_input_grad[4 : 4 + count])
        whole = cut.result("x") if trained and not again else None
        results = [cut.result("y") for _ in weights]
        for number, part in cut.pieces.gathered(x):
            if whole is not None:
                whole.add(number, part)
            for result, w, b in zip(results, weights, biases, strict=True):
                assert w is not None, "only a bias may be None"
                result.add(number, cut.product(part, w, b, number))
            del part  # before the next arrives
        ctx.cut, ctx.again = cut, again
        kept = whole.whole() if whole is not None else x if trained else None
        ctx.save_for_backward(kept, *weights)
        ctx.set_materialize_grads(False)
        return tuple(result.whole() for result in results)

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _refuse_second_derivative()
        kept, *weights = ctx.saved_tensors
        cut: Cut = ctx.cut
        pairs = [(g, w) for g, w in zip(grads, weights, strict=True) if g is not None]
        needs_x, *needs = ctx.needs_input_grad[3:]

        def part(number: int) -> Tensor:
            first, *rest = (cut.y(g, number) @ cut.weight(w, number) for g, w in pairs)
            return sum(rest, start=first)

        wait = cut.pieces.scattered(part) if needs_x and pairs else None
        of_weights, of_biases = needs[: len(weights)], needs[len(weights) :]
        trained = [g if n else None for g, n in zip(grads, of_weights, strict=True)]
        found = (_again if ctx.again else _at_once)(cut, kept, trained)
        sums = [_of_bias(g) if g is not None and n else None for g, n in zip(grads, of_biases, strict=True)]
        return None, None, None, wait() if wait else None, *found, *sums


def _at_once(cut: Cut, whole: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of weights from the gathered x."""
    return [None if g is None else _of_weight(g, whole) for g in grads]


def _again(cut: Cut, x: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of weights from this rank's piece of x: the others are gathered again."""
    if all(g is None for g in grads):
        return list(grads)
    results = [cut.result("weight") for _ in grads]
    for number, part in cut.pieces.gathered(x):
        for result, g in zip(results, grads, strict=True):
            if g is not None:
                result.add(number, _of_weight(cut.y(g, number), part))
        del part  # before the next arrives
    return [None if g is None else result.whole() for result, g in zip(results, grads, strict=True)]


class _ProductScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cut: Cut, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.cut = cut
        ctx.save_for_backward(x, weight)
        return cut.pieces.scattered(lambda i: cut.product(cut.x(x, i), weight, bias, i))()

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _refuse_second_derivative()
        x, weight = ctx.saved_tensors
        cut: Cut = ctx.cut
        names = ("x", "weight", "bias")
        results = {
            name: cut.result(name) for name, is_needed in zip(names, ctx.needs_input_grad[1:], strict=True) if is_needed
        }
        for number, part in cut.pieces.gathered(grad):
            if "x" in results:
                results["x"].add(number, part @ cut.weight(weight, number))
            if "weight" in results:
                results["weight"].add(number, _of_weight(part, cut.x(x, number)))
            if "bias" in results:
                results["bias"].add(number, _of_bias(part))
            del part  # before the next arrives
        return None, *(results[name].whole() if name in results else None for name in names)


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _of_bias(grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).sum(0)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise AutoparError(
            "A derivative is taken of a gradient (a backward with create_graph=True), but a decomposed collective has "
            "none: leave out decompose=, or the plan's line `decomposed`."
        )

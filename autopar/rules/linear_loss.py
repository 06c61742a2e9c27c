"""The rule of a linear layer with its loss: rows and classes are split as those of the loss alone, and run in tiles.

    n d!, c d!, c, n, c -> | sum n c

On a rank the rows are cut into as many runs as their logits need, and the calls of each run bear its number in
`meta["tile"]`: backward computes these calls again, so that the logits of one run exist at a time. The loss and the
gradient of the matrix are added up over tiles in float32 or wider.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ops.attention_block import wide
from autopar.rules.loss import MEAN, SUM, OverTokens
from autopar.rules.spec import Call, Hidden, Kept, Letters, Local, Nest, Spec, StatedCollective, local_arguments

aten = torch.ops.aten
# In backward there are, besides the logits, their log-probabilities and the gradients of both.
_TENSORS_OF_A_TILE = 4
# Each has about ten calls in the graph. A plan that is read could ask for a tile a row.
_MOST_TILES = 1024
# An add reads the sum of the matrix's gradient and a part of it, and writes the sum.
_TENSORS_OF_AN_ADD = 3


def linear_cross_entropy(call: Call) -> Spec:
    """linear_cross_entropy, see above."""
    x, matrix = call.operands[:2]
    logits = torch.empty((x.shape[0], matrix.shape[0]), dtype=call["dtype"], device="meta")
    target = call["target"].meta["val"]
    sizes = {"n": x.shape[0], "d": x.shape[1], "c": matrix.shape[0]}
    sizes = {letter: int(size) for letter, size in sizes.items() if size > 1}
    n, d, c = ((letter,) if letter in sizes else () for letter in "ndc")
    lines: dict[str, Letters] = {"x": (n, d), "matrix": (c, d), "bias": (c,), "target": (n,), "weight": (c,)}
    reduced = call["reduction"] in (MEAN, SUM)
    of_loss = OverTokens(call, logits, target, (n,), c, normalizes=True)
    nests = _nests(call, logits, sizes)
    return Spec(
        tuple(lines[name] for name in lines if isinstance(call[name], fx.Node)),
        (() if reduced else (n,),),
        sizes,
        sums=frozenset(n if reduced else ()) | frozenset(c),
        whole=frozenset(d),
        contiguous=frozenset(c),
        flops=round(sum(nest.flops(sizes) for nest in nests)),
        nests=nests,
        stated_kept=_kept(call, logits, (c, d)),
        collectives=_collectives(call, of_loss),
        localize=_InTiles(of_loss, call["tile_bytes"], n, matrix.dtype),
    )


def _collectives(call: Call, of_loss: OverTokens) -> tuple[StatedCollective, ...]:
    """Those of the loss; backward repeats the messages of every token."""
    found = of_loss.collectives(call["weight"], wanted=0 in call.wanted)
    again = [each._replace(forward="", backward=each.forward) for each in found if each.letters and call.wanted]
    return (*found, *again)


def _kept(call: Call, logits: torch.Tensor, letters: Letters) -> Kept:
    """All operands, and what one tile takes while it is computed again, just before all else is freed.

    Of a matrix in 16 bits, with these letters, also the wide copy and its gradient.
    """
    tile_bytes = min(call["tile_bytes"], logits.numel() * logits.element_size())
    tile = Hidden("tile", (), torch.uint8, _TENSORS_OF_A_TILE * tile_bytes)
    matrix = call.operands[1]
    copied = (Hidden("wide", letters, wide(matrix.dtype), 2),) * (wide(matrix.dtype) != matrix.dtype)
    return Kept(tuple(range(len(call.operands))), (), (tile, *copied)) if call.wanted else Kept()


def _nests(call: Call, logits: torch.Tensor, sizes: dict[str, int]) -> tuple[Nest, ...]:
    """The product, the loss of its results, both again in backward, and the sum of the matrix's gradient over tiles."""
    n, d, c = ((letter,) if letter in sizes else () for letter in "ndc")
    x = call.operands[0].element_size()
    size, trains = logits.element_size(), int(bool(call.wanted))
    product = Nest(
        2.0,
        n,
        c,
        d,
        itemsize_bytes=x,
        gradients=trains * (1 + len(call.wanted & {0, 1})),
        moved=(((*n, *d), x), ((*c, *d), x), ((*n, *c), x)),
    )
    loss = Nest(4.0, (*n, *c), gradients=2 * trains, moved=(((*n, *c), 2 * size),))
    added_bytes = wide(call.operands[1].dtype).itemsize
    adds = _TENSORS_OF_AN_ADD * added_bytes * size * logits.shape[1] / call["tile_bytes"]
    added = Nest(0.0, gradients=int(1 in call.wanted), moved=(((*n, *c, *d), adds),))
    return product, loss, added


class _InTiles:
    """Writes the calls of all tiles of a rank.

    Args:
        of_loss: writes the loss of rows of logits.
        tile_bytes: bytes of the logits of a tile.
        rows: letter of the rows; () for one row.
        dtype: format of the matrix.
    """

    def __init__(self, of_loss: OverTokens, tile_bytes: int, rows: tuple[str, ...], dtype: torch.dtype) -> None:
        self.of_loss, self.tile_bytes, self.rows, self.dtype = of_loss, tile_bytes, rows, dtype

    def __call__(self, local: Local) -> fx.Node:
        given = local_arguments(local)
        axes = self.of_loss.axes(local)
        runs = [self._runs(local, given[name]) for name in ("x", "target")]
        if wide(self.dtype) != self.dtype:  # the gradients of all tiles are added up in the format of the copy
            given["matrix"] = local.emit(aten._to_copy.default, given["matrix"], dtype=wide(self.dtype))
        found = []
        for number, (x, target) in enumerate(zip(*runs, strict=True)):
            local.tile = number
            found.append(self._loss(local, given | {"x": x, "target": target}, axes[0]))
        local.tile = None
        if self.of_loss.reduction not in (MEAN, SUM):
            return local.emit(aten.cat.default, found)
        total = found[0]
        for each in found[1:]:
            total = local.emit(aten.add.Tensor, total, each)
        return self.of_loss.divided(local, given, total, *axes) if self.of_loss.reduction == MEAN else total

    def _runs(self, local: Local, x: fx.Node) -> list[fx.Node]:
        """A tensor's rows by tile, outside of what is recomputed, so that tiles of one size have the same code."""
        count, rows = self.count(local), math.prod(local.part(letter) for letter in self.rows)
        ends = [rows * number // count for number in range(count + 1)]
        sizes = [end - start for start, end in itertools.pairwise(ends)]
        runs = local.emit(aten.split_with_sizes.default, x, sizes)
        return [local.emit(operator.getitem, runs, number) for number in range(count)]

    def count(self, local: Local) -> int:
        """Number of tiles; the same on all ranks."""
        most = max(_by_rank(local.part(letter) for letter in self.rows) or [1])
        classes = max(_by_rank(local.part(letter) for letter in self.of_loss.channel) or [1])
        wanted = math.ceil(most * classes * self.of_loss.size_bytes / self.tile_bytes)
        return max(1, min(most, wanted, _MOST_TILES))

    def _loss(self, local: Local, given: dict[str, Any], classes: tuple[tuple[str, int], ...]) -> fx.Node:
        """The loss of a tile; its sum where the loss is reduced."""
        matrix = given["matrix"]
        if wide(self.dtype) != self.dtype:
            matrix = local.emit(aten._to_copy.default, matrix, dtype=self.dtype)
        logits = local.emit(aten.linear.default, given["x"], matrix, given["bias"])
        if self.dtype != given["dtype"]:
            logits = local.emit(aten._to_copy.default, logits, dtype=given["dtype"])
        of_loss = given | {"self": logits}
        reduced = self.of_loss.reduction in (MEAN, SUM)
        if classes:
            each = self.of_loss.over_classes(local, of_loss, classes)
            return local.emit(aten.sum.default, each) if reduced else each
        rest = given["weight"], SUM if reduced else 0, given["ignore_index"], given["label_smoothing"]
        return local.emit(aten.cross_entropy_loss.default, logits, given["target"], *rest)


def _by_rank(sizes: Any) -> list[int]:
    return [size for each in sizes for size in getattr(each, "by_rank", (each,))]


RULES: dict[str, Callable[[Call], Spec]] = {"autopar.linear_cross_entropy": linear_cross_entropy}

"""Ring attention as one rank runs it: every rank has a part of the keys and values, and the parts travel in a ring.

Queries and keys are split along their sequences over the same ranks. In n steps the keys and values of every rank
travel once round all n; each rank attends to the block that it has got, while the block already travels on, and
combines the results (Liu, Zaharia and Abbeel 2023, Ring Attention with Blockwise Transformers). No rank ever has more
than its own block and two that travel. Backward keeps the own query, key, value, result and log-sum-exp. The blocks
travel once more, and each takes the sum of its gradients along, which is complete when it comes home.

A block that a causal mask hides wholly is sent on and not computed. Where queries and keys are split alike, rows of a
causal attention are dealt out before (`autopar.ops.ring_place.deal`), so that every rank has as much to do, and results
go back; as in the load balance of torch.distributed.tensor.experimental.context_parallel, where users deal them.

Over several mesh axes the ranks are one ring that goes along the last axis to its end, one step along the axis before,
and along the last axis back (`route`).

A rank is written as a dialogue: a generator that yields what it sends (`Send`) and is given a function that waits for
what it receives. `autopar.ops.ring` answers it by process groups, `autopar.proof.lockstep_rings` from all ranks of one
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.ops.attention_block import Attended, AttentionBlock, combined, wide
from autopar.ops.ring_place import ROWS, Arrival, Dialogue, RingPlace, RowRun, Tensors, deal, runs


class Scoring(NamedTuple):
    """The arguments of a call of attention that are not tensors.

    Attributes:
        is_causal: whether query i of all sees no key behind key i of all.
        scale: factor of the scores.
        mask_travels: whether the mask is split along the keys and travels with them; else it has all keys' columns.
    """

    is_causal: bool
    scale: float
    mask_travels: bool = False


class Operands(NamedTuple):
    """A rank's parts of the operands.

    Attributes:
        query, key, value: tensors of shape (batch, heads, rows, width).
        mask: mask over the rank's queries, or over its keys if it travels; None for none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None

    def travelling(self, how: Scoring) -> Tensors:
        """The tensors that travel around the ring."""
        masks = (self.mask,) if how.mask_travels and self.mask is not None else ()
        return self.key, self.value, *masks

    def is_dealt(self, place: RingPlace, how: Scoring) -> bool:
        """Whether rows are dealt out: of causal attention whose queries and keys are split alike."""
        rows, columns = self.query.shape[ROWS], self.key.shape[ROWS]
        alike = all(place.turns) and rows == columns > 1
        return how.is_causal and self.mask is None and alike


class _Meeting(NamedTuple):
    """The queries of a rank, and the keys that are with it.

    Attributes:
        own: the rank's operands.
        here: keys, values and perhaps a mask of block `number`.
        number: number of that block.
        place: place of the rank.
        how: how it attends.
        dealt: whether rows are dealt out.
    """

    own: Operands
    here: Tensors
    number: int
    place: RingPlace
    how: Scoring
    dealt: bool

    def queries(self) -> list[RowRun]:
        rows = self.own.query.shape[ROWS]
        return runs(self.place.block, rows, self.place.blocks, dealt=self.dealt)

    def blocks(self) -> Iterator[tuple[int, RowRun, RowRun, AttentionBlock]]:
        """Every run of queries by its number, with every run of keys of which it sees some."""
        columns = self.here[0].shape[ROWS]
        of_keys = runs(self.number, columns, self.place.blocks, dealt=self.dealt)
        for i, rows in enumerate(self.queries()):
            for keys in of_keys:
                block = self._block(rows, keys)
                if block.is_seen:
                    yield i, rows, keys, block

    def _block(self, rows: RowRun, keys: RowRun) -> AttentionBlock:
        key, value = (keys.of(x) for x in self.here[:2])
        mask = self.own.mask  # rows are not dealt out then
        if mask is not None:
            mask = self.here[2] if self.how.mask_travels else _columns(mask, keys)
        offset = rows.first - keys.first if self.how.is_causal else keys.length - 1
        return AttentionBlock(rows.of(self.own.query), key, value, mask, offset, self.how.scale)


def _columns(mask: Tensor, keys: RowRun) -> Tensor:
    return mask if mask.shape[-1] == 1 else mask.narrow(-1, keys.first, keys.length)


def attend(place: RingPlace, how: Scoring, own: Operands) -> Dialogue[Attended]:
    """The rank's part of the result, and the log-sum-exp of the scores of every query.

    Args:
        place: place of the rank.
        how: how it attends.
        own: its parts of the operands.
    """
    dealt = own.is_dealt(place, how)
    if dealt:
        query, key, value = yield from deal(place, own[:3])
        own = Operands(query, key, value, None)
    here, arrival = own.travelling(how), None
    found: dict[int, Attended] = {}
    for number, onward in place.stops():
        here = here if arrival is None else arrival()
        if onward is not None:
            arrival = yield place.send(*onward, here)
        for i, _, _, block in _Meeting(own, here, number, place, how, dealt).blocks():
            both = block.attend()
            found[i] = combined(found[i], both) if i in found else both
    in_order = (found[i] for i in sorted(found))
    result, logsumexp = (torch.cat(x, ROWS) for x in zip(*in_order, strict=True))
    result = result.to(own.query.dtype)
    if dealt:
        result, logsumexp = yield from deal(place, (result, logsumexp), back=True)
    return result, logsumexp


def attend_backward(
    place: RingPlace, how: Scoring, own: Operands, attended: Attended, gradient: Tensor
) -> Dialogue[Tensors]:
    """The gradients of the rank's query, key and value.

    Args:
        place, how, own: as in `attend`.
        attended: what `attend` gave.
        gradient: gradient of the result.
    """
    if not own.is_dealt(place, how):
        return (yield from _backward(place, how, own, attended, gradient, dealt=False))
    tensors = yield from deal(place, (*own[:3], *attended, gradient))
    query, key, value, result, logsumexp, gradient = tensors
    own = Operands(query, key, value, None)
    found = yield from _backward(place, how, own, (result, logsumexp), gradient, dealt=True)
    return (yield from deal(place, found, back=True))


def _backward(
    place: RingPlace, how: Scoring, own: Operands, attended: Attended, gradient: Tensor, *, dealt: bool
) -> Dialogue[Tensors]:
    """The gradients of the rank's query, key and value, computed without dealing rows out or back.

    The sums of the gradients of keys and values travel one step behind their blocks. After the last step they return to
    the rank that owns the block.
    """
    here, arrival = own.travelling(how), None
    of_query = torch.zeros_like(own.query, dtype=wide(own.query.dtype))
    kept: Tensors | None = None  # of this rank's own keys and values, which are here first
    sums_arrival: Arrival | None = None
    sums: Tensors = ()
    for number, onward in place.stops():
        here = here if arrival is None else arrival()
        if onward is not None:
            arrival = yield place.send(*onward, here)
        meeting = _Meeting(own, here, number, place, how, dealt)
        sums = _added(_gradients(meeting, attended, gradient, of_query), sums_arrival)
        if kept is None:
            kept = sums
        elif onward is not None:
            sums_arrival = yield place.send(*onward, sums)
    assert kept is not None, "a ring has stops"
    for axis, shift in place.way_home():
        sums = (yield place.send(axis, shift, sums))()
    of_key, of_value = (x + y for x, y in zip(kept, sums, strict=True))
    return of_query.to(own.query.dtype), of_key, of_value


def _gradients(meeting: _Meeting, attended: Attended, gradient: Tensor, of_query: Tensor) -> Tensors:
    """Gradients of the keys and values that are here; that of the queries is added to `of_query`."""
    found = tuple(torch.zeros_like(x) for x in meeting.here[:2])
    for _, rows, keys, block in meeting.blocks():
        result, logsumexp = map(rows.of, attended)
        own, *others = block.attend_backward(result, logsumexp, rows.of(gradient))
        rows.of(of_query).add_(own)
        for x, y in zip(found, others, strict=True):
            keys.of(x).add_(y)
    return found


def _added(sums: Tensors, arrival: Arrival | None) -> Tensors:
    """The sums with those that arrive, if some do."""
    if arrival is None:
        return sums
    return tuple(x + y for x, y in zip(sums, arrival(), strict=True))

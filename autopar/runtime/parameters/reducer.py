"""Gradients on their way from the leaves back to the parameters at rest.

Leaves whose gradients travel by the same ops over the same axes share a bucket. A bucket leaves as soon
as the last of its gradients is complete and every bucket before it has left, so that all ranks start the
same collectives in the same order while backward goes on. What a bucket carries is freed at once.

Collectives, and the gradients of later micro-batches, are added to a gradient in place. So a leaf whose gradient is
complete gets its own copy if anything else, such as the backward that goes on, has the gradient's memory. After the
backward, gradients that are different parts of one buffer stay in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar import _torch
from autopar.ops.collectives import seen
from autopar.runtime.collectives.hops import signature
from autopar.runtime.collectives.transfer import Transfer
from autopar.runtime.failures.failing_op import naming_tensors
from autopar.runtime.parameters.parameters import Residents, batches

_MOST_UNDER_WAY = 2  # of buckets that shrink on arrival: more would keep full gradients alive


@dataclass
class Bucket:
    """A bucket: parameters whose gradients are reduced in one collective.

    Attributes:
        members: positions of the leaves.
        every_micro_batch: whether it is reduced after every micro-batch, or only after the last.
        shrinks: whether the reduction makes its gradients smaller, as a reduce-scatter does.
        stays: whether its gradients are complete on this rank already, so that no collective is needed.
        ready: members whose gradient is complete in this micro-batch.
        transfer: the reduction that is running; None if none is.
        sent: members whose gradients are part of the running reduction.
    """

    members: list[int]
    every_micro_batch: bool
    shrinks: bool
    stays: bool
    ready: set[int] = field(default_factory=set)
    transfer: Transfer | None = None
    sent: list[int] = field(default_factory=list)


class Reducer:
    """Reduces the gradients of one program's residents.

    Args:
        residents: the leaves and their routes back.
        every_micro_batch: per leaf, whether its gradient goes back after every micro-batch.
        late: leaves whose gradient is complete only when backward has ended.
        order: positions of the leaves in the order in which backward completes them, about.
        bucket_bytes: about how much one collective carries.
    """

    def __init__(
        self,
        residents: Residents,
        *,
        every_micro_batch: Sequence[bool],
        late: frozenset[int],
        order: Sequence[int],
        bucket_bytes: int,
    ) -> None:
        self._residents = residents
        self._late = late
        specs = residents.specs
        # Leaves in another tier have gradients that were moved there, which nothing else reads.
        self._on_device = [i for i, spec in enumerate(specs) if spec.tier == "device"]
        self._buckets = self._make_buckets(every_micro_batch, order, bucket_bytes)
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.members}
        self._watched: dict[int, Tensor] = {}
        self._departing: list[Bucket] = []  # this micro-batch's buckets that wait for gradients
        self._under_way: list[Bucket] = []

    def _make_buckets(self, every_micro_batch: Sequence[bool], order: Sequence[int], bucket_bytes: int) -> list[Bucket]:
        returns = self._residents.returns
        signatures = [
            (("when", int(each)), ("late", int(i in self._late)), *signature(hops))
            for i, (hops, each) in enumerate(zip(returns, every_micro_batch, strict=True))
        ]
        order = sorted(order, key=lambda i: not self._leaves_early(i))  # they must not hold up the others
        shapes = [
            self._residents.largest(kept.spec, spec.layout, spec.gradient_dtype)
            for kept, spec in zip(self._residents.kept, self._residents.specs, strict=True)
        ]
        return [
            Bucket(
                members,
                every_micro_batch[members[0]],
                _shrinks(signatures[members[0]]),
                stays=not signature(returns[members[0]]),
            )
            for members in batches(order, signatures, shapes, bucket_bytes)
        ]

    def attach(self) -> None:
        """Watches the leaves; to be called again when some are new tensors."""
        for i, leaf in enumerate(self._residents.leaves):
            if leaf.requires_grad and self._leaves_early(i) and self._watched.get(i) is not leaf:
                leaf.register_post_accumulate_grad_hook(lambda _, i=i: self._complete(i))
                self._watched[i] = leaf

    def _leaves_early(self, i: int) -> bool:
        """Whether a gradient can travel while backward goes on; one that goes nowhere need not be watched."""
        return i not in self._late and bool(signature(self._residents.returns[i]))

    def begin(self, *, last: bool) -> None:
        """Before the backward of a micro-batch."""
        self._departing = [b for b in self._buckets if last or b.every_micro_batch]
        self._under_way = []
        for bucket in self._buckets:
            bucket.ready, bucket.transfer, bucket.sent = set(), None, []

    def finish(self) -> None:
        """After the backward of a micro-batch: sends the remaining gradients, and writes all results to `.grad`."""
        leaves = self._residents.leaves
        _torch.own_gradients([leaves[i] for i in self._on_device])
        while self._departing:
            self._send(self._departing.pop(0))
        while self._under_way:
            self._receive(self._under_way.pop(0))

    def forget(self) -> None:
        """Drops the gradients of a step that did not end, and temporaries of the last one."""
        self._watched = {i: x for i, x in self._watched.items() if self._residents.leaves[i] is x}
        for leaf in self._residents.leaves:
            leaf.grad = None

    def _complete(self, i: int) -> None:
        if self._residents.specs[i].tier == "device":
            _torch.own_gradients([self._residents.leaves[i]])
        bucket = self._bucket_of[i]
        bucket.ready.add(i)
        while self._departing and self._is_full(self._departing[0]):
            self._send(self._departing.pop(0))

    def _is_full(self, bucket: Bucket) -> bool:
        leaves = self._residents.leaves
        return all(i in bucket.ready for i in bucket.members if leaves[i].requires_grad)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        if bucket.stays:
            self._keep(bucket.members)
            return
        shrinking = [b for b in self._under_way if b.shrinks]
        if bucket.shrinks and len(shrinking) >= _MOST_UNDER_WAY:
            self._under_way.remove(shrinking[0])
            self._receive(shrinking[0])
        gradients: list[Tensor] = []
        for i in bucket.members:
            leaf = self._residents.leaves[i]
            if leaf.grad is not None:
                bucket.sent.append(i)
                gradients.append(leaf.grad)
                leaf.grad = None
        if gradients:
            routes = [self._residents.returns[i] for i in bucket.sent]
            with self._naming(bucket):
                bucket.transfer = Transfer(routes, gradients, self._residents.world)
            self._under_way.append(bucket)

    def _keep(self, members: Sequence[int]) -> None:
        """Hands over the gradients of leaves that go nowhere."""
        leaves, returns = self._residents.leaves, self._residents.returns
        for i in members:
            gradient, hops = leaves[i].grad, returns[i]
            if gradient is not None:
                leaves[i].grad = None
                self._hand_over(i, seen(gradient, hops[-1].after) if hops else gradient)

    def _hand_over(self, i: int, gradient: Tensor) -> None:
        """Gives a gradient to its parameter.

        No flag is read: a step runs only while flags are those of its leaves, and a frozen leaf has no gradient.
        """
        _torch.accumulate_gradient(self._residents.kept[i].parameter, gradient)

    @torch.no_grad()
    def _receive(self, bucket: Bucket) -> None:
        assert bucket.transfer is not None
        with self._naming(bucket):
            gradients = bucket.transfer.wait()
        bucket.transfer = None
        for i, gradient in zip(bucket.sent, gradients, strict=True):
            self._hand_over(i, gradient)

    def _naming(self, bucket: Bucket) -> AbstractContextManager[None]:
        """A context in which an error says whose gradients a bucket has."""
        return naming_tensors("gradients", [self._residents.specs[i].name for i in bucket.sent])


def _shrinks(names: Sequence[tuple[str, int]]) -> bool:
    """Whether gradients become smaller on the way, if on the ranks alone that do not own them."""
    kinds = {name.partition(" ")[0] for name, _ in names}
    return not kinds.isdisjoint(("reduce_scatter", "shard", "reduce", "reduce_rows", "keep"))

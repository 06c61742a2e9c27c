"""Ring attention as an op in the graph of one rank, run over process groups.

    torch.ops.autopar.ring_attention(query, key, value, mask, sizes, groups, turns, is_causal, scale, mask_travels)
        -> (result, logsumexp)

`groups` are the mesh axes that split the queries, major first (c10d group names in a bound graph), `sizes` their
numbers of ranks, and `turns` the positions among them of those along which keys and values go round. Backward is
`ring_attention_backward`. What a rank does is written in `autopar.ops.ring_attention`; here process groups carry what
it sends, by all-to-alls in which most ranks send to one or two others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx

from autopar import _torch
from autopar.ops.attention_block import wide
from autopar.ops.collectives import naming_failures
from autopar.ops.nodes import is_operator, schema
from autopar.ops.ring_attention import Operands, Scoring, attend, attend_backward
from autopar.ops.ring_place import Arrival, Dialogue, RingPlace, Send, Tensors

T = TypeVar("T")
_NAME = "ring_attention"
ROTATE, ROTATE_BACK = "rotate", "rotate_back"  # what is sent forward and backward
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? mask"
_REST = "int[] sizes, str[] groups, int[] turns, bool is_causal, float scale, bool mask_travels"


class Ring(NamedTuple):
    """A call of ring attention, read from its node.

    Attributes:
        tensors: nodes of query, key, value and mask; None for no mask.
        sizes: number of ranks along every axis that splits the queries, major first.
        groups: names of these axes; in a bound graph, c10d names of process groups.
        turns: positions of the axes along which keys and values travel.
        how: how it attends.
    """

    tensors: tuple[fx.Node | None, ...]
    sizes: tuple[int, ...]
    groups: tuple[str, ...]
    turns: tuple[int, ...]
    how: Scoring

    @classmethod
    def of(cls, node: fx.Node) -> Ring | None:
        """The call that a node is; None for any other node."""
        if not is_operator(node) or schema(node).name != f"autopar::{_NAME}":
            return None
        *tensors, sizes, groups, turns, is_causal, scale, mask_travels = node.args
        how = Scoring(is_causal, scale, mask_travels)  # type: ignore[arg-type]
        return cls(tuple(tensors), tuple(sizes), tuple(groups), tuple(turns), how)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """The name of its messages, in the cost model and in a rule."""
        return ROTATE

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the node."""
        return (*self.tensors, *arguments(self.sizes, self.groups, self.turns, self.how))

    def bound(self, groups: Mapping[str, str]) -> Ring:
        """The call with the process groups of its axes."""
        return self._replace(groups=tuple(groups[name] for name in self.groups))

    @property
    def turning(self) -> tuple[str, ...]:
        """The axes along which keys and values travel."""
        return tuple(self.groups[i] for i in self.turns)

    def place(self, position: Sequence[int]) -> RingPlace:
        """The place of the rank with this position along `groups`."""
        turns = tuple(i in self.turns for i in range(len(self.sizes)))
        return RingPlace(self.sizes, turns, tuple(position))


def arguments(sizes: Sequence[int], groups: Sequence[str], turns: Sequence[int], how: Scoring) -> tuple[Any, ...]:
    """The arguments of the op behind its tensors."""
    return [*sizes], [*groups], [*turns], how.is_causal, how.scale, how.mask_travels


# --- on process groups


def _carried(dialogue: Dialogue[T], groups: Sequence[str]) -> T:
    """The result of a rank's dialogue, in which its process groups carry what it sends."""
    try:
        send = next(dialogue)
        while True:
            send = dialogue.send(_start(send, groups[send.axis]))
    except StopIteration as end:
        result: T = end.value
        return result


def _start(send: Send, group: str) -> Arrival:
    """Starts to send, and gives what waits for the tensors that arrive; those of one format travel as one message."""
    kinds = list(dict.fromkeys(x.dtype for x in send.like))
    with naming_failures(_NAME, group):
        coming = {kind: _start_kind(send, kind, group) for kind in kinds}

    def arrive() -> Tensors:
        with naming_failures(_NAME, group):
            arrived = {kind: wait().to(kind) for kind, wait in coming.items()}
        expected = [like for each in send.coming for like in each]
        lengths = {kind: [math.prod(s) for s, own in expected if own is kind] for kind in kinds}
        parts = {kind: iter(x.split(lengths[kind])) for kind, x in arrived.items()}
        return tuple(next(parts[kind]).view(shape) for shape, kind in expected)

    return arrive


def _start_kind(send: Send, kind: torch.dtype, group: str) -> Callable[[], Tensor]:
    """Starts to send all tensors of an element type; bool as uint8, because backends do not support bool."""
    parts = [[x.reshape(-1) for x in part if x.dtype is kind] for part in send.parts]
    nothing = send.like[0].new_empty(0, dtype=kind)
    message = torch.cat([nothing, *(x for part in parts for x in part)])
    sent = [sum(x.numel() for x in part) for part in parts]
    received = [sum(math.prod(s) for s, own in each if own is kind) for each in send.coming]
    message = message.to(torch.uint8) if kind is torch.bool else message
    return _torch.start_exchange_rows(message, sent, received, group)


def _ring(sizes: Sequence[int], groups: Sequence[str], turns: Sequence[int]) -> RingPlace:
    position = [_torch.resolve_group(group).rank() for group in groups]
    return RingPlace(tuple(sizes), tuple(i in turns for i in range(len(sizes))), tuple(position))


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sizes: list[int],
    groups: list[str],
    turns: list[int],
    is_causal: bool,
    scale: float,
    mask_travels: bool,
) -> tuple[Tensor, Tensor]:
    place, how = _ring(sizes, groups, turns), Scoring(is_causal, scale, mask_travels)
    dialogue = attend(place, how, Operands(query, key, value, mask))
    result, logsumexp = _carried(dialogue, groups)
    return result.contiguous(), logsumexp.contiguous()


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    result: Tensor,
    logsumexp: Tensor,
    gradient: Tensor,
    sizes: list[int],
    groups: list[str],
    turns: list[int],
    is_causal: bool,
    scale: float,
    mask_travels: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    place, how = _ring(sizes, groups, turns), Scoring(is_causal, scale, mask_travels)
    own = Operands(query, key, value, mask)
    dialogue = attend_backward(place, how, own, (result, logsumexp), gradient)
    of_query, of_key, of_value = _carried(dialogue, groups)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()


# --- shapes, autograd and registration


def _forward_shapes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    result = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return result, query.new_empty(query.shape[:-1], dtype=wide(query.dtype))


def _backward_shapes(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensors:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


class _Attending(torch.autograd.Function):
    """Ring attention, whose backward is the op `ring_attention_backward`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        with _torch.below_autograd():
            result, logsumexp = _torch.autopar_op(_NAME)(*args)
        ctx.rest = args[4:]
        ctx.save_for_backward(*args[:4], result, logsumexp)
        ctx.mark_non_differentiable(logsumexp)
        return result, logsumexp

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        call = _torch.autopar_op(_NAME + "_backward")
        found = call(*ctx.saved_tensors, gradient, *ctx.rest)
        return *found, None, *(None for _ in ctx.rest)


def register() -> torch.library.Library:
    """Defines both ops, which exist as long as the returned library."""
    library = torch.library.Library("autopar", "FRAGMENT")
    library.define(f"{_NAME}({_TENSORS}, {_REST}) -> (Tensor, Tensor)")
    library.impl(_NAME, _forward, "CompositeExplicitAutograd")
    library.impl(_NAME, lambda *args: _Attending.apply(*args), "Autograd")
    library.impl(_NAME, _forward_shapes, "Meta")
    name, kept = _NAME + "_backward", "Tensor result, Tensor logsumexp, Tensor gradient"
    library.define(f"{name}({_TENSORS}, {kept}, {_REST}) -> (Tensor, Tensor, Tensor)")
    library.impl(name, _backward, "CompositeExplicitAutograd")
    library.impl(name, _backward_shapes, "Meta")
    return library


LIBRARY = register()

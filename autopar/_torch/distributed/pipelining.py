"""torch.distributed.pipelining: the lists of actions that its classes make for several stages a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

ActionTuples = tuple[tuple[str, int, int], ...]

# The kinds of actions with a micro-batch. Lists of newer torches also say when a send has to be waited for.
_KINDS = frozenset({"F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"})


def pipeline_actions(name: str, stages_of: Sequence[Sequence[int]], micro_batches: int) -> tuple[ActionTuples, ...]:
    """The actions of every rank in the list that a schedule class makes at birth, sends and receives included.

    The class takes several stages a rank. A forward and a backward that it overlaps come one after the other.

    Args:
        name: name of the class in torch.distributed.pipelining.
        stages_of: the stages of every rank.
        micro_batches: number of micro-batches; the class raises ValueError for a number that it does not support.

    Returns:
        (kind, stage, micro-batch) for every action of every rank.
    """
    made = schedule_class(name)(_places(stages_of), micro_batches)
    lists = made.pipeline_order_with_comms
    return tuple(_flat_actions(lists[rank]) for rank in range(len(stages_of)))


def pipeline_computations(
    name: str, stages_of: Sequence[Sequence[int]], micro_batches: int
) -> tuple[ActionTuples, ...]:
    """The forwards and backwards of `pipeline_actions`, in order, without sends and receives.

    A class adds sends and receives to its list at birth, which takes most of the time, and keeps the order of
    computations. Here it adds none. Arguments and errors are those of `pipeline_actions`.
    """
    bare = type(name, (schedule_class(name),), {"_prepare_schedule_with_comms": _prepare_nothing})
    lists = bare(_places(stages_of), micro_batches).pipeline_order
    return tuple(_flat_actions(filter(None, lists[rank])) for rank in range(len(stages_of)))


def _prepare_nothing(*_: object, **__: object) -> None:
    """Stands in for the method of a schedule class that adds sends and receives."""


def schedule_class(name: str) -> Any:
    """A schedule class of torch.distributed.pipelining."""
    from torch.distributed import pipelining  # half a second, which only pipelines need

    return getattr(pipelining, name)


def _places(stages_of: Sequence[Sequence[int]]) -> list[SimpleNamespace]:
    """What a class asks of the first rank's stages before it makes the lists of all ranks: where they stand."""
    ranks, count = len(stages_of), sum(map(len, stages_of))
    return [
        SimpleNamespace(stage_index=index, num_stages=count, group_rank=0, group_size=ranks, submod=None)
        for index in stages_of[0]
    ]


def _flat_actions(actions: Iterable[Any]) -> ActionTuples:
    parts = (part for each in actions for part in each.sub_actions or (each,))
    return tuple(
        (part.computation_type.value, part.stage_index, part.microbatch_index)
        for part in parts
        if part.computation_type.value in _KINDS
    )

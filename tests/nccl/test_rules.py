"""Each of NCCL's rules finds a fault that was planted, and lets its legal twin pass."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.support.nccl.launches import MODES, Mode
from tests.support.nccl.rules import seconds, unlike_orders, violations
from tests.support.nccl.traces import Compute, parse


class Fault(NamedTuple):
    """A fault, and a program alike that is legal.

    Attributes:
        name: what is wrong.
        ranks: the program of each rank, as `parse` reads it.
        twin: the legal program of each rank; empty where there is none.
        modes: the modes in which it is wrong.
        said: a word of the message.
    """

    name: str
    ranks: tuple[str, ...]
    twin: tuple[str, ...]
    said: str
    modes: tuple[Mode, ...] = MODES


FAULTS = (
    # What is asked, whatever the order in time
    Fault("a collective is skipped", ("all_reduce barrier", "barrier"), ("all_reduce", "all_reduce"), "all_reduce"),
    Fault("a last collective is missing", ("barrier barrier", "barrier"), ("barrier", "barrier"), "run none"),
    Fault("one more at the end of another rank", ("barrier", "barrier all_gather"), (), "run none"),
    Fault(
        "buckets in another order",
        ("all_reduce*8 all_reduce*4", "all_reduce*4 all_reduce*8"),
        ("all_reduce*8 all_reduce*4",) * 2,
        "collective 0",
    ),
    Fault("a barrier against a sum", ("barrier*0", "all_reduce"), ("barrier*0", "barrier*0"), "barrier"),
    Fault("a sum against a maximum", ("all_reduce=SUM", "all_reduce=MAX"), ("all_reduce=MAX",) * 2, "MAX"),
    Fault("two sizes", ("all_gather*8", "all_gather*9"), ("all_gather*9",) * 2, "of 9"),
    Fault("one rank has nothing", ("reduce_scatter*8", "reduce_scatter*0"), ("reduce_scatter*0",) * 2, "of 0"),
    Fault("two dtypes", ("all_reduce:float32", "all_reduce:bfloat16"), ("all_reduce:bfloat16",) * 2, "bfloat16"),
    Fault("two roots of a broadcast", ("broadcast=0", "broadcast=1"), ("broadcast=1",) * 2, "broadcast"),
    Fault("two roots of a gather", ("gather=0", "gather=1"), ("gather=1",) * 2, "gather"),
    Fault(
        "an all-to-all of other rows",
        ("all_to_all=1,2/1,2", "all_to_all=3,4/2,4"),
        ("all_to_all=1,2/1,3", "all_to_all=3,4/2,4"),
        "rows",
    ),
    Fault("a dtype that NCCL lacks", ("all_reduce:int16",) * 2, ("all_reduce:int32",) * 2, "int16"),
    Fault("strides", ("strided_all_gather",) * 2, ("all_gather",) * 2, "contiguous"),
    Fault("a send to oneself", ("send>0 recv<0", ""), ("", ""), "no other member"),
    Fault("a stranger", ("send>7", ""), ("", ""), "no other member"),
    Fault(
        "another order of groups",
        ("new_group=01 new_group=0", "new_group=0 new_group=01"),
        ("new_group=01 new_group=0",) * 2,
        "new_group",
    ),
    Fault("a group that one rank does not make", ("new_group=0", ""), ("new_group=0",) * 2, "new_group"),
    Fault("a send without a receive", ("send>1 send>1", "recv<0"), ("send>1", "recv<0"), "messages"),
    Fault("a receive without a send", ("recv<1", ""), ("recv<1", "send>0"), "messages"),
    Fault(
        "two messages in another order",
        ("send>1*8 send>1*4", "recv<0*4 recv<0*8"),
        ("send>1*8 send>1*4", "recv<0*8 recv<0*4"),
        "message",
    ),
    Fault(
        "a message of two dtypes", ("send>1:float32", "recv<0:float16"), ("send>1:float16", "recv<0:float16"), "float16"
    ),
    Fault(
        "a batched send for a lone receive",
        ("[ send>1 recv<1 ]", "recv<0 send>0"),
        ("[ send>1 recv<1 ]", "[ recv<0 send>0 ]"),
        "messages",
        ("lazy",),
    ),
    # Who waits for whom
    Fault("both send first", ("send>1 recv<1", "send>0 recv<0"), ("send>1 recv<1", "recv<0 send>0"), "deadlock"),
    Fault(
        "both receive first", ("recv<1 send>1", "recv<0 send>0"), ("[ recv<1 send>1 ]", "[ recv<0 send>0 ]"), "deadlock"
    ),
    Fault(
        "two batches that cross",
        ("[ send>1 ] [ recv<1 ]", "[ send>0 ] [ recv<0 ]"),
        ("[ send>1 ] [ recv<1 ]", "[ recv<0 ] [ send>0 ]"),
        "deadlock",
    ),
    Fault(
        "a ring in which all send first",
        ("send>1 recv<2", "send>2 recv<0", "send>0 recv<1"),
        ("send>1 recv<2", "recv<0 send>2", "recv<1 send>0"),
        "deadlock",
    ),
    Fault(
        "a ring in which all wait first",
        ("recv<2 wait send>1", "recv<0 wait send>2", "recv<1 wait send>0"),
        ("send>1 recv<2 wait", "recv<0 wait send>2", "recv<1 wait send>0"),
        "deadlock",
    ),
    Fault(
        "two groups in another order, with a sync",
        ("all_reduce@a wait sync all_reduce@b", "all_reduce@b wait sync all_reduce@a"),
        ("all_reduce@a wait sync all_reduce@b",) * 2,
        "deadlock",
    ),
    Fault(
        "two groups in another order, with a wait",
        ("all_reduce@a wait all_reduce@b", "all_reduce@b wait all_reduce@a"),
        ("all_reduce@a wait all_reduce@b",) * 2,
        "deadlock",
    ),
    Fault(
        "two new groups in another order",
        ("all_reduce@a all_reduce@b", "all_reduce@b all_reduce@a"),
        ("all_reduce@a all_reduce@b",) * 2,
        "deadlock",
        ("lazy",),
    ),
    Fault(
        "a message and a sum in another order",
        ("send>1 all_reduce", "all_reduce recv<0"),
        ("send>1 all_reduce", "recv<0 all_reduce"),
        "deadlock",
    ),
    Fault(
        "a sync before what the other needs",
        ("all_reduce wait sync send>1", "recv<0 wait all_reduce"),
        ("all_reduce wait sync send>1", "all_reduce recv<0 wait"),
        "deadlock",
    ),
    Fault(
        "a first batch without the third rank",
        ("[ send>1 ]", "[ recv<0 ]", ""),
        ("barrier [ send>1 ]", "barrier [ recv<0 ]", "barrier"),
        "never come",
        ("lazy",),
    ),
)


def _found(ranks: tuple[str, ...], mode: Mode) -> list[str]:
    return violations({rank: parse(text, range(len(ranks))) for rank, text in enumerate(ranks)}, mode)


def test_at_least_thirty_faults_are_planted() -> None:
    assert len({fault.name for fault in FAULTS}) >= 30


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_and_its_legal_twin_passes(fault: Fault) -> None:
    for mode in MODES:
        found = _found(fault.ranks, mode)
        assert bool(found) == (mode in fault.modes), (mode, found)
        assert not found or fault.said in found[0], found
        assert not fault.twin or not _found(fault.twin, mode), mode


def test_a_receive_that_stands_early_holds_the_queue_of_its_communicator() -> None:
    """Rank 0 receives from rank 1 after 5 s, and what it sends to rank 2 meanwhile waits behind that receive.

    Two communicators of two ranks: rank 2 has its message after 1 s. One of the group: 5 s + 1 s + 1 s.
    """
    ranks = ("recv<1 send>2", "send>0", "recv<0 wait")
    traces = {rank: parse(text, range(3)) for rank, text in enumerate(ranks)}
    traces[1].insert(0, Compute(5.0))
    traces[2].append(Compute(6.0))
    assert seconds(traces, "lazy", lambda call: 1.0) == 1 + 6
    assert seconds(traces, "eager", lambda call: 1.0) == 5 + 1 + 1 + 6


def test_two_orders_of_launch_are_found() -> None:
    alike = {rank: parse("all_reduce@a all_gather@b", range(2)) for rank in range(2)}
    assert not unlike_orders(alike)
    alike[1] = parse("all_gather@b all_reduce@a", range(2))
    assert unlike_orders(alike).startswith("operation 0: ('all_reduce'")


def test_lines_with_parts_of_different_sizes_launch_in_one_order() -> None:
    """Ranks 2 and 3 have nothing of what ranks 0 and 1 add up, as where ZeRO stores 16 rows on 256 ranks."""
    traces = {rank: parse("all_reduce*8 all_gather", (0, 1)) for rank in (0, 1)}
    traces |= {rank: parse("all_reduce*0 all_gather", (2, 3)) for rank in (2, 3)}
    assert not unlike_orders(traces)
    traces[3] = parse("all_gather all_reduce*0", (2, 3))
    assert unlike_orders(traces)

"""Part 9: plans over the collectives of the device itself, by ranks that share one GPU over NCCL.

Where every rank has a device, the other parts have asked all this.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.accelerator import faults, overlap
from benchmarks.accelerator.figures import Figure, Sentence
from benchmarks.accelerator.joining import join_as_hosts, shares_device
from benchmarks.accelerator.parts import Context, Found
from benchmarks.accelerator.several_ranks import RANKS, every_plan
from tests.runtime.gloo_ranks import Ranks


def run(context: Context) -> Iterator[Found]:
    """Exactness, overlap and a killed rank, over NCCL."""
    why = _why_not(context)
    if why:
        yield Figure("plans over the device's own collectives", None, "error", note=why)
        return
    yield Sentence(
        f"{RANKS} ranks share one GPU over NCCL, to which each is a host of its own: messages go over sockets. "
        "That proves kernels, streams and the watchdog of NCCL; not what links between GPUs take."
    )
    ranks = Ranks(RANKS, join_as_hosts, context.processes)
    try:
        yield from every_plan(context, ranks)
    finally:
        ranks.stop()
    yield from overlap.shares(context, join_as_hosts)
    yield from faults.killed_rank(context, join_as_hosts, "killed rank, NCCL")


def _why_not(context: Context) -> str:
    """The reason why there is nothing to ask here, or ""."""
    if not context.on_accelerator:
        return "those of a processor are Gloo's, which the other parts use"
    if not shares_device(context, RANKS):
        return "the other parts have used them"
    return "" if context.device.type == "cuda" else "ranks can share a GPU over NCCL alone"

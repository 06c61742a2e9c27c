"""Collectives that are staged through the host give what Gloo gives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar import _torch
from benchmarks.accelerator.joining import join_staged
from tests.runtime.gloo_ranks import Ranks, equal_on_all

pytestmark = pytest.mark.multiprocess


def collectives() -> dict[str, list[float]]:
    """What two ranks get that give (1, 2) and (10, 20)."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None and dist.get_backend() == "staged"
    x = torch.tensor([1.0, 2.0]) * 10**rank
    name = group.group_name
    found = {
        "sum": _torch.all_reduce(x, name),
        "gathered": _torch.all_gather(x, 2, name),
        "scattered": _torch.all_gather(_torch.reduce_scatter(x, 2, name), 2, name),
        "exchanged": _torch.all_gather(_torch.all_to_all(x, 2, name), 2, name),
    }
    found["started"] = x.clone()
    _torch.start_all_reduce(found["started"], group).wait()
    found["broadcast"] = x.clone()
    dist.broadcast(found["broadcast"], src=1)
    part, parts = torch.empty(1), [x[:1].clone(), x[1:].clone()] if rank == 1 else None
    dist.scatter(part, parts, src=1)
    found["a part each"] = _torch.all_gather(part, 2, name)
    other = torch.empty(2)
    sends = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    found["passed on"] = x + other
    return {key: value.tolist() for key, value in found.items()}


def test_collectives_are_those_worked_out_by_hand() -> None:
    ranks = Ranks(2, join_staged)
    try:
        found = equal_on_all(ranks.run(collectives))
    finally:
        ranks.stop()
    assert found == {
        "sum": [11, 22],
        "gathered": [1, 2, 10, 20],
        "scattered": [11, 22],
        "exchanged": [1, 10, 2, 20],
        "started": [11, 22],
        "broadcast": [10, 20],
        "a part each": [10, 20],
        "passed on": [11, 22],
    }

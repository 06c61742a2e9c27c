"""The kernels on process groups agree with the definition, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.errors import PeerError
from autopar.ir.conversion import TRANSITIONS
from autopar.ops.collectives import KERNELS, LOCAL, group_name, result_shape
from tests.runtime.gloo_ranks import Ranks

pytestmark = pytest.mark.multiprocess

# those of a graph; tests/runtime/collectives/test_owners.py has the others
OPS = sorted({each for each in TRANSITIONS.values() if {*each} <= {*KERNELS}})
NEEDS = {"vary": 0, "partial": 0, "all_reduce": 0, "all_to_all": 2}  # dims; the others need one


def differing() -> list[str]:
    """The transitions whose kernels differ from `LOCAL` on this rank, on tensors that all ranks know."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), group_name(dist.group.WORLD)  # type: ignore[arg-type]
    found = []
    for forward, backward in OPS:
        for first in (0, 1):
            dims = [first, 1 - first][: NEEDS.get(forward, 1)]
            shards = [torch.randn(4, 8, dtype=torch.float64) for _ in range(size)]
            x = shards[rank].clone().requires_grad_()
            y = getattr(torch.ops.autopar, forward)(x, dims, size, group, backward)
            grads = [torch.randn(y.shape, dtype=torch.float64) for _ in range(size)]
            y.backward(grads[rank])
            same = torch.equal(y, LOCAL[forward](shards, rank, dims))
            same &= list(y.shape) == result_shape(forward, x.shape, dims, size)
            same &= torch.equal(x.grad, LOCAL[backward](grads, rank, dims[::-1]))  # type: ignore[arg-type]
            if not same:
                found.append(f"{forward}{dims}")
    return found


def test_kernels_agree_with_the_definition_on_two_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(differing) == [[], []]


def misshaped() -> list[str]:
    """The ops whose result has other strides than shape propagation says, for a transposed argument."""
    group = group_name(dist.group.WORLD)  # type: ignore[arg-type]
    found = []
    for forward, backward in OPS:
        call = ([0, 1][: NEEDS.get(forward, 1)], 2, group, backward)
        op = getattr(torch.ops.autopar, forward)
        real, fake = (op(torch.empty(8, 4, device=d).t(), *call) for d in ("cpu", "meta"))
        if real.stride() != fake.stride() or real.shape != fake.shape:
            found.append(forward)
    return found


def test_results_lie_in_memory_as_shape_propagation_says(two_ranks: Ranks) -> None:
    assert two_ranks.run(misshaped) == [[], []]


def bools() -> list[bool]:
    mask = torch.tensor([dist.get_rank() == 0, True])
    group = group_name(dist.group.WORLD)  # type: ignore[arg-type]
    return torch.ops.autopar.all_gather(mask, [0], 2, group, "shard").tolist()


def test_bools_travel(two_ranks: Ranks) -> None:
    assert two_ranks.run(bools) == [[True, True, False, True]] * 2


def test_peer_error_is_no_value_error() -> None:
    """A dead rank is nothing that a person could mend by other arguments."""
    assert not issubclass(PeerError, ValueError)

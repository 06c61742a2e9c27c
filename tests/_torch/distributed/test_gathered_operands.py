"""Operators that torch cannot run on shards, on whole operands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from autopar import _torch
from autopar._torch.distributed.gathered_operands import CAN_GATHER
from tests.runtime.gloo_ranks import Ranks, kept_ranks

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not CAN_GATHER, reason="torch 2.11 decides elsewhere whether it can run an operator"),
]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    yield from kept_ranks(2)


def uneven() -> tuple[Tensor, DTensor]:
    """A matrix of three rows, plain and on two ranks."""
    _torch.treat_as_plain()
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    plain = torch.linspace(-1, 2, 12).view(3, 4)
    return plain, torch.distributed.tensor.distribute_tensor(plain.clone(), mesh, [Shard(0)])


def results() -> list[tuple[bool, float]]:
    plain, cut = uneven()
    found = []
    for call in (lambda x: x.flatten().cumsum(0), lambda x: torch.renorm(x, 2, 0, 0.5), lambda x: x.view(2, 6) * 2):
        a, b = call(cut), call(plain)
        found.append((isinstance(a, DTensor), (a.full_tensor() - b).abs().max().item()))
    return found


def test_an_operator_without_a_strategy_has_the_result_of_one_process(two_ranks: Ranks) -> None:
    assert two_ranks.run(results) == [[(True, 0.0)] * 3] * 2


def written() -> tuple[bool, list[tuple[int, ...]], float, float]:
    plain, cut = uneven()
    is_same = cut.renorm_(2, 0, 0.5) is cut
    plain.renorm_(2, 0, 0.5)
    x = cut.detach().requires_grad_()
    x.flatten()[1:].pow(2).sum().backward()
    y = plain.clone().requires_grad_()
    y.flatten()[1:].pow(2).sum().backward()
    assert isinstance(x.grad, DTensor) and y.grad is not None
    gaps = [(cut.full_tensor() - plain).abs().max().item(), (x.grad.full_tensor() - y.grad).abs().max().item()]
    return is_same, [tuple(cut.shape)], *gaps  # type: ignore[return-value]


def test_what_is_written_is_cut_again_and_gradients_come_back(two_ranks: Ranks) -> None:
    assert two_ranks.run(written) == [(True, [(3, 4)], 0.0, 0.0)] * 2


def vectors() -> list[tuple[float, float]]:
    """Distances of a vector of parameters, and of its gradient, for columns of a buffer and for what rank 1 owns."""
    plain, cut = uneven()
    columns = plain.clone()[:, 2 * torch.distributed.get_rank() :][:, :2]
    owned = plain.clone() if torch.distributed.get_rank() == 1 else plain[:0]
    found = []
    for local, placement in ((columns, Shard(1)), (owned, _torch.Owned(1))):
        x = _torch.parameter_of(_torch.dtensor(local, cut.device_mesh, [placement], (3, 4)), requires_grad=True)
        vector = torch.nn.utils.parameters_to_vector([x, x])
        assert isinstance(vector, DTensor)
        vector.full_tensor().pow(2).sum().backward()
        gaps = vector.full_tensor() - plain.flatten().repeat(2), x.grad.full_tensor() - 4 * plain
        found.append(tuple(gap.abs().max().item() for gap in gaps))
    return found


def test_parameters_that_have_gaps_in_memory_or_an_owner_become_a_vector(two_ranks: Ranks) -> None:
    assert two_ranks.run(vectors) == [[(0.0, 0.0)] * 2] * 2


def sums() -> list[float]:
    """Writes into a sum that is still to be taken, and what has a size that depends on values."""
    plain, cut = uneven()
    found = []
    calls = (lambda x: x.renorm_(2, 0, 0.5), lambda x: x.clamp_(0), lambda x: x.fill_(3), lambda x: x.nonzero())
    for call in calls:
        x = DTensor.from_local(plain / 2, cut.device_mesh, [Partial()], run_check=False)
        found.append((call(x).full_tensor() - call(plain.clone())).abs().max().item())
    return found


def test_a_sum_that_is_still_to_be_taken_is_written_as_in_one_process(two_ranks: Ranks) -> None:
    assert two_ranks.run(sums) == [[0.0] * 4] * 2

"""Operators that torch cannot run on shards, on whole operands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

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

"""Parameters come to the device one by one: a rank never holds more than its shards and one whole tensor."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from autopar.runtime.model.placement import Placement
from tests.support.peak import PeakBytes

RANKS, WIDTH, LAYERS = 4, 64, 6
SMALL = 64  # bytes of tensors that are not parameters, such as a seed


@pytest.fixture
def first_of_four() -> Iterator[None]:
    """As the first of four ranks, of which the others are imagined."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("first_of_four")
@pytest.mark.parametrize(("recipe", "parts"), [("zero3", RANKS), ("ddp", 1)])
def test_a_rank_holds_its_shards_and_one_whole_tensor_at_most(recipe: str, parts: int) -> None:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    before = [layer.weight.detach() for layer in layers]  # what lies on the host is not counted
    counted = PeakBytes()

    def place(placement: Placement, *args: object) -> None:
        with counted:
            placed(placement, *args)  # type: ignore[arg-type]

    placed = Placement.place
    with mock.patch.object(Placement, "place", place):
        autopar.compile(
            model,
            loss_fn=torch.nn.functional.mse_loss,
            mesh={"dp": RANKS},
            recipe=recipe,
            device="cpu",
            example_inputs=(torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)),
        )
    whole = before[0].nbytes
    shards = LAYERS * whole // parts
    assert 0 <= counted.now - shards <= SMALL
    assert 0 <= counted.most - (shards + whole) <= SMALL

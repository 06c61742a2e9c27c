"""A loss in tiles is planned where only that fits, or is faster."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cost_model import find_hardware
from autopar.errors import MemoryBoundError
from autopar.planning import loss_tiles

RESERVED_BYTES = find_hardware("h100").reserved_bytes


class Head(nn.Module):
    def __init__(self, classes=4096):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, classes, bias=False)

    def forward(self, tokens, target):
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), target.flatten())


def explained(memory_bytes):
    with torch.device("meta"):
        model, batch = Head(), tuple(torch.zeros(1, 4096, dtype=torch.int64) for _ in range(2))
    options = {"mesh": {"dp": 1}, "micro_batches": 1, "without": "offload"}
    return autopar.explain(model, batch, cluster="h100x1", memory_bytes=memory_bytes, **options)


def test_tiles_are_taken_where_nothing_fits_without():
    # 4,096 rows of 4,096 classes in float32 are 67 MB, of which there are three; parameters and states take 2 MB.
    without = explained(None)
    tight = explained(int(RESERVED_BYTES + 50e6))
    assert without.plan.loss_tile_bytes is None
    assert tight.plan.loss_tile_bytes == 2**19  # at most a 64th of 50 MB
    assert tight.memory_bytes < RESERVED_BYTES + 50e6 < without.memory_bytes
    assert tight.step_seconds > without.step_seconds


def test_where_tiles_do_not_help_the_error_is_that_of_the_plan_without():
    with pytest.raises(MemoryBoundError, match="memory_bytes"):
        explained(int(RESERVED_BYTES + 1.3e6))


def test_training_in_tiles_gives_the_loss_and_gradients_of_the_plain_model():
    torch.manual_seed(0)
    model, generator = Head(2048).double(), torch.Generator().manual_seed(1)
    batch = tuple(torch.randint(0, 64, (2, 256), generator=generator) for _ in range(2))
    expected = model(*batch)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    made = compiled(model)
    loss = made.step(*batch)
    assert made.plan.loss_tile_bytes == 2**17
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(made(*batch), expected, rtol=1e-12, atol=0)  # in as little memory
    for parameter, gradient in zip(made.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)


def compiled(model, **options):
    bound = find_hardware("cpu-gloo").reserved_bytes + 10e6
    own = {"mesh": {"dp": 1}, "micro_batches": 1, "memory_bytes": int(bound), "without": "offload"}
    return autopar.compile(model, hardware="cpu-gloo", **own, **options)


def test_many_tiles_of_a_model_in_bfloat16_lose_no_digits(monkeypatch):
    monkeypatch.setattr(loss_tiles, "LARGEST_TILE_BYTES", 2**15)  # four rows of float32
    torch.manual_seed(0)
    model, generator = Head(2048).bfloat16(), torch.Generator().manual_seed(1)
    batch = tuple(torch.randint(0, 64, (2, 1024), generator=generator) for _ in range(2))
    exact = copy.deepcopy(model).double()
    expected = exact(*batch)
    expected.backward()
    made = compiled(model)
    loss = made.step(*batch)
    assert made.plan.loss_tile_bytes == 2**15
    assert loss.item() == pytest.approx(expected.item(), rel=2**-8)  # the format of the loss
    error = model.head.weight.grad.double() - exact.head.weight.grad
    assert error.norm() < 4e-3 * exact.head.weight.grad.norm()


def test_a_length_that_needs_tiles_may_come_after_one_that_needs_none_and_after_an_evaluation():
    torch.manual_seed(0)
    made, generator = compiled(Head(2048)), torch.Generator().manual_seed(1)
    short, long = (tuple(torch.randint(0, 64, (2, n), generator=generator) for _ in range(2)) for n in (16, 512))
    with torch.no_grad():
        made(*long)
    assert made.step(*short).isfinite() and made.step(*long).isfinite()

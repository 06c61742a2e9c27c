"""What pipeline stages share, each test the smallest case that showed a defect."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.proof.verdict import nan_last
from tests.runtime.gloo_ranks import Ranks
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess


class Branching(nn.Module):
    """The embedding is used again at the end, but in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(self.embedding(tokens))))
        if self.training:
            x = x @ self.embedding.weight.T
        return x.square().mean()


@captured_once()
def branching(micro_batches: int) -> list[float]:
    """Losses of steps in training and evaluation mode, all of which train."""
    torch.manual_seed(0)
    model = Branching().double()
    tokens = torch.arange(8).reshape(4, 2)
    step = None
    if micro_batches > 1:
        model = autopar.compile(  # type: ignore[assignment]
            model, mesh={"pp": 2}, recipe="1f1b", micro_batches=micro_batches
        )
        step = model.step
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for mode in (True, False, False, True, True):
        model.train(mode)
        if step is not None:
            loss = step(tokens)  # type: ignore[operator]
        else:
            loss = model(tokens)
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_later_program_uses_a_shared_parameter_on_fewer_stages(two_ranks: Ranks) -> None:
    """Its gradient is that of all who hold it, or their copies drift apart."""
    expected = branching(1)
    for found in two_ranks.run(branching, 2):
        assert found == pytest.approx(expected, rel=1e-12)


class Living(TorchDispatchMode):
    """Counts the storages of tensors of one size that are alive."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.most = numel, 0
        self._found: dict[int, StorageWeakRef] = {}

    def count(self) -> int:
        self._found = {k: r for k, r in self._found.items() if not r.expired()}
        return len(self._found)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.numel() == self.numel:
                reference = StorageWeakRef(x.untyped_storage())
                self._found[reference.cdata] = reference
        self.most = max(self.most, self.count())
        return result


def total(y: Tensor) -> Tensor:
    return y.sum()


@captured_once()
def alive(schedule: str, micro_batches: int) -> tuple[int, int]:
    """Activations alive in a step at most, and after it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)))
    batch = torch.randn(5 * micro_batches, 24)
    made = autopar.compile(model, loss_fn=total, mesh={"pp": 2}, schedule=schedule, micro_batches=micro_batches)
    made.step(batch)
    with Living(5 * 24) as living:
        made.step(batch)
    gc.collect()
    return living.most, living.count()


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_nothing_outlives_its_backward(two_ranks: Ranks, schedule: str) -> None:
    few, many = (two_ranks.run(alive, schedule, m) for m in (4, 12))
    assert all(after <= 1 for _, after in (*few, *many))  # the last micro-batch's input
    if schedule == "1f1b":  # others keep what they send until the end of the step
        assert [most for most, _ in few] == [most for most, _ in many]


@captured_once()
def loaded(mesh: dict[str, int]) -> float:
    """The largest entry that differs from the single device's state dict after loading it."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    batch = torch.randn(8, 8)
    recipe = {"dp": "zero3"} if "dp" in mesh else "gpipe"
    made = autopar.compile(model, loss_fn=total, mesh=mesh, recipe=recipe, example_inputs=(batch,))
    made.load_state_dict(plain.state_dict())
    own = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in made.state_dict().shards().items()}
    assert own
    return max(((v - plain.state_dict()[k]).abs().max().item() for k, v in own.items()), key=nan_last)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}])
def test_a_single_device_state_dict_is_loaded(two_ranks: Ranks, mesh: dict[str, int]) -> None:
    assert two_ranks.run(loaded, mesh) == [0.0, 0.0]

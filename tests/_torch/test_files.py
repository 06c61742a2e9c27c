"""Tensors in files, and parameters that have their states made elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop

from autopar import _torch


def test_a_tensor_and_its_file_hold_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(16))
    x = _torch.map_file(str(path), torch.Size([2, 2]), torch.float32)
    x.fill_(1)
    assert path.read_bytes() == torch.ones(4).numpy().tobytes()
    path.unlink()
    assert x.sum() == 4, "the memory outlives the name"


@pytest.mark.parametrize(
    ("optimizer", "made"),
    [(AdamW, 2), (Adagrad, 1), (RMSprop, 1), (SGD, 0)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_states_that_are_made_like_the_parameter_are_made_by_the_function(
    optimizer: type[torch.optim.Optimizer], made: int
) -> None:
    """SGD's momentum is a clone of the gradient."""
    shapes = []

    def make_empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        shapes.append((tuple(shape), dtype))
        return torch.empty(shape, dtype=dtype)

    plain, elsewhere = (nn.Parameter(torch.ones(3)) for _ in range(2))
    _torch.make_states_by(make_empty, elsewhere)
    for parameter in (plain, elsewhere):
        steps = optimizer([parameter], lr=0.1)  # type: ignore[call-arg]
        for _ in range(3):
            parameter.grad = torch.arange(3.0)
            steps.step()
    assert torch.equal(plain, elsewhere) and shapes == [((3,), torch.float32)] * made
    assert type(elsewhere * 2) is Tensor and isinstance(elsewhere, nn.Parameter)
    twin = copy.deepcopy(elsewhere)
    assert type(twin) is nn.Parameter and twin.equal(elsewhere)

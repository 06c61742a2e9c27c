"""segment_reduce: samples and columns can be split, and random plans of a model with it are right."""

import pytest
import torch
from proof import labels_of, prove
from torch import nn

import autopar

LENGTHS = torch.tensor([[3, 1, 4], [2, 6, 0], [1, 1, 6], [4, 4, 0]])


class Pooled(nn.Module):
    def __init__(self, reduce):
        super().__init__()
        self.up, self.down, self.reduce = nn.Linear(8, 12), nn.Linear(12, 8), reduce

    def forward(self, x, lengths):
        pooled = torch.segment_reduce(self.up(x), self.reduce, lengths=lengths, axis=1, unsafe=True, initial=0)
        return self.down(pooled).square().mean()


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("reduce", "seed"), [("sum", 0), ("sum", 1), ("mean", 2), ("max", 3), ("min", 4), ("max", 5)])
def test_random_plans_are_right(reduce, seed):
    report = autopar.verify(
        Pooled(reduce).double(), (rand(4, 8, 8), LENGTHS), mesh={"dp": 2, "tp": 2}, plan="random", seed=seed
    )
    assert report.passed, report


def test_what_is_split():
    def pooled(x):
        return torch.segment_reduce(x, "sum", lengths=LENGTHS, axis=1, unsafe=True)

    assert labels_of(pooled, rand(4, 8, 6), kind="aten.segment_reduce") == {"-", "d0", "d2", "+0"}
    assert prove(pooled, rand(4, 8, 6), kind="aten.segment_reduce") > 3
    found = autopar.explain(
        Pooled("max"), (rand(4, 8, 8).float(), LENGTHS), mesh={"dp": 2, "tp": 2}, recipe="dp:ddp,tp:tp"
    )
    assert "segment_reduce: d0" in str(found.plan), found.plan

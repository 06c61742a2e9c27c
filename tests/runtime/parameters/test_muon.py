"""torch.optim.Muon on shards: it ends where one device does, bit for bit, and one rank computes each matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar._torch import muon
from tests.runtime.gloo_ranks import Ranks
from tests.support.staged import captured_once

SHAPES = [(8, 4), (4, 4), (4, 12), (16, 4), (4, 4), (6, 4)]


class Branches(nn.Module):
    """Matrices side by side. With whole numbers as inputs, sums of gradients are exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        heads = (b(x[:, : b.in_features]) for b in self.branches)
        factors = (x[:, :1] + i for i in range(len(SHAPES)))
        return torch.stack([(y * f).sum() for y, f in zip(heads, factors, strict=True)]).sum()


def batch(step: int) -> Tensor:
    return torch.randint(-3, 4, (8, 12), generator=torch.Generator().manual_seed(step)).float()


def train(model: nn.Module, nesterov: bool) -> tuple[dict[str, Tensor], int]:
    """The parameters after three steps, and how many matrices this rank has orthogonalized in the last one."""
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1, nesterov=nesterov)
    calls: list[torch.Size] = []
    inner = torch.optim._muon._zeropower_via_newtonschulz
    try:
        torch.optim._muon._zeropower_via_newtonschulz = lambda x, *args: (calls.append(x.shape), inner(x, *args))[1]
        for step in range(3):
            calls.clear()
            if isinstance(model, autopar.CompiledModule):
                model.step(batch(step))
            else:
                model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.optim._muon._zeropower_via_newtonschulz = inner
    found = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return {name: p.detach().clone() for name, p in found.items()}, len(calls)


@captured_once()
def trained(mesh: dict[str, int], recipe: str, nesterov: bool) -> tuple[dict[str, Tensor], int]:
    model = autopar.compile(Branches(), mesh=mesh, recipe=recipe, example_inputs=(batch(0),))
    return train(model, nesterov)


def check(ranks: Ranks, mesh: dict[str, int], recipe: str, nesterov: bool) -> list[int]:
    expected, _ = train(Branches(), nesterov)
    counts = []
    for parameters, count in ranks.run(trained, mesh, recipe, nesterov):
        counts.append(count)
        for name, want in expected.items():
            assert torch.equal(parameters[name.removeprefix("module.")], want), (name, recipe)
    return counts


@pytest.mark.multiprocess
@pytest.mark.parametrize("nesterov", [False, True])
def test_each_matrix_is_orthogonalized_by_one_rank(two_ranks: Ranks, nesterov: bool) -> None:
    assert sum(check(two_ranks, {"dp": 2}, "zero3", nesterov)) == len(SHAPES)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "mesh, recipe", [({"dp": 2}, "ddp"), ({"dp": 2}, "zero1"), ({"tp": 2}, "tp")], ids=["ddp", "zero1", "tp"]
)
def test_every_recipe_ends_where_one_device_does(two_ranks: Ranks, mesh: dict[str, int], recipe: str) -> None:
    assert len(check(two_ranks, mesh, recipe, nesterov=True)) == 2


@pytest.mark.multiprocess
def test_matrices_that_two_axes_split_end_where_one_device_does(four_ranks: Ranks) -> None:
    assert len(check(four_ranks, {"dp": 2, "tp": 2}, "dp:zero3,tp:tp", nesterov=True)) == 4


def test_owners_have_equal_work() -> None:
    # 16 matrices of 4 x 4 and one of 16 x 4 over 4 ranks: the largest is alone with one or two others.
    works = [muon.work(4, 4)] * 16 + [muon.work(16, 4)]
    loads = [0] * 4
    for owner, each in zip(muon.deal(works, 4), works, strict=True):
        loads[owner] += each
    assert max(loads) - min(loads) <= muon.work(4, 4)

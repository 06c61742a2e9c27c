"""Ops without a rule give way to their parts, if all of these have one."""

import torch
from torch import Tensor, nn

from autopar.capture.export import capture_step
from autopar.passes import clean_up

LIBRARY = torch.library.Library("open_unruled_test", "FRAGMENT")
LIBRARY.define("gated(Tensor x, Tensor weight) -> Tensor")


def gated(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x) * weight


LIBRARY.impl("gated", gated, "CompositeImplicitAutograd")


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.op, self.weight = (getattr(torch.ops.open_unruled_test, name), nn.Parameter(torch.ones(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, self.weight).sum()


def targets(name: str) -> list[str]:
    """The ops of the model's graph, in their order."""
    module = capture_step(Model(name), (torch.randn(4, 6),), {}, None).module
    clean_up(module)
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_an_op_made_of_others_becomes_them() -> None:
    assert targets("gated") == ["aten.relu.default", "aten.mul.Tensor", "aten.sum.default"]

"""Clean-up passes, one op at a time: the graph means what the model means."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.planning import prepare_step
from autopar.verify import verify


class Assigned(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        z = torch.zeros_like(h)
        z[:, :2] = h[:, 2:]
        return self.b(z).square().sum()


def test_a_slice_that_is_assigned_keeps_its_gradient():
    report = verify(
        Assigned().double(), (torch.randn(8, 4).double(),), mesh={"x": 2}, plan="random"
    )
    assert report.passed, report


class Attention(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.project, self.kwargs = nn.Linear(8, 24), kwargs

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        if self.kwargs.get("enable_gqa"):
            k, v = k[:, :1], v[:, :1]
        return F.scaled_dot_product_attention(q, k, v, **self.kwargs).square().mean()


NOTHING_SEEN = torch.arange(6)[:, None] > torch.arange(6)  # by the first query: its result is 0
OPENED = [
    {}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}, {"attn_mask": NOTHING_SEEN},
]  # fmt: skip


@pytest.mark.parametrize("kwargs", OPENED, ids=lambda kwargs: " ".join(kwargs) or "plain")
def test_attention_in_the_open_is_attention(kwargs):
    # with so little dropout that no weight of these is dropped
    x = torch.randn(2, 6, 8).double()
    model = Attention(**kwargs, dropout_p=1e-12).double()
    expected = Attention(**kwargs).double()
    expected.load_state_dict(model.state_dict())
    prepared = prepare_step(model, (x,))
    kinds = {op.kind for op in prepared.analysis.graph.ops}
    assert "aten.native_dropout" in kinds and "aten.scaled_dot_product_attention" not in kinds
    captured = prepared.captured
    own = dict(model.named_parameters())
    parameters = (own[n] for n in captured.parameters.values())
    (loss,) = captured.module(*parameters, *captured.constants.values(), x)
    torch.testing.assert_close(loss, expected(x))


class Typed(nn.Module):
    """The type is that of a tensor of more dims."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        h = self.a(x)
        return (h * self.scale.float().type_as(h) * torch.arange(4).type_as(h)).square().sum()


def test_of_a_tensor_that_gives_its_type_no_value_is_read():
    x = torch.randn(2, 8, 4).double()
    graph = prepare_step(Typed().double(), (x,)).analysis.graph
    assert not [op for op in graph.ops if op.kind == "aten.type_as"]
    for seed in range(3):
        report = verify(Typed().double(), (x,), mesh={"x": 2}, plan="random", seed=seed)
        assert report.passed, report

"""Sort, grouped products and back become one call where order, ends and inverse are what they must be."""

import pytest
import torch
import torch.nn.functional as F

from autopar.capture.export import capture_forward
from autopar.passes import clean_up


class Layer(torch.nn.Module):
    """One product for every row, between two permutations that are spelled by `order`, `ends` and `back`."""

    def __init__(self, ends, back, rows=lambda order: order // 2):
        super().__init__()
        self.ends, self.back, self.rows = ends, back, rows
        self.weight = torch.nn.Parameter(torch.randn(4, 8, 8).bfloat16())

    def forward(self, x, chosen):
        ordered, order = chosen.reshape(-1).sort()
        y = F.grouped_mm(x[self.rows(order)], self.weight, offs=self.ends(ordered))
        return y[self.back(order)]


def histogram(ordered):
    return torch.histc(ordered.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)


def one_hot(ordered):
    return F.one_hot(ordered, 4).sum(0).cumsum(0).to(torch.int32)


def written(order):
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return back


def kinds(layer):
    torch.manual_seed(0)
    x, chosen = torch.randn(6, 8).bfloat16(), torch.randint(4, (6, 2))
    captured = capture_forward(layer, (x, chosen), {})
    clean_up(captured.module)
    calls = captured.module.graph.find_nodes
    joined = [n for n in captured.module.graph.nodes if str(n.target) == "autopar.analysis.experts"]
    if joined:
        made = joined[0].target(x, chosen.reshape(-1), layer.weight)
        torch.testing.assert_close(made, layer(x, chosen))
    return len(joined), len(calls(op="call_function", target=torch.ops.aten.sort.default))


@pytest.mark.parametrize("ends", [histogram, one_hot])
@pytest.mark.parametrize("back", [written, torch.argsort])
def test_however_it_is_spelled_it_is_one_call(ends, back):
    assert kinds(Layer(ends, back)) == (1, 0)


def counted(ordered):
    return torch.histc(ordered.int(), 4, 0, 3).cumsum(0, dtype=torch.int32)


def test_integers_are_counted_as_on_a_gpu():
    with torch.device("meta"):
        layer, x = Layer(counted, torch.argsort), torch.empty(6, 8, dtype=torch.bfloat16)
        captured = capture_forward(layer, (x, torch.empty(6, 2, dtype=torch.int64)), {})
    clean_up(captured.module)
    assert any(str(n.target) == "autopar.analysis.experts" for n in captured.module.graph.nodes)


@pytest.mark.parametrize(
    "layer",
    [
        Layer(lambda ordered: histogram(ordered).roll(1), written),
        Layer(histogram, lambda order: order),
        Layer(histogram, written, rows=lambda order: order % 6),
    ],
    ids=["other ends", "not the inverse", "other rows"],
)
def test_what_is_no_mixture_is_left_alone(layer):
    assert kinds(layer) == (0, 1)


def test_the_fingerprint_sees_what_experts_do():
    class Gated(Layer):
        def __init__(self, gate):
            super().__init__(histogram, written)
            self.gate = gate

        def forward(self, x, chosen):
            ordered, order = chosen.reshape(-1).sort()
            y = F.grouped_mm(x[order // 2], self.weight, offs=self.ends(ordered))
            return self.gate(y)[self.back(order)]

    def fingerprint(gate):
        batch = (torch.zeros(6, 8).bfloat16(), torch.zeros(6, 2).long())
        captured = capture_forward(Gated(gate), batch, {})
        clean_up(captured.module)
        assert any(str(n.target) == "autopar.analysis.experts" for n in captured.module.graph.nodes)
        return captured.fingerprint

    assert fingerprint(F.silu) == fingerprint(F.silu) != fingerprint(F.gelu)

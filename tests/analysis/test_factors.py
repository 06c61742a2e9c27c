"""Factors of small graphs, by hand."""

import torch
import torch.nn.functional as F
from torch import nn

from autopar.analysis.atoms import Atom, leaves, unify
from autopar.analysis.factors import analyze
from autopar.capture.export import capture_step
from autopar.passes import clean_up


def sizes(atoms):
    return [atom.size for atom in leaves(atoms)]


def test_unify_refines_both_sides():
    a, b = [Atom(4096)], [Atom(32), Atom(128)]
    assert unify(a, b)
    assert sizes(a) == sizes(b) == [32, 128]
    # (32, 128) against (128, 32): boundaries at 32 and at 128 leave 32, 4, 32
    c = [Atom(128), Atom(32)]
    assert unify(a, c)
    assert sizes(a) == sizes(c) == sizes(b) == [32, 4, 32]


def test_unify_gives_up_where_neither_divides():
    assert not unify([Atom(2), Atom(3)], [Atom(3), Atom(2)])


def test_a_dim_without_elements_stays_apart():
    class Rotated(nn.Module):
        """Position is told to the first 8 of 8 columns, and not to the other none."""

        def forward(self, x):
            turned, rest = torch.split(x, [8, 0], -1)
            return torch.cat([-turned, rest], -1).sum()

    graph = analyzed(Rotated(), torch.zeros(4, 8))
    joined = next(op for op in graph.ops if op.name.startswith("cat"))
    assert graph.tensors[joined.results[0]].dims == ((4,), (8,))


def analyzed(model, *args):
    captured = capture_step(model, args, {}, None)
    clean_up(captured.module)
    return analyze(captured).graph


class Heads(nn.Module):
    """(batch 2, seq 4, width 6) -> 3 heads of 2."""

    def __init__(self):
        super().__init__()
        self.q, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        q = self.q(self.norm(x)).view(2, 4, 3, 2).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q)
        return (x + self.out(y.transpose(1, 2).reshape(2, 4, 6))).sum()


def test_a_view_refines_the_weight_it_came_from():
    graph = analyzed(Heads(), torch.zeros(2, 4, 6))
    assert graph.tensors[graph.parameters["q.weight"]].dims == ((3, 2), (6,))
    # the output projection's columns are the same heads; its rows are the residual width
    out = graph.tensors[graph.parameters["out.weight"]]
    assert out.dims == ((6,), (3, 2))
    assert out.factors[1] == graph.tensors[graph.parameters["q.weight"]].factors[0]


def test_names_and_roles():
    graph = analyzed(Heads(), torch.zeros(2, 4, 6))
    (x,) = graph.inputs.values()
    assert graph.tensors[x].factors[:2] == (("batch",), ("seq",))
    assert graph.factors["batch"].roles == {"batch"}
    assert graph.factors["seq"].roles == {"input"}
    (heads,) = {graph.tensors[graph.parameters["q.weight"]].factors[0][0]}
    assert graph.factors[heads].roles == {"parameter"}
    width = graph.tensors[x].factors[2][0]
    assert "normalized" in graph.factors[width].roles


def test_queries_and_keys_are_one_factor_and_two_choices():
    graph = analyzed(Heads(), torch.zeros(2, 4, 6))
    attention = next(op for op in graph.ops if "attention" in op.kind)
    factors = {choice.label: choice.factor for choice in attention.choices}
    assert factors["q"] == "seq"  # and k, which is seq too, stays whole
    assert "k" not in factors


def test_gradients_stop_at_detach_and_at_integers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (x * self.w.detach()).sum() + self.w.sum()

    graph = analyzed(Model(), torch.ones(4))
    needs = {op.kind: graph.tensors[op.results[0]].needs_grad for op in graph.ops}
    assert needs["aten.detach"] is False and needs["aten.mul"] is False
    assert needs["aten.add"] is True


def test_new_values_of_buffers_need_no_gradient():
    """Running statistics are results of the graph, and are written to their buffers without gradient."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x).square().sum()

    graph = analyzed(Model(), torch.ones(8, 4))
    norm = next(op for op in graph.ops if "batch_norm" in op.kind)
    normalised, *statistics = (graph.tensors[name].needs_grad for name in norm.results)
    assert normalised and not any(statistics)


def test_an_op_without_a_rule_stays_whole_and_is_known_as_such():
    class Model(nn.Module):
        def forward(self, x):
            return torch.histc(x @ x.T, 4).sum()

    graph = analyzed(Model(), torch.ones(4, 4))
    unruled = [op for op in graph.ops if not op.has_rule]
    assert unruled and all([c.label for c in op.choices] == ["-"] for op in unruled)

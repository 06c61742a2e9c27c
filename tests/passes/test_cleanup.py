"""Clean-up passes, one op at a time: the graph means what the model means."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autopar.errors import CaptureError
from autopar.passes.cleanup.real_scatters import real_scatters
from autopar.passes.cleanup.refresh_examples import refresh_examples
from autopar.planning.planning import prepare_step
from autopar.proof.verify import verify


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
    report = verify(Assigned().double(), (torch.randn(8, 4).double(),), mesh={"x": 2}, plan="random")
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
OPENED = [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}, {"attn_mask": NOTHING_SEEN}]


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


class LookedUp(nn.Module):
    """Tables that ask for sparse gradients."""

    def __init__(self):
        super().__init__()
        self.rows, self.bags = (kind(8, 4, sparse=True) for kind in (nn.Embedding, nn.EmbeddingBag))
        self.columns = nn.Parameter(torch.randn(8, 4))

    def forward(self, i):
        columns = torch.gather(self.columns, 0, i, sparse_grad=True)
        return (self.rows(i).sum(1) + self.bags(i) * columns).square().mean()


def test_gradients_of_lookups_are_dense():
    # verify compares them with the sparse ones of one device
    i = torch.arange(16).reshape(4, 4) * 5 % 8
    for recipe in ("ddp", "zero3"):
        report = verify(LookedUp().double(), (i,), mesh={"x": 2}, recipe=recipe)
        assert report.passed and report.parameters == 3, report


class Spectrum(nn.Module):
    """A few frequencies are weighed and the others left out, as in Fourier neural operators."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        kept = torch.zeros_like(spectrum)
        kept[:, :3] = spectrum[:, :3].conj() * self.weight
        kept[..., -1] = spectrum.conj()[:, 1] * self.weight[0]
        return torch.fft.irfft(kept, n=x.shape[1]).square().sum()


def test_a_slice_of_complex_numbers_that_is_assigned_keeps_its_gradient():
    x = torch.randn(4, 16).double()
    for kwargs in ({"recipe": "ddp"}, {"plan": "random", "seed": 1}):
        report = verify(Spectrum(), x, mesh={"x": 2}, **kwargs)
        assert report.passed, report


def _lines(module):
    lines = (line.split(";")[0].strip() for line in module.code.splitlines())
    return [line for line in lines if " = torch.ops" in line]


def _traced(function, *examples):
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in "xy"[: len(examples)]]
    for node, example in zip(nodes, examples, strict=True):
        node.meta["val"] = example
    made = graph.call_function(*function(*nodes))
    made.meta["val"] = made.target(*[getattr(a, "meta", {}).get("val", a) for a in made.args])
    graph.output((made,))
    return fx.GraphModule({}, graph)


def test_a_scatter_of_complex_numbers_is_one_of_their_parts():
    x, y = torch.randn(4, 6, dtype=torch.complex128), torch.randn(4, 3, dtype=torch.complex128)
    scatter = torch.ops.aten.slice_scatter.default
    module = _traced(lambda x, y: (scatter, (x, y, -1, 0, 3)), x, y)
    expected = module(x, y)
    real_scatters(module)
    assert _lines(module) == [
        "resolve_conj_default = torch.ops.aten.resolve_conj.default(x)",
        "view_as_real_default = torch.ops.aten.view_as_real.default(resolve_conj_default)",
        "resolve_conj_default_1 = torch.ops.aten.resolve_conj.default(y)",
        "view_as_real_default_1 = torch.ops.aten.view_as_real.default(resolve_conj_default_1)",
        "slice_scatter_default_1 = torch.ops.aten.slice_scatter.default("
        "view_as_real_default, view_as_real_default_1, 1, 0, 3, 1)",
        "view_as_complex_default = torch.ops.aten.view_as_complex.default(slice_scatter_default_1)",
    ]
    assert torch.equal(module(x, y)[0], expected[0])


_CONJ = torch.ops.aten.resolve_conj.default


def test_a_call_that_cannot_run_is_no_graph():
    x = torch.randn(4, dtype=torch.complex128, requires_grad=True)
    module = _traced(lambda x: (_CONJ, (x,)), x)
    (node,) = module.graph.find_nodes(op="call_function", target=_CONJ)
    node.target, node.args = torch.ops.aten.select_scatter.default, (*node.args, x[0], 0, 1)
    with pytest.raises(CaptureError, match=r"select_scatter.default: .* complex dtype"):
        refresh_examples(module)

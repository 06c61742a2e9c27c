"""Modules captured in another form: proved, undone afterwards, and split like what was written so."""

import logging

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture_step
from autopar.cost_model import H100
from autopar.errors import CaptureError, SearchError
from autopar.forms import FORMS
from autopar.ir import Mesh
from autopar.planning import make_plan
from autopar.verify import Subject


def tokens(low=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, 32, (4, 6), generator=generator)


def switch(**settings):
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    torch.manual_seed(0)
    config = SwitchTransformersConfig(
        vocab_size=32, d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=1, num_decoder_layers=1,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=4, expert_capacity=2,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
        **{"router_jitter_noise": 0.0, **settings},
    )  # fmt: skip
    model = SwitchTransformersForConditionalGeneration(config).train()
    ids = tokens()
    return model, {"input_ids": ids, "labels": ids, "output_router_logits": True}


def nllb():
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    torch.manual_seed(0)
    config = NllbMoeConfig(
        vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, num_experts=4,
        expert_capacity=4, encoder_sparse_step=1, decoder_sparse_step=1, max_position_embeddings=32,
        dropout=0.0, activation_dropout=0.0, attention_dropout=0.0, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0, moe_token_dropout=0.0, second_expert_policy="all", use_cache=False,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    ids = tokens()
    return NllbMoeForConditionalGeneration(config).train(), {"input_ids": ids, "labels": ids}


def in_float64(model):
    for module in model.modules():
        if hasattr(module, "classifier"):
            module.dtype = torch.float64  # the router's format, that of its configuration
    return model.double()


def stored(plan, axis=0):
    return {n: how.storage[axis] for n, how in plan.parameters.items() if ".expert_" in n}


def test_switch_transformers_drops_tokens_and_splits_experts():
    model, batch = switch()
    subject = Subject.of(in_float64(model), batch)
    dropped = []
    router = model.encoder.block[0].layer[1].mlp.router
    router.register_forward_hook(
        lambda _, __, out: dropped.append(int((out[0].sum(-1) == 0).sum()))
    )
    model(**batch)
    assert dropped[0] > 0, "no row is beyond the capacity"
    plan = make_plan(
        subject.prepared, Mesh.parse("dp=2,ep=2"), recipe="dp:zero3,ep:ep", hardware=H100
    )
    layers = [op for op in subject.prepared.analysis.graph.ops if op.kind == "autopar.experts"]
    assert [plan.ops[op.name] for op in layers] == [("t.0", "e")] * 2
    found = stored(plan, axis=1)
    assert len(found) == 16 and {state.kind for state in found.values()} == {"S"}
    report = subject.compare(plan)
    assert max(report.loss_error, report.worst_gradient_error) < 1e-9, report
    assert report.parameters == len(list(model.parameters()))


def test_nllb_equals_one_device_with_experts_split():
    model, batch = nllb()
    report = autopar.verify(
        in_float64(model), batch, mesh={"dp": 2, "ep": 2}, recipe="dp:ddp,ep:ep"
    )
    assert max(report.loss_error, report.worst_gradient_error) < 1e-9, report


def test_a_captured_model_is_as_it_was(caplog):
    model, batch = switch(router_jitter_noise=0.1)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    random = torch.get_rng_state()
    with caplog.at_level(logging.INFO, logger="autopar"):
        captured = capture_step(model.bfloat16(), (), batch, None)
    assert torch.equal(random, torch.get_rng_state())
    assert all("forward" not in vars(module) for module in model.modules())
    assert {x.dtype for x in model.parameters()} == {
        torch.bfloat16
    }  # eagerly a router is cast for good
    assert model.state_dict().keys() == state.keys()
    assert "SwitchTransformersExperts" in caplog.text and "decoder.block.0.layer.2" in caplog.text
    assert len(captured.forms) == 3 and all("on the captured inputs" in x for x in captured.forms)
    assert any(
        "uniform" in str(n.target) for n in captured.module.graph.nodes
    )  # the router's noise


class Hits(nn.Module):
    """Skips its product where no row is positive."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        rows = (x.sum(-1) > 0).nonzero().squeeze(-1)
        y = torch.zeros_like(x)
        if len(rows):
            y = y.index_add(0, rows, self.up(x[rows]))
        return y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.hits = Hits()

    def forward(self, x):
        return self.hits(x).square().mean()


def masked(module, x):
    return torch.where(x.sum(-1, keepdim=True) > 0, module.up(x), 0.0)


@pytest.fixture
def forms():
    """Rows that a test adds are removed."""
    before = dict(FORMS)
    yield
    FORMS.clear()
    FORMS.update(before)


def test_a_user_gives_a_form_in_one_line(forms):
    model, x = Model().double(), torch.randn(8, 4, dtype=torch.float64)
    with pytest.raises(CaptureError):
        capture_step(model, (x,), {}, None)
    autopar.register_form(Hits, masked)
    assert autopar.verify(model, (x,), mesh={"dp": 2}, recipe="ddp").worst_gradient_error < 1e-9


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            lambda module, x: module.up(x),
            r"Hits \(hits\) does not hold: results or gradients differ by",
        ),
        (lambda module, x: masked(module, x).detach() + 0 * module.up(x), "gradients differ by"),
        (lambda module, x: masked(module, x[:, :2]), "it fails"),
    ],
    ids=["values", "gradients", "fails"],
)
def test_a_form_that_computes_something_else_is_refused(forms, form, message):
    model = Model()
    autopar.register_form(Hits, form)
    with pytest.raises(CaptureError, match=message):
        capture_step(model, (torch.randn(8, 4),), {}, None)
    assert "forward" not in vars(model.hits)


def test_a_model_without_experts_refuses_to_split_them():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4)
    with pytest.raises(SearchError, match="ep splits nothing along ep=2"):
        autopar.verify(model, (x,), mesh={"ep": 2}, recipe="ep", loss_fn=lambda y: y.mean())

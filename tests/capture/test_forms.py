"""Modules captured in another form: proved, undone afterwards, and split like what was written so."""

import functools
import logging
from importlib import import_module

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.export import capture_step
from autopar.capture.forms import FORMS
from autopar.cost_model import H100
from autopar.errors import CaptureError, SearchError
from autopar.ir import Mesh
from autopar.planning.planning import make_plan
from autopar.proof.subject import Subject
from autopar.search.request.request import Request


def tokens(low=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, 32, (4, 6), generator=generator)


def switch(**settings):
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    torch.manual_seed(0)
    config = SwitchTransformersConfig(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_heads=4,
        num_layers=1,
        num_decoder_layers=1,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        expert_capacity=2,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        **{"router_jitter_noise": 0.0, **settings},
    )
    model = SwitchTransformersForConditionalGeneration(config).train()
    ids = tokens()
    return model, {"input_ids": ids, "labels": ids, "output_router_logits": True}


def nllb():
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    torch.manual_seed(0)
    config = NllbMoeConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_experts=4,
        expert_capacity=4,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
        max_position_embeddings=32,
        dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        moe_token_dropout=0.0,
        second_expert_policy="all",
        use_cache=False,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
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
    router.register_forward_hook(lambda _, __, out: dropped.append(int((out[0].sum(-1) == 0).sum())))
    model(**batch)
    assert dropped[0] > 0, "no row is beyond the capacity"
    plan = make_plan(subject.prepared, Request(H100, mesh=Mesh.parse("dp=2,ep=2"), recipe="dp:zero3,ep:ep"))
    layers = [op for op in subject.prepared.analysis.graph.ops if op.kind == "autopar.analysis.experts"]
    assert [plan.ops[op.name] for op in layers] == [("t.0", "t.0>e")] * 2
    assert any("SwitchTransformersExperts was captured in a form" in note for note in plan.notes)
    found = stored(plan, axis=1)
    assert len(found) == 16 and {state.kind for state in found.values()} == {"S"}
    report = subject.compare(plan)
    assert max(report.loss_error, report.worst_gradient_error) < 1e-9, report
    assert report.parameters == len(list(model.parameters()))


@pytest.mark.slow  # as Switch Transformers, and in the zoo
def test_nllb_equals_one_device_with_experts_split():
    model, batch = nllb()
    report = autopar.verify(in_float64(model), batch, mesh={"dp": 2, "ep": 2}, recipe="dp:ddp,ep:ep")
    assert max(report.loss_error, report.worst_gradient_error) < 1e-9, report


class Routed(nn.Module):
    """Rows of width 16, of shape (1, 12, 16), go to the best two of their experts."""

    def __init__(self, experts, count):
        super().__init__()
        self.experts, self.router = experts, nn.Linear(16, count)

    def forward(self, x):
        rows = x.view(-1, 16)
        shares, ids = self.router(rows).softmax(-1).topk(2)
        return self.experts(x if self.experts.of_three_dims else rows, ids, shares).square().mean()


LOOPING = {
    "Dbrx": ("dbrx", "FFNConfig", {"ffn_hidden_size": 24, "moe_num_experts": 4}),
    "LongcatFlash": (
        "longcat_flash",
        "Config",
        {"expert_ffn_hidden_size": 24, "n_routed_experts": 4, "zero_expert_num": 1},
    ),
    "Step3p7": ("step3p7", "TextConfig", {"num_local_experts": 4, "moe_intermediate_size": 24}),
}


@pytest.mark.parametrize("name", LOOPING)
def test_experts_in_a_loop_are_one_op_and_split(name):
    folder, config, sizes = LOOPING[name]
    package = f"transformers.models.{folder}"
    settings = getattr(import_module(f"{package}.configuration_{folder}"), f"{name}{config}")
    module = getattr(import_module(f"{package}.modeling_{folder}"), f"{name}Experts")
    torch.manual_seed(0)
    experts = module(settings(hidden_size=16, **sizes))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    experts.of_three_dims = name == "Dbrx"
    model = Routed(experts, 4 + sizes.get("zero_expert_num", 0)).double()
    report = autopar.verify(model, torch.randn(1, 12, 16).double(), mesh={"ep": 2}, recipe="ep")
    assert max(report.loss_error, report.worst_gradient_error) < 1e-9, report  # ep refuses what has no experts


def test_a_captured_model_is_as_it_was(caplog):
    model, batch = switch(router_jitter_noise=0.1)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    random = torch.get_rng_state()
    with caplog.at_level(logging.INFO, logger="autopar"):
        captured = capture_step(model.bfloat16(), (), batch, None)
    assert torch.equal(random, torch.get_rng_state())
    assert all("forward" not in vars(module) for module in model.modules())
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}  # eagerly a router is cast for good
    assert model.state_dict().keys() == state.keys()
    assert "SwitchTransformersExperts" in caplog.text and "decoder.block.0.layer.2" in caplog.text
    assert len(captured.forms) == 3 and all("on the captured inputs" in x for x in captured.forms)
    assert any("uniform" in str(n.target) for n in captured.module.graph.nodes)  # the router's noise


class Hits(nn.Module):
    """Skips its product where no row is positive."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        rows = (x.sum(-1) > 0).nonzero().squeeze(-1)
        y = torch.zeros_like(x)
        if len(rows):
            y = y.index_add(0, rows, self.up(x[rows]).to(y.dtype))
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


class Changing(Hits):
    """Changes a parameter and a buffer where it is run."""

    def __init__(self):
        super().__init__()
        self.register_buffer("runs", torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        self.runs += 1
        return super().forward(x) * self.runs


def changed(module, x):
    half = module.up.weight - module.up.weight.detach() / 2
    y = x @ half.T + module.up.bias
    return torch.where(x.sum(-1, keepdim=True) > 0, y, 0.0) * (module.runs + 1)


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self, hits):
        super().__init__()
        self.first = self.second = hits

    def forward(self, x):
        return self.second(self.first(x)).square().mean()


def test_the_proof_of_a_form_runs_on_copies_and_knows_modules_of_two_names(forms):
    autopar.register_form(Hits, masked)
    report = autopar.verify(Twice(Hits()).double(), (torch.randn(8, 4).double(),), mesh={"dp": 2})
    assert report.worst_gradient_error < 1e-9
    model = Twice(Changing())
    autopar.register_form(Changing, functools.partial(changed))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert "proved on" in capture_step(model, (torch.randn(8, 4),), {}, None).forms[0]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(isinstance(x, nn.Parameter) for x in model.parameters())


def test_no_row_for_a_form_is_a_gradient_of_zeros_and_a_module_not_called_is_not_proved(forms):
    autopar.register_form(Hits, masked)
    (line,) = capture_step(Model(), (-torch.ones(8, 4),), {}, None).forms
    assert "proved on the captured inputs" in line
    model = Model()
    model.spare = Hits()
    lines = capture_step(model, (torch.randn(8, 4),), {}, None).forms
    assert lines[0].endswith(": hits") and "not called" in lines[1] and lines[1].endswith(": spare")


def test_a_form_is_proved_under_autocast_and_errors_of_the_model_are_its_own(forms):
    def early(module, x):  # rounds elsewhere
        return torch.where(x.sum(-1, keepdim=True) > 0, module.up(x / 3) * 3 - 2 * module.up.bias, 0.0)

    autopar.register_form(Hits, early)
    with torch.autocast("cpu", torch.bfloat16):
        capture_step(Model(), (torch.randn(8, 4),), {}, None)
    with pytest.raises(CaptureError, match="cannot be multiplied"):
        capture_step(Model(), (torch.randn(8, 5),), {}, None)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda module, x: module.up(x), r"Hits \(hits\) does not hold: results or gradients differ by"),
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
    with pytest.raises(SearchError, match="ep splits nothing of this model"):
        autopar.verify(model, (x,), mesh={"ep": 2}, recipe="ep", loss_fn=lambda y: y.mean())

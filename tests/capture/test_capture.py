import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture.export import capture_forward, capture_step, target_count
from autopar.capture.remedies import traced_line
from autopar.errors import CaptureError, NoLossError, StepError
from autopar.passes import clean_up
from autopar.planning.planning import prepare_step
from autopar.proof.verify import verify


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens, *, shift=0.0):
        return self.head(self.table(tokens)) * self.scale + shift


TOKENS = torch.tensor([[1, 2, 3]])


def test_tied_parameters_are_one_placeholder_under_their_first_name():
    captured = capture_forward(Tied(), (TOKENS,), {})
    assert list(captured.parameters.values()) == ["table.weight"]
    assert dict(captured.tied) == {"head.weight": "table.weight"}
    assert list(captured.buffers.values()) == ["scale"]


def test_inputs_are_named_after_forward_and_literals_are_kept():
    captured = capture_forward(Tied(), (TOKENS,), {"shift": 0.5})
    assert list(captured.inputs.values()) == ["tokens"]
    assert dict(captured.literals) == {1: 0.5}


def test_placeholders_are_parameters_buffers_inputs():
    captured = capture_forward(Tied(), (TOKENS,), {})
    names = [n.name for n in captured.module.graph.find_nodes(op="placeholder")]
    assert names == [*captured.parameters, *captured.buffers, *captured.inputs]


def test_one_tensor_given_twice_stays_two_inputs():
    captured = capture_step(Tied(), (TOKENS, TOKENS), {}, lambda y, t: F.cross_entropy(y[0], t[0]))
    assert list(captured.inputs.values()) == ["tokens", "target"]


def test_a_no_grad_region_keeps_its_meaning():
    # [Note: no_grad regions]
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            with torch.no_grad():
                x = self.a(x)
            return self.b(x).sum()

    captured = capture_step(Model(), (torch.ones(1, 2),), {}, None)
    clean_up(captured.module)
    targets = [str(n.target) for n in captured.module.graph.nodes if n.op == "call_function"]
    assert targets == ["aten.linear.default", "aten.detach.default", "aten.linear.default", "aten.sum.default"]


def test_mutated_buffers_come_before_the_outputs():
    model = nn.Sequential(nn.BatchNorm1d(3))
    captured = capture_step(model, (torch.randn(4, 3),), {}, lambda y: y.sum())
    assert list(captured.mutated.values()) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]


def test_the_fingerprint_sees_shapes_and_not_values_or_devices():
    def fingerprint(model, rows):
        return capture_forward(model, (torch.zeros(rows, 4),), {}).fingerprint

    assert fingerprint(nn.Linear(4, 4), 2) == fingerprint(nn.Linear(4, 4), 2)
    assert fingerprint(nn.Linear(4, 4), 2) != fingerprint(nn.Linear(4, 4), 3)
    with torch.device("meta"):
        on_meta = capture_forward(nn.Linear(4, 4), (torch.zeros(2, 4),), {}).fingerprint
    assert on_meta == fingerprint(nn.Linear(4, 4), 2)


@pytest.mark.parametrize(
    ("loss_fn", "count"),
    [
        (F.cross_entropy, 1),
        (nn.MSELoss(), 1),
        (lambda out: out.sum(), 0),
        (lambda out, a, b: out.sum(), 2),
        (lambda out, target, scale=1.0: out.sum(), 1),
        (torch.mean, 0),  # without a signature
        (torch._C._nn.mse_loss, 1),
    ],
)
def test_targets_are_what_the_loss_needs_besides_the_result(loss_fn, count):
    assert target_count(loss_fn) == count


def test_a_loss_of_unreadable_parameters_is_named():
    with pytest.raises(StepError, match=r"is not in its signature.*lambda result, target"):
        target_count(iter)


def test_no_loss_function():
    with pytest.raises(StepError, match=r"`step` needs a loss: the model returns tensors of shapes \[\[2, 4\]\]"):
        capture_step(nn.Linear(4, 4), (torch.zeros(2, 4),), {}, None)


class LossBehind(nn.Linear):
    """Logits, and then the loss, as nanoGPT returns them."""

    def forward(self, x):
        logits = super().forward(x)
        return logits, logits.square().mean()


def test_a_loss_behind_other_results_is_named_in_the_order_of_the_model():
    with pytest.raises(StepError, match=r"shapes \[\[2, 4\], \[\]\], of which number 1 is one scalar"):
        capture_step(LossBehind(4, 4), (torch.zeros(2, 4),), {}, None)


def test_a_loss_of_none_is_named():
    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(4, 4)

        def forward(self, x, labels=None):
            y = self.map(x)
            return {"loss": None if labels is None else (y - labels).sum(), "y": y}

    with pytest.raises(StepError, match=r"returned None as its loss: .* labels=\.\.\."):
        capture_step(Labelled(), (torch.randn(2, 4),), {}, None)


def test_a_loss_that_is_no_scalar():
    with pytest.raises(StepError, match=r"returns tensors of shapes \[\[2, 4\]\]; `step` needs one scalar"):
        capture_step(nn.Linear(4, 4), (torch.zeros(2, 4),), {}, lambda y: y * 2)


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # the line to blame
            return x.sum()
        return x.mean()


def test_what_cannot_be_captured_names_line_and_remedy():
    with pytest.raises(CaptureError) as error:
        capture_step(Branching(), (torch.ones(2),), {}, None)
    message = str(error.value)
    assert "if x.sum() > 0:  # the line to blame" in message
    assert "test_capture.py" in message
    assert "use torch.where or torch.cond instead of `if`" in message


def test_rows_picked_by_a_mask_name_line_and_remedy():
    class Picking(nn.Module):
        def forward(self, x):
            return x[x > 0].sum()  # so many as only a run tells

    with pytest.raises(CaptureError) as error:
        capture_step(Picking(), (torch.ones(2),), {}, None)
    message = str(error.value)
    assert "test_capture.py:" in message and "so many as only a run tells" in message
    assert "mask with torch.where instead of x[mask]" in message
    assert 'torch.compile(model, backend="autopar")' in message


def test_data_of_a_parameter_names_the_module_that_reads_it():
    class Clipped(nn.Linear):
        def forward(self, x):  # export names no line of it
            self.weight.data.clamp_(-1, 1)
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.clipped = Clipped(4, 4)

        def forward(self, x):
            return self.clipped(x).sum()

    line = inspect.getsourcelines(Clipped.forward)[1]
    with pytest.raises(CaptureError) as error:
        capture_step(Model(), (torch.ones(2, 4),), {}, None)
    message = str(error.value)
    assert f"test_capture.py:{line}, in the forward of Clipped (clipped) or of what it" in message
    assert "Read x.detach() where this forward reads x.data" in message


class Slope(nn.Module):
    """Its loss has a gradient that the forward itself asks autograd for."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.linear(x).sin().sum(), x, create_graph=True)[0].sum()


def test_a_gradient_inside_of_a_forward_is_refused_by_name():
    """A compiled model is captured without values, where torch lets the gradient be a constant without values."""
    with pytest.raises(CaptureError, match=r"such as torch\.autograd\.grad"):
        autopar.compile(Slope(), recipe="ddp").step(torch.ones(2, 4))


def test_a_buffer_under_two_names_that_forward_changes_is_named():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.second(self.first(x)).sum()

    assert capture_step(Twice().eval(), (torch.ones(2, 4),), {}, None).buffers
    with pytest.raises(CaptureError, match=r"a single name: first\.running_mean and second\.running_mean"):
        capture_step(Twice(), (torch.ones(2, 4),), {}, None)


class Scaled(nn.Module):
    """A loss with a tensor of its own."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, y, target):
        return F.mse_loss(y * self.scale, target)


def test_a_loss_with_a_trained_tensor_is_refused():
    batch = (torch.ones(2, 4), torch.ones(2, 4))
    loss = Scaled(nn.Parameter(torch.ones(4)))
    leaf = torch.ones(4, requires_grad=True)
    for loss_fn in (loss, lambda y, t: loss(y, t), lambda y, t: F.mse_loss(y * leaf, t)):
        with pytest.raises(CaptureError, match=r"shape \[4\] that requires a gradient and is not a par"):
            capture_step(nn.Linear(4, 4), batch, {}, loss_fn)


def test_a_loss_may_hold_tensors_that_are_not_trained():
    batch = (torch.randn(2, 4), torch.tensor([0, 3]))
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4]))
    assert verify(nn.Linear(4, 4), batch, loss_fn=weighted, mesh={"dp": 2}, recipe="ddp").passed
    teacher = nn.Linear(4, 4)  # takes gradients, and gives none

    def distilled(y, x):
        with torch.no_grad():
            target = teacher(x)
        target = target * torch.ones_like(teacher(x)) + teacher.weight.new_zeros(4)
        return F.mse_loss(y, target) + F.mse_loss(y, teacher(x).detach())

    captured = capture_step(nn.Linear(4, 4), (batch[0], batch[0]), {}, distilled)
    assert sorted(captured.parameters.values()) == ["bias", "weight"] and captured.constants


def test_an_input_that_is_missing_only_in_a_trace_has_its_remedy():
    class Filling(nn.Module):
        def forward(self, x, mask=None):
            if mask is None and not torch.compiler.is_compiling():
                mask = torch.ones_like(x)
            return (x * mask[0]).sum()

    with pytest.raises(CaptureError, match="Give the optional inputs that are None here"):
        capture_step(Filling(), (torch.ones(2),), {}, None)


def test_a_buffer_assigned_to_itself_is_not_forgotten():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            self.scale = self.scale  # as models do whose buffer grows with the input
            return (self.linear(x) * self.scale).sum()

    assert capture_step(Lazy(), (torch.ones(2, 4),), {}, None).buffers


def test_an_input_changed_in_place():
    class Model(nn.Module):
        def forward(self, x):
            return x.add_(1).sum()

    with pytest.raises(CaptureError, match="changes one of its inputs in place; clone it first"):
        capture_step(Model(), (torch.ones(2),), {}, None)


def test_a_buffer_that_is_assigned_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return (x - self.mean).sum()

    with pytest.raises(CaptureError, match=r"buffer `mean` of Model is assigned .*self.mean.copy_"):
        capture_step(Model(), (torch.ones(2, 4),), {}, None)


def test_inference_mode_is_refused():
    class Model(nn.Module):
        def forward(self, x):
            with torch.inference_mode():
                y = x * 2
            return y.clone().sum()

    with pytest.raises(CaptureError, match=r"inference_mode\(\) cannot be captured; use torch.no_grad"):
        capture_step(Model(), (torch.ones(2),), {}, None)


def test_hooks_on_what_is_saved_for_backward_are_refused_with_their_line():
    class Model(nn.Module):
        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(torch.round, lambda x: x):
                return x.exp().sum()

    class OnTheHost(nn.Module):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():  # which changes no value
                return x.exp().sum()

    with pytest.raises(CaptureError, match=r"saved_tensors_hooks in .*test_capture.py:\d+"):
        capture_step(Model(), (torch.ones(2),), {}, None)
    capture_step(OnTheHost(), (torch.ones(2),), {}, None)


HOOKS = {
    "tensor": lambda h: h.register_hook(torch.neg),
    "node": lambda h: h.grad_fn.register_hook(lambda *_: None),
    "node before": lambda h: h.grad_fn.register_prehook(lambda *_: None),
    "several": lambda h: torch.autograd.graph.register_multi_grad_hook((h,), print),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_on_gradients_are_refused_with_their_line(register):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            hidden = self.layer(x)
            assert hidden.grad_fn is not None
            register(hidden)
            return hidden.sum()

    with pytest.raises(CaptureError, match=r"a hook on a gradient in .*test_capture.py:\d+"):
        capture_step(Model(), (torch.ones(2),), {}, None)
    assert "grad_fn" not in vars(torch.Tensor)


class Checkpointed(nn.Module):
    """Checkpointed calls, one inside of another."""

    def __init__(self, use_reentrant, at_input=False):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4).double() for _ in range(3))
        self.how, self.at_input = {"use_reentrant": use_reentrant}, at_input

    def inner(self, x):
        return self.second(x).relu()

    def outer(self, x):
        return checkpoint(self.inner, x, **self.how).sin(), [x * 2]

    def forward(self, x):
        y, (z,) = checkpoint(self.outer, x if self.at_input else self.first(x), **self.how)
        return (self.third(y) * z).sum()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("how", [(False,), (True,), (False, True), (True, True)])
def test_checkpointed_calls_have_the_gradients_that_they_have_eagerly(how):
    model = Checkpointed(*how)
    x = torch.randn(2, 4, dtype=torch.float64)
    autopar.compile(model, example_inputs=(x,)).step(x)
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == (found[name] is None), name
        assert p.grad is None or torch.allclose(p.grad, found[name], rtol=1e-12), name


def test_a_parameter_changed_in_forward_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)

        def forward(self, x):
            with torch.no_grad():
                self.a.weight.clamp_(-1, 1)
            return self.a(x).sum()

    with pytest.raises(CaptureError, match=r"changes the parameter a\.weight in place"):
        capture_step(Model(), (torch.ones(1, 2),), {}, None)


def test_an_input_called_target_and_a_target_are_two():
    class Model(nn.Module):
        def forward(self, source, target):
            return source * target

    batch = (torch.ones(2), torch.ones(2), torch.ones(2))
    captured = capture_step(Model(), batch, {}, lambda y, t: (y * t).sum())
    assert list(captured.inputs.values()) == ["source", "target", "target~2"]


def test_a_model_that_returns_its_loss_among_other_things():
    class Model(nn.Module):
        def forward(self, x):
            return {"logits": x * 2, "loss": x.sum()}

    captured = capture_step(Model(), (torch.ones(2),), {}, None)
    assert captured.is_step and len(captured.mutated) == 0


def test_a_number_that_only_an_assertion_reads_is_no_obstacle():
    class Model(nn.Module):
        def forward(self, x):
            torch._check((x > 0).all().item())
            return x.sum()

    prepared = prepare_step(nn.Sequential(nn.Linear(2, 2), Model()), (torch.ones(2, 2),))
    assert [op.kind for op in prepared.analysis.graph.ops] == ["aten.linear", "aten.sum"]


def test_what_is_added_in_place_to_the_result_of_a_no_grad_region_has_a_gradient():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.randn(4))

        @torch.no_grad()
        def positions(self, x):
            return x.cumsum(-1).sin()

        def forward(self, x):
            positions = self.positions(x).to(x.device)
            positions += self.shift
            return positions.square().sum()

    report = verify(Model().double(), (torch.randn(2, 4).double(),), mesh={"x": 2}, recipe="ddp")
    assert report.passed and report.parameters == 1, report


def test_what_a_no_grad_region_gives_back_as_it_is_keeps_its_gradient():
    class Model(nn.Module):
        """Casts as the indexers of sparse attention do: export shares the cast with later ops."""

        def __init__(self):
            super().__init__()
            self.up, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.up(x)
            with torch.no_grad():
                chosen = self.gate(x.to(self.gate.weight.dtype)).topk(2).indices
            gate = self.gate(x.to(self.gate.weight.dtype))
            return (gate * x).gather(-1, chosen).sum()

    report = verify(Model().double(), (torch.randn(2, 4).double(),), mesh={"x": 2}, recipe="ddp")
    assert report.passed and report.parameters == 4, report


def test_graphs_inside_the_graph_are_refused():
    class Branches(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)).mean()

    with pytest.raises(CaptureError, match="cond runs graphs inside the graph"):
        capture_step(Branches(), (torch.ones(4),), {}, None)


class Mixture(nn.Module):
    """The likelihood of a mixture of normals of which the model gives the parameters."""

    def __init__(self, validate_args=None):
        super().__init__()
        self.parts = nn.Linear(4, 6)
        self.validate_args = validate_args

    def forward(self, x, y):
        shares, means = self.parts(x).chunk(2, -1)
        parts = Normal(means, torch.ones_like(means), validate_args=self.validate_args)
        return -MixtureSameFamily(Categorical(logits=shares), parts).log_prob(y).mean()


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: nn.BatchNorm1d(4, momentum=None), "give it a momentum. .*takes a plain copy"),
        (lambda: Counted(), r"Count by torch.nn.functional.one_hot\(x, n\).sum\(0\)"),
    ],
)
def test_counts_of_batches_and_of_classes_are_refused_with_a_way_out(make, remedy):
    with pytest.raises(CaptureError, match=remedy):
        capture_forward(make(), (torch.ones(3, 4),), {})


class Counted(nn.Module):
    """Rows weighed by how often their class occurs."""

    def forward(self, x):
        return x * torch.bincount(x.argmax(1), minlength=4)


class Coded(nn.Module):
    """Targets that are computed of the result without gradients."""

    def forward(self, x):
        with torch.no_grad():
            q = x.exp().T
            q = q / q.sum()
        return -(q.T * x.log_softmax(1)).sum()


def test_what_is_computed_without_gradients_has_a_line_of_the_model():
    graph = capture_forward(Coded(), (torch.ones(3, 4),), {}).module.graph
    lines = {traced_line(node) for node in graph.nodes if node.op == "call_function"}
    assert {line.partition(":")[0] for line in lines} == {__file__}


def test_distributions_are_captured_without_their_checks():
    x = torch.randn(4, 4).double()
    report = verify(Mixture().double(), (x, x[:, 0]), mesh={"dp": 2}, recipe="ddp")
    assert report.passed and report.parameters == 2, report
    with pytest.raises(CaptureError, match="Make the distribution with validate_args=False: its"):
        capture_step(Mixture(validate_args=True), (x.float(), x[:, 0].float()), {}, None)


def test_masks_of_transformers_are_applied_and_not_read():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.encoder(x, mask).sin().mean()

    report = verify(Masked().double(), (torch.randn(4, 3, 4).double(),), mesh={"dp": 2}, recipe="ddp")
    assert report.passed and report.parameters == 12, report


class Ctc(nn.Module):
    def forward(self, x, y):
        return F.ctc_loss(x.log_softmax(-1), y, (6, 6), (2, 2))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 4)

    def forward(self, x, _):
        return self.layer(pack_padded_sequence(x, [6, 5]))[0].data.sum()


class Transformed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, _):
        def loss(parameters, row):
            return torch.func.functional_call(self.layer, parameters, row).sum()

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(self.layer.named_parameters()), x)
        return each["weight"].pow(2).sum()


class Unary(nn.Module):
    def forward(self, x):
        return x.sum()


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Ctc(), "has no kernel that export takes.*\n  remedy: Compute this outside of the captured code"),
        (Transformed(), r"torch.func transforms \(vmap, grad, jvp\) compute here"),
        (Packed(), "Packed sequences do: give the recurrent layer the padded batch"),
    ],
)
def test_remedies_are_of_what_failed(model, sentence, capfd):
    with pytest.raises(CaptureError, match=sentence):
        capture_step(model, (torch.randn(6, 2, 4), torch.tensor([[1, 2], [2, 3]])), {}, None)
    assert not capfd.readouterr().err


def test_arguments_that_a_forward_does_not_take_have_a_remedy():
    x = torch.randn(6, 2)
    with pytest.raises(NoLossError, match=r"takes 1 of them\. If the last is a target, name the loss"):
        capture_step(Unary(), (x, x), {}, None)
    with pytest.raises(CaptureError, match="Call it with the arguments that the model's forward takes"):
        capture_step(Unary(), (x, x, x), {}, None)

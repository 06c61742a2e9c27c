"""Captures as text: what is read back is the capture that was written."""

import collections
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar._torch import FakeTensorMode, OtherSizes
from autopar.capture.export import capture_forward, capture_step
from autopar.capture.stored.captured_text import read_captured, write_captured
from autopar.capture.stored.python_state import NoText
from autopar.ir import MixedPrecision
from autopar.planning.stored_captures import CaptureQuestion, StoredCaptures, is_same_capture
from autopar.program.captures import at_sizes

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from gpt import GPT, GPTConfig, loss_fn

TABLE = torch.arange(16.0).reshape(4, 4)  # a global that a model reads


class Constants(nn.Module):
    """Holds tensors in attributes and globals, and makes some in forward."""

    def __init__(self):
        super().__init__()
        self.body, self.shift = nn.Linear(4, 4), torch.ones(4)

    def forward(self, x):
        made = torch.tensor([[1.5, float("-inf"), float("nan"), -0.0]])
        kept = torch.tensor([True, False, True, True])
        y = self.body(x) @ TABLE + self.shift
        return torch.where(kept, y, made.nan_to_num()) * torch.tensor(2.5, dtype=torch.bfloat16)


class Counting(nn.Module):
    """Counts its calls, sets an attribute, ties two weights and changes buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.calls, self.mode, self.beta = 0, "none", 0.5

    def forward(self, x):
        self.calls += 1
        self.mode = "some"
        return self.last(self.norm(self.first(x))) * self.beta


class Parts(nn.Module):
    """Has several results, of ops that have several, and a keyword that is not a tensor."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x, *, scale: float):
        (left, right), (largest, places) = self.drop(x).chunk(2, -1), x.max(-1)
        spectrum = torch.fft.fft(right.float()).mul(2j).abs()
        return {"left": left[..., 1:] * scale, "rest": [spectrum.to(torch.float64), largest, places]}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * gradient


class Own(nn.Module):
    """Calls a function with a backward of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return Square.apply(self.body(x))


class Tokens(nn.Module):
    """Computes with the number of rows, and goes another way for few."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        rows = x.shape[0]
        y = self.body(x).view(2 * rows, 2)
        if rows > 3:
            y = y / rows
        return torch.cat([y[:rows], y[rows:]], 1).view(rows, 4) + (rows + 1) // 2


def asked(model, args, kwargs=None, loss=None, precision=None, dims=()):
    """A question, with fakes in place of parameters as at every capture of the runtime."""
    kwargs = kwargs or {}
    return CaptureQuestion(model, args, kwargs, loss, loss is not None, precision, dims)


def captured(question):
    args, kwargs, precision = question.args, dict(question.kwargs), question.precision
    if question.is_step:
        loss = question.loss_fn
        return capture_step(question.model, args, kwargs, loss, precision, (), question.open_dims)
    return capture_forward(question.model, args, kwargs, precision, (), question.open_dims)


def gpt():
    text = torch.zeros(2, 8, dtype=torch.long)
    model = GPT(GPTConfig(seq_len=8, width=16, heads=2, layers=2))
    return asked(model, (text, text), loss=loss_fn)


X = torch.ones(4, 4)
MODELS = {
    "the demo": gpt,
    "constants": lambda: asked(Constants(), (X, X), loss=F.mse_loss),
    "writes and buffers": lambda: asked(Counting(), (X, X), loss=F.mse_loss),
    "results and keywords": lambda: asked(Parts(), (X,), {"scale": 0.5}),
    "mixed precision": lambda: asked(Counting(), (X, X), loss=F.mse_loss, precision=MixedPrecision.of("bf16")),
    "open sizes": lambda: asked(Tokens(), (X, X), loss=F.mse_loss, dims=((0,), (0,))),
    "a loss that holds weights": lambda: asked(
        nn.Linear(4, 4), (X, X[0].long()), loss=nn.CrossEntropyLoss(torch.ones(4))
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_what_was_written(name):
    question = MODELS[name]()
    state = question.state()
    made = captured(question)
    text = json.dumps(write_captured(made, state))
    arguments = question.args, question.kwargs
    read = read_captured(json.loads(text), question.state(), arguments, question.precision)
    assert is_same_capture(made, read) and read.fingerprint == made.fingerprint
    assert json.dumps(write_captured(read, state)) == text
    assert read.module.code == made.module.code
    assert read.in_spec == made.in_spec and read.literals == made.literals
    assert list(map(repr, read.writes)) == list(map(repr, made.writes))


def test_open_sizes_take_the_same_values_and_refuse_the_same():
    question = MODELS["open sizes"]()
    made = captured(question)
    arguments = question.args, question.kwargs
    text = json.dumps(write_captured(made, question.state()))
    read = read_captured(json.loads(text), question.state(), arguments, question.precision)
    for rows in (4, 5, 64):
        found = [at_sizes(each, [(rows, 4)] * 2) for each in (made, read)]
        assert found[0].fingerprint == found[1].fingerprint
        assert is_same_capture(*found)
    for shapes in ([(3, 4)] * 2, [(1, 4)] * 2, [(4, 4), (5, 4)], [(4, 5)] * 2):
        said = []
        for each in (made, read):
            with pytest.raises(OtherSizes) as caught:
                at_sizes(each, shapes)
            said.append(str(caught.value))
        assert said[0] == said[1]


def test_a_constant_that_the_model_holds_is_that_of_the_reading_process():
    question = MODELS["constants"]()
    made = captured(question)
    other = asked(Constants(), (X, X), loss=F.mse_loss)
    read = read_captured(write_captured(made, question.state()), other.state(), (other.args, {}), None)
    held = [x for x in read.constants.values() if x is other.model.shift or x is TABLE]
    assert len(held) == 2
    assert all(g.place.holder is not vars(question.model) for g in read.guards)


def test_guards_that_were_read_notice_a_change():
    question = MODELS["writes and buffers"]()
    made = captured(question)
    arguments = question.args, question.kwargs
    read = read_captured(write_captured(made, question.state()), question.state(), arguments, None)
    assert read.guards.hold() and len(read.guards) == len(made.guards)
    question.model.beta = 0.25
    assert "model.beta" in str(read.guards.broken())


WITHOUT_TEXT = {
    "a backward of its own": (lambda: asked(Own(), (X, X), loss=F.mse_loss), "not an operator"),
    "weak references of a recurrent layer": (lambda: asked(nn.LSTM(4, 4), (X[None],)), "_flat_weight_refs"),
}


@pytest.mark.parametrize("name", WITHOUT_TEXT)
def test_what_has_no_text_is_not_stored_and_a_line_says_why(tmp_path, caplog, name):
    make, why = WITHOUT_TEXT[name]
    question = make()
    with pytest.raises(NoText, match=why):
        write_captured(captured(question), question.state())
    with caplog.at_level(logging.INFO, "autopar"):
        found = StoredCaptures(tmp_path).captured(question, lambda: captured(question))
    assert "The capture is not stored: " in caplog.text
    assert found.is_step == question.is_step and not list(tmp_path.iterdir())


def test_examples_of_a_read_graph_are_of_one_fake_mode():
    question = MODELS["the demo"]()
    made = captured(question)
    read = read_captured(write_captured(made, question.state()), question.state(), (question.args, {}), None)
    modes = {id(n.meta["val"].fake_mode) for n in read.module.graph.nodes if "val" in n.meta}
    assert len(modes) == 1 and isinstance(next(iter(read.module.graph.nodes)).meta["val"].fake_mode, FakeTensorMode)


RAN = []  # what a forged capture would add to, if text of it were run


def forged(document, *, node="linear", **changes):
    """A capture whose first node of such a name has other words; a change is a position and a value."""
    other = json.loads(json.dumps(document))
    row = next(row for row in other["graph"]["nodes"] if row[1].startswith(node))
    for place, value in changes.items():
        row[int(place.removeprefix("at"))] = value
    return other


CODE = "__import__('tests.capture.stored.test_captured_text').RAN.append(1)"
FORGERIES = {
    "a keyword": {"at4": {"dict": [[f"bias=None, x={CODE}, y", None]]}},
    "a keyword that the op does not take": {"at4": {"dict": [["alpha", 2]]}},
    "a name": {"at1": f"x = {CODE}\n"},
    "a placeholder": {"node": "p_", "at2": f"x={CODE}"},
    "a function of Python": {"at2": "eval"},
    "a class of Python": {"at2": "aten.__class__.mro"},
    "a file": {"at2": "aten.from_file.default"},
    "an attribute": {"at0": "get_attr", "at2": f"x[{CODE}]"},
    "a method": {"at0": "call_method", "at2": "share_memory_"},
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_graph_is_refused_and_none_of_it_is_run(name):
    question = asked(nn.Linear(4, 4), (X, X), loss=F.mse_loss)
    document = write_captured(captured(question), question.state())
    with pytest.raises(NoText, match=r"not names|takes no|no operator|no node of the kind"):
        read_captured(forged(document, **FORGERIES[name]), question.state(), (question.args, {}), None)
    assert not RAN


def test_results_in_containers_of_a_class_that_imports_what_it_reads_are_not_stored():
    class Counted(nn.Linear):
        def forward(self, x):
            return collections.defaultdict(list, y=super().forward(x))

    question = asked(Counted(4, 4), (X,))
    with pytest.raises(NoText, match="defaultdict has no text"):
        write_captured(captured(question), question.state())


def test_numbers_that_are_not_finite_have_a_text_of_their_own():
    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x).masked_fill(x > 0, float("-inf"))

    question = asked(Masked(4, 4), (X,))
    made = captured(question)
    text = json.dumps(write_captured(made, question.state()), allow_nan=False)
    read = read_captured(json.loads(text), question.state(), (question.args, {}), None)
    assert is_same_capture(made, read) and "-inf" in text

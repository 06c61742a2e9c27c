"""Captures in a folder: the same model is captured once, and one that Python could tell apart is captured anew."""

import contextlib
import logging
import os
import subprocess
import sys
import textwrap
import unittest.mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import _torch
from autopar.ir import MixedPrecision
from autopar.planning import stored_captures
from autopar.planning.stored_captures import is_same_capture
from autopar.program.captures import SizedCaptures
from tests.support.tables import often


def test_a_second_start_captures_nothing(starts):
    first, second, third = (starts.start() for _ in range(3))
    assert starts.count == 1 and len(starts.files) == 1
    assert first.fingerprint == second.fingerprint == third.fingerprint
    assert second.guards.hold() and len(second.guards) == len(first.guards) > 8


NAMED = """import math
from typing import NamedTuple

class Widths(NamedTuple):
    width: int
    rate = 2.0

def shifted_by(rate):
    return lambda x: x + rate

WIDTHS, FIRST, SECOND = Widths(3), shifted_by(1.0), shifted_by(2.0)
"""


def test_a_second_start_follows_named_tuples_and_two_closures_of_one_code(starts):
    starts.edit("helper", "import math", NAMED)
    new = "return SECOND(FIRST(inner(x))) * WIDTHS.rate * WIDTHS.width *"
    starts.edit("helper", "return inner(x) *", new)
    starts.start()
    starts.start()
    assert starts.count == 1
    starts.edit("helper", "shifted_by(2.0)", "shifted_by(3.0)")
    starts.start()
    assert starts.count == 2


def test_a_second_start_captures_no_length(starts):
    found = []
    for runs in (2, 0):
        captures, digests = SizedCaptures(), []
        for rows in (4, 6, 8, 16):
            made = captures.captured(((rows, 4), (rows, 4)), lambda dims, rows=rows: starts.start(rows=rows, dims=dims))
            digests.append((made.fingerprint, made.guards.hold(), made.is_clean))
        assert captures.count == runs and not captures.why_closed
        found.append(digests)
    assert found[0] == found[1] and starts.count == 2


def edited(name, old, new):
    return lambda starts: starts.edit(name, old, new)


FILES = {
    "a forward": edited("written", "F.gelu(", "F.relu("),
    "a helper in another file": edited("helper", "* FACTOR *", "+ FACTOR *"),
    "what a helper calls": edited("helper", "x + LIST[0]", "x - LIST[0]"),
    "a global number": edited("helper", "FACTOR = 2.0", "FACTOR = 2.5"),
    "a global list": edited("helper", "[1.0, 2.0]", "[1.5, 2.0]"),
    "an attribute of a class": edited("helper", "factor = 0.5", "factor = 0.75"),
    "an attribute of a module's class": edited("written", "bias = 0.25", "bias = 0.5"),
    "a closure": edited("written", "made(1.5)", "made(1.25)"),
    "a function that a closure makes": edited("written", "x + offset", "x - offset"),
    "a loss": edited("written", "F.mse_loss(", "F.l1_loss("),
    "what a name stands for": edited("written", "import torch.nn.functional as F", "import fake as F"),
    "a function of torch": edited("written", "class Body", "F.gelu = F.silu\n\nclass Body"),
}


NAMED_ELSEWHERE = {  # others are read in the same way
    "a helper in another file",
    "a global number",
    "an attribute of a module's class",
    "a function that a closure makes",
    "what a name stands for",
}


@pytest.mark.parametrize("name", often(FILES, FILES.keys() - NAMED_ELSEWHERE))
def test_an_edited_file_is_captured_anew(starts, name, monkeypatch):
    monkeypatch.setattr(F, "gelu", F.gelu)  # put back afterwards
    before = starts.start()
    starts.write("fake", "from torch.nn.functional import *\nfrom torch.nn.functional import silu as gelu")
    FILES[name](starts)
    after = starts.start()
    assert starts.count == 2 and not is_same_program(before, after)


def is_same_program(one, other):
    """Whether two captures compute the same with the same values of constants."""
    return one.fingerprint == other.fingerprint


def set_beta(model, script):
    model.beta = 2.0


def evaluate(model, script):
    model.body.drop.eval()


def freeze(model, script):
    model.body.linear.bias.requires_grad_(False)


def other_dtype(model, script):
    model.body.linear.double()


def wider(model, script):
    model.body.linear = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def hooked(model, script):
    model.body.register_forward_hook(lambda m, args, result: 2 * result)


def patched(model, script):
    model.body.forward = lambda x: x


def patched_class(model, script):
    script.Body.forward = lambda self, x: self.linear(x)


def patched_helper(model, script):
    script.helper.helped = torch.sigmoid


def longer(model, script):
    model.steps.append(3)


def tied(model, script):
    model.body.other = nn.Linear(4, 4)
    model.body.other.weight = model.body.linear.weight


def another_scale(model, script):
    model.scale.by = 4.0


def patched_inside_torch(model, script):
    torch.linalg.vector_norm = torch.sum


def patched_by_the_user(model, script):
    torch.linalg.vector_norm = lambda x: 2 * x.sum()


def another_table(model, script):
    model.table = 2 * model.table  # its values could be read


CHANGES = [
    set_beta,
    evaluate,
    freeze,
    other_dtype,
    wider,
    hooked,
    patched,
    patched_class,
    patched_helper,
    longer,
    tied,
    another_scale,
    another_table,
    patched_inside_torch,
    patched_by_the_user,
]


ALIKE = {evaluate, other_dtype, wider, patched_helper, longer, another_scale, patched_by_the_user}


@pytest.mark.parametrize("change", often(CHANGES, {*CHANGES} - ALIKE))
def test_a_changed_model_is_captured_anew(starts, change, monkeypatch):
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", norm)  # put back afterwards
    starts.edit("written", "y = helper", "x = x * torch.linalg.vector_norm(x)\n        y = helper")
    starts.start()
    dtype = torch.float64 if change is other_dtype else torch.float32
    starts.start(change, dtype=dtype)
    assert starts.count == 2
    torch.linalg.vector_norm = norm
    starts.start()
    assert starts.count == 2, "that of the model as it was is still there"


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def other_torch(name="2.99.0"):
    version, found = torch.__version__, stored_captures.code_version
    stored_captures.code_version = lambda: (*found()[:1], f"torch {name}", *found()[2:])
    try:
        yield
    finally:
        stored_captures.code_version = found
        assert torch.__version__ == version


@contextlib.contextmanager
def matmul_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def other_gpu():
    return unittest.mock.patch.object(_torch, "device_model", lambda device: "another GPU")


SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "a default dtype": default_dtype,
    "another version of torch": other_torch,
    "a precision of products": matmul_precision,
    "another GPU": other_gpu,
}


@pytest.mark.parametrize("name", often(SURROUNDINGS, SURROUNDINGS.keys() - {"no gradients", "a precision of products"}))
def test_other_modes_and_versions_are_captured_anew(starts, name):
    starts.start()
    with SURROUNDINGS[name]():
        starts.start(dtype=torch.float32)
    assert starts.count == 2


def test_the_version_is_that_of_torch_and_of_autopars_files():
    said = stored_captures.code_version()
    assert f"torch {torch.__version__}" in said and len(said[0]) == 64


ARGUMENTS = {"rows": {"rows": 8}, "a policy": {"precision": MixedPrecision.of("bf16")}, "a loss": {"loss": F.l1_loss}}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_other_arguments_are_captured_anew(starts, name):
    starts.start()
    starts.start(**ARGUMENTS[name])
    assert starts.count == 2 and len(starts.files) == 2


def damaged(text: str) -> dict[str, str]:
    body, _, seal = text.rpartition("\n")
    return {
        "empty": "",
        "cut short": text[: len(text) // 2],
        "no JSON": "\x00\x01",
        "a list": f"[]\n{seal}",
        "edited": text.replace("aten.gelu", "aten.silu"),
        "of another question": f"{body}\n{'0' * 64}",
    }


@pytest.mark.parametrize("kind", often(damaged("{}\n"), ("cut short", "edited", "of another question")))
def test_a_file_that_cannot_be_used_is_made_again(starts, caplog, kind):
    first = starts.start()
    (path,) = starts.files
    text = path.read_text()
    path.write_text(damaged(text)[kind])
    with caplog.at_level(logging.INFO, "autopar"):
        assert starts.start().fingerprint == first.fingerprint
    (said,) = [r.getMessage() for r in caplog.records if "is not used" in r.getMessage()]
    assert str(path) in said and starts.count == 2
    assert path.read_text() == text and starts.files == [path]


@pytest.mark.parametrize("how", ["other users can write it", "it belongs to user"])
def test_a_file_of_others_is_not_used_and_replaced(starts, caplog, how, monkeypatch):
    starts.start()
    (path,) = starts.files
    if how == "it belongs to user":
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    else:
        path.chmod(0o666)
    with caplog.at_level(logging.INFO, "autopar"):
        starts.start()
    (said,) = [r.getMessage() for r in caplog.records if "is not used" in r.getMessage()]
    assert str(path) in said and how in said
    assert starts.count == 2 and path.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("raised", [AssertionError("a shape"), RecursionError("too deep"), MemoryError("too long")])
def test_whatever_reading_raises_means_that_the_file_is_not_used(starts, caplog, raised, monkeypatch):
    starts.start()
    read, left = stored_captures.read_captured, [raised]

    def fails_once(*args):
        if left:
            raise left.pop()
        return read(*args)

    monkeypatch.setattr(stored_captures, "read_captured", fails_once)
    with caplog.at_level(logging.INFO, "autopar"):
        starts.start()
    assert starts.count == 2 and caplog.text.count("is not used") == 1


SCRIPT = """
    import sys, logging
    logging.basicConfig(level=logging.INFO)
    import torch
    from torch import nn
    import torch.nn.functional as F
    import autopar

    NAMES = {"left", "right", "middle", "over", "under"}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.kinds = nn.Linear(4, 4), frozenset(NAMES)

        def forward(self, x):
            return self.body(x) * (2.0 if "left" in self.kinds and "over" in NAMES else 1.0)

    torch.manual_seed(int(sys.argv[2]))
    x = torch.ones(4, 4)
    model = autopar.compile(Model(), loss_fn=F.mse_loss, cache=sys.argv[1], mesh={"dp": 1})
    loss = model.step(x, 2 * x)
    torch.manual_seed(int(sys.argv[2]))
    alone = F.mse_loss(Model()(x), 2 * x)
    print("equal", torch.equal(loss.detach(), alone.detach()))
"""


def test_another_process_uses_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    said = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, str(script), str(tmp_path / "kept"), seed]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        assert "equal True" in found.stdout
        said.append(found.stderr)
    assert "The capture was stored by an earlier start" not in said[0]
    assert "The capture was stored by an earlier start" in said[1]
    assert len(list((tmp_path / "kept").glob("*.capture"))) == 1


def test_a_stored_capture_trains_as_a_fresh_one(tmp_path):
    def losses():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        made = autopar.compile(model, loss_fn=F.mse_loss, cache=tmp_path)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            yield float(made.step(torch.arange(16.0).view(4, 4), torch.ones(4, 1)))
            optimizer.step()
            optimizer.zero_grad()
        yield from model[1].running_mean.tolist()

    first, second = list(losses()), list(losses())
    assert first == second and first[0] != first[2]
    assert len(list(tmp_path.glob("*.capture"))) == 1


def test_is_same_capture_sees_a_difference(starts):
    assert not is_same_capture(starts.start(), starts.start(rows=8))

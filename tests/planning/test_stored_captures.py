"""Captures in a folder: the same model is captured once, and one that Python could tell apart is captured anew."""

import contextlib
import functools
import importlib
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import unittest.mock
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import _torch
from autopar.capture.export import capture_step
from autopar.ir import MixedPrecision
from autopar.planning import stored_captures
from autopar.planning.stored_captures import CaptureQuestion, StoredCaptures, is_same_capture
from autopar.program.captures import SizedCaptures
from autopar.runtime.stand_ins import stand_ins
from tests.support.tables import often

HELPER = """
    import math

    FACTOR = 2.0
    LIST = [1.0, 2.0]

    class Scale:
        factor = 0.5

        def __init__(self, by):
            self.by = by

    def helped(x):
        return inner(x) * FACTOR * math.pi

    def inner(x):
        return x + LIST[0]

    def unused(x):
        return x
"""
MODEL = """
    import torch
    import torch.nn.functional as F
    from torch import nn

    import helper
    from helper import Scale

    def made(offset):
        def shifted(x):
            return x + offset
        return shifted

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)

        def forward(self, x):
            return F.gelu(self.drop(self.linear(x)))

    class Model(nn.Module):
        bias = 0.25

        def __init__(self):
            super().__init__()
            self.body, self.scale, self.beta = Body(), Scale(3.0), 1.0
            self.table, self.steps, self.shifted = torch.ones(4), [1, 2], made(1.5)

        def forward(self, x):
            y = helper.helped(self.body(x)) * self.scale.by * Scale.factor * self.beta + self.table
            return self.shifted(y) * len(self.steps) + self.bias

        def save(self, path):
            with open(path, "w") as file:
                file.write("never run by a capture")

    def loss(y, target):
        return F.mse_loss(y, target)
"""


class Starts:
    """Starts of a script of two files, and how often they had to capture.

    Attributes:
        count: number of captures so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.stored = StoredCaptures(folder / "kept")
        self.write("helper", HELPER)
        self.write("written", MODEL)

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(textwrap.dedent(text))

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.folder / f"{name}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def load(self):
        """The script's modules, as a new process imports them."""
        for name in ("helper", "written"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("written")

    def start(self, change=None, *, rows=4, dtype=torch.float32, loss=None, precision=None, **kw):
        """Captures the model of a new start, after a change to it if there is one."""
        script = self.load()
        model = script.Model()
        if change is not None:
            change(model, script)
        x = torch.ones(rows, 4, dtype=dtype)
        return self.capture(model, (x, x), loss or script.loss, precision, **kw)

    def capture(self, model, args, loss, precision=None, dims=()):
        with stand_ins(model, args, torch.device("cpu")) as fakes:
            args = tuple(fakes)

            def capture():
                self.count += 1
                return capture_step(model, args, {}, loss, precision, (), dims)

            question = CaptureQuestion(model, args, {}, loss, True, precision, dims)
            return self.stored.captured(question, capture)

    @property
    def files(self):
        return sorted(self.stored.folder.glob("*")) if self.stored.folder.is_dir() else []


@pytest.fixture
def starts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files are edited within a second
    yield Starts(tmp_path)
    for name in ("helper", "written"):
        sys.modules.pop(name, None)


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
            made = captures.captured(
                ((rows, 4), (rows, 4)), lambda dims, rows=rows: starts.start(rows=rows, dims=dims)
            )
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
    "what a name stands for": edited(
        "written", "import torch.nn.functional as F", "import fake as F"
    ),
    "a function of torch": edited("written", "class Body", "F.gelu = F.silu\n\nclass Body"),
}


NAMED_ELSEWHERE = {  # others are read in the same way
    "a helper in another file", "a global number", "an attribute of a module's class",
    "a function that a closure makes", "what a name stands for",
}  # fmt: skip


@pytest.mark.parametrize("name", often(FILES, FILES.keys() - NAMED_ELSEWHERE))
def test_an_edited_file_is_captured_anew(starts, name, monkeypatch):
    monkeypatch.setattr(F, "gelu", F.gelu)  # put back afterwards
    before = starts.start()
    starts.write(
        "fake", "from torch.nn.functional import *\nfrom torch.nn.functional import silu as gelu"
    )
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
    set_beta, evaluate, freeze, other_dtype, wider, hooked, patched, patched_class, patched_helper, longer, tied,
    another_scale, another_table, patched_inside_torch, patched_by_the_user,
]  # fmt: skip


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


@pytest.mark.parametrize(
    "name", often(SURROUNDINGS, SURROUNDINGS.keys() - {"no gradients", "a precision of products"})
)
def test_other_modes_and_versions_are_captured_anew(starts, name):
    starts.start()
    with SURROUNDINGS[name]():
        starts.start(dtype=torch.float32)
    assert starts.count == 2


def test_the_version_is_that_of_torch_and_of_autopars_files():
    said = stored_captures.code_version()
    assert f"torch {torch.__version__}" in said and len(said[0]) == 64


ARGUMENTS = {
    "rows": {"rows": 8},
    "a policy": {"precision": MixedPrecision.of("bf16")},
    "a loss": {"loss": F.l1_loss},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_other_arguments_are_captured_anew(starts, name):
    starts.start()
    starts.start(**ARGUMENTS[name])
    assert starts.count == 2 and len(starts.files) == 2


def damaged(text: str) -> dict[str, str]:
    head, _, body = text.partition("\n")
    return {
        "empty": "",
        "cut short": text[: len(text) // 2],
        "no JSON": "\x00\x01",
        "a list": "[]\n[]",
        "edited": text.replace("aten.gelu", "aten.silu"),
        "of another question": json.dumps(json.loads(head) | {"question": "0" * 64}) + "\n" + body,
    }


@pytest.mark.parametrize(
    "kind", often(damaged('{"a": 1}\n'), ("cut short", "edited", "of another question"))
)
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


# --- what depends on more than the key says

UNKNOWN = {
    "asks torch": ("F.gelu(", "(torch.get_num_threads() or 1) * F.gelu(", "get_num_threads"),
    "asks for a rank": ("F.gelu(", "(torch.distributed.is_available() + 1) * F.gelu(", "distributed"),
    "reads a file": ("F.gelu(", "len(open(__file__).read()) * F.gelu(", "open"),
    "imports": ("return F.gelu", "import platform; return len(platform.system()) * F.gelu", "platform"),
    "evaluates": ("return F.gelu", "return eval('helper.un' + 'used')(x) + F.gelu", "eval"),
    "finds code by its name": (
        "return F.gelu", "return self.forward.__globals__['hel' + 'per'].unused(x) + F.gelu", "found in a way",
    ),
    "finds a number by its name": (
        "return F.gelu", "return vars(helper)['FAC' + 'TOR'] * F.gelu", "for anything",
    ),
    "a function that keeps results": (
        "def made(", "import functools\n\n@functools.lru_cache\ndef made(", "made keeps results",
    ),
    "a method of a lock": (
        "return F.gelu", "return (1 + helper.is_locked()) * F.gelu", "helper.is_locked",
    ),
    "an attribute of a tensor": (
        "return F.gelu", "return helper.TABLE.rate * F.gelu", "helper.TABLE",
    ),
    "a default": (
        "    def forward(self, x):\n        return F.gelu",
        "    def forward(self, x, lock=helper.LOCK):\n        return (1 + lock.locked()) * F.gelu", "a default of",
    ),
    "a lock": (
        "return F.gelu", "return (1 + helper.LOCK.locked()) * F.gelu", "helper.LOCK",
    ),
}  # fmt: skip


LATE = """import math, threading, torch

LOCK = threading.Lock()
is_locked = LOCK.locked
TABLE = torch.ones(4)
TABLE.rate = 2.0
"""


ALSO_UNKNOWN = {
    "asks for a rank", "finds code by its name", "a method of a lock", "an attribute of a tensor", "evaluates",
}  # fmt: skip


@pytest.mark.parametrize("name", often(UNKNOWN, UNKNOWN.keys() - ALSO_UNKNOWN))
def test_what_may_depend_on_more_is_not_stored(starts, caplog, name):
    old, new, why = UNKNOWN[name]
    starts.edit("helper", "import math", LATE)
    starts.edit("written", old, new)
    with caplog.at_level(logging.INFO, "autopar"):
        starts.start()
        starts.start()
    assert starts.count == 2 and not starts.files
    assert "The capture is not stored: " in caplog.text and why in caplog.text


def scaled_by_lock(lock, module, args, result):
    return (1 + lock.locked()) * result


class LockHook:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, module, args, result):
        return (1 + self.lock.locked()) * result


def hook_with_a_lock(model):
    model.register_forward_hook(functools.partial(scaled_by_lock, threading.Lock()))


def object_as_a_hook(model):
    model.register_forward_hook(LockHook())


@pytest.mark.parametrize("change", [hook_with_a_lock, object_as_a_hook])
def test_what_a_hook_holds_is_a_part_of_the_state(starts, caplog, change):
    with caplog.at_level(logging.INFO, "autopar"):
        starts.start(lambda model, script: change(model.body))
    assert not starts.files and "The capture is not stored: " in caplog.text


def test_a_value_whose_text_cannot_be_made_keeps_a_capture_from_being_stored(starts, caplog):
    class Silent(int):
        def __repr__(self):
            raise RuntimeError("no text")

    def change(model, script):
        model.silent = Silent(3)

    with caplog.at_level(logging.INFO, "autopar"):
        assert starts.start(change).fingerprint
    assert not starts.files and "The capture is not stored: no text" in caplog.text


def test_a_number_that_only_the_forward_imports_is_not_stored(starts, caplog, monkeypatch):
    starts.write("imported_late", "PART = 2.0")
    starts.edit("written", "return F.gelu", "from imported_late import PART; return PART * F.gelu")
    monkeypatch.setitem(sys.modules, "imported_late", None)  # put back afterwards
    del sys.modules["imported_late"]
    importlib.import_module("imported_late")
    with caplog.at_level(logging.INFO, "autopar"):
        starts.start()
    assert not starts.files and "imported_late.PART" in caplog.text


def test_a_model_of_an_installed_library_is_not_stored(starts, caplog):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    question = CaptureQuestion(model, (), {}, None, True, None, ())
    assert "belongs to an installed library" in question.state().obstacle


def test_a_mode_of_the_user_is_not_stored(starts):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        starts.start()
    assert not starts.files


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
        found = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=True
        )
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

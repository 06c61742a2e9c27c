"""Captures that may depend on more than their key says: they are not stored, and the log says why."""

import functools
import importlib
import logging
import sys
import threading

import pytest
import torch

from autopar.planning.stored_captures import CaptureQuestion
from tests.support.tables import often

UNKNOWN = {
    "asks torch": ("F.gelu(", "(torch.get_num_threads() or 1) * F.gelu(", "get_num_threads"),
    "asks for a rank": ("F.gelu(", "(torch.distributed.is_available() + 1) * F.gelu(", "distributed"),
    "reads a file": ("F.gelu(", "len(open(__file__).read()) * F.gelu(", "open"),
    "imports": ("return F.gelu", "import platform; return len(platform.system()) * F.gelu", "platform"),
    "evaluates": ("return F.gelu", "return eval('helper.un' + 'used')(x) + F.gelu", "eval"),
    "finds code by its name": (
        "return F.gelu",
        "return self.forward.__globals__['hel' + 'per'].unused(x) + F.gelu",
        "reached in a way",
    ),
    "finds a number by its name": ("return F.gelu", "return vars(helper)['FAC' + 'TOR'] * F.gelu", "for anything"),
    "a function that keeps results": (
        "def made(",
        "import functools\n\n@functools.lru_cache\ndef made(",
        "made keeps results",
    ),
    "a method of a lock": ("return F.gelu", "return (1 + helper.is_locked()) * F.gelu", "helper.is_locked"),
    "an attribute of a tensor": ("return F.gelu", "return helper.TABLE.rate * F.gelu", "helper.TABLE"),
    "a default": (
        "    def forward(self, x):\n        return F.gelu",
        "    def forward(self, x, lock=helper.LOCK):\n        return (1 + lock.locked()) * F.gelu",
        "a default of",
    ),
    "a lock": ("return F.gelu", "return (1 + helper.LOCK.locked()) * F.gelu", "helper.LOCK"),
}


LATE = """import math, threading, torch

LOCK = threading.Lock()
is_locked = LOCK.locked
TABLE = torch.ones(4)
TABLE.rate = 2.0
"""


ALSO_UNKNOWN = {
    "asks for a rank",
    "finds code by its name",
    "a method of a lock",
    "an attribute of a tensor",
    "evaluates",
}


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
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
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

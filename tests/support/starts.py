"""Starts of a script of two files, with a folder of stored captures."""

import importlib
import sys
import textwrap
from pathlib import Path

import torch

from autopar import _torch
from autopar.capture.export import capture_step
from autopar.planning.stored_captures import CaptureQuestion, StoredCaptures

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
        with _torch.stand_ins(model, args, torch.device("cpu")) as fakes:
            args = tuple(fakes)

            def capture():
                self.count += 1
                return capture_step(model, args, {}, loss, precision, (), dims)

            question = CaptureQuestion(model, args, {}, loss, True, precision, dims)
            return self.stored.captured(question, capture)

    @property
    def files(self):
        return sorted(self.stored.folder.glob("*")) if self.stored.folder.is_dir() else []

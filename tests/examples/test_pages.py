"""Every example of a page runs as it stands there, and prints what the page says that it prints.

An example is a block of Python on a page of docs/. Names that the prose of a page takes for granted come from the
`before` of its case. A block that starts several ranks runs under `autopar run`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

SMALL = """
import torch
import torch.nn.functional as F
from torch import nn

import autopar

loss_fn = F.cross_entropy
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
inputs, targets = torch.randn(8, 8), torch.randint(4, (8,))
tokens = inputs
"""
REGRESSION = f"{SMALL}\nx, y = torch.randn(8, 4), torch.randn(8, 4)\n"
BETA = f"""{SMALL}
class Model(nn.Module):
    beta = 1.0

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x):
        return (self.map(x) * self.beta).square().mean()

model, batch = Model(), (torch.randn(8, 4),)
"""
TOWERS = f"""{SMALL}
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(8, width), nn.ReLU()) for width in (16, 32))
        self.head = nn.Linear(48, 4)

    def forward(self, x):
        return self.head(torch.cat([self.a(x), self.b(x)], 1))

torch.manual_seed(0)  # every rank has the same batch
inputs, targets = torch.randn(8, 8), torch.randint(4, (8,))
model = Towers()
"""
VACANT = TOWERS.replace("(8, 8)", "(9, 8)").replace("(8,)", "(9,)")  # rows for three workers
LOADED = f"""{SMALL}
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.distributed.init_process_group("gloo")
dataset = TensorDataset(torch.randn(16, 8), torch.randint(4, (16,)))
"""
DEEP = f"""{SMALL}
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
batches = [(torch.randn(32, 8), torch.randint(8, (32,)))] * 2
"""
LANGUAGE = """
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (8, 8))]
args = TrainingArguments("out", max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True)
optimizer, loader = torch.optim.AdamW(model.parameters()), DataLoader(data, 2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
"""
LIGHTNING = """
import torch
from lightning.pytorch import LightningModule

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(8, 4)

    def training_step(self, batch, number):
        self.trainer.should_stop = True  # after one epoch
        return self.network(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

module, loader = Module(), torch.utils.data.DataLoader(torch.randn(8, 8), 2)
"""
# torchrun starts Python unbuffered, where a line and its end are two writes, which those of other ranks come between.
WHOLE_LINES = "import sys\nsys.stdout.reconfigure(line_buffering=True, write_through=False)\n"
TARGETS = "from autopar.models.targets import resolve_target, weight_of\n"


@dataclass(frozen=True)
class Case:
    """Examples of a page that run one after the other.

    Attributes:
        page: name of the page, without its suffix.
        blocks: positions of the examples among those of the page.
        before: code that defines what the prose takes for granted.
        ranks: number of ranks that the examples need; 1 runs them in this process.
        prints: number of printed lines, from the first one on, that stand on the page.
        slow: whether they take more than some seconds.
    """

    page: str
    blocks: tuple[int, ...] = (0,)
    before: str = ""
    ranks: int = 1
    prints: int = 0
    slow: bool = False

    @property
    def code(self) -> str:
        found = examples(self.page)
        return "\n".join([self.before, *(found[n] for n in self.blocks)])


CASES = (
    Case("index", before=SMALL),
    Case("start", (2,), before=SMALL),
    Case("start", (1,), before="import torch\nimport autopar\nmodel = torch.nn.Linear(64, 8)"),
    Case("verify", before=BETA),
    Case("verify", (1,)),
    Case("shapes", (4,), before=REGRESSION),
    Case("replicas"),
    Case("replicas", (1,), before=DEEP, ranks=4, slow=True),
    Case("replicas", (2,), prints=1),
    Case("explain", (1,), before=TARGETS),
    Case("training", (3,), prints=4),
    Case("rules"),
    Case("rules", (1,)),
    Case("rules", (2,), slow=True),
    Case("search", before=SMALL),
    Case("splitting", prints=1, slow=True),
    Case("splitting", (1,), prints=1, slow=True),
    Case("splitting", (2,), prints=1, slow=True),
    Case("precision", (3,), prints=1, slow=True),
    Case("precision", (4,), prints=1, slow=True),
    Case("explain", slow=True),
    Case("search", (2,), slow=True),
    Case("memory", prints=3),
    Case("memory", (1,), slow=True),
    Case("checkpoints", (2, 3), slow=True),
    Case("precision", ranks=2, prints=4, slow=True),
    Case("precision", (1,), ranks=2, prints=5, slow=True),
    Case("precision", (2,), ranks=2, prints=3, slow=True),
    Case("shapes", (0, 1), ranks=2, slow=True),
    Case("shapes", (2,), before=LOADED, ranks=2, slow=True),
    Case("shapes", (3,), ranks=2, prints=1, slow=True),
    Case("replicas", (3,), before=TOWERS, ranks=2, slow=True),
    Case("replicas", (4,), before=TOWERS, ranks=4, slow=True),
    Case("replicas", (5,), before=VACANT, ranks=4, slow=True),
    Case("pipeline", (1,), before=DEEP, ranks=4, slow=True),
    Case("pipeline", (2,), ranks=2, prints=1, slow=True),
    Case("coming_from", before=LANGUAGE, ranks=2, slow=True),
    Case("coming_from", (1,), before=LANGUAGE, ranks=2, slow=True),
    Case("coming_from", (2,), before=LANGUAGE, ranks=2, slow=True),
    Case("coming_from", (3,), before=LIGHTNING, ranks=2, slow=True),
    Case("backend", ranks=4, slow=True),
    Case("backend", (1, 2), ranks=4, slow=True),
    Case("backend", (3,), before=SMALL, ranks=2, slow=True),
)

ELSEWHERE = {  # example -> the test that runs it
    ("checkpoints", 0): "tests/runtime/checkpoint/test_checkpoint.py",
    ("checkpoints", 1): "tests/runtime/checkpoint/test_checkpoint.py",
    ("checkpoints", 4): "tests/runtime/checkpoint/test_checkpoint.py",
    ("coming_from", 4): "",  # of DeepSpeed
    ("coming_from", 5): "tests/examples/test_deepspeed_page.py",
    ("coming_from", 6): "tests/examples/test_deepspeed_page.py",
    ("pipeline", 0): "tests/program/test_stages.py",
    ("search", 1): "tests/planning/test_stored_plans.py",
    ("shapes", 5): "tests/proof/test_packed.py",
    ("start", 0): "tests/test_site.py",
    ("training", 0): "tests/examples/test_training_page.py",
    ("training", 1): "tests/examples/test_training_page.py",
    ("training", 2): "tests/examples/test_training_page.py",
}


def _is_program(code: str) -> bool:
    """Whether a block is Python that does more than call `compile` with what the reader has."""
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return False
    return any(isinstance(each, ast.Import | ast.ImportFrom | ast.Assign) for each in body)


def examples(page: str) -> list[str]:
    """The Python of a page, block by block: fenced, or indented up to the command that starts it."""
    text = (DOCS / f"{page}.md").read_text()
    pattern = r"```python\n(.*?)```|(?<=\n\n)((?: {4}[^\n]*\n|\n(?= {4}))+)"
    return [m[1] or _script(m[2]) for m in re.finditer(pattern, text, re.S) if m[1] or _script(m[2])]


def _script(indented: str) -> str:
    """The Python of an indented block; "" where it has none."""
    code = re.split(r"\n[^\n]*torchrun ", textwrap.dedent(indented))[0]
    return code if _is_program(code) else ""


def _run(case: Case, folder: Path) -> str:
    """What the examples print."""
    if case.ranks > 1:
        script = folder / "train.py"
        script.write_text(f"{WHOLE_LINES}{case.code}")
        command = (sys.executable, "-m", "autopar", "run", str(script), "--ranks", f"{case.ranks}")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(case.code, f"{case.page}.md", "exec"), {"__name__": "page"})
    return printed.getvalue()


def _parameters() -> Iterator[object]:
    for case in CASES:
        marks = [pytest.mark.slow] if case.slow else []
        if case.ranks > 1:
            marks.append(pytest.mark.multiprocess)
        yield pytest.param(case, id=f"{case.page}-{case.blocks[0]}", marks=marks)


@pytest.mark.parametrize("case", tuple(_parameters()))
def test_the_examples_of_a_page_run(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = _run(case, tmp_path).splitlines()
    page = (DOCS / f"{case.page}.md").read_text().splitlines()
    assert len(printed) >= case.prints
    assert {f"    {line}" for line in printed[: case.prints]} <= set(page)


def test_no_example_is_left_out() -> None:
    pages = (page.stem for page in DOCS.glob("*.md"))
    shown = {(page, n) for page in pages for n in range(len(examples(page)))}
    run = {(case.page, n) for case in CASES for n in case.blocks}
    assert shown == run | ELSEWHERE.keys()
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())

"""The wrong inputs: each is one change of a small training script that runs, at both doors.

`healthy` is that script. A case replaces some of its lines; what is wrong is thus what the case says and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Door = Literal["compile", "backend"]
DOORS: tuple[Door, ...] = ("compile", "backend")

SCRIPT = """\
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import autopar

RANK = int(os.environ["RANK"])
HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        h = self.up(x).relu()
        {forward}
        return self.down(h)


def train():
    torch.manual_seed(0)
    model = Net()
    {before}
    {compile}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    {after}
    for step in range(5):
        x, y = torch.randn(8, 16), torch.randn(8, 16)
        {batch}
        {step}
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {{step}} loss {{loss.item():.4f}}")


train()
"""

_LINES: Mapping[Door, Mapping[str, str]] = {
    "compile": {
        "compile": "model = autopar.compile(model, loss_fn=mse_loss, timeout_seconds=15, {asked})",
        "step": "loss = model.step(x, y)",
    },
    "backend": {
        "compile": 'net = torch.compile(model, backend="autopar", options={asked})',
        "step": "loss = mse_loss(net(x), y); loss.backward()",
    },
}
_ASKED = {"mesh": '{"dp": 2}', "recipe": '"ddp"'}


@dataclass(frozen=True)
class Case:
    """One wrong input.

    Attributes:
        name: the wrong input in words.
        cause: regular expression for the cause, which the first screen has to hold.
        remedy: regular expression for what to do, which the first screen has to hold.
        lines: name of a place in the script -> the line there.
        asked: option -> its value as Python text, at both doors.
        doors: the doors at which the input can be given.
        interrupt_at: text in the output at which Ctrl-C is pressed.
        fails: whether the run ends with an error.
    """

    name: str
    cause: str
    remedy: str
    lines: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    doors: tuple[Door, ...] = DOORS
    interrupt_at: str | None = None
    fails: bool = True

    def script(self, door: Door) -> str:
        """The training script with the wrong input."""
        asked = {k: v for k, v in {**_ASKED, **self.asked}.items() if v}
        if door == "compile":
            given = ", ".join(f"{name}={value}" for name, value in asked.items())
        else:
            asked["timeout_seconds"] = "15"
            given = "{" + ", ".join(f'"{name}": {value}' for name, value in asked.items()) + "}"
        lines = dict.fromkeys(("forward", "before", "after", "batch"), "")
        lines |= {**_LINES[door], **self.lines}
        lines["compile"] = lines["compile"].format(asked=given)
        text = SCRIPT.format(**lines)
        return "\n".join(line for line in text.split("\n") if line.strip() or not line) + "\n"


HEALTHY = Case("nothing is wrong", cause="step 4 loss", remedy="", fails=False)
_IN_DYNAMO = r'train\.py", line \d+, in forward\n +'  # how Dynamo names a line
_LINE = r"train\.py:\d+ in forward: "  # how autopar names a line
_COMPILE: tuple[Door, ...] = ("compile",)
_SAVE = "autopar.checkpoint.save_checkpoint(HERE / 'saved', model, optimizer); dist.barrier()"

CASES = (
    Case(
        "a mesh of four ranks, where two run",
        "mesh dp=4 has 4 ranks, but 2 run",
        "--nproc-per-node 4",
        asked={"mesh": '{"dp": 4}'},
    ),
    Case(
        "a mesh axis of no ranks",
        "tp.*0|0.*tp",
        "at least 1|1 or more|leave|positive",
        asked={"mesh": '{"dp": 2, "tp": 0}'},
    ),
    Case(
        "an input of the wrong shape",
        r"cannot be multiplied \(8x12 and 16x32\)|same reduction dim, but got \[8, 12\] X \[16, 32\]",
        rf"(?s)({_LINE}|{_IN_DYNAMO})h = self\.up\(x\).*give this layer 16 features, or make it for 12",
        {"batch": "x = x[:, :12]"},
    ),
    Case(
        "an input of the wrong dtype",
        "same dtype.*(double|Double).*(float|Float)|Double.*Float",
        rf"(?s)({_LINE}|{_IN_DYNAMO})h = self\.up\(x\).*convert one to the other's dtype",
        {"batch": "x = x.double()"},
    ),
    Case(
        "a tensor on another device",
        "meta",
        rf"(?s)({_LINE}|{_IN_DYNAMO})h = h \+.*move both to one device",
        {"forward": 'h = h + torch.ones(32, device="meta")'},
    ),
    Case("an unknown recipe", "There is no recipe 'zero4'", "zero3", asked={"recipe": '"zero4"'}),
    Case(
        "a broken hardware file",
        r"box\.toml",
        "line 2|calibrate",
        {"before": "(HERE / 'box.toml').write_text('[device]\\nname = cpu box\\n')"},
        asked={"hardware": "str(HERE / 'box.toml')"},
    ),
    Case(
        "a plan whose file is cut off",
        r"plan\.json",
        "save|again",
        {"before": '(HERE / \'plan.json\').write_text(\'{"version": 1, "mesh": [["dp",\')'},
        asked={"mesh": "", "recipe": "", "plan": "str(HERE / 'plan.json')"},
        doors=_COMPILE,
    ),
    Case(
        "a plan of another model",
        "another model|plan.*(up|width|64)",
        "[Mm]ake|plan again|another plan",
        {
            "before": 'plan = autopar.explain(Net(64), (torch.ones(8, 16), torch.ones(8, 16)), mesh={"dp": 2}, '
            'loss_fn=mse_loss, cluster="cpu-gloo").plan'
        },
        asked={"mesh": "", "recipe": "", "plan": "plan"},
        doors=_COMPILE,
    ),
    Case(
        "a truncated checkpoint",
        "saved",
        "Copy it again",
        {
            "after": f"model.step(torch.ones(8, 16), torch.ones(8, 16)); {_SAVE}\n"
            "    part = max((HERE / 'saved').rglob('*.safetensors'))\n"
            "    RANK or part.write_bytes(part.read_bytes()[:999]); dist.barrier()\n"
            "    autopar.checkpoint.load_checkpoint(HERE / 'saved', model, optimizer)"
        },
        doors=_COMPILE,
    ),
    Case(
        "a checkpoint of another model",
        "64",
        "model",
        {
            "after": "model.step(torch.ones(8, 16), torch.ones(8, 16))\n"
            "    other = autopar.compile(Net(64), loss_fn=mse_loss, mesh={'dp': 2}, recipe='ddp')\n"
            "    other.step(torch.ones(8, 16), torch.ones(8, 16))\n"
            "    autopar.checkpoint.save_checkpoint(HERE / 'saved', other); dist.barrier()\n"
            "    autopar.checkpoint.load_checkpoint(HERE / 'saved', model, optimizer)"
        },
        doors=_COMPILE,
    ),
    Case(
        "a batch with NaN",
        "loss.*nan|nan.*loss",
        "x.*(nan|NaN)",
        {"batch": "x[2, 3] = float('nan')"},
        fails=False,
        doors=_COMPILE,
    ),
    Case(
        "a memory bound that no plan meets",
        "(?s)memory|bytes",
        "(?s)zero3|micro_batches|recompute|bound",
        asked={"memory_bytes": "1000"},
        doors=_COMPILE,
    ),
    Case(
        "out of memory in a step",
        "(can't|Unable to) allocate|out of memory",
        r"train\.py:\d+.*h = h \+",
        {"forward": "h = h + h.new_zeros(2**20, 1, 2**30)[:, 0, :1].sum()"},
        asked={"memory_bytes": "10**18"},
        doors=_COMPILE,
    ),
    Case(
        "a rank that is killed",
        "Step 3 broke|another rank.*died|SIGKILL",
        "rank 1|own log",
        {"batch": "if step == 2 and RANK == 1: os.kill(os.getpid(), signal.SIGKILL)"},
    ),
    Case("Ctrl-C", "[Ii]nterrupt", "step", {"batch": "time.sleep(0.5)"}, interrupt_at="step 2"),
    Case(
        "a rank with another batch shape",
        r"different shapes: .*\[8, 16\].*\[6, 16\]|\[6, 16\].*Ranks \[0\] did not come within 15 s",
        "same",
        {"batch": "if step == 2 and RANK == 1: x, y = x[:6], y[:6]"},
    ),
    Case(
        "a rank with a different batch",
        "different values|not the same on all 2 ranks",
        "seed",
        {"batch": "x = x + RANK"},
    ),
    Case(
        "control flow that depends on values",
        "data-dependent|value",
        r"train\.py:\d+ in forward: if h\.sum",
        {"forward": "if h.sum() > 0: h = h * 2"},
        doors=_COMPILE,
    ),
    Case(
        "a batch too small for the mesh",
        "Here the batch is no dim above size 1",
        "in a number that 2 divides",
        {"batch": "x, y = x[:1], y[:1]"},
        doors=_COMPILE,
    ),
    Case(
        "an op that cannot be traced",
        "mine::double|mine.double",
        "register_fake",
        {
            "before": "@torch.library.custom_op('mine::double', mutates_args=())\n"
            "    def double(x: torch.Tensor) -> torch.Tensor: return 2 * x",
            "forward": "h = torch.ops.mine.double(h)",
        },
    ),
)

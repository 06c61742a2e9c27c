"""Time to check the guards of a program, which `step` does before it runs.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_guards.py --device cpu

Two models: a residual network of 1,000 modules, with plain parameters and with DTensors, and the GPT of
`examples/train_gpt.py`, whose step is timed as well.
The time has two parts: what Python and the model's tables hold, and `requires_grad` of every parameter. The flags
that the check reads are not read again where gradients are handed back; what that reading took is printed as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.capture.export import capture_forward
from autopar.capture.guards.guards import Guards
from autopar.capture.guards.structure import Structure
from autopar.runtime.parameters.adoption import adopt

EXAMPLES = Path(__file__).parents[2] / "examples"


class Block(nn.Module):
    """Three layers, all of which read attributes: four modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.drop(self.linear(self.norm(x)))
        return found


def fastest_seconds(function: Callable[[], Any], times: int) -> float:
    """The shortest of many calls, after some to warm up."""
    taken = []
    for _ in range(times):
        start_seconds = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start_seconds)
    return min(taken[times // 5 :])


@dataclass(frozen=True)
class Checked:
    """The shortest time of a check of all guards of a program.

    Attributes:
        seconds: duration of the whole check.
        values_seconds: duration without the flags.
        flags_seconds: duration of reading `requires_grad` of every parameter.
    """

    seconds: float
    values_seconds: float
    flags_seconds: float

    def __str__(self) -> str:
        parts = (self.seconds, self.values_seconds, self.flags_seconds)
        return "{:.1f} us ({:.1f} us of values and tables, {:.1f} us of flags)".format(*(1e6 * each for each in parts))


def checked(guards: Guards, structure: Structure) -> Checked:
    """Times the check of all guards of a program."""
    assert guards.hold() and structure.hold()
    return Checked(
        fastest_seconds(lambda: guards.hold() and structure.hold(), 2000),
        fastest_seconds(lambda: guards.hold() and structure.has_parts(), 2000),
        fastest_seconds(structure.has_flags, 2000),
    )


def large_model() -> None:
    """Prints the time for a model of 1,000 modules."""
    model = nn.Sequential(*[Block() for _ in range(250)])
    captured = capture_forward(model, (torch.ones(2, 8),), {})
    found = checked(captured.guards, Structure(model))
    print(f"{_counts(model, captured.guards)}: {found}; {_in_python(model)}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    adopt(model, init_device_mesh("cpu", (1,), mesh_dim_names=("x",)))
    found = checked(captured.guards, Structure(model))
    print(f"the same, whose parameters are DTensors: {found}; {_in_python(model)}")
    dist.destroy_process_group()


def _in_python(model: nn.Module) -> str:
    """The time to read the flags one by one, in words."""
    parameters = list(model.parameters())
    taken = fastest_seconds(lambda: [p.requires_grad for p in parameters], 2000)
    return f"the flags one by one in Python: {1e6 * taken:.1f} us"


def _counts(model: nn.Module, guards: Guards) -> str:
    modules, parameters = len(list(model.modules())), len(list(model.parameters()))
    return f"{modules} modules, {parameters} parameters, {len(guards)} values read"


def demo(device: str) -> None:
    """Prints the time for the demo, and its share of the demo's step."""
    sys.path.insert(0, str(EXAMPLES))
    from gpt import GPT, GPTConfig, loss_fn

    torch.manual_seed(0)
    config = GPTConfig()
    model = GPT(config).to(device)
    tokens = torch.randint(256, (32, config.seq_len), device=device)
    made = autopar.compile(model, loss_fn=loss_fn, example_inputs=(tokens, tokens))

    def step() -> None:
        made.step(tokens, tokens).item()

    step()
    (ready,) = made._kept.ready[True]
    found = checked(ready.guards, ready.structure)
    step_seconds = fastest_seconds(step, 10)
    share = 100 * found.seconds / step_seconds
    print(
        f"the demo, {_counts(model, ready.guards)}: {found}, {share:.4f} % of a step of "
        f"{step_seconds * 1e3:.1f} ms on {device}"
    )


@click.command(help=__doc__)
@click.option("--device", default="cpu", show_default=True, help="Where the demo's step runs.")
def main(device: str) -> None:
    """Print a line for each model."""
    large_model()
    demo(device)


if __name__ == "__main__":
    main()

"""Time to check the guards of a program, which `step` does before it runs.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_guards.py --device cpu

Two models: a residual network of 1,000 modules, and the GPT of `examples/train_gpt.py`, whose step is timed as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.export import capture_forward
from autopar.capture.structure import Structure

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


def check_seconds(guards: Any, structure: Structure) -> float:
    """Seconds to check all guards of a program."""
    assert guards.hold() and structure.hold()
    return fastest_seconds(lambda: guards.hold() and structure.hold(), 1000)


def large_model() -> None:
    model = nn.Sequential(*[Block() for _ in range(250)])
    captured = capture_forward(model, (torch.ones(2, 8),), {})
    seconds = check_seconds(captured.guards, Structure(model))
    count = len(list(model.modules()))
    print(f"{count} modules, {len(captured.guards)} values read: {seconds * 1e6:.0f} us")


def demo(device: str) -> None:
    sys.path.insert(0, str(EXAMPLES))
    from gpt import GPT, GPTConfig, loss_fn

    torch.manual_seed(0)
    config = GPTConfig()
    model = GPT(config).to(device)
    tokens = torch.randint(256, (32, config.seq_len), device=device)
    made = autopar.compile(model, loss_fn=loss_fn, example_inputs=(tokens, tokens))

    def step() -> None:
        made.step(tokens, tokens).item()

    (ready,) = made._kept.ready[True]
    seconds = check_seconds(ready.guards, ready.structure)
    step_seconds = fastest_seconds(step, 10)
    share = 100 * seconds / step_seconds
    print(
        f"{len(list(model.modules()))} modules of the demo, {len(ready.guards)} values read: {seconds * 1e6:.1f} us "
        f"of a step of {step_seconds * 1e3:.1f} ms on {device}, {share:.2f} %"
    )


@click.command(help=__doc__)
@click.option("--device", default="cpu", show_default=True, help="Where the demo's step runs.")
def main(device: str) -> None:
    large_model()
    demo(device)


if __name__ == "__main__":
    main()

"""Time of the host for a step of a compiled model on one device, against the plain model under the same executor.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_host.py [--executor eager|aot_eager|inductor] [--rounds 100]

The subjects of `benchmarks/accelerator/subjects.py` in sizes whose kernels take next to no time: a language model has
width 16, and a batch of 8 tokens. A step is forward, backward and SGD. Compiled and plain take turns; the columns have
the median of each in processor time, the median difference within a round, and the least of each.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where it runs as a script

from autopar.models.description import LLAMA, Transformer, VisionTransformer
from benchmarks.accelerator.one_rank import MODES
from benchmarks.accelerator.subjects import Subject
from benchmarks.accelerator.training import Step, compile_subject, compiled_step, plain_step

_WARM_UP = 10  # steps before the first that counts


@dataclass(frozen=True)
class Small:
    """The context of subjects that take their small sizes, on the processor."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    on_accelerator: bool = False

    def size(self, small: int, large: int) -> int:
        """The size for a processor."""
        return small


def subjects(layers: int) -> list[Subject]:
    """GPT-2, a Llama, a vision transformer, a mixture of experts and a U-Net."""
    sizes: dict[str, Any] = {"hidden": 16, "layers": layers, "heads": 2}
    tokens: dict[str, Any] = {**sizes, "vocab": 32, "max_positions": 16}
    experts = {"ffn": 16, "experts": 2, "experts_per_token": 1}
    return [
        Subject("gpt2", Transformer(**tokens, ffn=32), 1, 8),
        Subject("llama", Transformer(**(LLAMA | tokens), ffn=32, kv_heads=2), 1, 8),
        Subject("vit", VisionTransformer(**sizes, ffn=32, image=16, patch=8, classes=16), 1),
        Subject("experts", Transformer(**(LLAMA | tokens | experts)), 1, 8),
        Subject("unet", None, 1),
    ]


def contenders(subject: Subject, executor: str) -> tuple[Step, Step]:
    """A step of the compiled and of the plain model."""
    context: Any = Small()
    made, batch = compile_subject(subject, context, torch.float32, executor=executor)
    model, backend = subject.model(context, torch.float32), MODES[executor]
    called = torch.compile(model, backend=backend) if backend else None
    return compiled_step(made, batch), plain_step(model, batch, called)


def samples(steps: tuple[Step, Step], rounds: int) -> list[tuple[float, float]]:
    """Milliseconds of the processor for a step of each contender, in every round."""
    found = []
    for _ in range(_WARM_UP + rounds):
        moments = [time.process_time()]
        for step in steps:
            step()
            moments.append(time.process_time())
        found.append((1e3 * (moments[1] - moments[0]), 1e3 * (moments[2] - moments[1])))
    return found[_WARM_UP:]


@click.command(help=__doc__)
@click.option("--executor", type=click.Choice(list(MODES)), default="eager")
@click.option("--layers", default=4, help="Layers of each model but the U-Net.")
@click.option("--rounds", default=100, help="Rounds, in which the two take turns.")
def main(executor: str, layers: int, rounds: int) -> None:
    logging.getLogger("autopar").setLevel(logging.WARNING)
    columns = ("autopar, ms", "plain, ms", "difference, ms", "ratio", "least, ms", "least of plain, ms")
    table = Table(f"subject, {executor}", *columns)
    for subject in subjects(layers):
        found = samples(contenders(subject, executor), rounds)
        ours, plain = ([pair[i] for pair in found] for i in (0, 1))
        more = median(a - b for a, b in found)
        values = (median(ours), median(plain), more, median(ours) / median(plain), min(ours), min(plain))
        table.add_row(subject.name, *(f"{value:.2f}" for value in values))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

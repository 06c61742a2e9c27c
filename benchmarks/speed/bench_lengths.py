"""Seconds until a batch of a new length runs: of a bucketed loader, and at a second start of a script.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_lengths.py --ranks 2

A GPT of examples/gpt.py, or a small Llama of transformers (`--model llama`), takes batches of 15 lengths under a plan
that splits them. `--alone` captures each length by itself. Counted is the time of a step with a new length less that
of the next step with the same length. `--starts` compiles the demo's model in new processes, twice with one folder of
searched plans. Every figure is seconds on the clock and, in brackets, of the first rank's processor, which counts
where other programs take most of the cores.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port

import autopar
from autopar.program.captures import SizedCaptures

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig, loss_fn

LENGTHS = range(32, 32 + 15 * 16, 16)
Batch = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]  # length -> arguments of a step


def gpt() -> tuple[nn.Module, Any, Batch]:
    """The demo's model."""

    def batch(length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        text = torch.zeros(16, length, dtype=torch.long)
        return (text, text), {}

    return GPT(GPTConfig(seq_len=max(LENGTHS))), loss_fn, batch


def llama() -> tuple[nn.Module, Any, Batch]:
    """A Llama of 4 layers, with padding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )

    def batch(length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        text = torch.zeros(16, length, dtype=torch.long)
        return (), {"input_ids": text, "labels": text, "attention_mask": torch.ones_like(text)}

    return LlamaForCausalLM(config), None, batch


MODELS = {"gpt": gpt, "llama": llama}


@dataclass(frozen=True)
class Taken:
    """Seconds on the clock and of this process's processor."""

    clock: float
    processor: float

    @classmethod
    def now(cls) -> Taken:
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: Taken) -> Taken:
        return Taken(self.clock - other.clock, self.processor - other.processor)

    def __str__(self) -> str:
        return f"{self.clock:.2f} s ({self.processor:.2f})"


def median(found: Sequence[Taken]) -> Taken:
    return Taken(statistics.median(each.clock for each in found), statistics.median(each.processor for each in found))


def seconds_of_lengths(name: str, ranks: int, recipe: str) -> tuple[list[Taken], int]:
    """What each new length takes more than a known one, and how often the model was captured."""
    model, loss, batch = MODELS[name]()
    made = autopar.compile(model, loss_fn=loss, mesh={"dp": ranks}, recipe=recipe)
    found = []
    for length in LENGTHS:
        args, kwargs = batch(length)
        taken = []
        for _ in range(2):
            start = Taken.now()
            made.step(*args, **kwargs)
            taken.append(Taken.now() - start)
        found.append(taken[0] - taken[1])
    return found, made._kept.ready[True][-1].captures.count


def join(rank: int, ranks: int, port: int) -> None:
    """Makes the process group of this rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))


def start(rank: int, ranks: int, port: int, folder: str) -> None:
    """Compiles the demo's model with a folder of searched plans; imports are counted by themselves."""
    join(rank, ranks, port)
    text = torch.zeros(32, 64, dtype=torch.long)
    begin = Taken.now()
    compile_ = autopar.compile  # autopar imports its rooms when the first of its names is used
    importlib.import_module("torch.export._trace")  # torch imports it when it first exports
    imported = Taken.now()
    compile_(GPT(GPTConfig(seq_len=64)), example_inputs=(text, text), loss_fn=loss_fn, cache=folder)
    if rank == 0:
        print(f"the demo, {ranks} ranks: imports {imported - begin}, planned in {Taken.now() - imported}")
    dist.destroy_process_group()


def work(rank: int, ranks: int, port: int, name: str, recipe: str, alone: bool) -> None:
    join(rank, ranks, port)
    if alone:
        SizedCaptures._dims = lambda *_: ()  # type: ignore[method-assign]
    found, captures = seconds_of_lengths(name, ranks, recipe)
    if rank == 0:
        rest = found[2:]
        how = "each captured by itself" if alone else f"captured {captures} times"
        print(
            f"{name}, {ranks} ranks, {recipe}, {how}: first length {found[0]}, second {found[1]}, "
            f"median of {len(rest)} others {median(rest)}"
        )
    dist.destroy_process_group()


@click.command(context_settings={"show_default": True})
@click.option("--model", default="gpt", type=click.Choice(list(MODELS)), help="What is trained.")
@click.option("--ranks", default=2, help="Gloo processes.")
@click.option("--recipe", default="zero3", help="How it is split.")
@click.option("--alone", is_flag=True, help="Capture every length by itself.")
@click.option("--starts", is_flag=True, help="Compile the demo's model at two starts.")
def main(model: str, ranks: int, recipe: str, alone: bool, starts: bool) -> None:
    """Print the seconds of new lengths, or of two starts."""
    if starts:
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                mp.spawn(start, (ranks, get_free_port(), folder), ranks)
        return
    mp.spawn(work, (ranks, get_free_port(), model, recipe, alone), ranks)


if __name__ == "__main__":
    main()

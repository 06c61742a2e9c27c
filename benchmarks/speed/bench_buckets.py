"""Step times with buckets of seven sizes on Gloo ranks whose messages have a latency, and the size that is chosen.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_buckets.py --ranks 4 [--markdown PATH]

Every collective waits for a latency before it moves anything: that of the steps of its ring (2 (n - 1) for an
all-reduce, n - 1 for an all-gather or a reduce-scatter), and collectives of a rank run one after another, as on a link.
Products take at least their FLOPs by the rate `--gigaflops`, as in `bench_overlap.py`. The price knows a link that is
fitted to all-reduces of two sizes under this latency, and the rate of the products; nothing is fitted to a step.

The sizes are those by which a backward fills 1, 2, 3, 4, 8, 16 and 32 buckets. Turns of all sizes alternate, and the
fastest of each counts: other work on the machine only adds to a turn.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.utils.distributed import get_free_port

import autopar
from autopar import _torch
from autopar.cost_model import Hardware, Link, find_hardware
from autopar.search.refine.buckets import sizes_of, usual_bytes
from autopar.units import format_bytes

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.speed.bench_overlap import Device, Step
from benchmarks.speed.bench_step_time import Sizes, loss_fn, on_all, turn
from benchmarks.tables import markdown_table

HEADS = ("recipe", "latency of a message", "chosen", "its step", "best of seven", "its step", "slower")
PAGE = """# Buckets on ranks whose messages have a latency

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_buckets.py --ranks 4 --markdown benchmarks/results/buckets.md

A GPT of 8 layers on four Gloo ranks, whose collectives each wait for the latency of their ring's steps before they move
anything. The price knows a link that is fitted to all-reduces of two sizes under this latency, and the rate of the
products; nothing is fitted to a step. "Slower" is the step of the size that the search chooses over the best of seven.
"""
FIT_BYTES = (1_000_000, 8_000_000)  # messages that the link is fitted to
RANKS_OF_RING = {"start_all_reduce": 2, "start_all_gather": 1, "start_reduce_scatter": 1}  # times n - 1 steps


class Delayed:
    """Starts collectives one after another, each after the latency of its ring's steps.

    Attributes:
        latency_seconds: added latency of a message.
    """

    def __init__(self) -> None:
        self.latency_seconds = 0.0
        self._line = ThreadPoolExecutor(1)
        self._starts = {name: getattr(_torch, name) for name in RANKS_OF_RING}

    def start(self, name: str, *args: Any) -> Arriving:
        """Starts a collective of `autopar._torch`, whose last argument is its group."""
        steps = RANKS_OF_RING[name] * (args[-1].size() - 1)
        return Arriving(self._line.submit(self._run, name, steps * self.latency_seconds, args))

    def _run(self, name: str, seconds: float, args: Any) -> None:
        time.sleep(seconds)
        self._starts[name](*args).wait()

    def install(self) -> None:
        """Has the runtime start its collectives here, from now on."""
        for name in RANKS_OF_RING:
            mock.patch.object(_torch, name, partial(self.start, name)).start()


@dataclass
class Arriving:
    """The handle of a collective that was started."""

    arrived: Future[None]

    def wait(self) -> None:
        self.arrived.result()


def fitted_link(delayed: Delayed, ranks: int) -> Link:
    """The link whose all-reduces take as long as those of two sizes do, the fastest of five on the slowest rank."""
    group = dist.distributed_c10d._get_default_group()
    seconds = []
    for size in FIT_BYTES:
        x = torch.zeros(size // 4)
        found = []
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            delayed.start("start_all_reduce", x, group).wait()
            found.append(slowest(time.perf_counter() - start))
        seconds.append(min(found))
    by_byte = max(1e-12, (seconds[1] - seconds[0]) / (FIT_BYTES[1] - FIT_BYTES[0]))
    alone = max(0.0, seconds[0] - by_byte * FIT_BYTES[0])
    sent = 2 * (ranks - 1) / ranks
    return Link(bandwidth_bytes_per_second=sent / by_byte, latency_seconds=alone / (2 * (ranks - 1)))


def slowest(seconds: float) -> float:
    """The largest of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def machine(flops_per_second: float, link: Link) -> Hardware:
    """The ranks as a machine. Messages mostly wait, so that nothing keeps them from hiding."""
    figures: dict[str, Any] = {"hides": 1.0, "matmul_efficiency": 1.0, "matmul_half_size": 0.0, "launch_seconds": 0.0}
    cpu = replace(find_hardware("cpu-gloo"), peak_flops=((4, flops_per_second),), host_seconds=0.0, **figures)
    return replace(cpu, inside_node=link, across_nodes=link)


def stepper(sizes: Sizes, recipe: str, hardware: Hardware, bucket_bytes: int | None = None) -> tuple[Step, Any]:
    """A step without the optimizer, and the compiled model."""
    batch = sizes.batch_of(0)
    model = autopar.compile(
        sizes.model(),
        example_inputs=batch,
        loss_fn=loss_fn,
        mesh={"x": dist.get_world_size()},
        recipe=recipe,
        hardware=hardware,
        bucket_bytes=bucket_bytes,
    )

    def step() -> None:
        model.step(*batch)
        model.zero_grad()

    return step, model


def measured(steps: dict[int, Step], rounds: int, flops_per_second: float) -> dict[int, float]:
    """Size of a bucket -> seconds of the fastest turn."""
    found: dict[int, list[float]] = {size: [] for size in steps}
    with Device(flops_per_second):
        for number in range(rounds + 1):
            for size, step in steps.items():
                seconds = on_all(turn(step, 1).step_seconds) / dist.get_world_size()
                if number:  # the first warms up
                    found[size].append(seconds)
    return {size: min(seconds) for size, seconds in found.items()}


def row(sizes: Sizes, recipe: str, hardware: Hardware, flops_per_second: float) -> tuple[list[str], list[str]]:
    """A row of the table, and the step of each size."""
    _, model = stepper(sizes, recipe, hardware)
    explained = model.explain()
    usual = usual_bytes(explained.graph, explained.plan)
    chosen = model.plan.bucket_bytes or usual
    seven = list(sizes_of(explained.graph, explained.plan))
    steps = {size: stepper(sizes, recipe, hardware, size)[0] for size in {*seven, chosen}}
    found = measured(steps, sizes.rounds, flops_per_second)
    best = min(seven, key=found.__getitem__)
    shown = [format_bytes(chosen), ms(found[chosen]), format_bytes(best), ms(found[best])]
    each = [f"{format_bytes(size)}{' (usual)' if size == usual else ''} {ms(found[size])}" for size in sorted(found)]
    return [*shown, f"{found[chosen] / found[best] - 1:+.1%}"], each


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def work(rank: int, ranks: int, port: int, sizes: Sizes, how: dict[str, Any], page: Path | None) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    delayed, rows, lines, flops = Delayed(), [], [], how["gigaflops"] * 1e9
    delayed.install()
    for recipe in how["recipes"].split(","):
        for milliseconds in map(float, how["latencies"].split(",")):
            delayed.latency_seconds = milliseconds / 1e3
            hardware = machine(flops, fitted_link(delayed, ranks))
            cells, each = row(sizes, recipe, hardware, flops)
            rows.append([recipe, f"{milliseconds:g} ms", *cells])
            lines.append(f"{recipe}, {milliseconds:g} ms: {', '.join(each)}")
            if rank == 0:
                print(" | ".join(rows[-1]), "\n   ", lines[-1], flush=True)
    if rank == 0 and page is not None:
        table = markdown_table(HEADS, rows, text_columns=2)
        page.write_text(
            "\n".join([PAGE, *table, "", "Steps by the size of buckets:", "", *(f"- {x}" for x in lines), ""])
        )
    dist.destroy_process_group()


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default=4, help="Processes.")
@click.option("--recipes", default="ddp,zero3", help="Which to measure, separated by commas.")
@click.option("--latencies", default="0,1,5,20", help="Added latencies of a message in ms, separated by commas.")
@click.option("--layers", default=8)
@click.option("--width", default=320)
@click.option("--heads", default=4)
@click.option("--sequence", default=128)
@click.option("--batch", default=4, help="Sequences of the global batch.")
@click.option("--rounds", default=4, help="Turns of each size.")
@click.option("--gigaflops", default=6.0, help="GFLOP/s of a rank at most.")
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write the table there.")
def main(ranks: int, recipes: str, latencies: str, gigaflops: float, page: Path | None, **sizes: int) -> None:
    """Print step times with buckets of seven sizes, and with the size that the search chooses."""
    how = {"recipes": recipes, "latencies": latencies, "gigaflops": gigaflops}
    mp.spawn(work, (ranks, get_free_port(), Sizes(**sizes, steps=1), how, page), ranks)


if __name__ == "__main__":
    main()

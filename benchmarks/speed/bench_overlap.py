"""How much communication of a step hides behind its compute, on Gloo ranks behind a slow link, and its price.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_overlap.py --ranks 4

The ranks run in a network namespace of their own (Linux, as root), whose loopback is slowed by a token bucket, so that
all bytes of all ranks pass one link of a known rate. Products and attention, forward and backward, take at least their
FLOPs by the rate `--gigaflops`: a rank computes them, and sleeps for the rest of the time. So a rank is a device of a
known speed, where the processors are shared by all ranks and by other work. The rate of the link is chosen so that it
is busy for as long as the products take. Of a step, without the optimizer:

    products      seconds of products and attention, on the mean of the ranks
    busy          seconds in which the link sends the bytes of the step, which the kernel counts
    waits         the step if every message is waited for at once; it sends the same bytes and computes the same
    overlaps      the step
    hidden        waits - overlaps
    share         hidden / min(busy, products)
    priced        what the cost model says of both steps, for ranks of these FLOPs and a link of this rate

A recipe such as `tp+sp` is decomposed; `tp+sp:2` is not, and two micro-batches of half the rows run at a time. The
step that waits runs them at a time as well.

The turns of the two steps alternate, and the fastest of each counts: other work on the machine only adds to a turn.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import autopar
from autopar import _torch
from autopar.cost_model import Link, find_hardware
from autopar.cost_model.items import runs_every_time
from autopar.cost_model.machines.software import AUTOPAR
from autopar.pipeline.composed import step_of
from autopar.runtime.collectives.transfer import Transfer

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.speed.bench_step_time import Sizes, loss_fn, on_all, turn

PACKET_BYTES = 16_384  # at most, of the loopback
BURST_BYTES = 20_000  # of the token bucket, which passes as much at once after a pause
QUEUE_BYTES = 1_000_000_000  # so that no packet is dropped
COUNTERS = Path("/proc/net/dev")  # of this namespace; /sys has those of the one that mounted it
OWN_NETWORK = "AUTOPAR_BENCHMARK_NETWORK"  # set in the namespace
# Part of the messages of parameters that hides: all but the first of 4 gathers of a forward, and the last of 4
# reductions, which is 1/4 of 2 of 3 passes (`autopar.runtime.parameters.parameters.overlapping_bytes`).
HIDES = 1 - 1 / 4 * 2 / 3
Step = Callable[[], None]
aten = torch.ops.aten


def set_rate(bytes_per_second: float | None) -> None:
    """Gives the loopback of this namespace a rate; None for no bound. Every rank calls it, the first one acts."""
    dist.barrier()
    if dist.get_rank() == 0:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)
        if bytes_per_second is not None:
            bucket = f"rate {int(bytes_per_second * 8)} burst {BURST_BYTES} limit {QUEUE_BYTES}"
            subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *bucket.split()], check=True)
    dist.barrier()


def counted_bytes() -> int:
    """Bytes that the loopback of this namespace has sent so far."""
    lines = COUNTERS.read_text().splitlines()
    _, _, numbers = next(line for line in lines if line.strip().startswith("lo:")).partition(":")
    return int(numbers.split()[8])


def sent_bytes(step: Step) -> int:
    """Bytes that one step of all ranks sends over the loopback, headers included."""
    dist.barrier()
    before = counted_bytes()
    dist.barrier()
    step()
    dist.barrier()
    return counted_bytes() - before


@contextlib.contextmanager
def waiting_at_once() -> Iterator[None]:
    """Context in which whatever starts a message waits for it, too."""
    start, begin, wait = _torch.start_exchange_rows, Transfer.__init__, Transfer.wait

    def exchange(*args: Any) -> Callable[[], Tensor]:
        arrived = start(*args)()
        return lambda: arrived

    def transfer(self: Transfer, *args: Any) -> None:
        begin(self, *args)
        arrived = wait(self)
        self.wait = lambda: arrived  # type: ignore[method-assign]

    with mock.patch.object(_torch, "start_exchange_rows", exchange), mock.patch.object(Transfer, "__init__", transfer):
        yield


class Device(TorchDispatchMode):
    """Mode in which products and attention take at least their FLOPs divided by a rate.

    Args:
        flops_per_second: the rate.

    Attributes:
        seconds: what they took.
    """

    def __init__(self, flops_per_second: float) -> None:
        super().__init__()
        self.flops_per_second, self.seconds = flops_per_second, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if flops := flops_of(func.overloadpacket, args, result):
            time.sleep(max(0.0, start + flops / self.flops_per_second - time.perf_counter()))
            self.seconds += time.perf_counter() - start
        return result


def flops_of(packet: Any, args: Any, result: Any) -> int:
    """FLOPs of a product or of attention; 0 of any other op."""
    shapes = [x.shape if isinstance(x, Tensor) else x for x in args]
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*shapes[:3]))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*shapes[:4]))
    if packet in (aten.mm, aten.addmm, aten.bmm):
        return int(flop_registry[packet](*args, out_val=result))
    return 0


class Found(NamedTuple):
    """What was measured of one plan, and what it is priced at, in seconds.

    Attributes:
        products, busy, waits, overlaps: see the top of this file.
        priced: both steps by the cost model.
    """

    products: float
    busy: float
    waits: float
    overlaps: float
    priced: tuple[float, float]

    @property
    def cells(self) -> list[str]:
        """The cells of a row of the table."""
        hidden = self.waits - self.overlaps
        seconds = (self.products, self.busy, self.waits, self.overlaps, hidden)
        pairs = zip(self.priced, (self.waits, self.overlaps), strict=True)
        return [
            *(f"{x * 1e3:.0f}" for x in seconds),
            f"{hidden / min(self.busy, self.products):.0%}",
            *(f"{x * 1e3:.0f} ({x / real - 1:+.0%})" for x, real in pairs),
        ]


class Subject(NamedTuple):
    """One recipe of one model.

    Attributes:
        step: function that runs a step without the optimizer.
        explained: the plan with its prices.
    """

    step: Step
    explained: autopar.Explanation

    @classmethod
    def of(cls, sizes: Sizes, ranks: int, recipe: str) -> Subject:
        """The searched plan of a recipe, decomposed where it splits tensors, or with two micro-batches at a time."""
        recipe, _, turns = recipe.partition(":")
        at_a_time = int(turns or 1)
        mesh, batch = init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",)), sizes.batch_of(0)
        how: dict[str, Any] = {
            "example_inputs": batch,
            "loss_fn": loss_fn,
            "mesh": mesh,
            "recipe": recipe,
            "decompose": "x" if "tp" in recipe and at_a_time == 1 else "",
            "overlap_batches": at_a_time,
            "micro_batches": at_a_time,
        }
        model = autopar.compile(sizes.model(), **how)

        def step() -> None:
            model.step(*batch)
            model.zero_grad()

        return cls(step, model.explain())

    def priced(self, flops_per_second: float, busy: float) -> tuple[float, float]:
        """Seconds of a step that waits, and of one that overlaps, by the cost model.

        Args:
            flops_per_second: rate of a rank.
            busy: seconds for which the link is busy. The link has the bandwidth at which the priced collectives take as
                long: Gloo's reduce-scatter sends what an all-reduce does, which the price does not know.
        """
        one = Link(bandwidth_bytes_per_second=1.0, latency_seconds=0.0)
        cpu = replace(
            find_hardware("cpu-gloo"), peak_flops=((4, flops_per_second),), launch_seconds=0.0, inside_node=one
        )
        graph, plan = self.explained.graph, self.explained.plan
        bytes_seconds = sum(
            float(i.count * i.seconds) * (plan.micro_batches if runs_every_time(i) else 1)
            for i in step_of(graph, plan, cpu).items
            if i.carries
        )
        link = replace(one, bandwidth_bytes_per_second=bytes_seconds / busy)
        found = []
        for each, hides in ((replace(plan, decomposed=(), overlap_batches=1), 0.0), (plan, HIDES)):
            software = replace(AUTOPAR, hides=hides)
            step = step_of(graph, each, replace(cpu, inside_node=link), software=software)
            found.append(sum(float(term.value) for term in step.time() if term.name != "optimizer"))
        return found[0], found[1]


def measure(subject: Subject, rounds: int, flops_per_second: float) -> Found:
    """Takes turns of both kinds on the slow link."""
    device = Device(flops_per_second)

    def seconds(waits: bool) -> float:
        with waiting_at_once() if waits else contextlib.nullcontext(), device:
            return turn(subject.step, 1).step_seconds

    seconds(waits=True)  # warm up
    sent = sent_bytes(subject.step)
    device.seconds = 0.0
    seconds(waits=False)
    products = agreed(on_all(device.seconds) / dist.get_world_size())
    set_rate(sent / products)
    turns = [(seconds(waits=True), seconds(waits=False)) for _ in range(rounds)]
    set_rate(None)
    waits, overlaps = map(min, zip(*turns, strict=True))
    return Found(products, products, waits, overlaps, subject.priced(flops_per_second, products))


def agreed(seconds: float) -> float:
    """The value of the first rank."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.broadcast(value, 0)
    return value.item()


def work(rank: int, ranks: int, port: int, sizes: Sizes, recipes: list[str], gigaflops: float) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    columns = (
        "recipe",
        "products ms",
        "busy ms",
        "waits ms",
        "overlaps ms",
        "hidden ms",
        "share",
        "waits priced",
        "overlaps priced",
    )
    table = Table(*columns, title=f"{ranks} Gloo ranks, fastest of {sizes.rounds} turns")
    for recipe in recipes:
        table.add_row(recipe, *measure(Subject.of(sizes, ranks, recipe), sizes.rounds, gigaflops * 1e9).cells)
    if rank == 0:
        Console(width=150).print(table)
    dist.destroy_process_group()


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default=4, help="Processes.")
@click.option(
    "--recipes",
    default="tp+sp,tp+sp:2,zero3",
    help="Which to measure, separated by commas; `:2` for two micro-batches at a time.",
)
@click.option("--layers", default=4)
@click.option("--width", default=512)
@click.option("--heads", default=4)
@click.option("--sequence", default=128)
@click.option("--batch", default=4, help="Sequences of the global batch.")
@click.option("--rounds", default=4, help="Turns of each kind.")
@click.option("--gigaflops", default=4.0, help="GFLOP/s of a rank at most.")
def main(ranks: int, recipes: str, gigaflops: float, **sizes: int) -> None:
    """Print step times on a fast and on a slow link, and the share of communication that hides."""
    if OWN_NETWORK not in os.environ:  # the same command in a namespace of its own
        inside = ["unshare", "--net", sys.executable, *sys.argv]
        sys.exit(subprocess.run(inside, env={**os.environ, OWN_NETWORK: "1"}).returncode)
    size = str(PACKET_BYTES)
    subprocess.run(["ip", "link", "set", "lo", "mtu", size, "gso_max_size", size, "up"], check=True)
    given = (ranks, get_free_port(), Sizes(**sizes, steps=1), recipes.split(","), gigaflops)
    mp.spawn(work, given, ranks)


if __name__ == "__main__":
    main()

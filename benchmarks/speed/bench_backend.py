"""A training script under torch.compile(backend="autopar") against the same under DistributedDataParallel.

    torchrun --nproc-per-node 2 benchmarks/speed/bench_backend.py [--layers 8 --width 256 --batch 8 --steps 20]

Of each way the median time of a step, and the collectives of one step by name, from the profiler. The
ways take turns, so that what else the machine does falls on all alike. The table stands in
benchmarks/results/backend.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig

Step = Callable[[], object]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 8), ("width", 256), ("batch", 8), ("seq", 64), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def _script(arguments: argparse.Namespace, parallel: Callable[[nn.Module], nn.Module], part: slice) -> Step:
    """One step of a training script; `part` of the batch is what this rank gives."""
    torch.manual_seed(0)
    config = GPTConfig(seq_len=arguments.seq, layers=arguments.layers, heads=4, width=arguments.width)
    model = GPT(config)
    tokens = torch.randint(0, 256, (arguments.batch, arguments.seq))[part]
    wrapped = parallel(_WithLoss(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        wrapped(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="autopar", options={"recipe": "ddp"})  # type: ignore[return-value]


def _sharded(model: nn.Module) -> nn.Module:
    import autopar

    return _compiled(autopar.shard_(model, "zero3"))


def _ways(arguments: argparse.Namespace) -> dict[str, Step]:
    rank, each = dist.get_rank(), arguments.batch // dist.get_world_size()
    own, everything = slice(rank * each, (rank + 1) * each), slice(None)
    return {
        "DistributedDataParallel": _script(arguments, nn.parallel.DistributedDataParallel, own),
        "autopar, ddp": _script(arguments, _compiled, everything),
        "autopar, ddp, after shard_": _script(arguments, _sharded, everything),
    }


def _collectives(step: Step) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    names = [e.name for e in profiler.events() if e.name.startswith(("gloo:", "nccl:"))]
    return Counter(name.split(":")[1] for name in names)


def main() -> None:
    """Prints the table on the first rank."""
    torch.set_num_threads(1)
    dist.init_process_group()
    arguments = _arguments()
    ways = _ways(arguments)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.steps + 3):
        for name, step in ways.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if number >= 3:  # the first plan and compile
                seconds[name].append(time.perf_counter() - start)
    counts = {name: _collectives(step) for name, step in ways.items()}
    if dist.get_rank() == 0:
        print("| | step, ms | of DDP's | collectives of a step |\n|---|---|---|---|")
        base = statistics.median(seconds["DistributedDataParallel"])
        for name, found in seconds.items():
            median = statistics.median(found)
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts[name].items()))
            print(f"| {name} | {1e3 * median:.0f} | {median / base:.2f} | {kinds} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

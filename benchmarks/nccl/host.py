"""Time of the host for one collective of a graph, over torch's fake process group: no message, and no kernel.

OMP_NUM_THREADS=1 python -m benchmarks.nccl.host

64 x 64 floats on an axis of 8 ranks; the least mean of ten turns, in microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.ops.collectives import group_name, run_collective

_RANKS, _TURNS, _CALLS = 8, 10, 300
# A collective, its dims and the one that autograd runs on its gradient.
_COLLECTIVES = (
    ("all_reduce", [], "vary"),
    ("all_gather", [0], "reduce_scatter"),
    ("reduce_scatter", [0], "all_gather"),
)


def microseconds(call: Callable[[], object]) -> float:
    """What a call takes."""
    means = []
    for _ in range(_TURNS):
        begin_seconds = time.perf_counter()
        for _ in range(_CALLS):
            call()
        means.append((time.perf_counter() - begin_seconds) / _CALLS)
    return 1e6 * min(means)


def there_and_back(call: Callable[[], Tensor]) -> Callable[[], None]:
    """A call, and the backward of its result."""
    gradient = torch.ones_like(call())
    return lambda: call().backward(gradient)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_RANKS)
    assert dist.group.WORLD is not None, "it was made"
    group, plain = group_name(dist.group.WORLD), torch.randn(64, 64)
    leaf = plain.clone().requires_grad_()
    table = Table("call", "microseconds")
    table.add_row("dist.all_reduce, in place", f"{microseconds(lambda: dist.all_reduce(plain)):.1f}")
    for name, dims, back in _COLLECTIVES:

        def call(x: Tensor, name: str = name, dims: list[int] = dims, back: str = back) -> Tensor:
            return run_collective(name, x, dims, _RANKS, group, back)

        table.add_row(name, f"{microseconds(lambda call=call: call(plain)):.1f}")
        table.add_row(f"{name}, recorded by autograd", f"{microseconds(lambda call=call: call(leaf)):.1f}")
        both = there_and_back(lambda call=call: call(leaf))
        table.add_row(f"{name} and {back} in backward", f"{microseconds(both):.1f}")
    one = microseconds(there_and_back(lambda: leaf * 1))
    table.add_row("a product by 1 and its backward, for comparison", f"{one:.1f}")
    Console(width=100).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

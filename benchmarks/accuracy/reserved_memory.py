"""What CUDA's caching allocator would reserve for training, against what is allocated: how much fragments cost.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/reserved_memory.py

Gloo ranks train the GPT of examples/gpt.py. torch's profiler records every allocation of tensors of the first rank and
every free, from before `autopar.compile` on; `caching_allocator` replays the record. Temporaries inside of kernels
are those of a processor's kernels. Ops with large results are not computed: their results are tensors of the right
shape, which takes little from the record and most of the time and memory from the run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autopar

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2]))
from gpt import loss_fn

from autopar.runtime.collectives.flat import Started
from benchmarks.accuracy.caching_allocator import Event, in_one_block, least_device_bytes, replay
from benchmarks.speed.bench_step_time import Sizes
from benchmarks.tables import markdown_table

_LETS_GO_SECONDS = 0.005
_LARGE = 2**16  # elements


@contextmanager
def patient() -> Iterator[None]:
    """Inside it, waits for collectives last until Gloo's thread has let go of their tensors.

    Else that thread may be the one that frees them, which the profiler does not see.
    """
    wait = Started.wait

    def longer(started: Started) -> list[Tensor]:
        if started.work is not None:
            started.work.wait()
            time.sleep(_LETS_GO_SECONDS)
        return wait(started)

    Started.wait = longer  # type: ignore[method-assign]
    try:
        yield
    finally:
        Started.wait = wait  # type: ignore[method-assign]


@dataclass(frozen=True)
class Record:
    """What a call allocated.

    Attributes:
        events: the allocations and frees on the processor, in order.
        parameters: addresses of the rank's own parts of parameters at the end.
        states: the same for the optimizer's states.
    """

    events: list[Event]
    parameters: frozenset[int]
    states: frozenset[int]

    @property
    def unseen_frees(self) -> int:
        """Number of allocations at an address whose free was not recorded; their tensors seem to live too long."""
        live, count = set[int](), 0
        for event in self.events:
            count += event.address in live and event.size_bytes > 0
            (live.add if event.size_bytes else live.discard)(event.address)
        return count


def recorded(run: Callable[[], Optimizer]) -> Record:
    """The record of a call that trains and returns its optimizer."""
    with patient(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        optimizer = run()
    tree = found.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    changes = [e for e in _walk(tree) if e.tag.name == "Allocation"]
    changes.sort(key=lambda e: e.start_time_ns)
    fields = [e.extra_fields for e in changes if e.extra_fields.device.type == "cpu"]
    events = [Event(f.ptr, max(f.alloc_size, 0)) for f in fields]
    made = {e.address for e in events}
    states = [x for own in optimizer.state.values() for x in own.values()]
    return Record(events, _addresses(optimizer.state) & made, _addresses(states) & made)


def _addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    local = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
    return frozenset(x.untyped_storage().data_ptr() for x in local)


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)


class WithoutValues(TorchDispatchMode):
    """Inside it, ops with large results give tensors whose values are not written.

    The system gives a page of memory to a process when it is first written. So a record of a model that is many times
    as large as the machine's memory can be made. What kernels allocate for themselves is not in it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it runs the op on its local tensor
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace != "aten" or func.is_view or all(x.numel() < _LARGE for x in given):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            is_large = given[0].is_floating_point() and given[0].numel() >= _LARGE
            return args[0] if is_large and args[0] is given[0] else func(*args, **kwargs)
        faked = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs))
        result = func(*faked[0], **{k: "meta" if k == "device" else x for k, x in faked[1].items()})
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        is_small = all(x.numel() < _LARGE or not x.is_floating_point() for x in made)
        if is_small or _storages(made) & _storages(pytree.tree_leaves(faked)):
            return func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, _unwritten, result)


def _storages(found: Iterable[object]) -> set[int]:
    return {x.untyped_storage()._cdata for x in found if isinstance(x, Tensor)}


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _unwritten(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


def train(model: nn.Module, sizes: Sizes, recipe: str, micro_batches: int, options: dict[str, Any]) -> Optimizer:
    """A few steps of AdamW; returns the optimizer, which holds parameters and states."""
    batch = sizes.batch_of(0)
    compiled = autopar.compile(
        model,
        loss_fn=loss_fn,
        example_inputs=batch,
        mesh={"dp": dist.get_world_size()},
        recipe=recipe,
        micro_batches=micro_batches,
        memory_bytes=10**12,
        **options,  # the machine need not have them
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    for _ in range(sizes.steps):
        with WithoutValues():
            compiled.step(*batch)
            optimizer.step()
        optimizer.zero_grad()
    return optimizer


COLUMNS = (
    "recipe",
    "micro-batches",
    "unseen frees",
    "allocated MB",
    "reserved",
    "expandable: reserved",
    "least device",
    "parameters in an arena",
    "states",
    "each",
    "both in one",
)


def row(recipe: str, micro_batches: int, record: Record) -> tuple[str, ...]:
    """A table's row; all bytes after the first are divided by the first."""
    events, parameters, states = record.events, record.parameters, record.states
    plain = replay(events)
    most = plain.most_allocated_bytes
    found = [plain.most_reserved_bytes, replay(events, expandable=True).most_reserved_bytes]
    arenas: tuple[tuple[frozenset[int], ...], ...] = (
        (),
        (parameters,),
        (states,),
        (parameters, states),
        (parameters | states,),
    )
    found += [least_device_bytes(reduce(in_one_block, each, events)) for each in arenas]
    ratios = [f"{size_bytes / most:.3f}" for size_bytes in found]
    return recipe, str(micro_batches), str(record.unseen_frees), f"{most / 1e6:.1f}", *ratios


def work(
    rank: int,
    ranks: int,
    port: int,
    sizes: Sizes,
    cases: list[tuple[str, int]],
    precision: str | None,
    path: Path | None,
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rows = []
    for recipe, micro_batches in cases:
        torch.manual_seed(0)
        options = {"precision": precision} if precision else {}
        with WithoutValues():
            model = sizes.model()  # before the record begins, as one that was made on the processor
        record = recorded(lambda: train(model, sizes, recipe, micro_batches, options))  # noqa: B023
        if rank == 0:
            rows.append(row(recipe, micro_batches, record))
            print(*rows[-1], flush=True)
    if rank == 0:
        show(rows, path)
    dist.destroy_process_group()


def show(rows: list[tuple[str, ...]], path: Path | None) -> None:
    table = Table(*COLUMNS)
    for cells in rows:
        table.add_row(*cells)
    Console(width=130).print(table)
    if path is not None:
        path.write_text("\n".join(markdown_table(COLUMNS, rows)) + "\n")


@click.command(context_settings={"show_default": True})
@click.option("--recipes", default="ddp,zero1,zero3", help="Recipes, separated by commas.")
@click.option("--micro-batches", default="1,2", help="Numbers of them, separated by commas.")
@click.option("--ranks", default=2, help="Processes.")
@click.option("--layers", default=8)
@click.option("--width", default=1024)
@click.option("--heads", default=16)
@click.option("--sequence", default=256)
@click.option("--batch", default=8, help="Sequences of the global batch.")
@click.option("--steps", default=2)
@click.option("--precision", help="As of autopar.compile.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the table there.")
def main(recipes: str, micro_batches: str, ranks: int, precision: str | None, path: Path | None, **sizes: int) -> None:
    """Print a row per recipe and number of micro-batches."""
    cases = [(r, int(m)) for m in micro_batches.split(",") for r in recipes.split(",")]
    port = get_free_port()
    mp.spawn(work, (ranks, port, Sizes(**sizes, rounds=1), cases, precision, path), ranks)


if __name__ == "__main__":
    main()

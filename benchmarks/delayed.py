"""What the benchmarks of delayed training share: optimizers, errors, processes and the record of losses.

They compare plans whose parameters are used or averaged late with plain PyTorch under the same delays, and train a
small GPT for the pictures of the docs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from text import read_source, standard_library, unigram_entropy

OPTIMIZERS = ("sgd", "adamw")
EXACT_STEPS = 20
TEXT_BYTES = 2_000_000  # of the standard library, on which the losses of the pictures are taken
Losses = Callable[[str], list[float]]


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD or AdamW, whose eps lies above the noise of gradients that are zero but for rounding."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def random_batches(rows: int) -> list[tuple[Tensor, Tensor]]:
    """A batch of random passages for each of `EXACT_STEPS` steps, and the bytes that follow."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (EXACT_STEPS, rows, 17), generator=generator)
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in text]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference of an entry, relative to the largest entry of its parameter (or to 1e-3)."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()


def training_text() -> bytes:
    """The bytes that the models of the pictures learn."""
    return read_source(standard_library(), limit_bytes=TEXT_BYTES)


def record_losses(path: Path, losses: Losses, names: Sequence[str], *, ranks: int, steps_of_a_point: int) -> None:
    """Trains under every name on processes of this machine, and writes and prints the losses.

    Args:
        path: the JSON file, from which `benchmarks.site.pictures` draws.
        losses: trains as one rank, and returns the loss of every point; a function of a module's top level.
        names: recipes or schedules.
        ranks: number of processes.
        steps_of_a_point: number of steps whose losses a point is the mean of.
    """
    entropy, found = unigram_entropy(training_text()), dict[str, list[float]]()
    for name in names:
        found[name] = _trained(losses, name, ranks)
        document = {"entropy_nats": round(entropy, 4), "steps_of_a_point": steps_of_a_point, "losses_nats": found}
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{name:15} {found[name][-1]:.3f} nats per byte, unigram entropy {entropy:.3f}", flush=True)


def _trained(losses: Losses, name: str, ranks: int) -> list[float]:
    """The losses of one recipe or schedule, on processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "losses"
        mp.spawn(_train, (get_free_port(), ranks, str(file), losses, name), ranks)
        return list(map(float, json.loads(file.read_text())))


def _train(rank: int, port: int, ranks: int, path: str, losses: Losses, name: str) -> None:
    """Trains as one of the processes; the first writes the losses."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    found = losses(name)
    if rank == 0:
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()

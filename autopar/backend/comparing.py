"""What all ranks have to give alike to a graph of torch.compile: names, shapes and values of its arguments."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, StepError
from autopar.runtime.comparison import Comparison
from autopar.runtime.world import World

_COMPARISONS: weakref.WeakKeyDictionary[Any, Comparison] = weakref.WeakKeyDictionary()


def comparison_of(timeout_seconds: float | None) -> Comparison:
    """What ranks compare texts by, made once for all graphs; it ends with the default group."""
    if not dist.is_initialized():
        return Comparison(timeout_seconds)
    return _COMPARISONS.setdefault(dist.group.WORLD, Comparison(timeout_seconds))


def check_shapes(comparison: Comparison, named: Mapping[str, Any]) -> None:
    """Raises StepError, naming the first, unless all ranks have arguments of the same names and shapes.

    Ranks say so through the store: one that does not come is named, and meets none of its collectives here.
    """
    own = [[name, str(list(x.shape) if isinstance(x, Tensor) else x)] for name, x in named.items()]
    why = "A graph of torch.compile has arguments that are new to it, which all ranks compare."
    given = [[name, shape] for name, shape in own if name not in _parameters(named)]
    why += (
        f" Here they are {', '.join(' '.join(each) for each in given[:4]) or 'parameters alone'}."
    )
    found = [json.loads(text) for text in comparison.gather(json.dumps(own), why)]
    for rank, theirs in enumerate(found):
        for (name, shape), (other, its_shape) in zip(found[0], theirs, strict=False):
            if (name, shape) != (other, its_shape):
                raise StepError(
                    f"The ranks called a graph with different arguments: rank 0 gave {name} {shape}, rank {rank} "
                    f"gave {other} {its_shape}. Each has to give the same whole batch: seed the samplers alike on all "
                    "ranks, and use no DistributedSampler."
                )
        if len(theirs) != len(found[0]):
            raise StepError(
                f"The ranks run different graphs: of {len(found[0])} arguments on rank 0, of {len(theirs)} on rank "
                f"{rank}. Each has to run the same code with the same whole batch."
            )


def _parameters(named: Mapping[str, Any]) -> set[str]:
    return {name for name, x in named.items() if isinstance(x, nn.Parameter)}


def check_alike(world: World, named: Mapping[str, Any]) -> None:
    """Raises AutoparError unless all ranks have the same numbers, but for rounding; shards are not asked."""
    tensors = list(_plain(named))
    if world.mesh.size == 1 or not tensors:
        return
    own = torch.stack([_fingerprint(x).to(world.device) for _, x in tensors])
    first = own.clone()
    world.broadcast(first)
    differs = ((own - first).abs() > 1e-3).any(1).nonzero()
    wrong = torch.tensor(int(differs[0]) if len(differs) else len(tensors), device=world.device)
    dist.all_reduce(wrong, dist.ReduceOp.MIN)
    if int(wrong) < len(tensors):
        raise AutoparError(
            f"{tensors[int(wrong)][0]} is not the same on all {world.mesh.size} ranks, and each has to "
            "give the whole batch and the same parameters, as one device would have them: call "
            "torch.manual_seed with one number on all ranks before the model is made and data are drawn, "
            "and use no DistributedSampler."
        )


def _plain(named: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, x in named.items():
        if isinstance(x, Tensor) and not isinstance(x, DTensor):
            yield name, x


@torch.no_grad()
def _fingerprint(x: Tensor) -> Tensor:
    """The logarithm of a tensor's norm and its direction along a fixed vector, of a million entries at most."""
    values = torch.view_as_real(x) if x.is_complex() else x
    flat = values.detach().reshape(-1)
    flat = flat[:: 1 + flat.numel() // 2**20].double().nan_to_num(posinf=1e3, neginf=-1e3)
    weights = torch.cos(torch.arange(flat.numel(), device=x.device, dtype=torch.float64))
    norm = flat.norm() + 1e-30
    return torch.stack([norm.log(), flat.dot(weights) / norm])

"""Comparison across ranks of the arguments of a graph of torch.compile: names, shapes and values must be equal."""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopar._torch import pytree
from autopar.capture.remedies import traced_line
from autopar.errors import AutoparError, StepError
from autopar.runtime.ranks.comparison import SAME_SHAPES, Comparison
from autopar.runtime.ranks.processes import unlike_ranks
from autopar.runtime.ranks.world import World

_TO_DEVICE = ("to", "cuda")  # their number is a device
_COMPARISONS: weakref.WeakKeyDictionary[Any, Comparison] = weakref.WeakKeyDictionary()


def comparison_of(timeout_seconds: float | None) -> Comparison:
    """The `Comparison` that all graphs share; it is made once for each default process group."""
    if not dist.is_initialized():
        return Comparison(timeout_seconds)
    return _COMPARISONS.setdefault(dist.group.WORLD, Comparison(timeout_seconds))


def check_calls(
    comparison: Comparison, graph: fx.Graph, named: Mapping[str, Any], place: str, options: Sequence[str]
) -> None:
    """Raises StepError, naming the first difference, unless all ranks call the same graph with the same shapes.

    Raises MeshError where they have other options.

    Ranks compare through the store: a missing rank is named, and no collective of the others waits for it.

    Args:
        comparison: gathers the texts of all ranks.
        graph: the graph of torch.compile.
        named: the arguments by their names.
        place: the line of the user's code that the graph begins with, as a line to add to an error.
        options: the options of this rank's backend, as words.
    """
    ops = list(_ops(graph))
    digest = hashlib.sha256(repr([text for text, _ in ops]).encode()).hexdigest()
    own = [[name, str(list(x.shape) if isinstance(x, Tensor) else x)] for name, x in named.items()]
    why = "A graph of torch.compile was called with new arguments, and all ranks compare theirs."
    given = [[name, shape] for name, shape in own if not isinstance(named[name], nn.Parameter)]
    why += f" Here they are {', '.join(' '.join(each) for each in given[:4]) or 'parameters alone'}."
    remedy = f"{SAME_SHAPES}{place}"
    found = comparison.gather(json.dumps([digest, own, options]), why, remedy)
    said = [json.loads(text) for text in found]
    _refuse_options([given for _, _, given in said])
    if any(other != digest for other, _, _ in said):
        _refuse_ops([json.loads(x) for x in comparison.gather(json.dumps(ops), why, remedy)])
    _refuse_arguments([arguments for _, arguments, _ in said])


def _refuse_options(said: Sequence[Sequence[str]]) -> None:
    """Raises MeshError where a rank has other options than rank 0."""
    unlike = [rank for rank, options in enumerate(said) if options != said[0]]
    if unlike:
        raise unlike_ranks(unlike[0], "options", said[0], said[unlike[0]], len(unlike))


def _ops(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """Every op with its numbers and flags, and the line of the user's code that it comes from.

    Texts and devices are left out: a rank may name its own device.
    """
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        name = getattr(node.target, "__name__", str(node.target))
        given = [] if name in _TO_DEVICE else pytree.tree_leaves((node.args, node.kwargs))
        numbers = [repr(x) for x in given if isinstance(x, (int, float, complex, torch.dtype))]
        yield f"{name}({', '.join(numbers)})", traced_line(node)


def _refuse_arguments(found: Sequence[Sequence[tuple[str, str]]]) -> None:
    """Raises StepError for the first argument in which a rank differs from rank 0."""
    for rank, theirs in enumerate(found):
        for (name, shape), (other, its_shape) in zip(found[0], theirs, strict=False):
            if (name, shape) != (other, its_shape):
                raise StepError(
                    f"The ranks called a graph with different arguments: rank 0 gave {name} {shape}, rank {rank} "
                    f"gave {other} {its_shape}. Each rank must give the same whole batch: seed the samplers alike on "
                    "all ranks, and use no DistributedSampler."
                )
        if len(theirs) != len(found[0]):
            raise StepError(
                f"The ranks run different graphs: rank 0 has {len(found[0])} arguments, and rank {rank} has "
                f"{len(theirs)}. Each rank must run the same code with the same whole batch."
            )


def _refuse_ops(found: Sequence[Sequence[tuple[str, str]]]) -> None:
    """Raises StepError for the first op in which a rank's graph differs from rank 0's."""
    for rank, theirs in enumerate(found):
        for (op, line), (other, its_line) in itertools.zip_longest(
            found[0], theirs, fillvalue=("nothing", "the end of the graph")
        ):
            if op != other:
                raise StepError(
                    f"The ranks run different graphs: rank 0 computes {op} ({line}), and rank {rank} {other} "
                    f"({its_line}). Python has chosen differently: seed random and numpy alike on all ranks, and read "
                    "the clock or the rank outside of the compiled code."
                )


def check_alike(world: World, named: Mapping[str, Any]) -> None:
    """Raises AutoparError if a fingerprint of any plain tensor differs between ranks by more than 1e-3.

    Large tensors are sampled, so a small difference may pass. DTensors are not compared.
    """
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
            f"{tensors[int(wrong)][0]} is not the same on all {world.mesh.size} ranks, but each must give the whole "
            "batch and the same parameters, as on one device: call torch.manual_seed with one number on all ranks "
            "before the model is made and data are drawn, and use no DistributedSampler."
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

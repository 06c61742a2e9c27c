"""Rows of a batch: which tensors have a row for every sample, and a part of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar._torch import pytree
from autopar.errors import StepError


def have_rows(shapes: Sequence[Sequence[int]]) -> list[bool]:
    """For every shape whether it has a row for every sample: as many as the first shape with dims."""
    rows = next((shape[0] for shape in shapes if shape), None)
    return [bool(shape) and shape[0] == rows for shape in shapes]


def rows_of_replica(tensors: Sequence[Tensor], number: int, replicas: int) -> list[Tensor]:
    """The rows that one of several replicas trains on; what has no row for every sample is whole.

    Raises StepError where the replicas do not divide the rows.
    """
    found = []
    for x, is_cut in zip(tensors, have_rows([tuple(x.shape) for x in tensors]), strict=True):
        if is_cut and x.shape[0] % replicas:
            raise StepError(
                f"A batch of {x.shape[0]} rows cannot be shared by {replicas} replicas, each of which trains on rows "
                f"of its own: give a multiple of {replicas} rows, or drop a last, smaller batch (drop_last=True)."
            )
        found.append(x.chunk(replicas)[number] if is_cut and replicas > 1 else x)
    return found


def arguments_of_replica(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], number: int, replicas: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with the rows of one replica. Raises StepError, as `rows_of_replica`."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    found = iter(rows_of_replica([x for x in leaves if isinstance(x, Tensor)], number, replicas))
    whole = [next(found) if isinstance(x, Tensor) else x for x in leaves]
    own_args, own_kwargs = pytree.tree_unflatten(whole, spec)
    return own_args, own_kwargs

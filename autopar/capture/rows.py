"""Rows of a batch: which tensors have one row for each sample, and which rows a replica takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar._torch import pytree
from autopar.errors import StepError


def have_rows(shapes: Sequence[Sequence[int]]) -> list[bool]:
    """For each shape, whether the tensor has one row for each sample.

    The number of samples is dim 0 of the first shape that has dims.

    >>> have_rows([(8, 16), (8,), (16,), ()])
    [True, True, False, False]
    """
    rows = next((shape[0] for shape in shapes if shape), None)
    return [bool(shape) and shape[0] == rows for shape in shapes]


def rows_of_replica(tensors: Sequence[Tensor], number: int, replicas: int) -> list[Tensor]:
    """The part of each tensor that one replica trains on; a tensor without a row for each sample is passed on whole.

    Raises StepError where the replicas do not divide the rows.
    """
    found = []
    for x, is_cut in zip(tensors, have_rows([tuple(x.shape) for x in tensors]), strict=True):
        if is_cut and x.shape[0] % replicas:
            raise StepError(
                f"A batch of {x.shape[0]} rows cannot be divided among {replicas} replicas, each of which trains on "
                f"its own rows: give a multiple of {replicas} rows, or drop a last, smaller batch (drop_last=True)."
            )
        found.append(x.chunk(replicas)[number] if is_cut and replicas > 1 else x)
    return found


def arguments_of_replica(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], number: int, replicas: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step, cut to the rows of one replica. Raises StepError, as `rows_of_replica` does."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    found = iter(rows_of_replica([x for x in leaves if isinstance(x, Tensor)], number, replicas))
    whole = [next(found) if isinstance(x, Tensor) else x for x in leaves]
    own_args, own_kwargs = pytree.tree_unflatten(whole, spec)
    return own_args, own_kwargs

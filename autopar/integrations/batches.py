"""Data loaders whose every rank reads the batch of all ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autopar.errors import AutoparError


class JoinedBatches(BatchSampler):
    """Batches of a sampler, `count` after another joined into one, in the order in which ranks would take turns.

    >>> list(JoinedBatches(BatchSampler(range(7), 2, drop_last=False), 2))
    [[0, 1, 2, 3], [4, 5, 6]]
    """

    def __init__(self, batches: Any, count: int) -> None:
        """Takes the sampler of one rank's batches.

        Args:
            batches: sampler of one rank's batches.
            count: number of ranks.
        """
        self.batch_sampler, self._count = batches, count
        self.sampler: Any = getattr(batches, "sampler", None)
        self.drop_last = getattr(batches, "drop_last", False)
        size = getattr(batches, "batch_size", None)
        self.batch_size = None if size is None else size * count  # type: ignore[assignment]

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.batch_sampler)
        while group := list(itertools.islice(batches, self._count)):
            if len(group) == self._count or not self.drop_last:
                yield list(itertools.chain.from_iterable(group))

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        return batches // self._count if self.drop_last else -(-batches // self._count)


def with_batches_of_all(loader: DataLoader[Any], ranks: int) -> DataLoader[Any]:
    """A loader of the same data, whose batches each hold the batches of all ranks.

    Args:
        loader: loader of one rank's batches, as a script for one device writes it.
        ranks: number of ranks.

    Raises AutoparError for a loader without a batch size or a batch sampler.
    """
    options = _options(loader)
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise _no_batches()
        size = loader.batch_size * ranks
        return DataLoader(loader.dataset, batch_size=size, drop_last=loader.drop_last, **options)
    if loader.batch_sampler is None:
        raise _no_batches()
    sampler = JoinedBatches(loader.batch_sampler, ranks) if ranks > 1 else loader.batch_sampler
    return DataLoader(loader.dataset, batch_sampler=sampler, **options)


def generator_of(loader: Any) -> torch.Generator | None:
    """The generator of a loader's sampler, if it shuffles by one of its own."""
    samplers = [getattr(loader.batch_sampler, "sampler", None), loader.sampler]
    found = [getattr(sampler, "generator", None) for sampler in samplers]
    return next((each for each in found if isinstance(each, torch.Generator)), None)


def _no_batches() -> AutoparError:
    return AutoparError(
        "The data loader has batch_size=None, so the batch of one rank is not known. Give batch_size=... or "
        "batch_sampler=..., or split_batches=True if each of its items is the batch of all ranks."
    )


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    names = (
        "collate_fn num_workers pin_memory timeout multiprocessing_context generator prefetch_factor "
        "persistent_workers in_order"
    )
    options = {name: getattr(loader, name) for name in names.split()}
    return options | {"worker_init_fn": _alike_on_all_ranks(loader.worker_init_fn)}


def _alike_on_all_ranks(init: Any) -> Any:
    """The `worker_init_fn` of a loader, with the seed of the first rank on all ranks.

    transformers seeds workers by the rank, and here all ranks must read the same batch.
    """
    if isinstance(init, functools.partial) and "rank" in init.keywords:
        return functools.partial(init.func, *init.args, **{**init.keywords, "rank": 0})
    return init

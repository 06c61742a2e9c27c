"""Notices ranks that hold the same part of a parameter or buffer, but no longer the same bits of it.

[Note: replicas drift] What an axis replicates, each of its ranks computes by itself. An op between two collectives
whose kernel adds in any order gives each of them other bits. The parameters then walk apart by a rounding a step, and
no loss shows it. So at the ends of steps 1, 2, 4, 8 and so on, and before a save, the ranks compare what they hold: a
drift that begins with the update after step n is noticed by step 2n. Other steps do nothing for it.

Each rank makes one digest of all tensors whose part the same ranks hold, and the ranks compare these through the store.
Only where they differ, digests of single tensors are compared, to name them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import StepError
from autopar.ir import R
from autopar.ops.generated import op_words
from autopar.program.program import Program
from autopar.runtime.execute.settings import Drift
from autopar.runtime.model.placement import Placement
from autopar.runtime.ranks.all_ranks import warn_together
from autopar.runtime.ranks.comparison import Comparison

_WHY = "All ranks compare the parameters and buffers of which several hold the same part."
_CHUNK = 1 << 20  # numbers of which a digest is made at a time
# Multipliers of splitmix64 (Steele et al. 2014), as signed numbers of 64 bits.
_MIXERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Name of a tensor, and the place of its part -> what ranks say of it -> the ranks that say so.
Said = Mapping[tuple[str, str], Mapping[str, Sequence[int]]]


@dataclass(frozen=True, eq=False)
class _Copy:
    """What this rank holds of a tensor.

    Attributes:
        name: its name in the model.
        place: the same text on all ranks that hold the same part.
        local: the part.
        groups: the groups along which these ranks lie.
    """

    name: str
    place: str
    local: Tensor
    groups: Sequence[dist.ProcessGroup]

    def take_first(self, device: torch.device) -> None:
        """Overwrites the part by that of the first of the ranks that hold it."""
        near = self.local.to(device).contiguous()
        for group in self.groups:
            dist.broadcast(near, group=group, group_src=0)
        self.local.copy_(near)


class DriftCheck:
    """Compares what the ranks of a compiled module hold alike, see [Note: replicas drift].

    Args:
        model: the user's model.
        placement: where its parameters lie.
        comparison: gathers a text of every rank.
        drift: what is done about a drift.
    """

    def __init__(self, model: nn.Module, placement: Placement, comparison: Comparison, drift: Drift) -> None:
        self._model, self._placement, self._comparison, self._drift = model, placement, comparison, drift
        self._runs = 0
        self._equal = "when they were placed"

    def count(self, run: str) -> None:
        """Counts a run of training, and compares in those whose number is a power of two."""
        self._runs += 1
        if self._runs.bit_count() == 1:
            self.compare(f"in {run}")

    @torch.no_grad()
    def compare(self, when: str) -> None:
        """Warns on all ranks if some hold other bits of the same part; or raises StepError, or mends that, as asked.

        Args:
            when: when that is, in words.
        """
        if self._placement.store is None or self._comparison.is_alone:
            return
        held = [each for each in self._held() if each.groups]
        digests = {
            (each.name, each.place): digest
            for each, digest in zip(held, digests_of([each.local for each in held]), strict=True)
        }
        apart = {place for _, place in self._differing(_by_place(digests))}
        if apart:
            own = {(name, place): digest for (name, place), digest in digests.items() if place in apart}
            self._settle(when, held, self._differing(own))
        else:
            self._equal = when

    def _held(self) -> Iterator[_Copy]:
        """The parameters that lie on this rank, and the buffers of the first program."""
        first, store, shared = self._placement.first, self._placement.store, self._placement.shared
        assert first is not None and store is not None, "there was a first program"
        world = store.world
        axes = list(zip(world.mesh.names, world.mesh.coordinates(world.rank), world.groups, strict=True))
        for name, kept in store.kept.items():
            stages, across = ((), None) if shared is None else shared.holders(name)
            place = [f"{axis}={at}" for (axis, at, _), s in zip(axes, kept.storage, strict=True) if s != R]
            along = [group for (_, _, group), s in zip(axes, kept.storage, strict=True) if s == R]
            yield _Copy(name, f"{stages} {place}", kept.local, _present(*along, across))
        pipe = None if world.pipe is None else world.pipe.group
        for spec in first.buffers:
            yield _Copy(spec.name, "", self._model.get_buffer(spec.name), _present(*world.groups, pipe))

    def _differing(self, own: Mapping[tuple[str, str], str]) -> Said:
        """What ranks say differently."""
        text = json.dumps([[*key, digest] for key, digest in own.items()])
        said: dict[tuple[str, str], dict[str, list[int]]] = {}
        texts = self._comparison.gather(text, _WHY, kind="replicas")
        for rank, text in zip(self._comparison.ranks, texts, strict=True):
            for name, place, digest in json.loads(text):
                said.setdefault((name, place), {}).setdefault(digest, []).append(rank)
        return {key: ranks for key, ranks in said.items() if len(ranks) > 1}

    def _settle(self, when: str, held: Sequence[_Copy], apart: Said) -> None:
        """Warns of what differs, or raises the error, or overwrites it."""
        first = self._placement.first
        assert first is not None, "there was a first program"
        found = f"the same parameters and buffers have other bits of {_words(apart, first)} That was found {when}"
        text = f"Ranks that hold {found}, and they were equal {self._equal}. {_CAUSE}"
        if self._drift == "error":
            raise StepError(text)
        if self._drift == "mend":
            self._mend(held, {name for name, _ in apart})
            text = f"Ranks that hold {found}, and all have those of the first such rank now."
            self._equal = when
        warn_together(text, stacklevel=4)

    def _mend(self, held: Sequence[_Copy], names: Container[str]) -> None:
        """Overwrites the tensors of these names by those of the first rank that holds them."""
        store = self._placement.store
        assert store is not None, "there was a first program"
        for each in sorted(held, key=lambda x: x.name):
            if each.name in names:
                each.take_first(store.world.device)


_CAUSE = (
    "An op on ranks that compute the same gave them other results, such as a kernel that adds in any order; or the "
    "script wrote other values on some ranks. torch.use_deterministic_algorithms(True) has ops of torch add in one "
    'order. autopar.compile(..., drift="mend") gives all these ranks the values of the first, whenever they compare, '
    'and drift="error" ends the training (docs/training.md).'
)


def _by_place(digests: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """One digest for all tensors of a place."""
    found: dict[str, list[str]] = {}
    for (_, place), digest in digests.items():
        found.setdefault(place, []).append(digest)
    return {("", place): hashlib.sha256(" ".join(own).encode()).hexdigest()[:16] for place, own in found.items()}


def _present(*groups: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    return [group for group in groups if group is not None]


def _words(apart: Said, program: Program) -> str:
    """Which tensors differ, on which ranks, and what takes them."""
    names = list(dict.fromkeys(name for name, _ in apart))
    ends = dict.fromkeys((names[0], names[-1]))
    said = "; ".join(f"{name}, which {_taker(name, program)} takes: {_sides(apart, name)}" for name in ends)
    if len(names) == 1:
        return f"{said}."
    return (
        f"{len(names)} tensors. The first and the last in the model: {said}. A difference that begins in a forward "
        "reaches what comes later in the model, and one of a backward what comes before."
    )


def _sides(apart: Said, name: str) -> str:
    """The ranks that have a tensor alike, against the others."""
    sides = next(ranks for (each, _), ranks in apart.items() if each == name)
    return " against ".join(f"ranks {ranks}" for ranks in sides.values())


def _taker(name: str, program: Program) -> str:
    """The first op of a program that takes a parameter or buffer, in words."""
    taken = [node for node in program.module.graph.nodes if node.op == "placeholder"]
    specs = [*program.parameters, *program.buffers]
    users = [use for spec, node in zip(specs, taken, strict=False) if spec.name == name for use in node.users]
    return op_words(users[0]) if users else "no op"


def digests_of(tensors: Sequence[Tensor]) -> list[str]:
    """A number for each tensor, equal for equal bits; the host waits for the devices once.

    Where one element differs, the number does; several differences cancel with a chance of 2**-64.
    """
    found = [_bits(x) for x in tensors]
    counts = {x.device: min(_CHUNK, max(len(y) for y in found if y.device == x.device)) for x in found}
    weights = {device: _weights(count, device) for device, count in counts.items()}
    sums = [_digest(x, weights[x.device]) for x in found]
    return [str(x) for x in torch.stack([x.to(sums[0].device) for x in sums]).tolist()] if sums else []


def _bits(x: Tensor) -> Tensor:
    """The elements of a tensor as integers."""
    x = x if x.layout == torch.strided else x.to_dense()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.contiguous().view(-1).view(_INTEGERS[x.element_size()])


def _digest(bits: Tensor, weights: Tensor) -> Tensor:
    """The sum of integers times weights, modulo 2**64: of each chunk, and then of these sums."""
    sums = [(part.long() * weights[: len(part)]).sum() for part in bits.split(_CHUNK)]
    return sums[0] if len(sums) == 1 else _digest(torch.stack(sums), weights)


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers that look random: a product with one is zero for zero alone."""
    x = torch.arange(1, count + 1, device=device) * _MIXERS[0]
    for shift, mixer in zip((30, 27), _MIXERS[1:], strict=True):
        x = (x ^ (x >> shift)) * mixer
    return x ^ (x >> 31) | 1

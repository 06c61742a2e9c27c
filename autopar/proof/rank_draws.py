"""Random numbers of simulated ranks: a generator for every rank, and in a proof the noise for each of its keys.

The runtime gives all ranks one seed, and each draws keys from a generator of its own (see [Note: keys of random ops]).
Here every rank has such a generator, too, so that a rank that leaves out a draw is out of step from there on. In a
proof a key stands for noise: that of the part which the first rank with this key holds.

While a program runs, the seed of the default generator is a number that stands for the states of all ranks' generators;
every draw changes it. So code that restores the default generator, as the recomputation of a block does, restores the
generators of all ranks; code that forgets to restore it draws other keys.

    ranks hold        keys        noise
    part 0, part 1    a, b        part 0, part 1
    part 0, part 1    a, a        part 0, part 0      one mask for two parts: the loss is wrong
    part 0, part 0    a, b        part 0, other       two masks for one tensor: the loss is wrong
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch import CPU, forked_random_state
from autopar.ir import Plan, result_layouts
from autopar.ops.nodes import draws
from autopar.ops.sharding import shard
from autopar.proof.noise import DrawsFrom
from autopar.proof.streams import MicroBatchStreams, stream
from autopar.rules.random import is_key

_KEYED: dict[Any, int] = {torch.ops.autopar.keep_mask.default: 1, torch.ops.autopar.draw.default: 2}
_STATES = 2**62
_FIRST_SEED = 2**61  # that nobody else takes


class RankDraws:
    """The draws of all ranks in one run of a program. Without noise the ops draw from the ranks' generators.

    Args:
        plan: plan of the program.
        streams: noise of the micro-batch; None to draw as the runtime does.
    """

    def __init__(self, plan: Plan, streams: MicroBatchStreams | None) -> None:
        self._plan, self._streams = plan, streams
        self._before = torch.get_rng_state()
        first = self._before if streams is None else torch.Generator().get_state()
        # What the seeds of the default generator stand for, counted from `_FIRST_SEED`.
        self._states = [[first] * plan.mesh.size]
        # Key -> noise of the first rank that has it; first number of a part -> key of the first rank that draws it.
        self._noise: dict[int, list[Tensor]] = {}
        self._keys: dict[float, int] = {}
        self._latest: tuple[str, list[Tensor]] = "", []  # an op, and its noise for all ranks

    @contextmanager
    def on(self, node: fx.Node, rank: int, args: Sequence[Any]) -> Iterator[None]:
        """A context in which a rank runs a call of its graph, with these arguments."""
        is_keyed = node.target in _KEYED
        if not is_keyed and not draws(node):
            yield
        elif self._streams is None or is_key(node):
            with self._own_generator(rank):
                yield
        else:
            key = int(args[_KEYED[node.target]]) if is_keyed else self._drawn_key(rank)
            with DrawsFrom(_Given(key, self._of_key(key, self._part(node, rank)))):
                yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which a program runs. Afterwards the default generator is the first rank's, or as before."""
        torch.default_generator.manual_seed(_FIRST_SEED)
        try:
            yield
        finally:
            torch.set_rng_state(self._now()[0] if self._streams is None else self._before)

    def _now(self) -> list[Tensor]:
        """The states of all ranks' generators; those of the default one where nobody has set it back."""
        number = torch.initial_seed() - _FIRST_SEED
        if 0 <= number < len(self._states):
            return self._states[number]
        return [torch.get_rng_state()] * self._plan.mesh.size

    @contextmanager
    def _own_generator(self, rank: int) -> Iterator[None]:
        states = list(self._now())
        with forked_random_state([CPU]):
            torch.set_rng_state(states[rank])
            yield
            states[rank] = torch.get_rng_state()
        torch.default_generator.manual_seed(_FIRST_SEED + len(self._states))
        self._states.append(states)

    def _drawn_key(self, rank: int) -> int:
        """A number that stands for the state of a rank's generator before an op that has no key; below zero."""
        with self._own_generator(rank):
            return -1 - int(torch.randint(_STATES, ()))

    def _of_key(self, key: int, part: list[Tensor]) -> list[Tensor]:
        """The noise that a key stands for on a rank that holds a part."""
        marks = [float(x.reshape(-1)[0]) for x in part[:1] if x.numel()]
        if marks and self._keys.setdefault(marks[0], key) != key:
            part = [stream(key % _STATES, x.shape) for x in part]
        return self._noise.setdefault(key, part)

    def _whole(self, name: str) -> list[Tensor]:
        """The noise of an op for the whole micro-batch; one rank after the other asks for it."""
        assert self._streams is not None, "noise is asked for in a proof"
        if self._latest[0] != name:
            self._latest = name, self._streams.noise(name)
        return self._latest[1]

    def _part(self, node: fx.Node, rank: int) -> list[Tensor]:
        """The noise of a rank's part of what an op draws, for all of its draws."""
        assert self._streams is not None, "noise is asked for in a proof"
        name = node.meta["origin"]
        graph, noise = self._streams.streams.graph, self._whole(name)
        if not noise:  # dropout of everything draws nothing
            return []
        op = graph.by_name[name]
        layout = result_layouts(op, self._plan.ops[name])[0]
        result = graph.tensors[op.results[0]]
        if [tuple(x.shape) for x in noise] == [result.shape]:
            return [shard(noise[0], result.dims, layout, self._plan.mesh, rank)]
        states = zip(layout, self._plan.mesh.sizes, strict=True)
        is_split = any(state.kind == "S" and size > 1 for state, size in states)
        assert not is_split, f"{op.kind} draws inside, of which no part is known, and is split"
        return noise


class _Given:
    """Noise of several draws, one after the other; other noise where a draw has another shape than the given one."""

    def __init__(self, key: int, given: Sequence[Tensor]) -> None:
        self._key, self._given = key, iter(given)

    def __call__(self, shape: Sequence[int]) -> Tensor:
        found = next(self._given, None)
        if found is None or found.shape != torch.Size(shape):
            return stream(self._key % _STATES, shape)
        return found

"""Runs graphs of torch.compile: the whole graph on every rank, or the local graph of this rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, fx

from autopar import _torch
from autopar.backend.effects import ReturnedView
from autopar.backend.lifting import Lifted
from autopar.capture.captured import Captured
from autopar.cost_model.buckets import usual_bucket_bytes
from autopar.errors import PeerError
from autopar.ops.nodes import draws
from autopar.runtime.execute.compiled import Executor
from autopar.runtime.execute.lowering import LOWERING_OF_LOCAL_GRAPH, Binding, lower
from autopar.runtime.failures.failing_op import naming_line
from autopar.runtime.parameters.entries import Entries
from autopar.runtime.parameters.gather import Gathers
from autopar.runtime.ranks.world import World


@dataclass(frozen=True)
class _Shard:
    """The properties of a parameter by which it is grouped with others."""

    name: str
    local: Tensor
    parameter: Tensor

    @classmethod
    def of(cls, number: int, parameter: Tensor) -> _Shard:
        like = torch.empty_like(_torch.local_tensor(parameter), device="meta")
        name = f"parameter {number} of the graph"
        return cls(name, like, like.detach().requires_grad_(parameter.requires_grad))

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which the parameter's gradient is accumulated."""
        return self.local.dtype


class _Shards:
    """The parameters of a graph in the form that `Gathers` takes; autograd returns their gradients."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.kept = self.specs = list(starmap(_Shard.of, enumerate(parameters)))
        self.leaves: list[Tensor] = []

    def shape(self, i: int) -> tuple[int, ...]:
        """The shape of the part that a rank holds."""
        return tuple(self.kept[i].local.shape)


class WholeGraph:
    """Calls the graph that dynamo captured without splitting it.

    Every rank runs all ops and draws the same random numbers. An error names the model's line of the op that
    failed, or the mesh axis of the collective.
    """

    def __init__(self, module: fx.GraphModule, world: World) -> None:
        self._module, self._world = module, world

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        with _naming_failures(self._world), _same_seed(self._world):
            return list(self._module(*arguments))


class LocalGraph:
    """The graph that this rank runs in place of a graph of torch.compile, called with the same arguments.

    Args:
        lifted: kind of every argument (parameter, buffer or input), and the way in which results are made.
        captured: the captured graph, whose parameters, buffers and constants `local` takes in that order.
        local: the partitioned graph of one rank.
        world: the process groups.
        executor: backend that runs `local`: op by op, or compiled.
        examples: a value for each argument of the dynamo graph, like those it will be called with.
    """

    def __init__(
        self,
        lifted: Lifted,
        captured: Captured,
        local: fx.GraphModule,
        world: World,
        executor: Executor,
        examples: Sequence[Any],
    ) -> None:
        self._lifted, self._world = lifted, world
        self._constants = list(captured.constants.values())
        self._parameters = [lifted.parameters[name] for name in captured.parameters.values()]
        self._buffers = [lifted.buffers[name] for name in captured.buffers.values()]
        self._changed = [lifted.buffers[name] for _, name in sorted(captured.mutated.items())]
        sources = _Shards([examples[i] for i in self._parameters])
        self._gathers = Gathers(sources, world)
        self._entries = Entries(world)
        bucket_bytes = int(usual_bucket_bytes(captured.parameter_bytes, world.mesh.sizes))
        lower(Binding(local, world, executor, self._gathers, bucket_bytes, self._entries), LOWERING_OF_LOCAL_GRAPH)
        is_random = any(draws(node) for node in local.graph.nodes)
        self._graph = executor.ready(local)
        self._seed = (lambda: _same_seed(world)) if is_random else contextlib.nullcontext
        self._casts = _torch.without_autocast(world.device)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        changed = {*self._changed}
        # An argument that the graph changes is copied: backward may need its old value.
        state = [arguments[i].clone() if i in changed else arguments[i] for i in self._buffers]
        inputs = [arguments[i] for i in self._lifted.inputs]
        shards = [_torch.differentiable_local(arguments[i]) for i in self._parameters]
        with _naming_failures(self._world), self._seed(), self._casts, self._gathers.watching():
            leaves = self._entries.open(shards)
            results = list(self._graph(*leaves, *state, *self._constants, *inputs))
        with torch.no_grad():
            for i, value in zip(self._changed, results, strict=False):
                arguments[i].copy_(value)
        return self._results(results[len(self._changed) :], arguments)

    def _results(self, made: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        fresh = iter(made)
        return [
            next(fresh) if r is None else r.of(arguments) if isinstance(r, ReturnedView) else r
            for r in self._lifted.results
        ]


@contextlib.contextmanager
def _naming_failures(world: World) -> Iterator[None]:
    """Names the axis of a collective that broke, and the model's line of an op that failed."""
    try:
        with naming_line():
            yield
    except PeerError as error:
        raise world.explain(error, "A graph of torch.compile") from error


@contextlib.contextmanager
def _same_seed(world: World) -> Iterator[None]:
    """[Note: keys of random ops] in autopar/rules/random.py: all ranks draw in step.

    The seed of a call is a number from the first rank's default generator, so that torch.manual_seed and
    torch.set_rng_state there mean what they do on one device. A call that draws nothing leaves it alone.
    """
    with _torch.forked_random_state([world.device]):
        seed = world.agree(_number())
    with _torch.forked_random_state([world.device], seed):
        before = _torch.random_states(world.device)
        yield
        has_drawn = not all(map(torch.equal, before, _torch.random_states(world.device)))
    if has_drawn:
        _number()


def _number() -> int:
    """The next number of the default generator."""
    return int(torch.randint(2**62, ()))

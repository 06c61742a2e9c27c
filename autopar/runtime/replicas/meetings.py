"""Replicas synchronise: after every K steps their parameters become the same again (`autopar.ir.meeting`).

[Note: when replicas meet] The optimizer's step is the user's, and comes after `step` has returned. So the meeting of
steps 1 to K is held when step K + 1 begins, or earlier where somebody asks for it (`CompiledModule.meet`, a
checkpoint). What counts is the calls of `step` that leave gradients: every replica counts alike, whatever its optimizer
does, so that no replica waits for one that does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.cost_model.buckets import usual_bucket_bytes
from autopar.errors import PeerError, StepError
from autopar.ir import P, R
from autopar.ir.order import Order
from autopar.runtime.collectives.hops import Route, route, signature
from autopar.runtime.collectives.transfer import Transfer
from autopar.runtime.parameters.parameters import ParameterStore, batches
from autopar.runtime.ranks.world import Replicas, World
from autopar.runtime.replicas.outer_step import OuterStep

_UNDER_WAY = 2  # messages at a time: one travels while another is unpacked


class _Exchanged(NamedTuple):
    """A tensor that replicas exchange.

    Attributes:
        x: the rank's own tensor.
        sent: function that makes what is sent, which may be written into.
        take: function that takes the mean over the replicas.
    """

    x: Tensor
    sent: Callable[[], Tensor]
    take: Callable[[Tensor], object]


class Meetings:
    """The meetings of one rank's replica with the others.

    Args:
        replicas: this rank's place among the replicas.
        store: the parameters at rest.
        model: the model, whose running statistics replicas average as well.
        bucket_bytes: about how much one collective carries; None for the usual size.

    Attributes:
        steps: number of steps since the last meeting.
    """

    def __init__(
        self, replicas: Replicas, store: ParameterStore, model: nn.Module, *, bucket_bytes: int | None
    ) -> None:
        self.meeting, self.steps = replicas.meeting, 0
        # What begins the names of a checkpoint's entries that each replica has for itself, but for the first.
        self.prefix = f"replicas.{replicas.number}." if replicas.number else ""
        self._across, self._store, self._model = replicas.across, store, model
        self._bucket_bytes = bucket_bytes
        self._statistics: set[str] = set()
        self._trained: set[str] = set()  # parameters that steps since the last meeting had to train
        self._outer = OuterStep(replicas.meeting)
        self.begin_again()

    # --- when

    @property
    def kept_bytes(self) -> int:
        """Bytes that this rank keeps from one meeting to the next."""
        kept = (*self._outer.base.values(), *self._outer.momentum.values())
        return sum(x.nbytes for x in kept)

    @property
    def is_due(self) -> bool:
        """Whether the number of steps between two synchronisations has been run."""
        return self.steps >= self.meeting.steps

    def hold_if_due(self) -> None:
        """Before a step: a meeting, if it is time for one, see [Note: when replicas meet]."""
        if self.is_due:
            self.hold()

    def count_step(self, written: Sequence[str]) -> None:
        """After a step that left gradients.

        Args:
            written: names of the buffers that the step wrote.
        """
        self.steps += 1
        self._statistics.update(written)
        self._trained.update(n for n, kept in self._store.kept.items() if kept.parameter.requires_grad)

    def require(self, doing: str) -> None:
        """Holds a meeting that is due; raises StepError where replicas differ and none is.

        Args:
            doing: what needs equal replicas, for the error: "Saving a checkpoint".
        """
        self.hold_if_due()
        self.refuse_differences(doing)

    def refuse_differences(self, doing: str) -> None:
        """Raises StepError where replicas differ; see `require`."""
        if not self.steps:
            return
        found = (
            f"{doing} needs replicas that are alike, but {self.steps} of {self.meeting.steps} steps were done since "
            f"those along {self.meeting.axis} synchronised."
        )
        if self.is_due:
            raise StepError(
                f"{found} They will synchronise when the next step begins. Call model.meet() on every "
                "rank, after the optimizer's step, to do so now."
            )
        raise StepError(
            f"{found} Do it after a multiple of {self.meeting.steps} steps, or synchronise them earlier: model.meet(), "
            "on every rank."
        )

    # --- checkpoints

    def begin_again(self, momentum: Mapping[str, Tensor] | None = None) -> None:
        """Treats the current parameters as the result of a meeting, after a checkpoint was read into them.

        Args:
            momentum: momentum of the outer optimizer, by parameter; by default none, as at the start.
        """
        self.steps = 0
        self._trained.clear()
        own = {name: _torch.local_tensor(x) for name, x in (momentum or {}).items()}
        self._outer.begin(self._parameters(), own)

    def outer_momentum(self) -> dict[str, Tensor]:
        """Momentum of the outer optimizer, by parameter, each as the parameter lies."""
        return {name: self._as_stored(name, x) for name, x in self._outer.momentum.items()}

    def new_outer_momentum(self) -> dict[str, Tensor]:
        """Room for the momentum of the outer optimizer; none under the rules that have none."""
        if self.meeting.rule != "diloco":
            return {}
        return {n: self._as_stored(n, torch.zeros_like(x)) for n, x in self._parameters()}

    def _as_stored(self, name: str, local: Tensor) -> Tensor:
        """A local shard as a tensor of the parameter's whole shape."""
        parameter = self._store.kept[name].parameter
        if not isinstance(parameter, DTensor):
            return local
        return _torch.dtensor(local, parameter.device_mesh, parameter.placements, tuple(parameter.shape))

    # --- what

    @torch.no_grad()
    def hold(self) -> Order | None:
        """The meeting; every rank calls this. Raises PeerError if another rank died or hangs.

        Returns what an asynchronous server did since the last meeting; None where replicas have none.
        """
        if not self.steps:
            return None
        parts = [*self._parts()]
        routes = [_sum_over(part.x, self._across) for part in parts]
        size = self._bucket_bytes or usual_bucket_bytes(sum(p.x.nbytes for p in parts), self._store.world.mesh.sizes)
        runs = batches(range(len(parts)), [signature(each) for each in routes], [p.x for p in parts], size)
        under_way: list[tuple[list[int], Transfer]] = []
        try:
            for run in runs:
                sent = [parts[i].sent() for i in run]
                under_way.append((run, Transfer([routes[i] for i in run], sent, self._across)))
                if len(under_way) == _UNDER_WAY:
                    self._land(parts, *under_way.pop(0))
            for run, transfer in under_way:
                self._land(parts, run, transfer)
        except PeerError as error:
            doing = f"The meeting of {self.meeting.replicas} replicas after {self.steps} steps"
            raise self._store.world.explain(error, doing) from error
        self.steps = 0
        self._trained.clear()
        return None

    def _land(self, parts: Sequence[_Exchanged], run: Sequence[int], transfer: Transfer) -> None:
        """Waits for a message, and gives its tensors their common values."""
        for i, total in zip(run, transfer.wait(), strict=True):
            parts[i].take(total.div_(self.meeting.replicas))

    def _parts(self) -> Iterator[_Exchanged]:
        """The tensors that replicas exchange: parameters and the buffers that steps write, such as running statistics.

        Counters stay, as all replicas count alike.
        """
        for name, x in self._parameters():
            yield _Exchanged(x, partial(self._outer.sent, name, x), partial(self._outer.take, name, x))
        for name in sorted(self._statistics):
            buffer = self._model.get_buffer(name)
            if buffer.is_floating_point():
                yield _Exchanged(buffer, buffer.clone, buffer.copy_)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Stored shards of the parameters that are trained, by name, and of those frozen since the last meeting."""
        for name, kept in self._store.kept.items():
            if kept.parameter.requires_grad or name in self._trained:
                yield name, kept.local.detach()


def _sum_over(x: Tensor, world: World) -> Route:
    """The route of a tensor that becomes the sum over the replicas."""
    return route(tuple((size,) for size in x.shape), (P,), (R,), world.mesh, rank=world.rank)

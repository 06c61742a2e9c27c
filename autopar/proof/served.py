"""Replicas that exchange with an asynchronous server, on a single device: replays of orders, and proofs of plans.

The arithmetic of the server is determined by its order alone (`autopar.ir.order`). So one process can run the steps of
all replicas, one push after another:

    replay        plain copies of the model: autograd, the caller's optimizers, and the sums by torch alone
    a proof       the same copies with SGD, compared with the programs of a plan on simulated ranks and the runtime's
                  own differences and table, in an order in which the first replicas are as far ahead as they may be
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from autopar.capture.export import LossFunction, run_with_loss
from autopar.capture.rows import rows_of_replica
from autopar.errors import StepError
from autopar.ir.order import MEET, Order, ServerEvent
from autopar.proof.comparison import float64_verdicts, parameter_verdicts, plan_errors
from autopar.proof.replicas import ReplicaSteps, descend, trained, whole_gradients
from autopar.proof.single_device import copied
from autopar.proof.verdict import Verdict
from autopar.runtime.replicas.exchange_buffer import ExchangeBuffer
from autopar.runtime.replicas.outer_step import OuterStep
from autopar.runtime.replicas.server_table import ServerTable

SHOWN_STALENESS = 2  # largest staleness that is run: a further exchange adds nothing of another kind


def replay(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, ...]],
    order: Order | str,
    *,
    replicas: int,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    loss_fn: LossFunction | None = None,
) -> list[nn.Module]:
    """Trains once more as ranks did with an asynchronous server, in plain PyTorch, on one device and in their order.

    Up to rounding it gives the parameters that the ranks had after the meeting, of a model without random ops
    (docs/replicas.md).

    Args:
        model: plain PyTorch, with the parameters that the ranks began with; left as it is.
        batches: whole batches, as the ranks gave them to `step`; of each, replica r takes the r-th of equal parts of
            the rows.
        order: what `model.meet()` returned, or its text.
        replicas: number of replicas.
        optimizer_of: function that makes the optimizer of a replica, as each rank made its own.
        loss_fn: the same as in `compile`.

    Returns:
        The replicas, which are alike if the order ends with a meeting and none was lost.

    Raises StepError where the order has more steps than there are batches or is of another number of replicas,
    PlanError for an order that cannot be read.

    >>> import autopar, torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> batch = (torch.ones(2, 1), torch.tensor([[2.0], [6.0]]))
    >>> first, second = autopar.replay(
    ...     model, [batch, batch], "0+1 0= 0+1 1+1 1= 1+1 meet", replicas=2,
    ...     optimizer_of=lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
    ...     loss_fn=lambda y, t: (y - t).square().mean() / 2,
    ... )
    >>> first.weight.item(), second.weight.item()
    (3.28125, 3.28125)
    """
    read = Order.parse(replicas, order) if isinstance(order, str) else order
    if read.replicas != replicas:
        raise StepError(
            f"The order has {read.replicas} replicas, but replicas={replicas} was given; give replicas={read.replicas}."
        )
    pairs = [copied(model, loss_fn) for _ in range(replicas)]
    models = [own for own, _ in pairs]
    optimizers, steps = [optimizer_of(own) for own in models], [0] * replicas
    server = _PlainServer(models)
    for event in read.events:
        number = event.replica
        for _ in range(event.steps):
            if steps[number] == len(batches):
                raise StepError(
                    f"The order has more than {len(batches)} steps of replica {number}, but {len(batches)} batches "
                    "were given. Give the batches of all steps since the start, or since the last synchronisation."
                )
            own = rows_of_replica(batches[steps[number]], number, replicas)
            run_with_loss(models[number], tuple(own), {}, pairs[number][1]).backward()
            optimizers[number].step()
            optimizers[number].zero_grad()
            steps[number] += 1
        server.do(event)
    return models


class _PlainServer:
    """Common parameters of plain copies of a model, by torch alone (the reference side).

    Args:
        models: the replicas, which are alike.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._bases = [{name: x.clone() for name, x in _exchanged(model)} for model in models]
        # In 32 bits at least, so that small differences add up.
        self._common = {
            name: x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for name, x in self._bases[0].items()
        }

    @torch.no_grad()
    def do(self, event: ServerEvent) -> None:
        """Does what the server did in this event; the replica has run its steps already."""
        if event.kind == "push":
            own, base = dict(_exchanged(self._models[event.replica])), self._bases[event.replica]
            count = len(self._models)
            # A difference has its parameter's format, as in a message; its share has the wider one.
            self._common = {k: x + (own[k] - base[k]).to(x.dtype) / count for k, x in self._common.items()}
        elif event.kind == "pull":
            self._pull(event.replica)
        elif event.kind == "meet":
            for replica in range(len(self._models)):
                self._pull(replica)

    def _pull(self, replica: int) -> None:
        for name, x in _exchanged(self._models[replica]):
            x.copy_(self._common[name])
            self._bases[replica][name] = x.clone()


def _exchanged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Trained parameters, and buffers of numbers that are not whole."""
    yield from trained(model)
    for name, x in model.named_buffers():
        if x.is_floating_point():
            yield name, x


# --- the proof of a plan


class ServedSteps(ReplicaSteps):
    """The steps and exchanges of all replicas, which `verdicts` runs on both sides."""

    def verdicts(self) -> list[Verdict]:
        """Verdicts on every step of every replica, and on its parameters after every pull."""
        pairs = [copied(self.device.model, self.device.loss_fn) for _ in self.parts]
        plain, ours = [model for model, _ in pairs], self._copies()
        shown = replace(self.meeting, staleness=min(self.meeting.staleness, SHOWN_STALENESS))
        order = fastest_first(shown.replicas, shown.staleness, self.steps)
        reference, served = _PlainServer(plain), _Served(ours, ServerTable(shown, _values(ours[0])))
        found, steps = list[Verdict](), 0
        for event in order.events:
            i = event.replica
            for _ in range(event.steps):
                steps += 1
                expected = self.device.step_of(plain[i], pairs[i][1], self.together[i])
                results = self._simulated(ours[i], i, expected)
                found += float64_verdicts(plan_errors(results, expected), expected, steps)
                descend(plain[i], expected.gradients)
                descend(ours[i], whole_gradients(results))
            reference.do(event)
            served.do(event)
            found += parameter_verdicts(ours, plain, steps)
        return found


class _Served:
    """Replicas whose exchanges run the runtime's code, in one process.

    Args:
        models: the replicas.
        table: the common parameters.
    """

    def __init__(self, models: Sequence[nn.Module], table: ServerTable) -> None:
        self._models, self._table = models, table
        self._outers = [OuterStep(table.meeting) for _ in models]
        for outer, model in zip(self._outers, models, strict=True):
            outer.begin(_exchanged(model), {})
        self._parcels = [ExchangeBuffer(dict(_exchanged(model))) for model in models]

    @torch.no_grad()
    def do(self, event: ServerEvent) -> None:
        """Does what the server did in this event; the replica has run its steps already."""
        parcel = self._parcels[event.replica]
        if event.kind == "push":
            self._put_differences(event.replica)
            self._table.push(event.replica, event.steps, parcel)
        elif event.kind == "pull":
            assert self._table.may_pull(event.replica), f"{event} waits for another push"
            self._table.pull(event.replica, parcel)
            self._take(event.replica)
        else:
            self._table.meet(dict(enumerate(self._parcels)))
            for replica in range(len(self._models)):
                self._take(replica)

    def _put_differences(self, replica: int) -> None:
        outer, parcel = self._outers[replica], self._parcels[replica]
        for name, x in _exchanged(self._models[replica]):
            parcel.tensors[name].copy_(outer.sent(name, x))
        parcel.keep_changed_rows()

    def _take(self, replica: int) -> None:
        parcel = self._parcels[replica]
        for name, x in _exchanged(self._models[replica]):
            self._outers[replica].adopt(name, x, parcel.tensors[name], parcel.rows.get(name))


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in _exchanged(model)}


def fastest_first(replicas: int, staleness: int, steps: int = 1) -> Order:
    """An order in which every replica goes as far ahead of the next as it may, and that ends with a meeting.

    Args:
        replicas: number of replicas.
        staleness: number of exchanges that a replica may be ahead.
        steps: number of steps of every push.

    >>> str(fastest_first(2, 1))
    '0+1 0= 0+1 1+1 0= 0+1 1= 1+1 1= 1+1 meet'
    """
    pushes, wanted = [0] * replicas, staleness + 2
    waits, events = [False] * replicas, list[ServerEvent]()
    while (i := _next(pushes, waits, wanted, staleness)) is not None:
        if waits[i]:
            events.append(ServerEvent("pull", i))
        else:
            events.append(ServerEvent("push", i, steps))
            pushes[i] += 1
        waits[i] = not waits[i]
    return Order(replicas, (*events, MEET))


def _next(pushes: Sequence[int], waits: Sequence[bool], wanted: int, staleness: int) -> int | None:
    """The first replica that may push or pull, while its pushes are fewer than wanted; None if all have as many."""
    slowest = min(pushes)
    for i, (count, is_waiting) in enumerate(zip(pushes, waits, strict=True)):
        if count < wanted and (not is_waiting or count - slowest <= staleness):
            return i
    return None

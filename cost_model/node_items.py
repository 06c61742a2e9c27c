"""Items of nodes: where a node stands in the model, what to call it, and the item of one collective."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

from autopar.cost_model.arith import Quantity, hashable, larger, smaller
from autopar.cost_model.buckets import usual_bucket_bytes, whole_bytes
from autopar.cost_model.collectives import BUCKET_BYTES, collective_seconds
from autopar.cost_model.compute import inner_tensors
from autopar.cost_model.items import COMPUTE, FULL, MemoryItem, Phase, Places, Region, TrainingState, WorkItem
from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.owners import Position
from autopar.cost_model.sizes import Sizes
from autopar.cost_model.traffic import sends, traffic_bytes
from autopar.ir import ANY, Graph, Labels, Layout, LayoutStep, Op, State, Tensor, has_owner, owner_of


class NodeItems:
    """Shared inputs of the prices of all nodes of a graph.

    Args:
        graph: the captured model.
        sizes: local sizes of tensors on a rank.
        hardware: figures or symbols of the machine.
        links: link of every mesh axis, figures or symbols.
        layers: path of a list of repeated layers -> its number of layers, where it differs from the graph's number.
        training_state: gradients and optimizer states that training keeps for each parameter.
        fused: whether chains of element-wise ops run as one kernel, as `torch.compile` makes them.
        bucket_bytes: bytes of a bucket: parameters and gradients share collectives of this size. By default those of
            the runtime, and no more than all parameters have: together they pay for one collective at least.
        chosen_bucket_bytes: bytes of a bucket that a plan names for our own runtime; None for the usual size.
        recomputed: names of the ops that run again when their block is recomputed.
        micro_batches: number of micro-batches of a step.
        position: mesh coordinates of the rank whose memory is priced; it matters for parameters that one rank owns, see
            `autopar.cost_model.owners`.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        sizes: Sizes,
        hardware: Hardware,
        links: Sequence[Link],
        layers: Mapping[str, Quantity] | None = None,
        training_state: TrainingState = FULL,
        fused: bool = False,
        bucket_bytes: Quantity | None = None,
        chosen_bucket_bytes: Quantity | None = None,
        recomputed: Collection[str] = (),
        position: Position | None = None,
        micro_batches: int = 1,
    ) -> None:
        self.micro_batches = micro_batches
        self.position = position or [0] * len(sizes.mesh.axes)
        self.graph, self.sizes = graph, sizes
        own = _bucket_bytes(graph, sizes, chosen_bucket_bytes)
        self.bucket_bytes = own if bucket_bytes is None else bucket_bytes
        self.holds_buckets = bucket_bytes is None
        self.hardware, self.links, self.training_state = hardware, tuple(links), training_state
        self.layers = {stack.path: stack.layers for stack in graph.stacks} | dict(layers or {})
        self.recomputed = frozenset(recomputed)
        self.inner = inner_tensors(graph) if fused else frozenset()
        self.modules = {name: op.module for op in graph.ops for name in op.results}
        self.modules |= {tensor: name for name, tensor in graph.parameters.items()}
        self._regions = regions_of(graph)
        self._parameters = frozenset(graph.parameters.values())
        self._collectives: dict[Hashable, tuple[Quantity, Quantity]] = {}

    def place(self, name: str, module: str) -> tuple[Region, Quantity]:
        """The region of an op or tensor, and the number of layers of the whole model for which it stands."""
        place = self.graph.stack_of(module)
        if place is None:
            return self._regions.get(name, "before"), 1
        stack, index = place
        layer_count = self.layers[stack.path] - stack.captured + 1 if index == stack.middle else 1
        return "layers", layer_count

    def buckets(self) -> Iterator[MemoryItem]:
        """Memory of two buckets, one being filled and one being reduced, as far as each exceeds 25 MiB.

        The hardware's reserve includes 25 MiB for each buffer of collectives.
        """
        further = larger(0, self.bucket_bytes - BUCKET_BYTES) if self.holds_buckets else 0
        if not isinstance(further, int) or further:
            yield MemoryItem("buckets of gradients", "buffers", "layers", 2 * further)

    def _recomputed(self, op: str, phase: Phase) -> int:
        """See `WorkItem.recomputed`."""
        return int(phase == "forward" and op in self.recomputed)

    def _steps(
        self, tensor: Tensor, source: Layout, target: Layout
    ) -> Iterator[tuple[int, str, str, Quantity, Quantity, Places]]:
        """Yields axis, both collectives, bytes before and after, and the ranks that take part in each step."""
        layout = list(source)
        for step, before, after in self.sizes.steps(tensor, source, target):
            places = _places_of_step(layout, step)
            layout[step.axis] = step.target
            forward, backward = step.transition.forward, step.transition.backward
            yield step.axis, forward, backward, before, after, places

    def _item(
        self,
        title: str,
        name: str,
        axis: int,
        phase: Phase,
        region: Region,
        count: Quantity,
        before: Quantity,
        after: Quantity,
        carries: str,
        *,
        of: str,
        every_micro_batch: bool = True,
        recomputed: int | None = None,
        moves: str = "",
        places: Places = (),
    ) -> WorkItem:
        ranks = self.sizes.axis(axis)
        seconds, sent = self._collective(name, axis, before, after, carries != "activation")
        sent = sent * self._share_of_ranks(places, axis)
        local = not sends(name)
        if local:  # no op is run along an axis of one rank
            count = count * smaller(1, ranks - 1)
        return WorkItem(
            f"{name} {title}",
            name,
            COMPUTE if local else self.sizes.mesh.names[axis],
            phase,
            region,
            count,
            seconds,
            sent,
            kernels=int(carries == "activation"),
            carries="" if local else carries,
            every_micro_batch=every_micro_batch,
            ranks=1 if local else ranks,
            of=of,
            moves=moves,
            recomputed=self._recomputed(of, phase) if recomputed is None else recomputed,
            places=places,
        )

    def _collective(
        self, name: str, axis: int, before: Quantity, after: Quantity, bucketed: bool
    ) -> tuple[Quantity, Quantity]:
        """Seconds of a collective, and bytes that a rank sends; those of alike layers are computed once."""
        key = name, axis, hashable(before), hashable(after), bucketed
        if key not in self._collectives:
            ranks = self.sizes.axis(axis)
            seconds = collective_seconds(
                name,
                before_bytes=before,
                after_bytes=after,
                ranks=ranks,
                link=self.links[axis],
                hardware=self.hardware,
                bucketed=bucketed,
                bucket_bytes=self.bucket_bytes,
            )
            sent = traffic_bytes(name, before_bytes=before, after_bytes=after, ranks=ranks)
            self._collectives[key] = seconds, sent
        return self._collectives[key]

    def _share_of_ranks(self, places: Places, axis: int) -> Quantity:
        """Fraction of all ranks that take part in a collective along an axis, as the axis's other ranks do."""
        mesh = self.sizes.mesh
        shares = (len(at) / self.sizes.axis(other) for other, at in places if other != axis)
        found: Quantity = math.prod(shares, start=1)
        return found if mesh.occupied is None else found * mesh.size / mesh.ranks

    def _title(self, name: str) -> str:
        """Words for a tensor in reports: the parameter's name, or the op that produces it."""
        if name in self.graph.producer:
            return f"of {words_of(self.graph.producer[name])}"
        return numbers_out(self.modules.get(name, name))

    def _gradient_scale(self, tensor: Tensor) -> float:
        """Bytes of a parameter's gradient for each byte of the parameter."""
        given = self.training_state.gradient_bytes
        return tensor.gradient_scale if given is None else given / tensor.itemsize_bytes


def places_of(labels: Labels) -> Places:
    """The ranks that run an op: for each axis with a label such as `@1`, the axis and the position of this rank."""
    owners = ((axis, owner_of(label)) for axis, label in enumerate(labels))
    return tuple((axis, (owner,)) for axis, owner in owners if owner is not None)


def places_in(layout: Sequence[State]) -> Places:
    """The ranks that have a tensor in this layout: for each axis with an owner, the axis and the owner's position."""
    owned = ((axis, s.owner) for axis, s in enumerate(layout) if s.kind == "O" and s.owner != ANY)
    return tuple((axis, (owner,)) for axis, owner in owned)


def _places_of_step(layout: Sequence[State], step: LayoutStep) -> Places:
    """The ranks that take part in a step of a conversion: along its own axis all, or both ends of a send."""
    if step.target.kind != "O" and not has_owner(tuple(layout)):
        return ()
    found = tuple(place for place in places_in(layout) if place[0] != step.axis)
    if step.source.kind == step.target.kind == "O":
        found += ((step.axis, (step.source.owner, step.target.owner)),)
    return found


def _bucket_bytes(graph: Graph, sizes: Sizes, chosen: Quantity | None = None) -> Quantity:
    """Bytes of a bucket of the runtime, chosen or usual, for the parameters of a model: at most all of them."""
    total_bytes = whole_bytes(graph)
    axes = map(sizes.axis, range(len(sizes.mesh.axes)))
    return smaller(total_bytes, usual_bucket_bytes(total_bytes, axes) if chosen is None else chosen)


def regions_of(graph: Graph) -> dict[str, Region]:
    """Op, tensor or parameter name -> "before" or "after" the repeated layers; names inside them are meaningless."""
    inside = [i for i, op in enumerate(graph.ops) if graph.stack_of(op.module)]
    first_after = inside[-1] + 1 if inside else 0
    regions: dict[str, Region] = {}
    for position, op in enumerate(graph.ops):
        region: Region = "before" if position < first_after else "after"
        for name in (op.name, *op.results):
            regions[name] = region
        for name in op.operands:
            regions.setdefault(name, region)
    for name, tensor in graph.parameters.items():
        regions[name] = regions.get(tensor, "before")
    return regions


def numbers_out(name: str) -> str:
    """A path with `*` in place of the numbers of layers.

    >>> numbers_out("layers.3.mlp.up.weight")
    'layers.*.mlp.up.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=[. ]|$)", "*", name)


def words_of(op: Op) -> str:
    """Words for an op in reports: `mlp linear`, or `sum` for an op outside every submodule."""
    return f"{_leaf(op.module)} {op.kind.removeprefix('aten.')}".strip()


def _leaf(module: str) -> str:
    """The last two names of a module's path without numbers, such as `mlp.up`."""
    names = [part for part in module.split(".") if not part.isdigit()]
    return ".".join(names[-2:])

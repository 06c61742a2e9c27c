"""Time and memory of a whole training step, computed from its items of work and its holdings of memory.

The model has three regions: the ops before the repeated layers, those in them, and those after them. With m
micro-batches and p pipeline stages of equal depth, each in v chunks, the seconds are

    device = compute + exposed communication                     of one micro-batch in one region
    host   = kernels * host_seconds                              for the CPU to launch the kernels
    region = max(device, host)                                   where the CPU launches ahead of the device; else
    region = max(device + waits of single ops, host)
    stage  = the slowest stage: the first has the region before the layers and its share of the layers,
             the last its share and the region after them, the others only their share
    step   = m * stage + (before + layers + after - stage) / v   fill and drain of the pipeline
             + (m * v + p - 1) * 2 sends                         activations and gradients of chunks
             + exposed reductions of gradients + optimizer + fixed
             + a meeting of replicas / steps between meetings    (autopar.ir.meeting)

"Exposed" is what does not overlap with compute. With equal stages the second term of `step` is the bubble (p - 1) /
(v m) of GPipe and interleaved 1F1B (Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2). The memory
of saved activations counts as many micro-batches in flight as 1F1B has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cost_model.arith import Quantity, larger, power, smaller
from autopar.cost_model.collectives import collective_seconds
from autopar.cost_model.items import (
    COMPUTE,
    TOUCHED,
    Region,
    WorkItem,
    kind_of_work,
    runs_every_time,
)
from autopar.cost_model.steps.run import REGIONS, Term, total
from autopar.cost_model.steps.step_memory import StepMemory
from autopar.ir import Tier


class Step(StepMemory):
    """Time and memory of one step of a plan; see `StepData` for its attributes.

    Every method computes with numbers or with symbols, whichever the attributes have.
    """

    # --- time

    def time(self) -> tuple[Term, ...]:
        """The seconds of a step, by parts."""
        m = self.run.micro_batches
        slowest, everything = self._stages()
        ends = slowest - self._layers_share()
        layers = [
            Term(term.name, term.value * m, tuple(Term(p.name, p.value * m) for p in term.parts))
            for term in self._region_terms("layers", 1 / self.run.stages)
        ]
        return (
            *layers,
            Term("embedding, head and loss", ends * m, note="of the slowest stage"),
            Term("pipeline bubble", (everything - slowest) / self.run.chunks),
            Term("stage boundaries", self._boundary_seconds()),
            *self._once_a_step(),
            self._per_step("meet", {"layers": 1 / self.run.stages}),
            Term("optimizer", self._optimizer_seconds()),
            Term("fixed", self.software.step_seconds),
        )

    def seconds(self) -> Quantity:
        """Seconds of a step."""
        return total(self.time())

    def _stages(self) -> tuple[Quantity, Quantity]:
        """Seconds of a micro-batch on the slowest stage, and on all stages together."""
        before, layers, after = (self.region_seconds(region) for region in REGIONS)
        alone, cuts, one = self._alone, self.cuts, layers / self.layers
        first = before + cuts.first * one + alone * after
        last = after + cuts.last * one + alone * before
        return larger(first, larger(cuts.middle * one, last)), before + layers + after

    def _layers_share(self) -> Quantity:
        return self.region_seconds("layers") / self.run.stages

    def region_seconds(self, region: Region) -> Quantity:
        """Seconds that one micro-batch takes in a region of the model, summed over all pipeline stages.

        Args:
            region: "before", "layers" or "after", relative to the repeated layers.
        """
        return self._once(("region", region), lambda: total(self._region_terms(region, 1)))

    def _region_terms(self, region: Region, share: Quantity) -> tuple[Term, ...]:
        """Compute, communication by axis, the overlap of both, and the time that the device waits for the host."""
        compute = self._by_name(self.runs(region, COMPUTE), "compute", share)
        communication = tuple(
            self._by_name(self.runs(region, axis), f"communication along {axis}", share) for axis in self.axes
        )
        hidden = self._hidden(region) * share
        return (
            compute,
            *communication,
            Term("hidden behind compute", -hidden),
            Term("waiting for the host", self.waits(region) * share),
        )

    def waits(self, region: Region) -> Quantity:
        """Seconds that the device waits in a region, because the host takes longer to launch kernels than they run.

        Where the host does not launch ahead of the device, every op that is slower to launch than to run adds its
        difference. A region takes at least what the host needs to launch all of it, also what hides behind compute.
        """
        return larger(self._waits_for_ops(region), self._behind_seconds(region))

    def is_late(self, region: Region) -> bool:
        """Whether a region takes what the host needs to launch it, so that its kernels' durations do not matter."""
        return bool(self._behind_seconds(region) > self._waits_for_ops(region))

    def _waits_for_ops(self, region: Region) -> Quantity:
        """Seconds that ops are slower to launch than to run; 0 where the host launches ahead of the device."""
        if self.software.runs_ahead:
            return 0
        return sum(
            (
                times * item.count * larger(0, self.issue_seconds(item) - item.seconds)
                for item, times in self._all_runs(region)
                if item.kernels
            ),
            start=0,
        )

    def _behind_seconds(self, region: Region) -> Quantity:
        """Seconds that the host takes to launch a region, less those that the device takes to run it."""
        return self._hidden(region) + sum(
            (n * i.count * (self.issue_seconds(i) - i.seconds) for i, n in self._all_runs(region)),
            start=0,
        )

    def _all_runs(self, region: Region) -> list[tuple[WorkItem, Quantity]]:
        return [run for resource in (COMPUTE, *self.axes) for run in self.runs(region, resource)]

    def issue_seconds(self, item: WorkItem) -> Quantity:
        """Seconds that the host takes to launch an item; a collective waits for the host of the slowest rank."""
        issued = item.kernels * self.hardware.host_seconds
        if item.resource != COMPUTE:  # nothing is issued along an axis of one rank
            issued = issued * smaller(1, item.ranks - 1)
        if item.carries != "activation":
            return issued
        nodes = larger(1, item.ranks / self.hardware.devices_per_node)
        stall = self.software.stall_seconds * self.boundary_crosses * power(nodes, 0.5)
        several = smaller(1, item.ranks - 1)
        return issued + self.software.skew_seconds * (item.ranks - 1) + several * stall * item.ranks

    @property
    def recomputed_share(self) -> Quantity:
        """Fraction of the layers, 0 to 1, that are recomputed in backward."""
        if isinstance(self.run.recompute, str):
            return 1 if self.run.recompute == "full" else 0
        mean = self.layers / self.run.stages
        return self.run.again(mean) / mean

    def times(self, item: WorkItem) -> Quantity:
        """Mean number of executions of an item in a micro-batch, recomputation included."""
        if item.region != "layers" or not item.recomputed:
            return 1
        return 1 + item.recomputed * self.recomputed_share

    def runs(self, region: Region, resource: str) -> list[tuple[WorkItem, Quantity]]:
        """Items that every micro-batch executes, each with `times`."""
        return [
            (item, self.times(item))
            for item in self.items
            if item.region == region and item.resource == resource and runs_every_time(item)
        ]

    def _by_name(self, found: Sequence[tuple[WorkItem, Quantity]], name: str, share: Quantity) -> Term:
        sums: dict[str, Quantity] = {}
        for item, times in found:
            title = f"{item.name} {item.phase}" if item.resource == COMPUTE else item.name
            sums[title] = sums.get(title, 0) + times * item.count * item.seconds * share
        parts = tuple(Term(title, value) for title, value in sums.items())
        return Term(name, total(parts), parts)

    @property
    def axes(self) -> list[str]:
        """Mesh axes along which something is sent."""
        return list(dict.fromkeys(i.resource for i in self.items if i.resource != COMPUTE))

    def _hidden(self, region: Region) -> Quantity:
        """Seconds of communication that overlap with compute: gathers of parameters and reductions of gradients.

        Where the runtime or the plan sends activations piece by piece, or micro-batches take turns, those overlap, too.
        """
        return self._once(("hidden", region), lambda: sum(self._overlap(region).values(), start=0))

    def hidden_seconds(self, item: WorkItem) -> Quantity:
        """Seconds of one execution of an item that overlap with compute; an equal share for all of its kind."""
        kind = kind_of_work(item)
        if not runs_every_time(item) or kind not in ("stored", "activation"):
            return 0
        share = self._once(("share", item.region, kind), lambda: self._share_hidden(item.region, kind))
        return item.hidden_seconds + share * (item.seconds - item.hidden_seconds)

    def _share_hidden(self, region: Region, kind: str) -> Quantity:
        """The part of the communication of a kind that overlaps with compute, beside what products in pieces hide."""
        moved = self._moved(region)[kind]
        return self._overlap(region)[kind] / moved if moved else 0

    def _moved(self, region: Region) -> dict[str, Quantity]:
        """Seconds of communication by kind of work, without what products in pieces hide."""
        moved: dict[str, Quantity] = {"stored": 0, "activation": 0, "move": 0}
        for axis in self.axes:
            for i, times in self.runs(region, axis):
                moved[kind_of_work(i)] += times * i.count * (i.seconds - i.hidden_seconds)
        return moved

    def _overlap(self, region: Region) -> dict[str, Quantity]:
        """Seconds that overlap with compute by kind of work, and those that products in pieces hide."""
        compute = sum((times * i.count * i.seconds for i, times in self.runs(region, COMPUTE)), start=0)
        pieces = sum(
            (n * i.count * i.hidden_seconds for axis in self.axes for i, n in self.runs(region, axis)),
            start=0,
        )
        moved, hides = self._moved(region), self.hardware.hides
        stored = hides * smaller(moved["stored"], compute)
        activations: Quantity = 0
        if self.run.overlap_batches != 1:
            # Products in pieces hide theirs already.
            left = larger(0, compute - pieces - stored)
            activations = hides * smaller(moved["activation"], left)
        elif self.software.hides_activations:
            activations = self.software.hides_activations * smaller(moved["activation"], compute)
        return {"pieces": pieces, "stored": stored, "activation": activations}

    def _once_a_step(self) -> tuple[Term, ...]:
        """Gathers of stored parameters and reductions of gradients that run once a step."""
        shares = {"layers": 1 / self.run.stages}
        gathers = self._per_step("gather", shares)
        reductions = self._per_step("reduce", shares)
        sent = sum(
            (
                i.count * i.seconds * shares.get(i.region, 1)
                for i in self.items
                if i.phase == "reduce" and not i.every_micro_batch and kind_of_work(i) == "stored"
            ),
            start=0,
        )
        hidden = self.hardware.hides * smaller(sent, self.backward_seconds())
        return (gathers, reductions, Term("reductions hidden behind backward", -hidden))

    def backward_seconds(self) -> Quantity:
        """Seconds of compute in a micro-batch's backward on one stage, with which reductions overlap."""
        shares = {"layers": 1 / self.run.stages}
        return sum(
            (
                i.count * i.seconds * shares.get(i.region, 1)
                for i in self.items
                if i.resource == COMPUTE and i.phase == "backward"
            ),
            start=0,
        )

    def _per_step(self, phase: str, shares: Mapping[str, Quantity]) -> Term:
        sums: dict[str, Quantity] = {}
        for i in self.items:
            if i.phase == phase and not i.every_micro_batch:
                cost = i.count * i.seconds * shares.get(i.region, 1)
                sums[i.kind + " along " + i.resource] = sums.get(i.kind + " along " + i.resource, 0) + cost
        names = {
            "gather": "gathering parameters",
            "reduce": "reducing gradients",
            "meet": "replicas meeting",
        }
        parts = tuple(Term(name, value) for name, value in sums.items())
        return Term(names[phase], total(parts), parts)

    def _boundary_seconds(self) -> Quantity:
        """Seconds to send activations and gradients between stages, for all chunks and for the fill of the pipeline."""
        run = self.run
        ticks = smaller(1, run.stages - 1) * (run.micro_batches * run.chunks + run.stages - 1)
        return 2 * ticks * self.send_seconds()

    def send_seconds(self) -> Quantity:
        """Seconds of a message from one stage to the next."""
        if self.boundary_link is None:
            return 0
        sent = self.boundary_bytes / self.boundary_parts
        one = collective_seconds(
            "send",
            before_bytes=sent,
            after_bytes=sent,
            ranks=2,
            link=self.boundary_link,
            hardware=self.hardware,
        )
        return one + self.software.send_seconds * self.boundary_crosses

    def _optimizer_seconds(self) -> Quantity:
        """Seconds to update the parameters of the first stage; each tier (device, host, nvme) has its own rate."""
        return sum(
            (self._touched_bytes(tier) / self.hardware.updates_per_second(tier) for tier in self.tiers),
            start=0,
        )

    def _touched_bytes(self, tier: Tier) -> Quantity:
        """Bytes that the optimizer reads and writes in a tier, on the first stage."""
        return sum(
            (
                times * self._share(h.region, "first") * h.bytes
                for kind, times in TOUCHED.items()
                for h in self.holdings
                if h.kind == kind and h.tier == tier and h.is_stored
            ),
            start=0,
        )

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that hold something, the device first."""
        return tuple(dict.fromkeys(("device", *(h.tier for h in self.holdings))))

    # --- traffic

    def traffic(self) -> tuple[Term, ...]:
        """Bytes that a rank sends in a step, by axis and collective."""
        found: dict[str, dict[str, Quantity]] = {}
        for i in self.items:
            if i.resource == COMPUTE:
                continue
            once = i.phase in ("gather", "reduce", "meet") and not i.every_micro_batch
            times = 1 if once else self.run.micro_batches
            times = self.times(i) * times
            share = 1 / self.run.stages if i.region == "layers" else 1
            of_axis = found.setdefault(i.resource, {})
            of_axis[i.name] = of_axis.get(i.name, 0) + times * share * i.count * i.traffic_bytes
        return tuple(
            Term(f"along {axis}", sum(names.values()), tuple(Term(n, v) for n, v in names.items()))
            for axis, names in found.items()
        )

    def boundary_traffic(self) -> Quantity:
        """Bytes that a rank between two others sends them in a step: activations, and gradients of its input.

        The ranks of two stages have one neighbour each, so that each sends one of the two.
        """
        run, sent = self.run, self.boundary_bytes / self.boundary_parts
        return smaller(2, run.stages - 1) * run.micro_batches * run.chunks * sent

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

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from autopar.cost_model.arith import Quantity, larger, power, smaller
from autopar.cost_model.collectives import collective_seconds
from autopar.cost_model.cuts import Cuts, equal_cuts
from autopar.cost_model.items import COMPUTE, TOUCHED, MemoryItem, Region, WorkItem, kind_of_work, runs_every_time
from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.machines.software import Software
from autopar.cost_model.steps.run import REGIONS, STAGES, Run, Stage, Term, total
from autopar.ir import Tier


@dataclass
class Step:
    """Time and memory of one step of a plan.

    Every method computes with numbers or with symbols, whichever the attributes have.

    Attributes:
        items: work of a step, such as matrix products and collectives, each with its duration.
        holdings: memory of a rank, such as parameters and saved activations.
        run: number of micro-batches, stages and so on.
        hardware: figures of the machine.
        software: figures of the runtime, such as what it overlaps with compute.
        layers: number of repeated layers in the whole model.
        boundary_bytes: size of the activations that one layer passes to the next, of one micro-batch on one rank.
        boundary_link: link between two pipeline stages.
        boundary_crosses: 1 where messages between stages leave the node, 0 where none does.
        boundary_parts: number of ranks that each send a part of these activations to the next stage, whose ranks
            gather them (Narayanan et al. 2021, section 4.1). Saved activations stay whole.
        buckets_hide: the largest part of the messages of parameters that their buckets let compute hide, 0 to 1.
    """

    items: Sequence[WorkItem]
    holdings: Sequence[MemoryItem]
    run: Run
    hardware: Hardware
    software: Software
    layers: Quantity = 1
    boundary_bytes: Quantity = 0
    boundary_link: Link | None = None
    boundary_crosses: Quantity = 0
    boundary_parts: Quantity = 1
    buckets_hide: Quantity = 1
    _sums: dict[object, Quantity] = field(default_factory=dict)

    @property
    def cuts(self) -> Cuts:
        """Number of layers of the first, middle and last stages."""
        return self.run.cuts or equal_cuts(self.layers, self.run.stages)

    @property
    def _alone(self) -> Quantity:
        """1 for a single stage, which has the regions before and after the layers; else 0."""
        return larger(0, 2 - self.run.stages)

    def _share(self, region: Region, stage: Stage) -> Quantity:
        """Fraction of a region that a stage has, 0 to 1."""
        if region == "layers":
            return getattr(self.cuts, stage) / self.layers
        if stage == "middle":
            return 0
        return 1 if (region, stage) in (("before", "first"), ("after", "last")) else self._alone

    def held(self, kind: str, stage: Stage, tier: Tier = "device") -> Quantity:
        """Bytes of one kind of holding on a stage, for one micro-batch."""
        return self._once(
            ("held", kind, stage, tier),
            lambda: sum(
                (self._share(h.region, stage) * h.bytes for h in self.holdings if h.kind == kind and h.tier == tier),
                start=0,
            ),
        )

    def _held_parts(self, kind: str, stage: Stage, tier: Tier = "device") -> tuple[Term, ...]:
        sums: dict[str, Quantity] = {}
        for h in self.holdings:
            if h.kind == kind and h.tier == tier:
                sums[h.name] = sums.get(h.name, 0) + self._share(h.region, stage) * h.bytes
        return tuple(Term(name, value) for name, value in sums.items())

    def _once(self, key: object, make: Callable[[], Quantity]) -> Quantity:
        if key not in self._sums:
            self._sums[key] = make()
        return self._sums[key]

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
            Term("embedding, head and loss", ends * m, note="" if _is_one(self.run.stages) else "of the slowest stage"),
            Term("pipeline bubble", (everything - slowest) / self.run.chunks),
            Term("stage boundaries", self._boundary_seconds()),
            *self._once_a_step(),
            self._per_step("meet", {"layers": 1 / self.run.stages}),
            Term("optimizer", self._optimizer_seconds()),
            Term("fixed", self.software.step_seconds + self.hardware.step_seconds),
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
        """Whether a region takes as long as the host needs to launch it, whatever its kernels' durations."""
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
            (n * i.count * (self.issue_seconds(i) - i.seconds) for i, n in self._all_runs(region)), start=0
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

    @property
    def hides_stored(self) -> Quantity:
        """The part of gathers and reductions of parameters that hides: of the machine, or of their buckets if less."""
        return smaller(self.hardware.hides, self.buckets_hide)

    def _overlap(self, region: Region) -> dict[str, Quantity]:
        """Seconds that overlap with compute by kind of work, and those that products in pieces hide."""
        compute = sum((times * i.count * i.seconds for i, times in self.runs(region, COMPUTE)), start=0)
        pieces = sum(
            (n * i.count * i.hidden_seconds for axis in self.axes for i, n in self.runs(region, axis)), start=0
        )
        moved = self._moved(region)
        stored = self.hides_stored * smaller(moved["stored"], compute)
        activations: Quantity = 0
        if self.run.overlap_batches != 1:
            # Products in pieces hide theirs already.
            left = larger(0, compute - pieces - stored)
            activations = self.hardware.hides * smaller(moved["activation"], left)
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
        hidden = self.hides_stored * smaller(sent, self.backward_seconds())
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
        names = {"gather": "gathering parameters", "reduce": "reducing gradients", "meet": "replicas meeting"}
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
            "send", before_bytes=sent, after_bytes=sent, ranks=2, link=self.boundary_link, hardware=self.hardware
        )
        return one + self.software.send_seconds * self.boundary_crosses

    def _optimizer_seconds(self) -> Quantity:
        """Seconds to update the parameters of the first stage; each tier (device, host, nvme) has its own rate."""
        rate = self.hardware.updates_per_second
        moved = sum((self._touched_bytes(tier) / rate(tier) for tier in self.tiers), start=0)
        ops = (self._share(i.region, "first") * i.count * i.seconds for i in self.items if i.phase == "update")
        return moved + sum(ops, start=0)

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

    # --- memory

    def peak_bytes(self) -> Quantity:
        """Peak memory of the fullest rank."""
        first, middle, last = (total(self.memory(stage)) for stage in STAGES)
        return larger(first, larger(middle, last))

    def memory(self, stage: Stage = "first") -> tuple[Term, ...]:
        """Peak memory of a device on a pipeline stage, by parts; "middle" is the fullest stage between the ends."""
        kinds = ("parameters", "gradients", "optimizer", "buffers")
        saved = self._saved(stage)
        return (
            *(Term(kind, self.held(kind, stage), self._held_parts(kind, stage)) for kind in kinds),
            saved,
            Term("transient peak", self._transient(stage), note="the loss, or one layer gathered or recomputed"),
            Term("reserved", self.hardware.reserved_bytes, note="context and library buffers"),
        )

    def stored(self, tier: Tier, stage: Stage = "first") -> tuple[Term, ...]:
        """Memory that a rank keeps on the host or in files, by parts."""
        return tuple(
            Term(kind, self.held(kind, stage, tier), self._held_parts(kind, stage, tier))
            for kind in (*TOUCHED, "saved activations")
        )

    def _transient(self, stage: Stage) -> Quantity:
        """Bytes of the largest memory that exists only while one block (a layer) runs.

        While a loss runs, its operands and their gradients exist, which autograd does not save. While a block with
        sharded parameters runs, the gathered parameters and their gradients exist. While a block is recomputed, all
        activations that it saves exist; the blocks after the recomputed ones have freed theirs by then.
        """
        moments = self._moments(stage)
        found = list(moments.values())
        if recomputed := self._by_block("recomputed", stage):
            returned = sum((h.bytes for h in self.holdings if h.kind == "returned"), start=0)
            found += [moments.get(block, 0) + held - returned for block, held in recomputed.items()]
        elif self._recomputes:
            found.append(self._last_layer_again(stage, moments))
        return reduce(larger, _distinct(found), 0)

    @property
    def _recomputes(self) -> bool:
        return not (isinstance(self.run.recompute, str) and self.run.recompute == "none")

    def _last_layer_again(self, stage: Stage, moments: Mapping[Hashable, Quantity]) -> Quantity:
        """Bytes of the last layer while it is recomputed, beyond what the loss and the head have freed by then.

        It takes no more than layers that run once, where there are such: they have freed theirs.
        """
        layers = self._saved_of("layers")
        count = self._share("layers", stage) * self.layers
        is_last = larger(0, 1 - (count - self.run.again(count)))
        blocks = {h.block for h in self.holdings if h.region == "layers"}
        moment = reduce(larger, (moments[block] for block in blocks if block in moments), 0)
        freed = self._share("after", stage) * self._saved_of("after")
        return moment + is_last * layers / self.layers - freed

    def _saved_of(self, region: Region) -> Quantity:
        """Bytes of a region's activations that stay where nothing is recomputed, of the whole model."""
        found = (h.bytes for h in self.holdings if self._is(h, "saved activations", region))
        return sum(found, start=0)

    def _moments(self, stage: Stage) -> dict[Hashable, Quantity]:
        """Block -> bytes of its loss, or of its gathered parameters with their gradients, whichever is more."""
        working, gathered = (self._by_block(kind, stage) for kind in ("working", "gathered"))
        return {block: larger(working.get(block, 0), 2 * gathered.get(block, 0)) for block in {**working, **gathered}}

    def _by_block(self, kind: str, stage: Stage) -> dict[Hashable, Quantity]:
        """Block -> bytes of a kind of memory that exists only while the block runs; a layer counts in full."""
        found: dict[Hashable, Quantity] = {}
        for h in self.holdings:
            if h.kind == kind:
                share = 1 if h.region == "layers" else self._share(h.region, stage)
                found[h.block] = found.get(h.block, 0) + share * h.bytes
        return found

    def _in_flight(self, stage: Stage) -> Quantity:
        """Number of micro-batches whose activations a stage keeps at once under 1F1B, counted in whole stages.

        Stage r keeps p - r of them. With v chunks it runs 2 (p - 1 - r) + (v - 1) p + 1 of its chunks
        before the first backward (Narayanan et al. 2021, section 2.2), which is p + (p - 1) / v on the
        first stage.
        """
        if self.run.overlap_batches != 1:  # without stages
            return self.run.overlap_batches
        p, v = self.run.stages, self.run.chunks
        behind = {"first": p - 1, "middle": p - 2, "last": 0}[stage]
        return smaller(self.run.micro_batches, ((v - 1) * p + 1 + smaller(2, v) * behind) / v)

    def _saved(self, stage: Stage) -> Term:
        """Saved activations of the micro-batches in flight."""
        flight = self._in_flight(stage)
        if self._recomputes:
            return self._recomputed(stage, flight)
        parts = self._held_parts("saved activations", stage)
        return Term(
            "saved activations",
            flight * self.held("saved activations", stage),
            tuple(Term(part.name, flight * part.value) for part in parts),
            "of all micro-batches in flight",
        )

    def _recomputed(self, stage: Stage, flight: Quantity) -> Term:
        """Bytes of saved activations if layers are recomputed, times the micro-batches in flight.

        They are the inputs of the recomputed layers and the activations of the other layers. The activations of the
        layer that backward recomputes at the moment are part of the transient peak.
        """
        ends = (self._share(region, stage) * self._saved_of(region) for region in ("before", "after"))
        count, one = (self._share("layers", stage) * self.layers, self._saved_of("layers") / self.layers)
        again = self.run.again(count)
        parts = (
            Term("inputs of layers", flight * self.boundary_bytes * again),
            Term("layers that run once", flight * one * (count - again)),
            Term("embedding, head and loss", flight * sum(ends)),
        )
        return Term("saved activations", total(parts), parts, "layers are recomputed in backward")

    @staticmethod
    def _is(h: MemoryItem, kind: str, region: Region) -> bool:
        return h.kind == kind and h.region == region


def _distinct(values: Iterable[Quantity]) -> list[Quantity]:
    """The values without repetitions, since equal blocks have equal formulas. Arrays are all kept."""
    kept, seen = [], set()
    for value in values:
        key = id(value) if isinstance(value, np.ndarray) else value
        if key not in seen:
            seen.add(key)
            kept.append(value)
    return kept


def _is_one(count: Quantity) -> bool:
    """Whether a number is 1; a formula or an array of numbers is not."""
    return isinstance(count, (int, float)) and count == 1

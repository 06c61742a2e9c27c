"""From a model and a cluster to a plan with its explanation: what the command line and reports stand on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.candidates import Priced, Space, best_that_fits, compared, smallest
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.items import FULL, MIXED_FLOAT32_GRADIENTS, Precision
from autopar.cost_model.software import AUTOPAR, Software
from autopar.cost_model.step import Recompute, Run
from autopar.errors import SearchError
from autopar.explanation import Explanation
from autopar.ir import Graph, Mesh, Stack
from autopar.planning import Prepared, make_plan, prepare_step
from autopar.targets import Target, resolve_target

_EXPLORED_BATCH = 8  # sequences of the graph that all settings are priced with


@dataclass(frozen=True)
class Wishes:
    """What a person wants of a plan, as intents rather than placements.

    Attributes:
        mesh: axes to use, None to search them.
        recipe: constraints on the search along the axes.
        pins: single choices that are fixed.
        micro_batches: of a step; None to search.
        stages: pipeline depths that may be chosen; this version runs depth 1 alone.
        max_memory_bytes: of a rank; None for what the hardware has.
        inside_node: axes whose groups must not leave a node.
        without: of "recompute", "tp", "zero3" and so on, what must not be used.
    """

    mesh: Mesh | None = None
    recipe: str = "auto"
    pins: Mapping[str, str] = field(default_factory=dict)
    micro_batches: int | None = None
    stages: tuple[int, ...] = (1,)
    max_memory_bytes: int | None = None
    inside_node: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Question:
    """A model, a cluster, and how much of it a step should train.

    Attributes:
        target: as `autopar.targets.resolve_target` reads it.
        cluster: where.
        batch: sequences of a step on all ranks; None for one per rank.
        seq: tokens of a sequence; None for what the model is known for.
        wishes: constraints.
        software: what the runtime adds or hides.
    """

    target: str
    cluster: Cluster
    batch: int | None = None
    seq: int | None = None
    wishes: Wishes = field(default_factory=Wishes)
    software: Software = AUTOPAR

    @property
    def bound_bytes(self) -> int:
        """What a rank may use."""
        bound = self.wishes.max_memory_bytes
        return int(self.cluster.hardware.memory_bytes) if bound is None else bound

    @property
    def global_batch(self) -> int:
        return self.batch or self.cluster.ranks

    def settings(self) -> list[Priced]:
        """Every setting that the wishes leave, priced, fastest first. Raises AutoparError for none."""
        space = self.space()
        return [each for each in space.price() if self._wished(each)] or space.price()[:0]

    def space(self) -> Space:
        """All settings of the captured model on the cluster."""
        _, graph = captured(self.target, _EXPLORED_BATCH, self.seq)
        again: tuple[Recompute, ...] = ("none", "full") if graph.stacks else ("none",)
        return Space(
            graph, self.cluster, self.global_batch, precision_of(graph), self.software,
            stages=self.wishes.stages,
            recomputes=("none",) if "recompute" in self.wishes.without else again,
        )  # fmt: skip

    def _wished(self, each: Priced) -> bool:
        setting, wishes = each.setting, self.wishes
        sizes = {"dp": setting.dp, "tp": setting.tp, "pp": setting.stages}
        node = self.cluster.devices_per_node
        strides = {"tp": setting.tp, "dp": setting.tp * setting.dp}
        return (
            (wishes.mesh is None or dict(wishes.mesh.axes) == _used(sizes, wishes.mesh))
            and wishes.micro_batches in (None, setting.micro_batches)
            and all(node % strides.get(axis, 1) == 0 for axis in wishes.inside_node)
            and not any(_uses(each, what) for what in wishes.without)
        )

    def answer(self) -> Explanation:
        """The chosen plan with the next best. Raises SearchError where nothing fits, with what would."""
        priced = self.settings()
        best = best_that_fits(priced, self.bound_bytes)
        if best is None:
            raise self._nothing_fits(priced)
        chosen = self.explain(best)
        return replace(chosen, candidates=compared(priced, best, self.bound_bytes))

    def explain(self, priced: Priced) -> Explanation:
        """A setting with the plan that a search finds for it: its own recipe's, or a better free one."""
        setting = priced.setting
        prepared, graph = captured(self.target, setting.micro_batch * setting.dp, self.seq)
        recipes = [setting.recipe] if self.wishes.recipe == "auto" else [self.wishes.recipe]
        found = [self._explained(prepared, graph, priced, recipe) for recipe in recipes]
        return min(found, key=lambda each: (not each.fits, each.step_seconds))

    def _explained(
        self, prepared: Prepared, graph: Graph, priced: Priced, recipe: str
    ) -> Explanation:
        setting = priced.setting
        plan = make_plan(
            replace(prepared, analysis=replace(prepared.analysis, graph=graph)), setting.mesh,
            hardware=self.cluster.hardware, recipe=recipe, pins=self.wishes.pins,
            memory_bytes=10**18,
        )  # fmt: skip
        run = Run(
            setting.micro_batches, setting.stages, recompute=setting.recompute,
            precision=precision_of(graph),
        )  # fmt: skip
        plan = replace(plan, micro_batches=setting.micro_batches)
        return Explanation(
            graph, plan, self.cluster, run, self.software, self.wishes.max_memory_bytes,
            tokens=tokens_of(graph),
        )  # fmt: skip

    def _nothing_fits(self, priced: list[Priced]) -> SearchError:
        if not priced:
            return SearchError(
                f"Nothing is left of the ways to lay {self.target} on {self.cluster}: the mesh, the "
                "micro-batches and what may not be used rule out all of them. Drop one of these wishes."
            )
        least = smallest(priced)
        return SearchError(
            f"{self.target} does not fit on {self.cluster}: the smallest way found, "
            f"{least.setting.name}, takes {least.memory_bytes / 1e9:.1f} GB of a rank, "
            f"{(least.memory_bytes - self.bound_bytes) / 1e9:.1f} GB more than the "
            f"{self.bound_bytes / 1e9:.1f} GB there are. What would help: about "
            f"{-(-least.memory_bytes * self.cluster.ranks // self.bound_bytes):.0f} ranks, a smaller "
            "batch or shorter sequences, or devices with more memory."
        )


def captured(target: str, batch: int, seq: int | None) -> tuple[Prepared, Graph]:
    """The captured step of a target at this micro-batch, few layers standing for all.

    A function has its own example inputs, whatever the batch.
    """
    function = ":" in target
    found = resolve_target(target, batch=None if function else batch, seq=seq)
    model, args, kwargs, loss_fn = found.build_few()
    prepared = prepare_step(model, args, kwargs, loss_fn=loss_fn)
    stacks = stacks_of(found)
    return prepared, replace(prepared.analysis.graph, stacks=stacks)


def stacks_of(target: Target) -> tuple[Stack, ...]:
    """The repeated layers of a target, as the graph has them."""
    return tuple(Stack(s.path, s.layers, s.captured_layers) for s in target.stacks)


def precision_of(graph: Graph) -> Precision:
    """How parameters of this number format are usually trained: 16-bit ones with float32 masters."""
    tensors = (graph.tensors[name] for name in graph.parameters.values())
    sizes = [t.itemsize_bytes for t in tensors if t.needs_grad]
    return MIXED_FLOAT32_GRADIENTS if min(sizes, default=4) <= 2 else FULL


def tokens_of(graph: Graph) -> int | None:
    """Tokens of a micro-batch: batch times sequence, where the model has both."""
    batch, seq = graph.factors.get("batch"), graph.factors.get("seq")
    return batch.size * seq.size if batch and seq else None


def _used(sizes: Mapping[str, int], mesh: Mesh) -> dict[str, int]:
    """The sizes of the axes that a mesh names; an axis it does not name must be of one rank."""
    unnamed = [name for name, size in sizes.items() if name not in mesh.names and size > 1]
    return {} if unnamed else {name: sizes.get(name, 0) for name in mesh.names}


def _uses(each: Priced, what: str) -> bool:
    setting = each.setting
    return {
        "recompute": setting.recompute != "none",
        "tp": setting.tp > 1,
        "dp": setting.dp > 1,
        "pp": setting.stages > 1,
        "sp": setting.tp > 1 and setting.tensor == "tp+sp",
    }.get(what, setting.data == what and setting.dp > 1)

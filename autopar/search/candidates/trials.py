"""Settings of an outer search before their exact search: which are promising, and what was found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.cost_model.machines.cluster import Cluster
from autopar.cost_model.machines.hardware import Hardware
from autopar.errors import SearchError
from autopar.ir import PIPELINE_AXIS, Graph, Mesh
from autopar.pipeline.blocks import has_blocks
from autopar.pipeline.parts import block_starts
from autopar.search.candidates.candidates import SettingEstimator
from autopar.search.candidates.request_filters import allows, has_closed_form, recomputations
from autopar.search.candidates.settings import EXPERT_AXIS, PricedCandidate
from autopar.search.refine.buckets import usual_seconds
from autopar.search.request.recipe_rows import RecipeLike
from autopar.search.request.recipes import is_open, recipe_axes
from autopar.search.request.refusals import Refusal, ruled_out
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from autopar.search.stages.pipeline_settings import divisors, searched_chunks
from autopar.units import counted, format_seconds

MOST_EXACT = 5  # number of settings whose plans are searched; the fifth was the best one of Nemotron 340B on 128 H100
MOST_OPENED = 2  # number of settings that are searched without the recipe of their estimate, which had no plan
WORTH_MOVING = 0.25  # smallest state of training worth moving to the host, as a part of the memory for tensors
_SAME_MESH = 2  # numbers of micro-batches to try on one mesh, and again on the best mesh
# A model of 0.24 million parameters on two ranks is searched in 0.4 s; its estimates alone take 2.0.
_FEW_RANKS, _FEW_PARAMETERS = 4, 1_000_000
_FULL = 0.8  # smallest part of the bound on memory that a plan takes if memory is tight
# A step whose estimate is this multiple of the best step is surely slower: estimates exceed the price of a plan by up
# to 1.6 % (bert-large, eight H100, dp=4,tp=2), and by 4.9 % where 256 ranks choose the size of their buckets.
SURELY_SLOWER = 1.05
# Plans of other settings are kept for display if their steps are at most this many times as long as the best one.
MOST_SHOWN = 1.1
Parts = tuple[int, tuple[int, ...]]  # pipeline ranks, and sizes of the other axes of several ranks


class Trial(NamedTuple):
    """A setting to search exactly.

    Attributes:
        mesh: the mesh of all ranks.
        micro_batches: number of micro-batches; None where the search on the mesh chooses it.
        recipe: recipe for the mesh of one stage.
        promise_seconds: optimistic estimate of a step; 0 where there is no estimate.
        priced: the estimate of the setting; None where there is none.
        known: a plan for the mesh under another recipe; the search looks only for a faster one.
    """

    mesh: Mesh
    micro_batches: int | None
    recipe: RecipeLike
    promise_seconds: float = 0.0
    priced: PricedCandidate | None = None
    known: Planned | None = None


class Explored(NamedTuple):
    """All settings of a request with their estimates.

    Attributes:
        space: the space of settings, which can price more of them.
        settings: estimates of all settings, fastest first.
        on_fewer: number of ranks -> estimates of all settings on so many; those that were asked for.
    """

    space: SettingEstimator
    settings: tuple[PricedCandidate, ...]
    on_fewer: dict[int, list[PricedCandidate]]


class Searched(NamedTuple):
    """The outcome of the outer search.

    Attributes:
        best: the fastest plan that fits.
        trial: the setting of the best plan.
        others: plans of other settings, fastest first.
        explored: all settings with their estimates; None where there are no estimates.
    """

    best: Planned
    trial: Trial
    others: tuple[Planned, ...] = ()
    explored: Explored | None = None


@dataclass
class Tried:
    """The settings that were searched so far.

    Attributes:
        found: settings with their plans.
        refusals: meshes of the settings without a plan, with their errors.
        failed: settings that no plan of their recipe fits.
        searched: mesh and number of micro-batches of every setting.
        opened: parts of the mesh and number of micro-batches of every setting that was searched without a recipe.
        most_shown: largest step of a plan that is kept, as a multiple of the best one.
    """

    found: list[tuple[Trial, Planned]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    failed: list[Trial] = field(default_factory=list)
    searched: set[tuple[Mesh, int | None]] = field(default_factory=set)
    opened: set[tuple[Parts, int | None]] = field(default_factory=set)
    most_shown: float = MOST_SHOWN

    @property
    def ranked(self) -> list[tuple[Trial, Planned]]:
        """All plans, best first."""
        return sorted(self.found, key=lambda each: each[1].key)

    @property
    def best_seconds(self) -> float:
        """Seconds of a step of the fastest plan; infinite without a plan."""
        return min((each.price.step_seconds for _, each in self.found), default=math.inf)

    def usual_seconds(self, request: Request) -> float:
        """Seconds of the fastest plan in the usual buckets, by which a search of stages compares."""
        return min((usual_seconds(each, request) for _, each in self.ranked[:1]), default=math.inf)

    @property
    def worth_seconds(self) -> float:
        """Estimated seconds of a step from which on no plan is the best."""
        return SURELY_SLOWER * self.best_seconds

    def least_of_promise(self, mesh: Mesh) -> float:
        """The smallest ratio of a plan's seconds on a mesh to its setting's lower bound; 1 if none was below 1.

        Promises assume that all stages have as many blocks. Where the last one also has a large head, stages that are
        cut with fewer blocks there take less (5.6 % for gpt2-xl in four stages on L4s of twice the memory bandwidth).
        """
        parts = (
            each.price.step_seconds / trial.promise_seconds
            for trial, each in self.found
            if trial.mesh == mesh and trial.promise_seconds > 0
        )
        return min([1.0, *parts])

    def repeats(self, trial: Trial, request: Request) -> bool:
        """Whether a setting differs from one that was searched without a recipe only in the names of axes.

        It is noted as searched. Pins and `decompose` name axes.
        """
        if not is_open(trial.recipe) or request.pins or request.decompose:
            return False
        key = parts_of(trial.mesh), trial.micro_batches
        is_known = key in self.opened
        self.opened.add(key)
        return is_known

    def words_before(self, trial: Trial) -> str:
        """A progress line for the setting that is being searched, with the best result so far."""
        fastest = f"; fastest so far {format_seconds(self.best_seconds)}" if self.found else ""
        return f"{trial.mesh}{fastest}"


def best_of_each_kind(ranked: Sequence[tuple[Trial, Planned]]) -> list[tuple[Trial, Planned]]:
    """The best setting, and after it the best that differs in having stages, and that differs in an axis for experts.

    Layouts without a recipe gain more on one of them than on the other. On 256 H100 with EFA `dp=32,tp=8` falls from
    708 to 562 ms for a Llama of 9B, and `pp=2,dp=32,tp=4`, which is faster under recipes, from 655 to 598.
    """

    def kind(each: tuple[Trial, Planned]) -> tuple[bool, bool]:
        mesh = each[0].mesh
        return depth_of(mesh) > 1, EXPERT_AXIS in mesh.names

    first, *others = ranked
    found = {id(first): first}
    for at in range(2):
        differing = [each for each in others if kind(each)[at] != kind(first)[at]]
        found |= {id(each): each for each in differing[:1]}
    return [*found.values()]


def explore(graph: Graph, request: Request, rows: int) -> Explored | None:
    """All settings of a request with their estimates.

    None where the request or the model has no closed forms, and where a small model has so few meshes that a search of
    each takes less time than the estimates.
    """
    if request.ranks == 1 or not has_closed_form(request) or is_small(graph, request):
        return None
    space = space_of(graph, request, rows)
    # No dim is the batch, say: ranks may repeat work. A batch that is named has to be split.
    if request.batch is None and space.is_empty:
        return None
    return Explored(space, closed_forms(space, request), {})


def is_small(graph: Graph, request: Request) -> bool:
    """Whether a model is small and has few meshes. Each is searched in a third of the time that the estimates take."""
    assert request.ranks is not None, "a searched mesh needs a number of ranks"
    tensors = (graph.tensors[name] for name in graph.parameters.values())
    numbers = sum(graph.layer_count.get(each.name, 1) * math.prod(each.shape) for each in tensors)
    return request.ranks <= _FEW_RANKS and numbers <= _FEW_PARAMETERS and is_open(request.recipe)


def depths_of(graph: Graph, request: Request) -> tuple[Sequence[int], Sequence[int]]:
    """Numbers of pipeline ranks to try first, and those to try if no plan with the first ones fits.

    If the user names a recipe without a schedule, pipeline stages are tried only if nothing fits without them.
    Raises SearchError for a number that the user names and no mesh of these ranks can have.
    """
    assert request.ranks is not None, "a searched mesh needs a number of ranks"
    depths = [depth for depth in divisors(request.ranks) if depth <= blocks_of(graph)]
    if request.depths is not None:
        _refuse_depths([depth for depth in request.depths if depth not in depths], depths, request.ranks)
        return [depth for depth in depths if depth in request.depths], ()
    if request.chosen_schedule or request.chunks:
        return depths[1:] or depths, ()
    if not asks_for_no_stages(request) or is_open(request.inside):
        return depths, ()
    return depths[:1], depths[1:]


def asks_for_no_stages(request: Request) -> bool:
    """Whether nothing that the user asks for has to do with pipeline stages."""
    named = request.depths is not None or request.chosen_schedule or request.chunks
    return not named and PIPELINE_AXIS not in recipe_axes(request.recipe)


def _refuse_depths(asked: Sequence[int], known: Sequence[int], ranks: int) -> None:
    """Raises SearchError if numbers of stages were asked for that are not among those that are known."""
    if asked:
        able = " or ".join(map(str, known))
        raise SearchError(
            f"stages={', '.join(map(str, asked))}: with {counted(ranks, 'rank')} this model can have {able} stages, "
            "numbers that divide the ranks and give each stage at least one block."
        )


def blocks_of(graph: Graph) -> int:
    """Number of blocks of the model; a stage has at least one."""
    return len(block_starts(graph)) if has_blocks(graph) else 1


def space_of(graph: Graph, request: Request, rows: int) -> SettingEstimator:
    """The space of settings of a model on the ranks of a request, for a step of `rows` samples."""
    assert request.ranks is not None, "a searched mesh needs a number of ranks"
    again = [r for r in recomputations(request) if not isinstance(r, float)] or ["none", "full"]
    first, if_none_fits = depths_of(graph, request)
    return SettingEstimator(
        graph,
        cluster_of(request.hardware, request.ranks),
        rows,
        request.training_state,
        request.software,
        stages=(*first, *if_none_fits),
        recomputes=tuple(again) if graph.stacks else ("none",),
        pins=request.pins,
        own_batch=not request.cuts_batch,
        asked_count=request.chosen_micro_batches,
        shares_sequences=request.leaves_axes_open,
    )


def cluster_of(hardware: Hardware, ranks: int) -> Cluster:
    """The nodes that hold this many ranks."""
    node = math.gcd(ranks, hardware.devices_per_node)
    return Cluster(replace(hardware, devices_per_node=node), ranks // node)


def closed_forms(space: SettingEstimator, request: Request) -> tuple[PricedCandidate, ...]:
    """Estimates of all settings that a request allows, fastest first. Raises AutoparError if there are none."""
    found = tuple(allowed(space, request))
    if not found:
        raise SearchError(
            f"None is left of the {len(_every(space, request))} ways to lay the model on {space.cluster}: "
            + ruled_out(request, "all of them")
        )
    return found


def allowed(space: SettingEstimator, request: Request) -> list[PricedCandidate]:
    """Estimates of all settings that a request allows, fastest first. Raises AutoparError if the space is empty."""
    node = request.hardware.devices_per_node
    return [each for each in _every(space, request) if allows(request, each.setting, node)]


def _every(space: SettingEstimator, request: Request) -> list[PricedCandidate]:
    """Estimates of all settings of a space, fastest first."""
    priced = space.price()
    if {"none", "full"} <= {*space.recomputes}:  # then also numbers of blocks between them
        kept = [each for each in priced if each.setting.recompute == "none"]
        priced += space.with_fewest_blocks(kept, request.bound_bytes)
        priced += beside_host(space, kept, request)
        priced.sort(key=lambda each: (each.seconds, each.setting.name))
    return priced


def beside_host(space: SettingEstimator, priced: Sequence[PricedCandidate], request: Request) -> list[PricedCandidate]:
    """Settings that need the host, with the fewest recomputed layers with which it can store the rest."""
    host = request.hardware.host if request.offload else None
    if host is None or not {"none", "full"} <= {*space.recomputes}:
        return []
    return space.with_fewest_blocks(priced, request.bound_bytes, host.memory_bytes)


def promising(settings: Sequence[PricedCandidate], request: Request, blocks: int) -> Iterator[Trial]:
    """Settings in the order in which they are searched. Every mesh occurs with at most `_SAME_MESH` micro-batches.

    First come those whose estimated memory fits, by the mean of estimate and promise: the best promises alone would
    all be pipelines of many ranks and few micro-batches, which seldom keep them. Then come the others, least memory
    first. Where the host may store what does not fit, settings that do not fit are not put last: they come by their
    estimated seconds and those of the host.
    """

    def order(each: PricedCandidate) -> tuple[bool, float, str]:
        moved = moved_seconds(each, request)
        if moved == 0:
            return False, (each.seconds + promise(each)) / 2, each.setting.name
        is_lost = math.isinf(moved)
        return is_lost, each.memory_bytes if is_lost else each.seconds + moved, each.setting.name

    def promise(each: PricedCandidate) -> float:
        """The estimate with the smallest bubble of a searched number of chunks; see `_least_bubble`."""
        moved = moved_seconds(each, request)
        hidden = 1 - _least_bubble(each, blocks, halves=request.splits_backward)
        seconds = each.seconds - hidden * each.parts.get("bubble", 0.0)
        return seconds if math.isinf(moved) else seconds + moved

    counts: dict[Mesh, set[int]] = {}
    for each in sorted(settings, key=order):
        mesh, count = each.setting.world_mesh, each.setting.micro_batches
        known = counts.setdefault(mesh, set())
        if count not in known and len(known) < _SAME_MESH:
            known.add(count)
            yield Trial(mesh, count, each.setting.recipe, promise(each), each)


def _least_bubble(each: PricedCandidate, blocks: int, *, halves: bool) -> float:
    """The least bubble of any searched number of chunks, as a part of the estimate's.

    With v chunks it is 1/v of the estimate's (p - 1) w, where a rank takes w for a micro-batch and there are p ranks.
    But no micro-batch passes all stages in less than p w, of which m w are busy with m micro-batches: p - m of the
    p - 1 remain, however many chunks there are. Of a backward in halves a stage passes on the first before it runs the
    second, which takes a third of w: then p w - (p - 1) w / 3 pass.

    Args:
        each: the setting with its estimate.
        blocks: number of blocks of the model.
        halves: whether schedules may run a backward in two halves.
    """
    ranks, count = depth_of(each.setting.world_mesh), each.setting.micro_batches
    if ranks == 1:
        return 1.0
    chunks = max(searched_chunks(blocks, ranks), default=1)
    passing = ranks - (ranks - 1) / 3 if halves else ranks
    return max(1 / chunks, (passing - count) / (ranks - 1))


def moved_seconds(each: PricedCandidate, request: Request) -> float:
    """The least seconds of a step in which the host stores what a setting takes beyond the bound on memory.

    Each byte that is not on the device crosses the link to the host or is updated there, at least once per step. The
    result is 0 for a setting that fits, and infinite where the host must not or cannot store so much: beyond its memory
    for a rank, or beyond what of a stage can be there at all (`PricedCandidate.movable_bytes`).
    """
    excess_bytes, host = each.memory_bytes - request.bound_bytes, request.hardware.host
    if excess_bytes <= 0:
        return 0.0
    if not request.offload or host is None or excess_bytes > min(host.memory_bytes, each.movable_bytes):
        return math.inf
    return excess_bytes / max(host.bandwidth_bytes_per_second, host.update_bytes_per_second)


def is_tight(known: tuple[Trial, Planned] | None, request: Request) -> bool:
    """Whether the bound on memory is likely to have ruled out a faster plan than the best known one."""
    if known is None:
        return True
    plan, bytes_ = known[1].plan, known[1].price.peak_bytes
    gives_way = plan.recompute != "none" or bool(plan.saved)
    return gives_way or depth_of(known[0].mesh) * bytes_ > _FULL * request.bound_bytes


def depth_of(mesh: Mesh) -> int:
    """Number of pipeline ranks of a mesh."""
    return dict(mesh.axes).get(PIPELINE_AXIS, 1)


def parts_of(mesh: Mesh) -> Parts:
    """Number of pipeline ranks, and sizes of the other axes of several ranks: meshes with equal ones differ in names.

    >>> parts_of(Mesh.parse("dp=4,tp=1")) == parts_of(Mesh.parse("dp=1,tp=4")) == (1, (4,))
    True
    """
    sizes = tuple(size for name, size in mesh.axes if size > 1 and name != PIPELINE_AXIS)
    return depth_of(mesh), sizes

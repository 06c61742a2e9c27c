"""The ways to store a parameter: every legal combination of storage, resident layout and reduction of gradients.

Along one axis they are the stages of ZeRO (Rajbhandari et al. 2020), see `autopar.ir.plan`:

    stage 0      storage R      resident V, or R if every use needs R
    stage 1, 2   storage S(d)   resident V or R; gradients reduced per step (1) or per micro-batch (2)
    stage 3      storage S(d)   resident S(d): gathered around each use, or used in shards
    owned        storage O(i)   resident V or R; gradients reduced per step. Only recipes ask for it, with `O(*)` if
                                `autopar.search.exact.owners` is to choose the owners

A parameter may be stored on the device or on the host (`autopar.ir.tier`). If it is stored on the host, its gradient
may be moved there after each micro-batch, with any ZeRO stage.

S(d) splits the major factor of dim d. If the axis size divides the whole dim but not this factor, the state is S(d.*),
and so it is of every dim of several factors if the axis divides none. A dim of one factor is in S(d), whether the axis
divides it or not: ranks hold the parts of `torch.chunk`. S(d.*), and S(d) of different sizes, are never combined with
another split of the same dim. An inner factor is split only if earlier axes split the factors before it into parts
of size 1, so that every part is a nested shard of DTensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.errors import RecipeError
from autopar.ir import (
    TIERS,
    WHOLE,
    Mesh,
    O,
    ParameterPlan,
    R,
    S,
    State,
    Tensor,
    Tier,
    TieredLayout,
    V,
    is_storable,
    lies_in_chunks,
)
from autopar.ir.parameter_plan import Reduction
from autopar.search.request.pins import AxisStates
from autopar.search.request.recipe_rows import ON_DEVICE, Recipe, Tiering


class Strategy(NamedTuple):
    """A way to store a parameter, with its price.

    Attributes:
        plan: layouts of the parameter and reduction of its gradient.
        seconds: seconds that one parameter adds to a step.
        bytes: memory of one parameter, its gradient and its optimizer states on a rank's device.
    """

    plan: ParameterPlan
    seconds: float
    bytes: float


Select = Callable[[Sequence[Strategy]], list[Strategy]]  # picks the best ways, as `fastest` and `pareto` do


class _AxisOption(NamedTuple):
    storage: State
    resident: State
    stages: tuple[int, ...]
    falls_back: bool  # whether it is stage 0 although the recipe asks for shards


def storable(
    tensor: Tensor,
    name: str,
    recipes: Sequence[Recipe],
    pinned: AxisStates,
    mesh: Mesh,
    *,
    tiers: Sequence[Tiering] = (ON_DEVICE,),
) -> tuple[ParameterPlan, ...]:
    """The ways to store a parameter that the recipes and pins allow.

    `tiers` are those in which the parameter may be stored if no recipe names a tier. Raises RecipeError if the recipes
    and pins allow no way.
    """
    plans = tuple(
        each
        for plan in _plans(tensor, recipes, dict(pinned), mesh)
        for each_tier in tiers_of(recipes) or tiers
        for each in _stored_in(*each_tier, plan)
    )
    if not plans:
        asked = ", ".join(f"{state}@{mesh.names[axis]}" for axis, state in pinned)
        names = ", ".join(f"{axis}:{row.name}" for axis, row in zip(mesh.names, recipes, strict=True))
        raise RecipeError(
            f"Parameter {name} of shape {tensor.shape} is pinned to {asked}, but the recipe "
            f"{names} on the mesh {mesh} leaves no such storage."
        )
    return plans


def strategies(plans: Iterable[ParameterPlan], price: Callable[[ParameterPlan], Strategy]) -> tuple[Strategy, ...]:
    """The ways to store a parameter with their prices, without those that are worse in every respect.

    For each resident layout and tier the result has the fastest way, and slower ways that take fewer bytes.
    """
    by_resident: dict[TieredLayout, list[Strategy]] = {}
    for plan in plans:
        by_resident.setdefault(plan.in_use, []).append(price(plan))
    best = [each for alike in by_resident.values() for each in (*fastest(alike), *pareto(alike))]
    return tuple(dict.fromkeys(best))


def tiers_of(recipes: Sequence[Recipe]) -> tuple[Tiering, ...]:
    """The tiers that the recipes ask for: those of the axis that asks for the farthest one; () if none asks."""
    asked = [Tiering(row.tier, row.resident_tier) for row in recipes if row.tier != "device"]
    farthest = [[TIERS.index(tier) for tier in (each.resident, each.stored)] for each in asked]
    return (asked[farthest.index(max(farthest))],) if asked else ()


def _stored_in(tier: Tier, resident: Tier, plan: ParameterPlan) -> Iterator[ParameterPlan]:
    """Yields the plan with its storage in a tier; outside the device also with gradients reduced per micro-batch.

    During a step the parameter stays in the tier `resident` if its resident layout equals its storage. Another resident
    layout is on the device.
    """
    used: Tier = resident if plan.storage == plan.resident else "device"
    yield replace(plan, tier=tier, resident_tier=used)
    if tier != "device" and plan.reduce == "step":
        yield replace(plan, tier=tier, resident_tier=used, reduce="micro_batch")


def _plans(tensor: Tensor, recipes: Sequence[Recipe], pinned: dict[int, State], mesh: Mesh) -> Iterator[ParameterPlan]:
    has_owners = any(recipe.owner is not None for recipe in recipes)
    per_axis = [
        _axis_options(tensor, recipe, size, pinned.get(axis), mesh.sizes[:axis], has_owners)
        for axis, (recipe, size) in enumerate(zip(recipes, mesh.sizes, strict=True))
    ]
    combined = [options for options in itertools.product(*per_axis) if _legal(options, tensor, mesh)]
    fewest = min((_fallbacks(options) for options in combined), default=0)
    for options in combined:
        if _fallbacks(options) == fewest:
            storage = tuple(option.storage for option in options)
            resident = tuple(option.resident for option in options)
            for reduce in _reductions(options):
                yield ParameterPlan(storage, resident, reduce)


def _fallbacks(options: Sequence[_AxisOption]) -> int:
    return sum(option.falls_back for option in options)


def _legal(options: Sequence[_AxisOption], tensor: Tensor, mesh: Mesh) -> bool:
    storage = tuple(option.storage for option in options)
    return is_storable(tensor.dims, storage, mesh) and lies_in_chunks(tensor.dims, storage, mesh)


def _reductions(options: Sequence[_AxisOption]) -> Iterator[Reduction]:
    """When gradients may be reduced, per step or per micro-batch: all axes with a sharded storage must allow it."""
    sharded = [set(o.stages) for o in options if o.storage.kind in "SO" and o.storage != o.resident]
    agreed = set.intersection(*sharded) if sharded else {1}
    if 1 in agreed:
        yield "step"
    if 2 in agreed:
        yield "micro_batch"


def _axis_options(
    tensor: Tensor, recipe: Recipe, size: int, pinned: State | None, earlier: Sequence[int], has_owners: bool
) -> list[_AxisOption]:
    shards = [*_shards(tensor, size), *_inner_shards(tensor, size, earlier)]
    if not has_owners and size > 1:  # an owner has the whole of a dim
        shards += _uneven_shards(tensor, size, is_last_resort=not shards)
    if recipe.owner is not None:
        shards = _owned(tensor, size, recipe.owner)
    sharded = tuple(stage for stage in recipe.stages if stage in (1, 2))
    options = []
    if 0 in recipe.stages or pinned is None:
        falls_back = 0 not in recipe.stages
        options += [_AxisOption(R, resident, (0,), falls_back) for resident in (R, V)]
    for shard in shards:
        if sharded:
            options += [_AxisOption(shard, resident, sharded, False) for resident in (R, V)]
        if 3 in recipe.stages:
            options.append(_AxisOption(shard, shard, (3,), False))
    return [option for option in options if pinned in (None, option.storage)]


def _owned(tensor: Tensor, size: int, owner: int) -> list[State]:
    """The state O of a parameter; none for a scalar, which every rank stores."""
    return [O(owner)] if size > 1 and tensor.dims else []


def _shards(tensor: Tensor, size: int) -> list[State]:
    """The states S(d) and S(d.*) of parts of one size in which a parameter can be stored along an axis."""
    if size == 1:
        return []
    found = []
    for dim, factors in enumerate(tensor.dims):
        if factors and factors[0] % size == 0:
            found.append(S(dim))
        elif math.prod(factors) % size == 0:
            found.append(S(dim, WHOLE))
    return found


def _uneven_shards(tensor: Tensor, size: int, *, is_last_resort: bool) -> Iterator[State]:
    """The states of parts of different sizes; if a parameter can be stored in others, those that ops can take."""
    for dim, factors in enumerate(tensor.dims):
        length = math.prod(factors)
        if length % size and length > 1:
            if len(factors) == 1 and (is_last_resort or length > size):
                yield S(dim)
            elif is_last_resort:
                yield S(dim, WHOLE)


def _inner_shards(tensor: Tensor, size: int, earlier: Sequence[int]) -> Iterator[State]:
    """The splits of inner factors that are possible if earlier axes split all factors before them to size 1."""
    for dim, factors in enumerate(tensor.dims):
        for factor in range(1, len(factors)):
            outer = math.prod(factors[:factor])
            if size > 1 and factors[factor] % size == 0 and math.prod(earlier) % outer == 0:
                yield S(dim, factor)


def pareto(found: Sequence[Strategy]) -> list[Strategy]:
    """The ways for which no other takes at most as many seconds and at most as many bytes, fastest first."""
    kept: list[Strategy] = []
    for strategy in sorted(found, key=lambda each: (_rounded(each.seconds), each.bytes)):
        if not kept or strategy.bytes < kept[-1].bytes:
            kept.append(strategy)
    return kept


def fastest(found: Sequence[Strategy]) -> list[Strategy]:
    """The fastest way to store a parameter; of equally fast ones, the one with the fewest sharded axes."""

    def key(strategy: Strategy) -> tuple[float, int]:
        shards = sum(state.kind == "S" for state in strategy.plan.storage)
        return _rounded(strategy.seconds), shards

    return [min(found, key=key)] if found else []


def _rounded(seconds: float) -> float:
    """Seconds rounded to twelve digits, so that the order of a sum does not decide between equal ways."""
    return float(f"{seconds:.11e}")

"""The ways a parameter can lie on the mesh: every legal (storage, resident, reduction).

Along one axis these are the stages of ZeRO (Rajbhandari et al. 2020), see `autopar.ir.plan`:

    stage 0      storage R      resident V, or R where every use is R
    stage 1, 2   storage S(d)   the same; gradients reduced per step (1) or per micro-batch (2)
    stage 3      storage S(d)   resident S(d): gathered around each use, or used as it is
    owned        storage O(i)   resident V or R; gradients reduced per step. By recipe alone: `O(*)` where
                                `autopar.search.owners` is to spread parameters over the axis

Each may be stored on the device or on the host (`autopar.ir.tier`). On the host gradients of every ZeRO stage may
also leave the device after each micro-batch.

S(d) splits the major factor of dim d, as DTensor does; where the axis does not divide that but
divides the whole dim, it is S(d.*). The same dim is never split by S(d.*) and by something else. An inner
factor is split where earlier axes split those before it to the end, as two nested shards of DTensor do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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
    divides,
    lies_in_chunks,
)
from autopar.ir.plan import Reduction
from autopar.search.pins import AxisStates
from autopar.search.recipes import ON_DEVICE, Recipe, Tiering


class Strategy(NamedTuple):
    """A way to keep a parameter, with its price.

    Attributes:
        plan: layouts of the parameter and reduction of its gradient.
        seconds: what one parameter adds to a step.
        bytes: memory of one parameter, its gradient and its optimizer states on a rank's device.
    """

    plan: ParameterPlan
    seconds: float
    bytes: float


class _AxisOption(NamedTuple):
    storage: State
    resident: State
    stages: tuple[int, ...]
    falls_back: bool  # stage 0 where the recipe asks for more, but no dim divides


def strategies(
    tensor: Tensor,
    name: str,
    recipes: Sequence[Recipe],
    pinned: AxisStates,
    mesh: Mesh,
    price: Callable[[ParameterPlan], Strategy],
    *,
    tiers: Sequence[Tiering] = (ON_DEVICE,),
) -> tuple[Strategy, ...]:
    """The strategies that the recipes and pins leave and that are the best of some kind.

    Of those that are resident in the same place, which serve the same uses, only the fastest is kept, and
    what saves bytes for more seconds. The tiers are those of parameters that no recipe
    has tiers for. Raises RecipeError where recipes and pins leave nothing.
    """
    plans = [
        each
        for plan in _plans(tensor, recipes, dict(pinned), mesh)
        for each_tier in tiers_of(recipes) or tiers
        for each in _stored_in(*each_tier, plan)
    ]
    if not plans:
        asked = ", ".join(f"{state}@{mesh.names[axis]}" for axis, state in pinned)
        names = ", ".join(
            f"{axis}:{row.name}" for axis, row in zip(mesh.names, recipes, strict=True)
        )
        raise RecipeError(
            f"Parameter {name} of shape {tensor.shape} is pinned to {asked}, and the recipe "
            f"{names} on the mesh {mesh} leaves no such storage."
        )
    by_resident: dict[TieredLayout, list[Strategy]] = {}
    for plan in plans:
        by_resident.setdefault(plan.in_use, []).append(price(plan))
    best = [each for alike in by_resident.values() for each in (*fastest(alike), *pareto(alike))]
    return tuple(dict.fromkeys(best))


def tiers_of(recipes: Sequence[Recipe]) -> tuple[Tiering, ...]:
    """The tiers that the recipes ask for, those of the axis that asks for the farthest; none where none does."""
    asked = [Tiering(row.tier, row.resident_tier) for row in recipes if row.tier != "device"]
    farthest = [[TIERS.index(tier) for tier in (each.resident, each.stored)] for each in asked]
    return (asked[farthest.index(max(farthest))],) if asked else ()


def _stored_in(tier: Tier, resident: Tier, plan: ParameterPlan) -> Iterator[ParameterPlan]:
    """The plan in a tier; a gradient may leave the device after every micro-batch, also where nothing is sharded.

    A parameter stays there during a step if its resident layout is that of its storage; another is made on the device.
    """
    used: Tier = resident if plan.storage == plan.resident else "device"
    yield replace(plan, tier=tier, resident_tier=used)
    if tier != "device" and plan.reduce == "step":
        yield replace(plan, tier=tier, resident_tier=used, reduce="micro_batch")


def _plans(
    tensor: Tensor, recipes: Sequence[Recipe], pinned: dict[int, State], mesh: Mesh
) -> Iterator[ParameterPlan]:
    per_axis = [
        _axis_options(tensor, recipe, size, pinned.get(axis), mesh.sizes[:axis])
        for axis, (recipe, size) in enumerate(zip(recipes, mesh.sizes, strict=True))
    ]
    combined = [
        options for options in itertools.product(*per_axis) if _legal(options, tensor, mesh)
    ]
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
    return divides(tensor.dims, storage, mesh) and lies_in_chunks(tensor.dims, storage, mesh)


def _reductions(options: Sequence[_AxisOption]) -> Iterator[Reduction]:
    """When gradients are reduced: what every axis that stores less than is resident agrees to."""
    sharded = [set(o.stages) for o in options if o.storage.kind in "SO" and o.storage != o.resident]
    agreed = set.intersection(*sharded) if sharded else {1}
    if 1 in agreed:
        yield "step"
    if 2 in agreed:
        yield "micro_batch"


def _axis_options(
    tensor: Tensor, recipe: Recipe, size: int, pinned: State | None, earlier: Sequence[int]
) -> list[_AxisOption]:
    shards = [*_shards(tensor, size), *_inner_shards(tensor, size, earlier)]
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
    """The state of a parameter on its owner; a single number is stored on every rank."""
    return [O(owner)] if size > 1 and tensor.dims else []


def _shards(tensor: Tensor, size: int) -> list[State]:
    """The split states that a parameter can be stored in along an axis of this size."""
    if size == 1:
        return []
    found = []
    for dim, factors in enumerate(tensor.dims):
        if factors and factors[0] % size == 0:
            found.append(S(dim))
        elif math.prod(factors) % size == 0:
            found.append(S(dim, WHOLE))
    return found


def _inner_shards(tensor: Tensor, size: int, earlier: Sequence[int]) -> Iterator[State]:
    """The splits of inner factors that may lie in chunks: earlier axes could split what is before to the end."""
    for dim, factors in enumerate(tensor.dims):
        for factor in range(1, len(factors)):
            outer = math.prod(factors[:factor])
            if size > 1 and factors[factor] % size == 0 and math.prod(earlier) % outer == 0:
                yield S(dim, factor)


def pareto(found: Sequence[Strategy]) -> list[Strategy]:
    """The strategies that no other beats or equals in both seconds and bytes, fastest first."""
    kept: list[Strategy] = []
    for strategy in sorted(found, key=lambda each: (_rounded(each.seconds), each.bytes)):
        if not kept or strategy.bytes < kept[-1].bytes:
            kept.append(strategy)
    return kept


def fastest(found: Sequence[Strategy]) -> list[Strategy]:
    """The fastest strategy; of equally fast ones that which shards least."""

    def key(strategy: Strategy) -> tuple[float, int]:
        shards = sum(state.kind == "S" for state in strategy.plan.storage)
        return _rounded(strategy.seconds), shards

    return [min(found, key=key)] if found else []


def _rounded(seconds: float) -> float:
    """Seconds to twelve digits: sums in another order must not decide between equals."""
    return float(f"{seconds:.11e}")

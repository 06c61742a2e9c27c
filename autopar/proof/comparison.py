"""Errors of every tensor of a step against a float64 reference: for simulated ranks, and for a single device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from autopar.ir import Plan
from autopar.ops.sharding import shard
from autopar.program.program import Program, TensorSpec
from autopar.proof.lockstep import Ranks
from autopar.proof.single_device import Results
from autopar.proof.verdict import TOLERANCE_FLOAT64, Kind, Verdict, nan_last, rounding_bound

# A gradient is a sum. Its terms may be as large as the largest gradient of the model and cancel (as for a bias before
# batch norm), and each is rounded by eps. The error of a small gradient is therefore measured relative to this share of
# the largest gradient: an error of 64 roundings of the largest (1.4e-14 of it) is within the tolerance.
_FLOOR = 64 * torch.finfo(torch.float64).eps / TOLERANCE_FLOAT64  # 1.4e-5
# The same holds for a buffer and the largest buffer of its module: a running mean may be only rounding errors.
_BUFFER_FLOOR = 0.1

Key = tuple[Kind, str]


@dataclass(frozen=True)
class PlanResults:
    """The results of one step on simulated ranks.

    Attributes:
        program: the program of the whole model.
        losses: loss of every rank of the last stage, the mean over the micro-batches.
        stored: parameter name -> its shards, which hold the gradients.
        buffers: buffer name -> value on every rank, for each buffer that the plan or the model updates.
    """

    program: Program
    losses: Ranks
    stored: Mapping[str, Ranks]
    buffers: Mapping[str, Ranks]


def plan_errors(plan: PlanResults, reference: Results) -> dict[Key, float]:
    """For every tensor, the largest absolute error of any of its entries on any rank."""
    errors: dict[Key, float] = {("loss", ""): largest_difference(plan.losses, reference.loss)}
    mesh = plan.program.plan.mesh
    for spec in plan.program.parameters:
        if spec.name in plan.program.frozen:
            continue
        expected = _gradient(reference, spec.name, plan.stored[spec.name][0], spec.shape)
        layout = plan.program.plan.parameters[spec.name].storage
        errors["gradient", spec.name] = max(
            (
                _difference(held_gradient(x), shard(expected, spec.dims, layout, mesh, rank))
                for rank, x in enumerate(plan.stored[spec.name])
            ),
            key=nan_last,
        )
    for name, ranks in plan.buffers.items():
        errors["buffer", name] = largest_difference(ranks, reference.buffers[name])
    return errors


def own_errors(samples: Sequence[Results], keys: Iterable[Key], reference: Results) -> dict[Key, float]:
    """The largest absolute error of an entry of every tensor, over several runs of a single device.

    A run in which other entries than in the reference are no numbers shows no rounding of a tensor, and does not count.
    """
    found = {key: [_difference(_value(x, key), _value(reference, key)) for x in samples] for key in keys}
    return {key: max(filter(math.isfinite, errors), default=0.0) for key, errors in found.items()}


def float64_verdicts(errors: Mapping[Key, float], reference: Results, step: int) -> list[Verdict]:
    """Verdicts on a run in float64: an error divided by the tensor's largest entry must stay below the tolerance."""
    scales = _scales(errors, reference)
    return [
        Verdict(kind, name, step, "float64", error, 0.0, TOLERANCE_FLOAT64 * scale, scale)
        for ((kind, name), error), scale in zip(errors.items(), scales.values(), strict=True)
    ]


def doubtful(verdicts: Iterable[Verdict], reference: Results) -> list[Verdict]:
    """Float64 verdicts of gradients that miss their bound, and are too small to tell from the rounding of addends.

    The true gradient of a bias before a batch norm is zero, and `_FLOOR` is a guess of what its addends are rounded by.
    """
    return [
        v
        for v in verdicts
        if not v.passed and v.kind == "gradient" and largest_entry(_value(reference, (v.kind, v.name))) < v.scale
    ]


def judged_by_rounding(verdicts: Sequence[Verdict], samples: Sequence[Results], reference: Results) -> list[Verdict]:
    """Float64 verdicts, of which doubtful ones have the bound of rounding where that is larger.

    Args:
        verdicts: verdicts on a step in float64.
        samples: runs of the single device in float64 whose last bits are drawn at random, see [Note: the bound of
            rounding] in `autopar.proof.verdict`.
        reference: results of a single device in float64.
    """
    doubted = doubtful(verdicts, reference)
    own = own_errors(samples, [(v.kind, v.name) for v in doubted], reference)
    return [_with_rounding(v, own, reference) if v in doubted else v for v in verdicts]


def _with_rounding(verdict: Verdict, own: Mapping[Key, float], reference: Results) -> Verdict:
    key = verdict.kind, verdict.name
    largest = largest_entry(_value(reference, key))
    bound = rounding_bound(own[key], unit_roundoff(torch.float64), largest)
    return replace(verdict, own=own[key], bound=max(verdict.bound, bound))


def rounding_verdicts(
    errors: Mapping[Key, float],
    own: Mapping[Key, float],
    reference: Results,
    dtypes: Mapping[Key, torch.dtype],
    arithmetic: str,
) -> list[Verdict]:
    """Verdicts on a run in the model's own dtypes: an error may be about as large as that of a single device.

    Args:
        errors: errors of the plan, by tensor.
        own: errors of a single device in the same arithmetic, by tensor.
        reference: results of a single device in float64.
        dtypes: dtype of every tensor, whose rounding enters the bound.
        arithmetic: name of the arithmetic, for the report.
    """
    scales = _scales(errors, reference)
    verdicts = []
    for key, error in errors.items():
        largest = largest_entry(_value(reference, key))
        bound = rounding_bound(own[key], unit_roundoff(dtypes[key]), largest)
        verdicts.append(Verdict(*key, 1, arithmetic, error, own[key], bound, scales[key]))
    return verdicts


def dtypes_of(plan: PlanResults) -> dict[Key, torch.dtype]:
    """The dtype of every compared tensor, as the ranks return it."""
    found: dict[Key, torch.dtype] = {("loss", ""): plan.losses[0].dtype}
    found |= {("gradient", name): ranks[0].dtype for name, ranks in plan.stored.items()}
    return found | {("buffer", name): ranks[0].dtype for name, ranks in plan.buffers.items()}


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest: 2**-24 for float32, 0.0 for integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def comparable(gradient: Tensor, largest: float) -> float:
    """The scale of a gradient's errors: its largest entry, but at least `_FLOOR` times `largest`.

    `largest` is the largest entry of all gradients.
    """
    return max(largest_entry(gradient), _FLOOR * largest)


def largest_entry(x: Tensor) -> float:
    """The largest absolute value of a finite entry; 0.0 without such."""
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _scales(keys: Iterable[Key], reference: Results) -> dict[Key, float]:
    found = [g for g in reference.gradients.values() if g is not None]
    largest = max(map(largest_entry, found), default=0.0)
    keys = list(keys)
    buffers = [name for kind, name in keys if kind == "buffer"]
    scales = {}
    for key in keys:
        kind, name = key
        scale = largest_entry(_value(reference, key))
        if kind == "gradient":
            scale = max(scale, _FLOOR * largest)
        elif kind == "buffer":
            scale = max(scale, _BUFFER_FLOOR * _largest_of_module(name, buffers, reference))
        scales[key] = scale or 1.0
    return scales


def _largest_of_module(name: str, updated: Iterable[str], reference: Results) -> float:
    """The largest entry of the updated floating-point buffers in the module of a buffer."""
    module = name.rpartition(".")[0]
    beside = [reference.buffers[other] for other in updated if other.rpartition(".")[0] == module]
    return max((largest_entry(x) for x in beside if x.is_floating_point()), default=0.0)


def _value(results: Results, key: Key) -> Tensor:
    kind, name = key
    if kind == "loss":
        return results.loss
    if kind == "buffer":
        return results.buffers[name]
    gradient = results.gradients[name]
    return torch.zeros(()) if gradient is None else gradient


def _gradient(results: Results, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A gradient; zeros for a parameter that the model does not use."""
    found = results.gradients[name]
    return like.new_zeros(shape) if found is None else found


def held_gradient(x: Tensor) -> Tensor:
    """The gradient that a shard holds; zeros where it holds none."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def largest_difference(ranks: Ranks, expected: Tensor) -> float:
    """The largest absolute error of an entry, on the worst rank; infinite for another shape."""
    return max((_difference(x, expected) for x in ranks), key=nan_last)


def _difference(value: Tensor, expected: Tensor) -> float:
    if value.shape != expected.shape:  # broadcasting would hide this error of a plan
        return float("inf")
    if torch.equal(value, expected):  # also where both are infinite
        return 0.0
    exact = torch.promote_types(expected.dtype, torch.float64)
    a, b = value.to(exact), expected.to(exact)
    apart = a - b
    apart[(a == b) | (a.isnan() & b.isnan())] = 0  # infinite, or no number, on both sides
    return apart.abs().max().item()


def whole_of_shards(spec: TensorSpec, shards: Sequence[Tensor], plan: Plan) -> Tensor:
    """A parameter's whole tensor, assembled from the stored shards of all ranks."""
    layout = plan.parameters[spec.name].storage
    places = torch.arange(torch.Size(spec.shape).numel()).view(spec.shape)
    whole = shards[0].new_empty(places.numel())
    for rank, own in enumerate(shards):
        whole[shard(places, spec.dims, layout, plan.mesh, rank).reshape(-1)] = own.reshape(-1)
    return whole.view(spec.shape)


def parameter_verdicts(found: Sequence[nn.Module], expected: Sequence[nn.Module], step: int) -> Iterator[Verdict]:
    """Verdicts on the parameters of models that a plan updated, compared with plain models."""
    for ours, plain in zip(found, expected, strict=True):
        own = dict(ours.named_parameters())
        for name, x in plain.named_parameters():
            scale = max(x.abs().max().item(), torch.finfo(torch.float64).tiny) if x.numel() else 1.0
            error = (own[name] - x).abs().max().item() if x.numel() else 0.0
            bound = TOLERANCE_FLOAT64 * scale
            yield Verdict("parameter", name, step, "float64", error, 0.0, bound, scale)

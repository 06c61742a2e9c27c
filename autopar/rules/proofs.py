"""Runs one captured call of an op on random tensors, whole and in parts, to find out what can be split."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar.ir import State
from autopar.rules.spec import Call
from autopar.rules.trial import Results, difference, on_parts

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex128: 1e-9, torch.complex64: 1e-4}
HALF_TOLERANCE = 3e-2
# Elements of all tensors of a call above which it is not run only to find out something.
MOST_ELEMENTS = 1 << 24


class Splitting(NamedTuple):
    """One choice of a rule: the states of all tensors, and the number of parts."""

    text: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    parts: int


def comparison(call: Call, splitting: Splitting, magnitude: float = 1.0) -> float:
    """The largest difference of results and gradients on parts from those on whole tensors, as `trial.difference`.

    Raises what the op raises on parts.
    """
    operands = examples(call.operands, magnitude)
    run = runner(call.node)
    split = on_parts(run, splitting.operands, splitting.results, splitting.parts)
    return difference(split, run, operands, _differentiable(run, operands, call.wanted))


def why_not_run(call: Call) -> str:
    """Why an op fails on random tensors of the captured shapes; "" if it runs."""
    try:
        runner(call.node)(*examples(call.operands))
    except Exception as fault:  # whatever a kernel raises where it is not built
        return f"{type(fault).__name__}: {fault}"
    return ""


def forked_randomness(call: Call) -> contextlib.AbstractContextManager[None]:
    """Context whose draws leave the random numbers of training as they are."""
    devices = {x.device.index or 0 for x in call.operands if x.device.type == "cuda"}
    return torch.random.fork_rng(devices=sorted(devices))


def key_of(call: Call) -> str:
    """A key that is equal for calls whose proofs are the same."""
    tensors = [(tuple(x.shape), x.dtype, x.device.type) for x in call.operands]
    others = fx.map_arg((call.node.args, call.node.kwargs), lambda _: None)
    return f"{call.node.target!r} {tensors} {others} {sorted(call.wanted)}"


def _differentiable(run: Any, operands: Sequence[Tensor], wanted: Iterable[int]) -> list[int]:
    """Positions whose gradient can be compared: none where the op has no backward, as in inference."""
    positions = sorted(i for i in wanted if operands[i].is_floating_point())
    try:
        difference(run, run, operands, positions)
    except (RuntimeError, NotImplementedError):
        return []
    return positions


def tolerance_of(call: Call) -> float:
    """The difference that rounding in the formats of a call explains."""
    tensors = [*call.operands, *call.results]
    return tolerance(t.dtype for t in tensors if t.is_floating_point() or t.is_complex())


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """The difference that rounding in some formats explains."""
    return max((_TOLERANCES.get(dtype, HALF_TOLERANCE) for dtype in dtypes), default=0.0)


def examples(operands: Sequence[Tensor], magnitude: float = 1.0) -> list[Tensor]:
    """Random tensors of the captured shapes; a model on the meta device is tried on the CPU."""
    generator = torch.Generator().manual_seed(0)
    found = [_example(x, generator) for x in operands]
    return [magnitude * x if x.is_floating_point() and magnitude != 1 else x for x in found]


def _example(x: Tensor, generator: torch.Generator) -> Tensor:
    device = "cpu" if x.device.type == "meta" else x.device
    if x.is_floating_point() or x.is_complex():
        wide = torch.complex128 if x.is_complex() else torch.float64
        return torch.randn(x.shape, dtype=wide, generator=generator).to(device, x.dtype)
    return torch.randint(2, x.shape, generator=generator).to(device, x.dtype)


def runner(node: fx.Node) -> Callable[..., Results]:
    """The op as a function of its tensor operands, with the call's other arguments."""

    def run(*operands: Tensor) -> Results:
        remaining = iter(operands)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(remaining))
        result: Any = node.target(*args, **kwargs)  # type: ignore[operator]
        return tuple(result) if isinstance(result, (list, tuple)) else (result,)

    return run


def can_be_tried(call: Call) -> bool:
    """Whether a call may run only to find out something: its sizes are known, and its tensors are small."""
    tensors = [*call.operands, *call.results]
    known = all(isinstance(size, int) for x in tensors for size in x.shape)
    return known and sum(x.numel() for x in tensors) <= MOST_ELEMENTS


def decomposes(node: fx.Node, parts: Callable[..., Any]) -> bool:
    """Whether the parts of an op give its results and gradients on random tensors; False if it cannot be tried."""
    call = Call(node)
    if not can_be_tried(call):
        return False
    operands = examples(call.operands)

    def of_parts(*tensors: Tensor) -> Results:
        result = parts(*tensors)
        return tuple(result) if isinstance(result, (list, tuple)) else (result,)

    run = runner(node)
    with forked_randomness(call):
        try:
            wanted = _differentiable(run, operands, call.wanted)
            return difference(of_parts, run, operands, wanted) <= tolerance_of(call)
        except Exception:  # the op does not run here
            return False

"""Random ops as functions of noise: one uniform number per logical element of what an op draws.

On ranks the generator gives other numbers than on a single device. In a proof a draw is therefore an input: a tensor of
uniform numbers in [0, 1), of the shape of what the op draws, lies on the ranks as the op's result does, and the op
computes its numbers from it, by the inverse of its distribution:

    dropout(x, p)       x * (u < 1 - p) / (1 - p)
    uniform(a, b)       a + (b - a) u
    exponential(rate)   -log(1 - u) / rate

Ops without a simple inverse (`poisson`, `multinomial`) run element by element, or row by row, with a generator that u
seeds. Numbers that all dtypes are to share have eight significant bits, so that a run in bfloat16 has those of float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar._torch import CPU, OpOverload, TorchDispatchMode, forked_random_state, schema
from autopar.ops.nodes import draws_numbers
from autopar.ops.random import drawn_call

Noise = Callable[[Sequence[int]], Tensor]  # shape of what an op draws -> uniform numbers in [0, 1)
_Named = Mapping[str, Any]  # the arguments of a call by their names

_BITS = 52 - 7  # of a float64's mantissa that bfloat16 does not have
_SEEDS = 2**53  # uniform numbers of float64
_LARGEST = 2**24  # bound of `random_()` without one: float32 has all whole numbers below it


class DrawsFrom(TorchDispatchMode):
    """Inside this mode random ops take their numbers from noise, not from the default generator.

    Args:
        noise: function that gives the noise of the next op that draws, for the shape of what it draws.
    """

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self._noise = noise

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.ops.autopar.keep_mask.default:
            x, _, p = args
            return self._noise(x.shape).to(x.device) < 1 - p
        if func is torch.ops.autopar.draw.default:
            func, args, given = drawn_call(*args, **given)
        if not draws_numbers(func, args, given):
            return func(*args, **given)
        return _drawn(func, args, given, self._noise)


def _drawn(func: OpOverload, args: Sequence[Any], kwargs: _Named, noise: Noise) -> Any:
    """The result of a random op with the numbers that noise gives it."""
    own: dict[str, Any] = {a.name: a.default_value for a in schema(func).arguments}
    own |= dict(zip(own, args, strict=False)) | dict(kwargs)
    name = func.overloadpacket.__name__.removesuffix("_")
    is_known = name in _NUMBERS.keys() | _ROW_DIMS.keys() | {"native_dropout", "rrelu_with_noise"}
    seed = 0 if is_known else int(noise(()) * _SEEDS)
    with forked_random_state([CPU], seed):
        made = func(*args, **kwargs)  # of a known op only the shape, dtype and place are used
    if not is_known:
        return made
    if name == "native_dropout":
        return _dropped(own["input"], own["p"], noise) if 0 < own["p"] < 1 else made
    u = noise(made.shape).to(made.device)
    if name == "rrelu_with_noise":
        slopes = own["lower"] + (own["upper"] - own["lower"]) * _coarse(u)
        own["noise"].copy_(torch.where(own["self"] <= 0, slopes, 1))
        return made.copy_(own["self"] * own["noise"])
    if name in _ROW_DIMS:
        return made.copy_(_by_rows(func, args, kwargs, made.shape, u))
    return made.copy_(_NUMBERS[name](u, own))


def _dropped(x: Tensor, p: float, noise: Noise) -> tuple[Tensor, Tensor]:
    mask = noise(x.shape).to(x.device) < 1 - p
    return x * mask * (1 / (1 - p)), mask


# --- distributions: noise and the arguments of an op -> its numbers


def _coarse(x: Tensor) -> Tensor:
    """Numbers rounded towards zero to the bits that bfloat16 has, in float64."""
    return (x.view(torch.int64) >> _BITS << _BITS).view(torch.float64)


def _normal(u: Tensor, own: _Named) -> Tensor:
    return own.get("mean", 0) + own.get("std", 1) * _coarse(torch.special.ndtri(u))


def _whole(u: Tensor, own: _Named, lowest: str, above: str) -> Tensor:
    """Whole numbers from `lowest` to below `above`, two names of arguments."""
    low, high = own.get(lowest) or 0, own.get(above)
    if high is None:
        high = _LARGEST
    return low + (u * (high - low)).floor()


def _bernoulli(u: Tensor, own: _Named) -> Tensor:
    p = own.get("p")
    return u < (own["self"] if p is None else p)


_NUMBERS: Mapping[str, Callable[[Tensor, _Named], Tensor]] = {
    "bernoulli": _bernoulli,
    "cauchy": lambda u, own: own["median"] + own["sigma"] * _coarse(torch.tan(math.pi * (u - 0.5))),
    "exponential": lambda u, own: _coarse(-torch.log1p(-u)) / own["lambd"],
    "geometric": lambda u, own: (torch.log1p(-u) / math.log1p(-own["p"])).ceil().clamp(min=1),
    "log_normal": lambda u, own: torch.exp(_normal(u, own)),
    "normal": _normal,
    "normal_functional": _normal,
    "rand": lambda u, own: _coarse(u),
    "rand_like": lambda u, own: _coarse(u),
    "randint": lambda u, own: _whole(u, own, "low", "high"),
    "randint_like": lambda u, own: _whole(u, own, "low", "high"),
    "randn": _normal,
    "randn_like": _normal,
    "random": lambda u, own: _whole(u, own, "from", "to"),
    "randperm": lambda u, own: u.argsort(),
    "uniform": lambda u, own: own["from"] + (own["to"] - own["from"]) * _coarse(u),
}

# Ops that draw every element, or every row of the last dim, by itself -> number of dims of a row.
_ROW_DIMS = {"poisson": 0, "binomial": 0, "_standard_gamma": 0, "_sample_dirichlet": 1, "multinomial": 1}


def _by_rows(func: OpOverload, args: Sequence[Any], kwargs: _Named, shape: Sequence[int], u: Tensor) -> Tensor:
    """The results of an op for every row of its operands, each with the generator that the row's noise seeds."""
    kept = _ROW_DIMS[func.overloadpacket.__name__]
    rows = shape[: len(shape) - kept]
    count = math.prod(rows)
    if not count:
        return u.new_empty(tuple(shape))  # a rank may have no rows of a batch
    operands = [
        x.expand(*rows, *x.shape[x.ndim - kept :]).reshape(count, *x.shape[x.ndim - kept :]).double()
        for x in args
        if isinstance(x, Tensor)
    ]
    others = [x for x in args if not isinstance(x, Tensor)]
    seeds = (u.reshape(count, -1)[:, 0] * _SEEDS).long().tolist()
    found = [
        func(*row, *others, **{**kwargs, "generator": torch.Generator().manual_seed(seed)})
        for seed, *row in zip(seeds, *operands, strict=True)
    ]
    return torch.stack(found).reshape(tuple(shape))


def drawn_shapes(call: Callable[[], object]) -> list[tuple[int, ...]]:
    """The shapes of a function's random draws, in order; the default generator is restored."""
    found: list[tuple[int, ...]] = []

    def note(shape: Sequence[int]) -> Tensor:
        found.append(tuple(shape))
        return torch.rand(tuple(shape), dtype=torch.float64)

    with forked_random_state([CPU]), DrawsFrom(note):
        call()
    return found


def example_of(value: Any) -> Any:
    """A tensor of ones in place of a tensor without values; anything else itself."""
    is_tensor = isinstance(value, Tensor)
    return torch.ones(value.shape, dtype=value.dtype) if is_tensor else value

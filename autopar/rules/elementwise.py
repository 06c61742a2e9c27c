"""Rules of point-wise ops: dims are aligned from the right, and every dim can be split.

PyTorch tags these ops (`torch.Tag.pointwise`), so this module does not list them. It lists those through which a
partial sum may pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.rules.spec import Call, Dim, Letters, Spec, aten_ops

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


def _together(call: Call) -> tuple[frozenset[int], ...]:
    """add(P, P), if all addends are tensors."""
    return (frozenset(range(len(call.operands))),) if len(call.operands) == 2 else ()


def _each(call: Call) -> tuple[frozenset[int], ...]:
    """mul(P, V) and mul(V, P)."""
    return tuple(frozenset({i}) for i in range(len(call.operands)))


def _first(call: Call) -> tuple[frozenset[int], ...]:
    """neg(P), div(P, V)."""
    rounds = call.arguments.get("rounding_mode") is not None
    return () if rounds else (frozenset({0}),)


def _branches(call: Call) -> tuple[frozenset[int], ...]:
    """where(V, P, P)."""
    return (frozenset({1, 2}),) if len(call.operands) == 3 else ()


LINEAR: dict[str, Callable[[Call], tuple[frozenset[int], ...]]] = {
    "aten.add": _together,
    "aten.sub": _together,
    "aten.mul": _each,
    "aten.div": _first,
    "aten.neg": _first,
    "aten.where": _branches,
    "aten.clone": _first,
    "aten.alias": _first,
    "aten.detach": _first,
    "aten._to_copy": _first,
    "aten.type_as": _first,
}


def aligned(shape: torch.Size, rank: int) -> Letters:
    """Letters of a tensor that is broadcast to `rank` dims; the last dim is `d0`."""
    letters: list[Dim] = []
    for position, size in enumerate(shape):
        letters.append((f"d{len(shape) - 1 - position}",) if size > 1 else ())
    assert len(shape) <= rank
    return tuple(letters)


def _is_same_type(call: Call) -> bool:
    return call.operands[0].dtype is call.results[0].dtype


def elementwise(call: Call) -> Spec:
    """Rule of all point-wise ops."""
    name = str(call.node.target).rsplit(".", 1)[0]
    rank = max((t.ndim for t in [*call.operands, *call.results]), default=0)
    operands = tuple(aligned(t.shape, rank) for t in call.operands)
    results = tuple(aligned(t.shape, rank) for t in call.results)
    sizes = {
        dim[0]: size
        for letters, tensor in zip(results, call.results, strict=True)
        for dim, size in zip(letters, tensor.shape, strict=True)
        if dim
    }
    floating = all(t.dtype in FLOATING for t in call.results)
    linear = LINEAR.get(name, lambda _: ())(call) if floating else ()
    spec = Spec(operands, results, sizes)
    return Spec(
        operands,
        results,
        sizes,
        linear=linear,
        flops=spec.points,
        is_view=name in ("aten.alias", "aten.detach") or (name == "aten.type_as" and _is_same_type(call)),
    )


# Point-wise ops that PyTorch 2.13 does not tag.
RULES = dict.fromkeys(LINEAR, elementwise) | aten_ops(
    elementwise,
    """
    __and__ __or__ __xor__ __lshift__ __rshift__ ones_like zeros_like full_like empty_like fill rsub masked_fill
    floor_divide complex polar imag real conj _conj resolve_conj resolve_neg isclose isreal hardswish log_sigmoid
    lift_fresh_copy alias_copy contiguous to float_power absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh
    clip divide fix greater greater_equal less less_equal multiply negative not_equal subtract true_divide
    special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit special_expm1 special_gammainc
    special_gammaincc special_gammaln special_i0 special_log1p special_logit special_multigammaln special_ndtr
    special_polygamma special_psi special_round special_sinc special_xlogy softsign tanhshrink
    """,
)

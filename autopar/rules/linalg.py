"""Rules of linear algebra and Fourier transforms: matrices stay whole, and leading dims are a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from autopar.rules.notation import line, spec_of
from autopar.rules.reduce import whole_reduction
from autopar.rules.shape import along
from autopar.rules.spec import Call, Local, RuleDoesNotApply, Spec, aten_ops, needs_a_row

Rule = Callable[[Call], Spec]


def batched(text: str) -> Rule:
    """Rule of an op on matrices that one line describes. Its FLOPs are estimated as n multiply-adds per element."""

    def rule(call: Call) -> Spec:
        if any(t.ndim < 2 for t in call.operands[:1]):
            raise RuleDoesNotApply("a vector")
        if len(call.operands) > text.partition("->")[0].count(",") + 1:
            raise RuleDoesNotApply("a tolerance that is a tensor")
        spec = spec_of(text, call)
        x = call.operands[0]
        return replace(spec, flops=2 * x.numel() * min(x.shape[-2:]))

    return rule


def solve(call: Call) -> Spec:
    """linalg_solve and the like: `a x = b`, where b is a matrix or a vector."""
    a, b = call.operands
    if call.arguments.get("left") is False or b.ndim not in (a.ndim, a.ndim - 1):
        raise RuleDoesNotApply("x a = b, or a right side that is broadcast")
    if b.ndim < a.ndim:
        if b.shape != a.shape[:-1]:
            raise RuleDoesNotApply("a matrix of right sides that is broadcast")
        return batched("b.. n! n!, b.. n! -> b.. n!")(call)
    return batched("b.. n! n!, b.. n! r -> b.. n! r")(call)


def solve_factored(call: Call) -> Spec:
    """cholesky_solve, lu_solve: the right-hand side is the first operand."""
    b, a = call.operands[:2]
    if b.ndim != a.ndim:
        raise RuleDoesNotApply("a vector as right-hand side")
    return batched("b.. n! r, b.. n! n!, b.. n! -> b.. n! r")(call)


def solve_by_factors(call: Call) -> Spec:
    """linalg_lu_solve, linalg_ldl_solve: the right-hand side is the last operand, and its columns can be split."""
    if len({t.ndim for t in (call.operands[0], call.operands[2])}) > 1:
        raise RuleDoesNotApply("a right side that is broadcast")
    if call.arguments.get("left") is False:
        return batched("b.. n! n!, b.. n!, b.. r n! -> b.. r n!")(call)
    return batched("b.. n! n!, b.. n!, b.. n! r -> b.. n! r")(call)


@needs_a_row
def of_time(call: Call) -> Spec:
    """stft, istft: signals can be split; frames, frequencies, the window and the parts of a number cannot."""
    x, y = (t.ndim - 1 for t in (call.operands[0], call.results[0]))
    if min(x, y) < 1 or max(x, y) < 2:
        raise RuleDoesNotApply("one signal")
    of_x, of_y = (" ".join(f"{tag}{d}!" for d in range(n)) for tag, n in (("x", x), ("y", y)))
    spec = spec_of(f"b {of_x}, w! -> b {of_y} | linear 0", call)
    elements = max(call.operands[0].numel(), call.results[0].numel())
    return replace(spec, flops=5 * elements * math.ceil(math.log2(call["n_fft"] + 1)))


def _powers_locally(local: Local) -> fx.Node:
    """linalg_vander with its number of powers, which it would take from this rank's part."""
    return local.emit(local.node.target, *local.args, N=local.result_shapes[0][-1])


def matrix_norm(call: Call) -> Spec:
    """linalg_matrix_norm: both dims stay whole."""
    return whole_reduction(call)


def _transformed(call: Call) -> Sequence[int]:
    """Dims of a Fourier transform: `dim`; without it the last dims, one for each size; without sizes all."""
    if call["dim"] is not None:
        return call.dims(call["dim"])
    lengths = call.arguments.get("s")
    rank = call.operands[0].ndim
    return range(rank - len(lengths) if lengths is not None else 0, rank)


@needs_a_row
def transform(call: Call) -> Spec:
    """fft: transformed dims stay whole, 5 n log n operations (the usual count of radix 2)."""
    spec = along(_transformed)(call)
    points = math.prod(call.operands[0].shape[d] for d in _transformed(call))
    elements = max(call.operands[0].numel(), call.results[0].numel())
    return replace(spec, flops=5 * elements * math.ceil(math.log2(max(points, 2))))


def _rows(text: str, names: str) -> dict[str, Rule]:
    return aten_ops(batched(text), names)


RULES: dict[str, Rule] = {
    **_rows(
        "b.. n! m! -> b.. n! m!",
        """
        cholesky linalg_cholesky linalg_inv inverse matrix_exp linalg_matrix_exp linalg_matrix_power matrix_power
        cholesky_inverse
    """,
    ),
    **_rows("b.. n! m! -> b.. p! q!", "linalg_pinv pinverse"),
    **_rows("b.. n! m! -> b.. p!", "linalg_svdvals linalg_eigvals linalg_eigvalsh"),
    **_rows("b.. n! m! -> b..", "linalg_det det logdet linalg_matrix_rank linalg_cond"),
    **_rows("b.. n! m! -> b.., b..", "linalg_slogdet slogdet"),
    **_rows("b.. n! m! -> b.. p!, b.. q! r!", "linalg_eigh linalg_eig"),
    **_rows("b.. n! m! -> b.. p! q!, b.. r! s!", "linalg_qr qr"),
    **_rows("b.. n! m! -> b.. p! q!, b.. r!, b.. s! t!", "linalg_svd svd"),
    **_rows("b.. n! m!, b.. k! -> b.. p! q!, b.. r! s!, b.. t! u!", "lu_unpack"),
    **_rows("b.. n! r, b.. n! n! -> b.. n! r, b.. n! n!", "triangular_solve"),
    **_rows("b.. n! m! -> b.. n! m!, b..", "linalg_cholesky_ex linalg_inv_ex"),
    **_rows("b.. n! m! -> b.. n! m!, b.. p!", "linalg_lu_factor linalg_ldl_factor geqrf"),
    **_rows("b.. n! m! -> b.. n! m!, b.. p!, b..", "linalg_lu_factor_ex linalg_ldl_factor_ex"),
    **_rows("b.. n! m! -> b.. p! q!, b.. r! s!, b.. t! u!", "linalg_lu"),
    **_rows("b.. n! m!, b.. k! -> b.. n! p!", "linalg_householder_product"),
    "aten.linalg_solve": solve,
    "aten.linalg_lu_solve": solve_by_factors,
    "aten.linalg_ldl_solve": solve_by_factors,
    "aten.linalg_vander": line("b.. -> b.. m!", localize=_powers_locally),
    "aten.stft": of_time,
    "aten.istft": of_time,
    "aten.linalg_solve_triangular": solve,
    "aten.cholesky_solve": solve_factored,
    "aten.lu_solve": solve_factored,
    "aten.linalg_matrix_norm": matrix_norm,
    **{
        f"aten.fft_{name}": transform
        for name in (
            "fft",
            "ifft",
            "rfft",
            "irfft",
            "hfft",
            "ihfft",
            "fft2",
            "ifft2",
            "rfft2",
            "irfft2",
            "hfft2",
            "ihfft2",
            "fftn",
            "ifftn",
            "rfftn",
            "irfftn",
            "hfftn",
            "ihfftn",
            "fftshift",
            "ifftshift",
        )
    },
}

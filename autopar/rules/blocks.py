"""Rules of ops that cut dims into blocks or windows, or build a grid from vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from autopar.rules.shape import along, named_dim
from autopar.rules.spec import Call, Dim, Letters, RuleDoesNotApply, Spec, needs_a_row, plain
from autopar.rules.views import FIRST, replacing


def windows(call: Call) -> Spec:
    """unfold puts windows along a dim into a new last dim; both dims stay whole."""
    dim = call.dim(call["dimension"])
    letters, sizes = plain(call.operands[0].shape)
    count, width = call.results[0].shape[dim], call.results[0].shape[-1]
    if not letters:
        raise RuleDoesNotApply("a tensor without dims")
    sizes |= {name: size for name, size in (("y", count), ("w", width)) if size > 1}
    new, last = (((name,) if name in sizes else ()) for name in ("y", "w"))
    whole = frozenset((*letters[dim], *new, *last))
    result = (*letters[:dim], new, *letters[dim + 1 :], last)
    return Spec((letters,), (result,), sizes, whole=whole, linear=FIRST, is_view=True)


@needs_a_row
def shuffled(call: Call) -> Spec:
    """pixel_shuffle: `b.. c p! q!, h, w -> b.. c, h p!, w q!`, channels cut into blocks of p x q."""
    return _shuffle(call, call.operands[0], call.results[0], call["upscale_factor"])


@needs_a_row
def unshuffled(call: Call) -> Spec:
    """pixel_unshuffle: the inverse of pixel_shuffle."""
    spec = _shuffle(call, call.results[0], call.operands[0], call["downscale_factor"])
    return replace(spec, operands=spec.results, results=spec.operands)


def _shuffle(call: Call, deep: torch.Tensor, wide: torch.Tensor, factor: int) -> Spec:
    lead, sizes = plain(deep.shape[:-3])
    names = {"c": wide.shape[-3], "h": deep.shape[-2], "w": deep.shape[-1], "p": factor, "q": factor}
    sizes |= {name: int(size) for name, size in names.items() if size > 1}

    def dims(*texts: str) -> tuple[Dim, ...]:
        return tuple(tuple(x for x in text if x in sizes) for text in texts)

    return Spec(
        ((*lead, *dims("cpq", "h", "w")),),
        ((*lead, *dims("c", "hp", "wq")),),
        sizes,
        whole=frozenset({"p", "q"} & sizes.keys()),
        linear=FIRST,
        flops=deep.numel(),
    )


def grid(call: Call) -> Spec:
    """meshgrid: vectors `i`, `j` ... -> one tensor for each, with the dims of all."""
    sizes = {f"d{i}": t.numel() for i, t in enumerate(call.operands) if t.numel() > 1}
    if any(t.ndim != 1 for t in call.operands):
        raise RuleDoesNotApply("a number among the vectors")
    names: list[Dim] = [(f"d{i}",) if f"d{i}" in sizes else () for i in range(len(call.operands))]
    result = list(names)
    if call.arguments.get("indexing") == "xy" and len(result) > 1:
        result[:2] = result[1::-1]
    return Spec(tuple((n,) for n in names), (tuple(result),) * len(names), sizes)


def interleaved(call: Call) -> Spec:
    """repeat_interleave: `b.. d -> b.. d r!`, with every element of the dim r times."""
    if call.arguments.get("dim") is None or len(call.operands) > 1:
        raise RuleDoesNotApply("all elements in a row, or counts in a tensor")
    if call["output_size"] is not None:
        return along(named_dim)(call)
    dim, times = call.dim(call["dim"]), int(call["repeats"])
    letters, sizes = plain(call.operands[0].shape)
    again: Dim = ("r",) if times > 1 else ()
    sizes |= dict.fromkeys(again, times)
    result = (*letters[:dim], (*letters[dim], *again), *letters[dim + 1 :])
    return Spec((letters,), (result,), sizes, whole=frozenset(again), linear=FIRST, flops=call.results[0].numel())


def joined_windows(call: Call) -> Spec:
    """im2col (F.unfold): `b.. c h! w! -> b.. c k! l!`, the windows' points behind their channel."""
    return _windows_of(call.operands[0], call.results[0], call["kernel_size"])


def parted_windows(call: Call) -> Spec:
    """Rule of col2im (F.fold), the adjoint of im2col: batch and channels can be split, pixels and windows cannot."""
    spec = _windows_of(call.results[0], call.operands[0], call["kernel_size"])
    return replace(spec, operands=spec.results, results=spec.operands)


def _windows_of(image: torch.Tensor, columns: torch.Tensor, kernel: Sequence[int]) -> Spec:
    names = {
        "n": image.shape[0] if image.ndim > 3 else 1,
        "c": image.shape[-3],
        "h": image.shape[-2],
        "w": image.shape[-1],
        "k": math.prod(kernel),
        "l": columns.shape[-1],
    }
    sizes = {name: int(size) for name, size in names.items() if size > 1}

    def dims(*texts: str) -> Letters:
        own = ("n", *texts) if image.ndim > 3 else texts
        return tuple(tuple(x for x in text if x in sizes) for text in own)

    return Spec(
        (dims("c", "h", "w"),),
        (dims("ck", "l"),),
        sizes,
        whole=frozenset(sizes) - {"n", "c"},
        linear=FIRST,
        flops=columns.numel(),
    )


RULES: dict[str, Callable[[Call], Spec]] = {
    "aten.unfold": windows,
    "aten.pixel_shuffle": shuffled,
    "aten.pixel_unshuffle": unshuffled,
    "aten.meshgrid": grid,
    "aten.repeat_interleave": interleaved,
    "aten.im2col": joined_windows,
    "aten.col2im": parted_windows,
}
RULES["aten.unfold_copy"] = replacing(windows, is_view=False)

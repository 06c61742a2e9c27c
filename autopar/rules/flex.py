"""Rules of flex_attention and varlen_attn. The first is split by where its functions read the indices.

    b (g r) q e!, b g k! e!, b g k! v!, tensors -> b (g r) q v!, b (g r) q

A tensor that both functions only read as x[b, q] has these letters; `docs[b, q] == docs[b, k]` leaves b, and the other
dim whole. Everywhere else a split index is counted from the rank's first one: the program of the rank has one more
operand for it (`PointProgram.shifted`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ops.point_program import INDICES, PointProgram, over_all, read_program
from autopar.rules.attention import scores_and_values
from autopar.rules.kept.kernels import on_accelerator
from autopar.rules.notation import spec_of
from autopar.rules.spec import Call, Dim, Kept, Letters, Local, RuleDoesNotApply, Spec, local_arguments

aten = torch.ops.aten

# The letter along which an index is split.
_SPLIT = {"b": "b", "h": "g", "q": "q"}
_SAMPLES = 64


def flex_attention(call: Call) -> Spec:
    """flex_attention, see above. FLOPs are those of the scores that are seen where all tensors that a mask reads are 0:
    a batch of documents counts as one document a row."""
    query, key, value, *tensors = call.operands
    batch, heads, queries, inner = query.shape
    groups, keys, width = key.shape[1], key.shape[2], value.shape[3]
    sizes = {"b": batch, "g": groups, "r": heads // groups, "q": queries, "k": keys, "e": inner, "v": width}
    sizes = {letter: size for letter, size in sizes.items() if size > 1}
    programs = _programs(call["mask"], call["score"])
    extra = [_letters_of(i, x.shape, programs, sizes) for i, x in enumerate(tensors)]
    sizes |= {x: int(t.shape[d]) for own, t in zip(extra, tensors, strict=True) for d, (x, *_) in _own(own)}
    q, k, v, y = (_known(x, sizes) for x in ("b g+r q e", "b g k e", "b g k v", "b g+r q v"))
    counted = frozenset(_SPLIT[i] for i in _SPLIT if _counts(i, programs, extra))
    whole = {"k", "e", "v", *(x for own in extra for _, (x, *_) in _own(own))}
    if any(p.reads_beyond_lookups("h", frozenset()) for p in programs):
        whole.add("r")  # heads of a part would not follow each other
    seen, most = _density(call["mask"], queries, keys, tuple(tuple(x.shape) for x in tensors))
    nests = scores_and_values(2 * seen, [x for x in "bgrqkev" if x in sizes], q, k, v)
    flops = sum(nest.flops(sizes) for nest in nests)
    kept = Kept(tuple(range(len(call.operands))), (0, 1) if on_accelerator(call) else ()) if call.wanted else Kept()
    return Spec(
        (q, k, v, *extra),
        (y, y[:-1]),
        sizes,
        whole=frozenset(whole & sizes.keys()),
        contiguous=counted & sizes.keys(),
        batch=frozenset({"b"} & sizes.keys()) - counted,
        flops=round(flops),
        nests=nests,
        stated_kept=kept,
        stretch={"q": most} if most > 1 else {},
        localize=_FlexLocalizer(tuple(extra)),
    )


def _programs(*texts: str) -> list[PointProgram]:
    return [read_program(text) for text in texts if text]


def _known(row: str, sizes: dict[str, int]) -> Letters:
    return tuple(tuple(x for x in word.split("+") if x in sizes) for word in row.split())


def _own(letters: Letters) -> list[tuple[int, Dim]]:
    """The dims with a letter that no other tensor has."""
    return [(d, dim) for d, dim in enumerate(letters) if dim and dim[0].startswith("x")]


def _letters_of(i: int, shape: Sequence[int], programs: Sequence[PointProgram], sizes: dict[str, int]) -> Letters:
    """Letters of a tensor that the functions read: those of an index by which alone a dim is looked up."""
    dims: list[Dim] = []
    reads = [p.lookups(p.scalars + i) for p in programs]
    for d, size in enumerate(shape):
        by = {_index(p, read, d) for p, own in zip(programs, reads, strict=True) for read in own or [()]}
        index = by.pop() if len(by) == 1 and None not in reads else None
        dim = _known({"b": "b", "h": "g+r", "q": "q", "k": "k"}.get(index or "", ""), sizes)
        fits = bool(dim) and math.prod(sizes[x] for x in dim[0]) == size
        dims.append(dim[0] if fits else (f"x{i}_{d}",) if size > 1 else ())
    return tuple(dims)


def _index(program: PointProgram, read: Sequence[int | None], dim: int) -> str | None:
    """The name of the index by which a dim is looked up; None where it is another number."""
    number = read[dim] if dim < len(read) else None
    name = None if number is None or number >= program.scalars else program.inputs[number]
    return name if name in INDICES else None


def _counts(index: str, programs: Sequence[PointProgram], extra: Sequence[Letters]) -> bool:
    """Whether the functions count an index, rather than only look up tensors that are split by it."""
    own = _split_by(_SPLIT[index], extra)
    return any(p.reads_beyond_lookups(index, frozenset(p.scalars + i for i in own)) for p in programs)


def _split_by(letter: str, extra: Sequence[Letters]) -> list[int]:
    return [i for i, own in enumerate(extra) if any(letter in dim for dim in own)]


@functools.lru_cache(maxsize=256)
def _density(text: str, queries: int, keys: int, shapes: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    """The part of all scores that a mask lets be seen, and how often as many an eighth of the queries sees at most.

    Of a few queries and keys at equal distances, with zeros for all tensors that the mask reads.
    """
    if not text:
        return 1.0, 1.0
    program = read_program(text)
    tensors = [torch.zeros((), dtype=torch.int64).expand(shape) for shape in shapes]
    places = [torch.arange(min(n, _SAMPLES)) * n // min(n, _SAMPLES) for n in (queries, keys)]
    try:
        zero = torch.zeros(1, dtype=torch.int64)
        seen = over_all(program, None, (zero, zero, *places), tensors)[0, 0].double()
    except (RuntimeError, IndexError, ValueError):
        return 1.0, 1.0
    mean = max(float(seen.mean()), 1 / max(keys, 1))
    return mean, max(max(float(x.mean()) for x in seen.chunk(8)) / mean, 1.0)


class _FlexLocalizer:
    """Writes the call on a rank's part, with functions that count from its first indices.

    Args:
        extra: letters of the tensors that the functions read.
    """

    def __init__(self, extra: tuple[Letters, ...]) -> None:
        self.extra = extra

    def __call__(self, local: Local) -> fx.Node:
        given: dict[str, Any] = local_arguments(local)
        where = local.node.meta["val"][0].device
        texts, tensors = [given["mask"], given["score"]], list(given["tensors"])
        for index, letter in _SPLIT.items():
            if not local.axes(letter) or not _counts(index, _programs(*texts), self.extra):
                continue
            own = _split_by(letter, self.extra)
            tensors.append(local.emit(aten.full.default, [], local.first(letter), dtype=torch.int64, device=where))
            texts = [_shifted(text, index, own) for text in texts]
        operands = (given[name] for name in ("query", "key", "value"))
        return local.emit(local.node.target, *operands, tensors, *texts, given["scale"])


def _shifted(text: str, index: str, own: Sequence[int]) -> str:
    if not text:
        return text
    program = read_program(text)
    return program.shifted(index, frozenset(program.scalars + i for i in own)).text()


def variable_length(call: Call) -> Spec:
    """varlen_attn of torch, of documents one behind the other, whose first positions x3 and x4 list: split over heads.

    FLOPs are those of one document. The state of random numbers, its last result, is the same everywhere.
    """
    if len(call.operands) != 5:
        raise RuleDoesNotApply("keys in pages, or of which a part is used")
    spec = spec_of("s! (g r) e!, t! g e!, t! g v!, n!, n! -> s! (g r) v!, (g r) s!, z!", call)
    nests = scores_and_values(2.0, [x for x in "stgrev" if x in spec.sizes], *spec.operands[:3])
    return replace(
        spec,
        whole=spec.whole | ({"r"} if "g" in spec.sizes else set()),  # else heads of a part would not follow each other
        agreed=frozenset({"g", "r"} & spec.sizes.keys()),
        flops=round(sum(nest.flops(spec.sizes) for nest in nests)),
        nests=nests,
        stated_kept=Kept((0, 1, 2, 3, 4), (0, 1, 2)) if call.wanted else Kept(),
    )


RULES: dict[str, Callable[[Call], Spec]] = {
    "autopar.flex_attention": flex_attention,
    "torch_attn._varlen_attn": variable_length,
}

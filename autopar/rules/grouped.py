"""Rules of grouped products: rows are sorted into groups, and each group is multiplied with a matrix of its own.

`grouped_mm(rows, weights, ends)` multiplies rows `ends[e - 1]` to `ends[e]` with `weights[e]`. `ends` counts from the
first of all rows, so rows and groups stay whole. `autopar.analysis.experts` makes one op of a whole mixture of experts,
which can be split along both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.rules.notation import spec_of
from autopar.rules.spec import Call, Dim, Letters, Nest, RuleDoesNotApply, Spec, plain

# The op itself, and the one that transformers runs where a compiler or a device has none.
PRODUCTS = ("aten._grouped_mm", "transformers.grouped_mm_fallback")

_ROWS = {
    (2, 3): "r! k, e! k j, e! -> r! j | sum k | linear 0 1",  # forward, and the gradient of rows
    (2, 2): "k r!, r! j, e! -> e! k j | linear 0 1",  # the gradient of weights
    (3, 2): "e! i k, k r!, e! -> i r! | sum k | linear 0 1",
    (3, 3): "e i k, e k j -> e i j | sum k | linear 0 1",  # groups of one size: a batched product
}


_ROW_BYTES = 16


def product_of_rows(call: Call) -> Spec:
    """The rule of a grouped matmul inside a mixture-of-experts layer: `r k, e! k j, e! -> r j | sum k | linear 0 1`.

    The operands are the rows sorted by expert, the weights of the `e` experts, and the end of each expert's rows.
    Unlike under `grouped`, the rows (`r`) can be split, because each rank sorts the rows that it has
    (`autopar.analysis.experts`). A row is multiplied with the weights of one expert: 2 r k j FLOPs in all.
    """
    spec = spec_of("r k, e! k j, e! -> r j | sum k | linear 0 1", call)
    rows, width = call.operands[0].shape
    spec = replace(spec, flops=2 * rows * width * call.results[0].shape[1])
    return _of_groups(_aligned(spec, call))


def _of_groups(spec: Spec) -> Spec:
    """A product of rows with one matrix of several each, with its loop nest."""
    left, right, result = ({x for dim in tensor for x in dim} for tensor in (*spec.operands[:2], spec.results[0]))
    groups = right - left - result
    nest = Nest.of(2, [x for x in spec.sizes if x not in groups], left, right, result)
    return replace(spec, nests=(nest._replace(groups=tuple(groups)),))


def grouped(call: Call) -> Spec:
    """_grouped_mm in its four forms; a call with scales or a bias has no rule."""
    ranks = (call.operands[0].ndim, call.operands[1].ndim)
    has_ends = ranks != (3, 3)
    if len(call.operands) != 2 + has_ends or ranks not in _ROWS:
        raise RuleDoesNotApply("a bias, or groups given in another way")
    spec = spec_of(_ROWS[ranks], call)
    # k of (2, 2) is a free letter: what is summed there are the rows of a group.
    groups = spec.sizes.get("e", 1) if has_ends else 1
    spec = _aligned(replace(spec, flops=2 * spec.points // groups), call)
    return _of_groups(spec) if ranks == (2, 3) else spec


def _aligned(spec: Spec, call: Call) -> Spec:
    """Letters of a matrix whose contiguous dim is cut into runs of 16 bytes, which stay whole: `k -> (k, k_row!)`.

    ATen's kernels require that every row of a matrix begins at a multiple of 16 bytes (`check_valid_strides`).
    """
    unit = _ROW_BYTES // call.operands[0].element_size()
    if "transformers" in str(call.node.target) or unit < 2:
        return spec
    tensors = zip([*call.operands, *call.results], [*spec.operands, *spec.results], strict=True)
    widths = {x for t, dims in tensors for s, dim in zip(t.stride(), dims, strict=True) for x in dim if s == 1}
    wide = [x for x in spec.sizes if x in widths and spec.splittable(x) and not spec.sizes[x] % unit]
    split = {x: (x, f"{x}_row") if spec.sizes[x] > unit else (f"{x}_row",) for x in wide}

    def apart(letters: Letters) -> Letters:
        return tuple(tuple(y for x in dim for y in split.get(x, (x,))) for dim in letters)

    sizes = {x: size // unit if x in split else size for x, size in spec.sizes.items()}
    minor = {split[x][-1]: unit for x in wide}
    return replace(
        spec,
        operands=tuple(map(apart, spec.operands)),
        results=tuple(map(apart, spec.results)),
        sizes={x: size for x, size in sizes.items() if x not in split or size > 1} | minor,
        sums=frozenset(y for x in spec.sums for y in split.get(x, (x,))),
        whole=spec.whole | minor.keys(),
    )


def histogram(call: Call) -> Spec:
    """histc, and bincount with a given number of bins: the counts of the parts add up."""
    given = call.arguments
    if "bins" in given and not given["min"] < given["max"]:
        raise RuleDoesNotApply("bins between the smallest and the largest element")
    if "bins" not in given or len(call.operands) > 1:
        raise RuleDoesNotApply("as many bins as the largest element says, or weights")
    letters, sizes = plain(call.operands[0].shape)
    count = call.results[0].numel()
    bins: Dim = ("bins",) if count > 1 else ()
    return Spec(
        (letters,),
        ((bins,),),
        sizes | dict.fromkeys(bins, count),
        sums=frozenset(sizes),
        whole=frozenset(bins),
        flops=call.operands[0].numel(),
    )


RULES: dict[str, Callable[[Call], Spec]] = {**dict.fromkeys(PRODUCTS, grouped), "aten.histc": histogram}

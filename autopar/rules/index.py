"""Rules of lookups by index: indexed dims stay whole, and dims of the index can be split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from autopar.rules.notation import line
from autopar.rules.spec import Call, Dim, Letters, Local, RuleDoesNotApply, Spec, aten_ops, plain, run_as_is
from autopar.rules.views import FIRST

aten = torch.ops.aten


def embedding(call: Call) -> Spec:
    """`v d, b.. -> b.. d | sum v`: over a split vocabulary each rank looks up the rows it has."""
    weight, index = call.operands
    where, sizes = plain(index.shape, "b")
    # Frequencies are those of the whole batch.
    batch = frozenset(sizes) if call["scale_grad_by_freq"] else frozenset()
    sizes |= {n: int(s) for n, s in zip("vd", weight.shape, strict=True) if s > 1}
    rows, columns = ((n,) if n in sizes else () for n in "vd")
    # A mask of rows would give an index without dims one, and would count what it leaves out as row 0.
    masks = index.ndim > 0 and not batch
    return Spec(
        ((rows, columns), where),
        ((*where, columns),),
        sizes,
        sums=frozenset(rows if masks else ()),
        whole=batch | frozenset(() if masks else rows),
        contiguous=frozenset(rows),
        flops=call.results[0].numel(),
        looks_up=_letters(where),
        equal=frozenset(columns if call["sparse"] else ()),  # parts of a sparse gradient are not padded
        localize=_look_up_locally,
    )


def _letters(dims: Letters) -> tuple[str, ...]:
    return tuple(letter for dim in dims for letter in dim)


def _look_up_locally(local: Local) -> fx.Node:
    """A lookup in a split table. Rows of other ranks are looked up as row 0 and set to zero, so results add up."""
    if not local.axes("v"):
        return run_as_is(local)
    weight, index = local.args[:2]
    padding = local.args[2] if len(local.args) > 2 else -1
    here = shifted(local, index, "v")
    height = local.emit(aten.sym_size.int, weight, 0)
    mine = local.emit(
        aten.logical_and.default, local.emit(aten.ge.Scalar, here, 0), local.emit(aten.lt.Scalar, here, height)
    )
    rows = local.emit(aten.embedding.default, weight, local.emit(aten.mul.Tensor, here, mine))
    found = zeroed(local, rows, local.emit(aten.unsqueeze.default, mine, -1))
    if padding < 0:
        return found
    # The padding row is looked up like any other and requires no gradient.
    pad = local.emit(aten.unsqueeze.default, local.emit(aten.eq.Scalar, index, padding), -1)
    return local.emit(aten.where.self, pad, local.emit(aten.detach.default, found), found)


def zeroed(local: Local, x: fx.Node, kept: fx.Node) -> fx.Node:
    """`x` where `kept` is true, else 0. A product would not do, because x may be infinite where `kept` is false."""
    gone = local.emit(aten.logical_not.default, kept)
    return local.emit(aten.masked_fill.Scalar, x, gone, 0)


def shifted(local: Local, index: fx.Node, letter: str) -> fx.Node:
    """`index`, counted from the first entry of a letter that this rank has."""
    return local.emit(aten.sub.Scalar, index, local.first(letter))


def index(call: Call) -> Spec:
    """x[i, :, j]: the indexed dims stay whole, the index tensors are broadcast together."""
    x, *indices = call.operands
    given = [dim for dim, i in enumerate(call["indices"]) if i is not None]
    if any(i.dtype not in (torch.int64, torch.int32) for i in indices):
        raise RuleDoesNotApply("a mask as index gives a result of unknown size")
    letters, sizes = plain(x.shape)
    rank = max(i.ndim for i in indices)
    chosen, broadcast = plain(torch.broadcast_shapes(*(i.shape for i in indices)), "i")
    operands = [letters]
    for tensor in indices:
        lead = rank - tensor.ndim
        dims = enumerate(tensor.shape)
        operands.append(tuple(chosen[lead + d] if s > 1 else () for d, s in dims))
    kept = [letter for dim, letter in enumerate(letters) if dim not in given]
    # Adjacent indices leave their dims in place, others move them to the front (NumPy's rule).
    adjacent = given == list(range(given[0], given[-1] + 1))
    place = given[0] if adjacent else 0
    result: tuple[Dim, ...] = (*kept[:place], *chosen, *kept[place:])
    whole = frozenset(letter for dim in given for letter in letters[dim])
    return Spec(
        tuple(operands),
        (result,),
        sizes | broadcast,
        whole=whole,
        flops=call.results[0].numel(),
        looks_up=_letters(chosen) if given == [0] else None,
    )


def index_select(call: Call) -> Spec:
    """index_select: the dim stays whole in the operand, and has the index's letter in the result."""
    letters, sizes = plain(call.operands[0].shape)
    dim = call.dim(call["dim"])
    count = call.operands[1].numel()
    new: Dim = ("i",) if count > 1 else ()
    sizes |= {"i": count} if count > 1 else {}
    result = (*letters[:dim], new, *letters[dim + 1 :])
    return Spec(
        (letters, (new,) * call.operands[1].ndim),
        (result,),
        sizes,
        whole=frozenset(letters[dim]),
        flops=call.results[0].numel(),
        looks_up=None if dim else new,
    )


def gather(call: Call) -> Spec:
    """gather: the dim stays whole in the operand. Another dim can be split if the index covers all of it."""
    x, where = call.operands
    dim = call.dim(call["dim"])
    letters, sizes = plain(x.shape, "x")
    result, more = plain(where.shape, "i")
    names = list(letters)
    whole = set(letters[dim])
    for d, (a, b) in enumerate(zip(x.shape, where.shape, strict=True)):
        if d != dim and a == b:
            names[d] = result[d]
        elif d != dim:
            whole |= {*letters[d], *result[d]}
    used = {letter for name in names for letter in name}
    sizes = {letter: size for letter, size in sizes.items() if letter in used} | more
    return Spec((tuple(names), result), (result,), sizes, whole=frozenset(whole), flops=where.numel())


def scattered(call: Call) -> Spec:
    """scatter: the dim stays whole. Another dim can be split if operand, index and source have the same size there."""
    dim, rank = call.dim(call["dim"]), call.operands[0].ndim
    if not rank:
        raise RuleDoesNotApply("a tensor without dims")
    tensors = [*call.operands, *call.results]
    alike = {d for d in range(rank) if d != dim and len({t.shape[d] for t in tensors if t.ndim}) == 1}
    names: list[Letters] = []
    sizes: dict[str, int] = {}
    for i, tensor in enumerate(tensors):
        names.append(_dims(tensor, [f"d{d}" if d in alike else f"x{i}_{d}" for d in range(tensor.ndim)], sizes))
    whole = frozenset(letter for letter in sizes if letter[0] == "x")
    count = len(call.operands)
    return Spec(tuple(names[:count]), tuple(names[count:]), sizes, whole=whole, flops=call.results[0].numel())


def _dims(tensor: torch.Tensor, names: Sequence[str], sizes: dict[str, int]) -> Letters:
    """A letter for each dim of a size other than 1; adds their sizes to the spec's sizes."""
    pairs = list(zip(names, tensor.shape, strict=True))
    sizes |= {name: int(size) for name, size in pairs if size != 1}
    return tuple((name,) if size != 1 else () for name, size in pairs)


def indexed_by_one(call: Call) -> Spec:
    """index_add, index_copy, index_fill: the dim and the index stay whole; the other dims can be split."""
    x, dim = call.operands[0], call.dim(call["dim"])
    letters, sizes = plain(x.shape)
    names = [letters]
    for i, tensor in enumerate(call.operands[1:], 1):
        source = tensor.ndim == x.ndim and x.ndim > 1
        own = [f"d{d}" if source and d != dim else f"x{i}" for d in range(tensor.ndim)]
        names.append(_dims(tensor, own, sizes))
    whole = frozenset(letter for letter in sizes if letter[0] == "x") | frozenset(letters[dim] if letters else ())
    return Spec(tuple(names), (letters,), sizes, whole=whole, flops=call.results[0].numel())


def index_put(call: Call) -> Spec:
    """x[i, :, j] = values writes the elements that `index` would read; only dims without an index can be split."""
    x, *rest = call.operands
    given = [dim for dim, i in enumerate(call["indices"]) if i is not None]
    *indices, values = rest
    if any(i.dtype not in (torch.int64, torch.int32) for i in indices):
        raise RuleDoesNotApply("a mask as index writes an unknown number of values")
    letters, sizes = plain(x.shape)
    rank = max(i.ndim for i in indices)
    kept = [letter for dim, letter in enumerate(letters) if dim not in given]
    adjacent = given == list(range(given[0], given[-1] + 1))
    place = given[0] if adjacent else 0
    full: list[Dim | None] = [*kept[:place], *[None] * rank, *kept[place:]]
    operands = [letters]
    for n, tensor in enumerate(indices):
        operands.append(_dims(tensor, [f"i{n}_{d}" for d in range(tensor.ndim)], sizes))
    lead = len(full) - values.ndim
    own = [(full[lead + d] or (f"i_{d}",))[0] for d in range(values.ndim)]
    source = _dims(values, own, sizes)
    whole = {letter for dim in given for letter in letters[dim]}
    whole |= {letter for letter in sizes if letter[0] == "i"}
    return Spec((*operands, source), (letters,), sizes, whole=frozenset(whole), flops=values.numel())


def along_index(call: Call) -> Spec:
    """take_along_dim: gather with operands that are broadcast."""
    if call["dim"] is None or call.operands[0].ndim != call.operands[1].ndim:
        raise RuleDoesNotApply("without a dim it reads all elements in one order")
    dim = call.dim(call["dim"])
    sizes: dict[str, int] = {}
    names = [
        _dims(t, [f"x{i}" if d == dim else f"d{d}" for d in range(t.ndim)], sizes)
        for i, t in enumerate([*call.operands, *call.results])
    ]
    names[2] = tuple(names[1][d] if d == dim else names[2][d] for d in range(len(names[2])))
    sizes.pop("x2", None)
    whole = frozenset({"x0"} & sizes.keys())
    return Spec((names[0], names[1]), (names[2],), sizes, whole=whole, flops=call.results[0].numel())


def looked_up_in_one(call: Call) -> Spec:
    """take, bucketize, isin: the table stays whole; the dims of the other operand can be split."""
    if len(call.operands) < 2:
        raise RuleDoesNotApply("a number to look up, or as the table")
    table, where = (0, 1) if "index" in call.arguments else (1, 0)
    letters, sizes = plain(call.operands[where].shape)
    own, more = plain(call.operands[table].shape, "t")
    operands = {where: letters, table: own}
    return Spec(
        (operands[0], operands[1]), (letters,), sizes | more, whole=frozenset(more), flops=call.results[0].numel()
    )


def searched(call: Call) -> Spec:
    """searchsorted: `b.. t!, b.. n (, b.. t!) -> b.. n`, or one table `t!` for all."""
    if not isinstance(call["self"], fx.Node):
        raise RuleDoesNotApply("a number to look up")
    lead = "" if call.operands[0].ndim == 1 else "b.. "
    values = "b.." if not lead else "b.. n"
    return line(f"{lead}t!, {values}, {lead}t! -> {values}")(call)


def bagged(call: Call) -> Spec:
    """embedding_bag: only the columns of the table can be split; its other results depend on indices alone."""
    sizes: dict[str, int] = {}

    def whole(tensor: torch.Tensor, tag: str) -> Letters:
        return _dims(tensor, [f"{tag}_{d}" for d in range(tensor.ndim)], sizes)

    weight, *rest = call.operands
    operands = [whole(x, f"x{i}") for i, x in enumerate(rest)]
    results = []
    for i, y in enumerate(call.results):
        columns = y.ndim == 2 and y.shape[1] == weight.shape[1]
        results.append(_dims(y, [f"y{i}", "d"], sizes) if columns else whole(y, f"y{i}"))
    table = _dims(weight, ["v", "d"], sizes)
    return Spec(
        (table, *operands),
        tuple(results),
        sizes,
        whole=frozenset(sizes) - {"d"},
        agreed=frozenset("d"),
        equal=frozenset("d" if call["sparse"] else ()),
        flops=call.results[0].numel(),
        looks_up=_letters(operands[0]),
    )


def filled_in_order(call: Call) -> Spec:
    """masked_scatter: if the mask takes or leaves whole rows, the columns can be split.

    The mask is then one of rows that is expanded over the last dim, for example features put among tokens.
    """
    x, mask, source = call.operands
    rows = call.operand_nodes[1]
    expanded = str(rows.target) in ("aten.expand.default", "aten.expand_as.default")
    if not expanded or rows.args[0].meta["val"].shape[-1:] != (1,) or x.shape != mask.shape:  # type: ignore[union-attr]
        raise RuleDoesNotApply("which element goes where depends on all before it")
    if source.ndim < 2 or source.shape[-1] != x.shape[-1]:
        raise RuleDoesNotApply("rows of another width")
    of_x, of_source = (
        " ".join(f"{tag}{d}!" for d in range(ndim - 1)) for tag, ndim in (("x", x.ndim), ("s", source.ndim))
    )
    return line(f"{of_x} d, {of_x} d, {of_source} d -> {of_x} d")(call)


def segmented(call: Call) -> Spec:
    """segment_reduce: `b.. n! d.., b.. m! -> b.. m! d..`. Rows meet in their segments, samples and columns do not."""
    if len(call.operands) != 2:
        raise RuleDoesNotApply("segments by lengths, or by offsets")
    data, segments = call.operands
    axis = segments.ndim - 1
    letters, sizes = plain(data.shape)
    whole = {*letters[axis]}

    def counted(count: int, name: str) -> Dim:
        """The letter of the dim that counts segments: by offsets there is one more than results."""
        if count == 1:
            return ()
        sizes[name] = count
        whole.add(name)
        return (name,)

    bounds = counted(segments.shape[axis], "s" if call["offsets"] is None else "o")
    found = counted(call.results[0].shape[axis], "s")
    adds = call["reduce"] in ("sum", "mean") and call["initial"] is None
    return Spec(
        (letters, (*letters[:axis], bounds)),
        ((*letters[:axis], found, *letters[axis + 1 :]),),
        sizes,
        whole=frozenset(whole),
        linear=FIRST if adds else (),
        flops=data.numel(),
    )


def one_hot(call: Call) -> Spec:
    """one_hot: the new dim stays whole."""
    if call["num_classes"] < 0:
        raise RuleDoesNotApply("as many classes as the largest index says")
    letters, sizes = plain(call.operands[0].shape)
    count = call.results[0].shape[-1]
    new: Dim = ("c",) if count > 1 else ()
    sizes |= {"c": count} if count > 1 else {}
    return Spec((letters,), ((*letters, new),), sizes, whole=frozenset(new), flops=call.results[0].numel())


RULES: dict[str, Callable[[Call], Spec]] = {
    "aten.embedding": embedding,
    "aten.index": index,
    "aten.index_select": index_select,
    "aten.gather": gather,
    "aten.take_along_dim": along_index,
    "aten.index_put": index_put,
    "aten.one_hot": one_hot,
    **aten_ops(scattered, "scatter scatter_add scatter_reduce"),
    **aten_ops(indexed_by_one, "index_add index_copy index_fill index_reduce"),
    **aten_ops(looked_up_in_one, "take bucketize isin"),
    "aten._unsafe_index": index,
    "aten.searchsorted": searched,
    "aten.embedding_bag": bagged,
    "aten.segment_reduce": segmented,
    "aten.masked_scatter": filled_in_order,
}

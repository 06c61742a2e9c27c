"""A captured graph with another batch size, so that the search can price micro-batches without a second capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.errors import SearchError
from autopar.ir import Choice, Graph, Leaf, Op, Plan, Tensor, Work, is_legal


def sizes_of_micro_batches(rows: int, count: int) -> tuple[int, ...]:
    """The rows of every micro-batch of a batch, as of `torch.tensor_split`: they differ by at most one, larger first.

    >>> sizes_of_micro_batches(30, 4), sizes_of_micro_batches(32, 4)
    ((8, 8, 7, 7), (8, 8, 8, 8))
    """
    least, larger = divmod(rows, count)
    return (least + 1,) * larger + (least,) * (count - larger)


def first_smaller(sizes: Sequence[int]) -> int:
    """The number of the first micro-batch with fewer rows than those before it; 0 where all have as many.

    >>> first_smaller((8, 8, 7, 7)), first_smaller((8, 8))
    (2, 0)
    """
    return sizes.index(sizes[-1]) if sizes[-1] < sizes[0] else 0


def captured_batch(graph: Graph) -> int:
    """Number of rows of the batch with which the graph was captured; 1 where no input has a batch dim."""
    return max((graph.factors[name].size for name in graph.batch), default=1)


def with_batch(graph: Graph, batch: int) -> Graph:
    """The graph with another number of rows, `batch`, in its batch.

    Every size that is the batch size is replaced; names, choices and edges stay the same. Sizes that the model
    computed from the batch size (such as its double) stay the same, too. The result is therefore good enough to price a
    plan, and a model that is to run is captured again. Raises SearchError for a graph without a batch.
    """
    names = graph.batch
    if not names:
        raise SearchError(
            "No dim of the model's inputs is known to be the batch, so other numbers of micro-batches cannot be "
            "priced; give micro_batches=... instead of leaving it to the search."
        )
    if batch == captured_batch(graph):
        return graph
    sizes = dict.fromkeys(names, batch)
    return dataclasses.replace(
        graph,
        tensors={name: _tensor(tensor, sizes) for name, tensor in graph.tensors.items()},
        ops=tuple(_op(op, sizes) for op in graph.ops),
        factors={name: dataclasses.replace(f, size=sizes.get(name, f.size)) for name, f in graph.factors.items()},
    )


def fits_graph(plan: Plan, graph: Graph) -> bool:
    """Whether a plan that was made for another batch size is legal for this graph."""
    mesh = plan.mesh
    inputs = all(graph.can_take(graph.inputs[name], layout, mesh) for name, layout in plan.inputs.items())
    return inputs and all(is_legal(graph, op, plan.ops[op.name], mesh) for op in graph.ops)


def _tensor(tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
    if not any(name in sizes for names in tensor.factors for name in names):
        return tensor
    dims = tuple(
        tuple(sizes.get(name, size) for name, size in zip(names, dim, strict=True))
        for names, dim in zip(tensor.factors, tensor.dims, strict=True)
    )
    return dataclasses.replace(tensor, dims=dims)


def _op(op: Op, sizes: Mapping[str, int]) -> Op:
    choices = tuple(_choice(choice, sizes) for choice in op.choices)
    works = tuple(_work(work, sizes) for work in op.work)
    flops = round(sum(work.flops for work in works)) if works else op.flops
    collectives = tuple(dataclasses.replace(each, leaves=_leaves(each.leaves, sizes)) for each in op.collectives)
    looks_up = None if op.looks_up is None else _leaves(op.looks_up, sizes)
    return dataclasses.replace(op, choices=choices, work=works, flops=flops, collectives=collectives, looks_up=looks_up)


def _choice(choice: Choice, sizes: Mapping[str, int]) -> Choice:
    size = sizes.get(choice.factor, choice.size)
    return choice if size == choice.size else dataclasses.replace(choice, size=size)


def _work(work: Work, sizes: Mapping[str, int]) -> Work:
    return dataclasses.replace(
        work,
        rows=_leaves(work.rows, sizes),
        columns=_leaves(work.columns, sizes),
        inner=_leaves(work.inner, sizes),
        batch=_leaves(work.batch, sizes),
        groups=_leaves(work.groups, sizes),
        moved=tuple(each._replace(leaves=_leaves(each.leaves, sizes)) for each in work.moved),
    )


def _leaves(group: tuple[Leaf, ...], sizes: Mapping[str, int]) -> tuple[Leaf, ...]:
    return tuple(leaf._replace(size=sizes.get(leaf.factor, leaf.size)) for leaf in group)

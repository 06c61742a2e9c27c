"""Selective recomputation: the fastest choice of ops to recompute with which a block keeps at most a budget of bytes.

Let r(o) = 1 if the op o is recomputed, and k(t) = 1 if the tensor t is kept (see [Note: recomputing ops] in
`autopar.pipeline.recomputable`). The program is

    minimize    sum of seconds(o) r(o)
    subject to  k(t) >= 1 - r(producer of t)         if an op saves t
                k(t) >= r(o) - r(producer of t)      if o reads t
                sum of bytes(t) k(t) <= budget

where "producer of t" is the op that computes t, and r = 0 for the producer of a tensor that enters the block. Jain et
al. 2020 (Checkmate) also choose the order of all ops of a step. Here the order is fixed, because backward recomputes a
whole block at a time. With a price for every byte in place of the last row, the program is a minimum cut:
`tests/search/exact/test_selection.py` compares it with networkx. `k` need not be declared integer: its least value is 0
or 1 if r is 0 or 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from autopar.ir.recompute import Selection, path_pattern
from autopar.pipeline.recomputable import BlockChoices
from autopar.search.exact.solver import MixedIntegerProgram

T = TypeVar("T")

PARTS = tuple(1 - step / 16 for step in range(1, 17))  # of what may be kept, in decreasing order


def fastest_within(block: BlockChoices[T], budget_bytes: float) -> frozenset[str] | None:
    """The ops to recompute so that a block keeps at most `budget_bytes`, in the least time.

    Returns None if the block keeps more even if all ops are recomputed. Raises SearchError at the solver's limits.
    """
    program = MixedIntegerProgram()
    recomputed = {name: program.binary(seconds=op.seconds, preference=1) for name, op in block.ops.items()}
    kept = {key: program.continuous(bytes=tensor.bytes) for key, tensor in block.tensors.items()}
    for key, tensor in block.tensors.items():
        made = [recomputed[tensor.producer]] if tensor.producer else []
        if tensor.is_saved:
            program.row([kept[key], *made], lower=1, upper=2)
        for name, op in block.ops.items():
            if key in op.reads and name != tensor.producer:
                program.row([kept[key], *made], [recomputed[name]], lower=0, upper=2)
    solution = program.solve(max_bytes=budget_bytes)
    if solution is None:
        return None
    chosen = (name for name, column in recomputed.items() if solution.values[column] > 0.5)
    return frozenset(block.running(chosen))


def select(blocks: Sequence[tuple[str, BlockChoices[T]]], part: float) -> Selection:
    """The fastest selection of ops to recompute that keeps a given part of the saved activations.

    Args:
        blocks: path and choices of every block that may be recomputed.
        part: bound on the memory of every block, on a linear scale: 1 is what autograd keeps without recomputation, 0
            is what it keeps with all ops recomputed.

    Equal blocks have one entry in the selection, under a pattern such as `layers.*`.
    """
    found: dict[tuple[object, ...], tuple[str, ...]] = {}
    chosen: dict[str, tuple[str, ...]] = {}
    for path, block in blocks:
        if block.signature not in found:
            names = fastest_within(block, budget_bytes(block, part))
            if names is None:  # by rounding, since all ops are within any part
                names = frozenset(block.running(block.ops))
            found[block.signature] = tuple(name for name in block.ops if name in names)
        names_of_block = found[block.signature]
        if chosen.setdefault(path_pattern(path), names_of_block) != names_of_block:
            chosen[path] = names_of_block
    return Selection(tuple(chosen.items()))


def budget_bytes(block: BlockChoices[T], part: float) -> float:
    """Bytes that a block may keep for a part, see `select`."""
    most, least = block.kept_bytes(()), block.kept_bytes(block.ops)
    return least + part * max(0.0, most - least)

"""The ops of a block to recompute: by brute force, by minimum cuts, and by hand."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest

from autopar.pipeline.recomputable import BlockChoices, BlockTensor, RecomputableOp
from autopar.search.exact.selection import budget_bytes, fastest_within, select

Block = BlockChoices[str]


def block(ops: dict[str, tuple[float, str]], tensors: dict[str, tuple[float, str, bool]]) -> Block:
    """Ops with their seconds and what they read, tensors with bytes, producer ("" for none), and whether saved."""
    return BlockChoices(
        {name: RecomputableOp(s, tuple(reads.split())) for name, (s, reads) in ops.items()},
        {name: BlockTensor(b, producer or None, saved) for name, (b, producer, saved) in tensors.items()},
    )


# The block of [Note: recomputing ops]: `h` is four times as wide as the others.
MLP = block(
    {"norm": (1, "x"), "up": (40, "n"), "gelu": (4, "h"), "down": (40, "g")},
    {"x": (1, "", True), "n": (1, "norm", True), "h": (4, "up", True), "g": (4, "gelu", True), "y": (1, "down", False)},
)


@pytest.mark.parametrize(
    ("budget", "recomputed"),
    [(10, ""), (9, "norm"), (6, "gelu"), (5, "norm gelu"), (4, "up gelu"), (1, "norm up gelu")],
)
def test_a_feed_forward_block_by_hand(budget: float, recomputed: str) -> None:
    """Norm and GELU cost little and save 5 of 10 bytes; with `up` recomputed, 2 bytes are x and n.

    `down` is never recomputed, for nobody needs y.
    """
    assert fastest_within(MLP, budget) == frozenset(recomputed.split())


def test_no_set_of_ops_keeps_less_than_what_enters() -> None:
    assert fastest_within(MLP, 0.5) is None
    assert MLP.kept(MLP.ops) == ("x",)
    assert MLP.running(MLP.ops) == ("norm", "up", "gelu")


def test_an_op_that_reads_what_is_not_kept_needs_its_maker_too() -> None:
    """a -> b -> c, of which c alone is saved: recomputing c keeps b or recomputes it."""
    chain = block({"b": (1, "a"), "c": (1, "b")}, {"a": (1, "", False), "b": (9, "b", False), "c": (5, "c", True)})
    assert (chain.kept_bytes(["c"]), chain.kept_bytes(["b", "c"])) == (9, 1)
    assert fastest_within(chain, 4) == {"b", "c"}
    assert fastest_within(chain, 5) == frozenset()


def random_block(seed: int, count: int = 9) -> Block:
    """A random graph in which op i makes one or two tensors of what came before."""
    draw = random.Random(seed)
    tensors = {"x": (float(draw.randint(1, 9)), "", draw.random() < 0.5)}
    ops: dict[str, tuple[float, str]] = {}
    for i in range(count):
        reads = draw.sample(sorted(tensors), min(len(tensors), draw.randint(1, 2)))
        ops[f"o{i}"] = float(draw.randint(0, 20)), " ".join(reads)
        for j in range(draw.randint(1, 2)):
            tensors[f"t{i}{j}"] = float(draw.randint(1, 9)), f"o{i}", draw.random() < 0.6
    return block(ops, tensors)


def all_sets(of: Block) -> list[tuple[str, ...]]:
    return [s for n in range(len(of.ops) + 1) for s in itertools.combinations(of.ops, n)]


@pytest.mark.parametrize("seed", range(12))
def test_no_set_of_ops_is_faster_within_the_same_bytes(seed: int) -> None:
    some = random_block(seed)
    figures = [(some.kept_bytes(each), some.seconds(each)) for each in all_sets(some)]
    most = some.kept_bytes(())
    for tenths in range(11):
        budget = most * tenths / 10
        best = min((s for b, s in figures if b <= budget), default=None)
        found = fastest_within(some, budget)
        assert (found is None) == (best is None)
        if found is not None:
            assert some.kept_bytes(found) <= budget and some.seconds(found) == best


def least_by_cut(some: Block, price: float) -> float:
    """The least of seconds plus `price` for every kept byte, as a minimum cut.

    An op on the sink's side is recomputed: that cuts its edge from the source. A tensor has a node that goes
    to the sink's side if the tensor is read by a recomputed op; it then cuts the edge from its producer.
    """
    graph = nx.DiGraph()
    for name, op in some.ops.items():
        graph.add_edge("keep", name, capacity=op.seconds)
    for name, tensor in some.tensors.items():
        producer = tensor.producer or "keep"
        graph.add_edge(producer, ("kept", name), capacity=price * tensor.bytes)
        if tensor.is_saved:
            graph.add_edge(("kept", name), "recompute", capacity=float("inf"))
        for reader, op in some.ops.items():
            if name in op.reads:
                graph.add_edge(("kept", name), reader, capacity=float("inf"))
    return float(nx.minimum_cut_value(graph, "keep", "recompute"))


@pytest.mark.parametrize("seed", range(6))
def test_a_minimum_cut_bounds_what_is_found(seed: int) -> None:
    """With a price for every byte in place of the budget the best set is a minimum cut."""
    some = random_block(seed)
    figures = [(some.kept_bytes(each), some.seconds(each)) for each in all_sets(some)]
    for price in (0.1, 0.5, 1.0, 3.0):
        least = least_by_cut(some, price)
        assert least == pytest.approx(min(s + price * b for b, s in figures))
        for tenths in (3, 6, 9):
            budget = some.kept_bytes(()) * tenths / 10
            found = fastest_within(some, budget)
            if found is not None:
                assert some.seconds(found) >= least - price * budget - 1e-9


def test_equal_blocks_stand_once_in_a_selection() -> None:
    other = random_block(3)
    chosen = select([("layers.0", MLP), ("layers.1", MLP), ("layers.2", other), ("head", MLP)], 0.5)
    assert [path for path, _ in chosen.blocks] == ["layers.*", "layers.2", "head"]
    assert chosen.names("layers.1") == {"norm", "gelu"} == chosen.names("head")
    assert other.kept_bytes(chosen.names("layers.2")) <= budget_bytes(other, 0.5)


@pytest.mark.parametrize("seed", range(4))
def test_more_memory_is_never_slower(seed: int) -> None:
    some = random_block(seed)
    found = [fastest_within(some, budget_bytes(some, tenths / 10)) for tenths in range(11)]
    seconds = [some.seconds(each) for each in found if each is not None]
    assert len(seconds) == 11 and seconds == sorted(seconds, reverse=True) and seconds[-1] == 0

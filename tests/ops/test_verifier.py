"""Broken rings are named; `tests/passes/test_partition.py` has what else the verifier finds."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.errors import VerifierError
from autopar.ops.ring import Ring
from autopar.ops.ring_attention import Scoring
from autopar.ops.verifier import verify_graph


def verify_ring(sizes: tuple[int, ...], groups: tuple[str, ...], turns: tuple[int, ...]) -> None:
    graph = fx.Graph()
    tensors = tuple(graph.placeholder(name) for name in ("query", "key", "value"))
    ring = Ring((*tensors, None), sizes, groups, turns, Scoring(True, 1.0))
    graph.output(graph.call_function(torch.ops.autopar.ring_attention.default, ring.args))
    verify_graph(fx.GraphModule({}, graph), after="sabotage")


@pytest.mark.parametrize(
    ("sizes", "turns", "says"),
    [
        ((2,), (0,), r"a ring along the axes \(0,\) of \['cp', 'tp'\]"),
        ((2, 3), (2,), r"a ring along the axes \(2,\) of"),
        ((2, 3), (), r"a ring along the axes \(\) of"),
        ((2, 1), (0,), r"a ring over \[2, 1\] ranks"),
    ],
)
def test_what_is_no_ring_is_named(sizes: tuple[int, ...], turns: tuple[int, ...], says: str) -> None:
    # Along an axis that splits its queries a ring is whole.
    verify_ring((2, 3), ("cp", "tp"), (1,))
    with pytest.raises(VerifierError, match=f"After sabotage, node ring_attention_default: {says}"):
        verify_ring(sizes, ("cp", "tp"), turns)

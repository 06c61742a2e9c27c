"""The rewrites that bind a graph to a rank, and their order."""

from __future__ import annotations

from autopar.runtime.execute.lowering import LOWERING, LOWERING_OF_LOCAL_GRAPH, enter_parameters


def test_a_graph_of_torch_compile_is_bound_in_the_order_of_a_program() -> None:
    shared = [rewrite for rewrite in LOWERING_OF_LOCAL_GRAPH if rewrite is not enter_parameters]
    assert shared == [rewrite for rewrite in LOWERING if rewrite in shared]


def test_every_rewrite_says_what_it_does() -> None:
    assert all(rewrite.__doc__ for rewrite in {*LOWERING, *LOWERING_OF_LOCAL_GRAPH})

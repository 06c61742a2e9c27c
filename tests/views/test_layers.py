import itertools

from hypothesis import given
from hypothesis import strategies as st

from autopar.views.layers import Bend, place


def test_a_diamond_stands_straight():
    placed = place(dict.fromkeys("abcd", 10.0), [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")], gap=4, bend=2)
    assert placed.layers == (("a",), ("b", "c"), ("d",))
    assert placed.middle["a"] == placed.middle["d"] == 12  # 10 + 4 + 10 wide
    assert placed.width == 24


def test_long_edges_bend_in_every_layer_and_run_straight():
    edges = [("x", "a"), ("a", "b"), ("b", "y"), ("x", "y")]
    placed = place({"x": 5.0, "a": 20.0, "b": 40.0, "y": 5.0}, edges, gap=4, bend=2)
    bends = (Bend("x", 1), Bend("x", 2))
    assert placed.routes["x", "y"] == ("x", *bends, "y")
    assert placed.middle[bends[0]] == placed.middle[bends[1]]


def test_sources_stand_right_above_what_they_feed():
    edges = [("a", "b"), ("b", "c"), ("w", "c")]
    assert place(dict.fromkeys("abwc", 9.0), edges, gap=1, bend=1).layers[1] in (("b", "w"), ("w", "b"))


def test_nothing():
    assert place({}, [], gap=1, bend=1).layers == ()


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 14))
    names = [f"n{i}" for i in range(count)]
    pairs = [(a, b) for i, b in enumerate(names) for a in names[:i]]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=24)) if pairs else []
    return {name: draw(st.floats(5, 200)) for name in names}, edges


@given(graphs())
def test_nothing_overlaps_and_edges_go_down(graph):
    widths, edges = graph
    placed = place(widths, edges, gap=4.0, bend=2.0)
    assert sorted(v for row in placed.layers for v in row if isinstance(v, str)) == sorted(widths)
    for row in placed.layers:
        placed_row = sorted(row, key=lambda v: placed.middle[v])
        for a, b in itertools.pairwise(placed_row):
            apart = (widths.get(a, 2.0) + widths.get(b, 2.0)) / 2 + 4.0
            assert placed.middle[b] - placed.middle[a] >= apart - 1e-6
    layer = {v: i for i, row in enumerate(placed.layers) for v in row}
    for route in placed.routes.values():
        assert [layer[v] for v in route] == list(range(layer[route[0]], layer[route[-1]] + 1))
    assert all(-1e-6 <= x <= placed.width + 1e-6 for x in placed.middle.values())

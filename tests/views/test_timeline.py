import itertools

from autopar.cost_model.breakdown import Event
from autopar.views import lanes
from autopar.views.svg import Linear
from autopar.views.timeline import bars
from tests.views import sample


def test_narrow_neighbours_are_drawn_as_one_and_none_is_lost():
    events = sample.events()
    scale = Linear(0.0, max(lanes.end(e) for e in events), 0.0, 1000.0)
    for row in lanes.rows(events):
        found = bars(row, scale)
        assert [e for bar in found for e in bar.events] == list(row.events)
        assert len(found) < 1000
        for a, b in itertools.pairwise(found):
            assert a.stop <= b.start + 1e-6


def test_what_is_wide_stands_alone():
    row = lanes.LaneRow("tp", 0, (Event("tp", "a", 0, 1), Event("tp", "b", 1, 1), Event("tp", "c", 5, 9)))
    found = bars(row, Linear(0.0, 6.0, 0.0, 60.0))
    assert [(bar.start, bar.stop) for bar in found] == [(0, 10), (10, 20), (50, 60)]

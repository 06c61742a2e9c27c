from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.breakdown import Event
from autopar.views import lanes


def test_what_overlaps_gets_a_row_of_its_own():
    events = [Event("dp", "a", 0, 4), Event("dp", "b", 1, 2), Event("compute", "c", 2, 1), Event("dp", "d", 4, 1)]
    assert [(row.name, [e.name for e in row.events]) for row in lanes.rows(events)] == [
        ("compute", ["c"]),
        ("dp", ["a", "d"]),
        ("dp (2)", ["b"]),
    ]


def test_exposed_is_what_compute_leaves():
    compute = lanes.busy([Event("compute", "", 1, 1), Event("compute", "", 2, 1), Event("compute", "", 5, 9)])
    assert compute == ((1, 3), (5, 14))
    assert lanes.exposed((0, 6), compute) == ((0, 1), (3, 5))
    assert lanes.exposed((1, 2), compute) == ()
    assert lanes.exposed((20, 21), compute) == ((20, 21),)


times = st.integers(0, 60)
spans = st.lists(st.tuples(times, st.integers(1, 20)), max_size=12)


@given(spans, times, st.integers(1, 20))
def test_exposed_against_counting(found, start, length):
    """On whole seconds: a second is exposed when no compute event covers it."""
    covered = {second for begin, long in found for second in range(begin, begin + long)}
    compute = lanes.busy(Event("compute", "", begin, long) for begin, long in found)
    free = sum(stop - begin for begin, stop in lanes.exposed((start, start + length), compute))
    assert free == len(set(range(start, start + length)) - covered)


@given(spans)
def test_rows_hold_every_event_once_and_apart(found):
    events = [Event("dp", str(i), begin, long) for i, (begin, long) in enumerate(found)]
    rows = lanes.rows(events)
    assert sorted(e.name for row in rows for e in row.events) == sorted(e.name for e in events)
    for row in rows:
        for a, b in zip(row.events, row.events[1:], strict=False):
            assert lanes.end(a) <= b.start_seconds

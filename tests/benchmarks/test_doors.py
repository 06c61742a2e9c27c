"""Recorded calls of the doors: a slice of them; `python -m benchmarks.doors` compares all."""

from benchmarks.doors.__main__ import difference, recorded
from benchmarks.doors.calls import CALLS


def test_every_call_is_recorded() -> None:
    assert list(recorded()) == list(CALLS)
    assert len(CALLS) >= 200


def test_calls_make_the_requests_that_were_recorded() -> None:
    known = recorded()
    assert not [line for call in CALLS[::3] if (line := difference(call, known[call]))]

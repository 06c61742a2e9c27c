import json

import pytest

from autopar.cost_model.breakdown import Event
from autopar.errors import AutoparError
from autopar.views import read_trace, to_trace, write_trace
from tests.views import sample


def test_a_small_trace():
    events = [Event("tp", "all_gather", 1e-3, 2e-6, {"bytes": 64}), Event("compute", "linear", 0, 1e-3)]
    assert to_trace(events) == {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "predicted step"}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}},
            {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": 0, "args": {"sort_index": 0}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "tp"}},
            {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": 1, "args": {"sort_index": 1}},
            {"ph": "X", "name": "linear", "cat": "compute", "pid": 0, "tid": 0, "ts": 0.0, "dur": 1000.0, "args": {}},
            {
                "ph": "X",
                "name": "all_gather",
                "cat": "tp",
                "pid": 0,
                "tid": 1,
                "ts": 1000.0,
                "dur": 2.0,
                "args": {"bytes": 64},
            },
        ],
    }


def test_the_schema_of_a_whole_step(tmp_path):
    """What Perfetto asks of the JSON form: numbers, known phases, and no overlap on a thread."""
    path = tmp_path / "trace.json"
    write_trace(sample.events(), path)
    document = json.loads(path.read_text())
    threads: dict[int, float] = {}
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X") and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= threads.get(event["tid"], 0.0) - 1e-6
            assert event["dur"] >= 0 and isinstance(event["args"], dict)
            threads[event["tid"]] = event["ts"] + event["dur"]
    named = {e["tid"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert set(threads) == named


def place(event: Event) -> tuple[str, float]:
    return event.lane, event.start_seconds


def test_round_trip(tmp_path):
    path = tmp_path / "trace.json"
    events = sample.events()
    write_trace(events, path)
    found = read_trace(path)
    for a, b in zip(sorted(found, key=place), sorted(events, key=place), strict=True):
        assert (a.lane, a.name, a.detail) == (b.lane, b.name, b.detail)
        assert a.start_seconds == pytest.approx(b.start_seconds, abs=1e-9)
        assert a.duration_seconds == pytest.approx(b.duration_seconds, abs=2e-9)


def test_names_and_details_of_any_kind(tmp_path):
    path = tmp_path / "trace.json"
    write_trace([Event("compute", 'a "b" </script>\n☃', 0, 1, {"shape": (2, 3), "dtype": object})], path)
    (found,) = read_trace(path)
    assert found.name == 'a "b" </script>\n☃' and found.detail["shape"] == [2, 3]


def test_what_overlaps_on_a_lane_goes_to_another_thread():
    document = to_trace([Event("dp", "a", 0, 4), Event("dp", "b", 1, 4)])
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["dp", "dp (2)"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}', "[" * 300])
def test_another_file_is_no_trace(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(AutoparError, match=r"x\.json is not a trace"):
        read_trace(tmp_path / "x.json")

"""Estimates of settings in buckets of the usual size, which those of a search do not take."""

from __future__ import annotations

import pytest

from autopar.cost_model.buckets import usual_bucket_bytes


def estimate_in_usual_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of a test, estimates take buckets of the size of a plan that names none."""

    def usual(total_bytes, axes):  # type: ignore[no-untyped-def]
        return usual_bucket_bytes(total_bytes, [size for size, _ in axes])

    monkeypatch.setattr("autopar.search.candidates.candidates.likely_bucket_bytes", usual)

"""The limits of types that a model's code asks for, in a run in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from autopar._torch import AskedLimits

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def asked(dtypes: Sequence[torch.dtype]) -> list[str]:
    """The types that one place in the code is answered with."""
    return [torch.finfo(dtype).dtype for dtype in dtypes]


def test_a_place_that_asks_for_float64_is_given_the_types_of_the_first_run_in_turn() -> None:
    limits = AskedLimits()
    with limits.noted():
        assert asked([HALF, SINGLE]) == ["bfloat16", "float32"]
    with limits.given():
        assert asked([DOUBLE] * 4) == ["bfloat16", "float32", "bfloat16", "float32"]
    assert asked([DOUBLE]) == ["float64"]


def test_a_place_that_names_a_type_is_given_it() -> None:
    limits = AskedLimits()
    with limits.noted():
        asked([HALF, DOUBLE])
    with limits.given():
        assert asked([SINGLE, DOUBLE]) == ["float32", "float64"]


def test_another_place_is_given_what_it_asks_for() -> None:
    limits = AskedLimits()
    with limits.noted():
        asked([SINGLE])
    with limits.given():
        assert torch.finfo(DOUBLE).dtype == "float64"


def test_no_type_is_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = AskedLimits()
    found = []
    for context, dtype in (limits.noted, SINGLE), (limits.given, DOUBLE):
        monkeypatch.setattr(torch, "get_default_dtype", lambda dtype=dtype: dtype)
        with context():
            found.append(torch.finfo().dtype)
    assert found == ["float32", "float32"]


def test_what_it_answers_is_a_finfo_and_an_error_is_torchs() -> None:
    with AskedLimits().noted():
        assert isinstance(torch.finfo(SINGLE), torch.finfo)
        assert not isinstance(1.0, (torch.finfo, torch.iinfo))
        with pytest.raises(TypeError):
            torch.finfo(torch.int64)
    assert isinstance(torch.finfo, type)

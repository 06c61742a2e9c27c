"""Long tables of cases, of which every run of the tests takes a part."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def often(cases: Iterable[Any], always: Container[Any]) -> list[Any]:
    """All cases for `parametrize`; those that are not in `always` are slow.

    Args:
        cases: the whole table: tuples of arguments, or single arguments.
        always: the cases that stand for every kind of case.
    """
    return [
        case
        if case in always
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]

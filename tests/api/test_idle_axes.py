"""What a planner warns of."""

import pytest

from autopar.api.announcing import warn_of_idle_axes
from autopar.ir import Mesh, Plan
from autopar.runtime.ranks import all_ranks


def idle(mesh):
    return Plan(mesh=Mesh.parse(mesh), fingerprint="", recipe="auto", micro_batches=1, parameters={}, inputs={}, ops={})


def test_axes_that_split_nothing_are_warned_of_in_one_line():
    with pytest.warns(UserWarning, match="The axes dp=2 and tp=3 split nothing: all 6 ranks") as found:
        warn_of_idle_axes(idle("dp=2,tp=3"))
    assert len(found) == 1
    with pytest.warns(UserWarning, match="The axis tp=3 splits nothing: all 3 ranks"):
        warn_of_idle_axes(idle("dp=1,tp=3"))


def test_another_rank_says_nothing_of_them(monkeypatch, recwarn):
    monkeypatch.setattr(all_ranks, "is_first", lambda: False)
    warn_of_idle_axes(idle("dp=2,tp=3"))
    assert not recwarn.list

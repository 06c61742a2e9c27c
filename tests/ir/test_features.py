"""Features that do not go together: one table for requests and plans."""

import pytest

from autopar.cost_model import find_hardware
from autopar.errors import PlanError, RecipeError
from autopar.ir import Mesh, Pipeline, Plan
from autopar.ir.features import EXCLUDES, Feature, check_features, conflict
from autopar.search.request.request import Request


@pytest.mark.parametrize("pair", EXCLUDES, ids=lambda pair: "-".join(each.name for each in pair))
def test_every_pair_of_the_table_is_refused_with_its_reason(pair: tuple[Feature, Feature]) -> None:
    found = {each: each.name for each in reversed(pair)}
    with pytest.raises(PlanError) as caught:
        check_features("The plan has", found, PlanError)
    first, second = pair
    why = f"{first.name} and {second.name}, which cannot be combined: {EXCLUDES[pair]}."
    assert str(caught.value) == f"The plan has {why} Leave out one of the two."


def test_features_by_themselves_go_with_each_other() -> None:
    assert not any(conflict({each: "this"}) for each in Feature)
    assert not conflict({Feature.STAGES: "2 stages", Feature.RECOMPUTED: "recomputed blocks"})


def test_requests_and_plans_are_asked_the_same_table() -> None:
    with pytest.raises(RecipeError, match="overlap_batches=2 and 2 pipeline ranks, which cannot"):
        Request(find_hardware("h100"), ranks=8, stages=2, overlap_batches=2, micro_batches=4)
    with pytest.raises(PlanError, match="2 micro-batches at a time and a pipeline of 2 stages"):
        Plan(Mesh.parse("dp=4"), "0", "auto", 4, {}, {}, {}, pipeline=Pipeline(2, "1f1b", ("b",)), overlap_batches=2)

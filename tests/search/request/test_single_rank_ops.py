"""Pins such as `@0`, which leave ops to one rank of an axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost_model import find_cluster
from autopar.errors import RecipeError
from autopar.explanation.asked import check_closed_form
from autopar.explanation.explanation import Explanation
from autopar.ir import Mesh, O, Plan, R
from autopar.planning.planning import prepare_step
from autopar.proof.subject import Subject
from autopar.search.exact.search import search
from autopar.search.request.request import Request
from autopar.search.request.single_rank_ops import LonePins, resolve_lone_pins
from tests.support.towers import Towers

SIDES = {"a": "@0", "b": "@1"}
CLUSTER = find_cluster("h100x2")


class Dropped(Towers):
    """The same with dropout between the towers and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.a.append(nn.Dropout(0.1))


def explained(pins: dict[str, str], model: type[nn.Module] = Towers, **options: Any) -> Explanation:
    torch.manual_seed(0)
    options = {"mesh": {"dp": 2}, "cluster": CLUSTER, **options}
    return autopar.explain(
        model(),
        (torch.randn(8, 8), torch.randint(0, 3, (8,))),
        loss_fn=nn.functional.cross_entropy,
        pins=pins,
        **options,
    )


def labels(plan: Plan, names: list[str]) -> list[str]:
    return [plan.ops[name][0] for name in names]


def test_submodules_run_on_the_ranks_that_pins_name() -> None:
    found = explained(SIDES)
    assert labels(found.plan, ["linear", "tanh", "linear_1"]) == ["@0"] * 3
    assert labels(found.plan, ["linear_2", "relu", "layer_norm", "linear_3"]) == ["@1"] * 4
    weight = found.plan.parameters["a.0.weight"]
    assert weight.storage == weight.resident == (O(0),)
    assert found.plan.parameters["b.3.weight"].storage == (O(1),)
    assert found.plan.parameters["head.weight"].storage != (O(0),)
    assert found.plan.inputs["x"] == (R,)
    assert "rank 1 of dp runs 4 of" in str(found)


@pytest.mark.parametrize("pattern", ["a", "a.*", "a.?", "*a*"])
def test_a_pattern_names_a_submodule(pattern: str) -> None:
    graph = explained({}).graph
    found = resolve_lone_pins({pattern: "@1"}, graph, Mesh.parse("dp=2"), lambda op: 1.0)
    assert {"linear", "linear_1"} <= found.owners.keys()
    assert found.owners["linear"] == {0: 1}


def test_the_plan_is_that_of_its_text() -> None:
    plan = explained(SIDES).plan
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("recipe", ["auto", "ddp", "zero3"])
def test_a_step_is_that_of_one_device(recipe: str) -> None:
    """What is not pinned follows the recipe."""
    torch.manual_seed(0)
    batch = (torch.randn(8, 8).double(), torch.randint(0, 3, (8,)))
    subject = Subject.of(Towers().double(), batch, loss_fn=nn.functional.cross_entropy)
    prepared = subject.prepared
    plan = search(
        prepared.analysis.graph,
        {"dp": 2},
        hardware=CLUSTER.hardware,
        recipe=recipe,
        pins=SIDES,
        fingerprint=prepared.captured.fingerprint,
    )
    assert plan.ops["linear_2"] == ("@1",)
    assert subject.compare(plan).passed


def test_pins_on_an_axis_of_several() -> None:
    found = explained({"a": "@1@tp"}, mesh={"dp": 1, "tp": 2})
    assert found.plan.ops["linear"][1] == "@1" and found.plan.ops["linear"][0] == "-"


def test_ops_that_draw_stay_on_all_ranks() -> None:
    found = explained(SIDES, Dropped)
    assert any("1 op that the pins leave to one rank" in note for note in found.plan.notes)
    assert not any("@" in labels[0] for name, labels in found.plan.ops.items() if "dropout" in name)


class Branches(nn.Module):
    """Branches of these widths, of which each is a submodule."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, width, bias=False) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        return sum(branch(x).sum() for branch in self.branches)  # type: ignore[return-value]


def test_branches_are_shared_out_by_their_work() -> None:
    """The longest first, each to the rank with the least so far: 7, then | 6, | 6 + 5, 7 + 4 |, 7 + 4 + 3 |."""
    widths = {"1": 7, "0": 3, "3": 6, "2": 5, "4": 4}
    model = Branches(*(64 * widths[name] for name in sorted(widths)))
    graph = prepare_step(model, (torch.randn(4, 8),)).analysis.graph
    work = {op.name: widths[op.module.rpartition(".")[2]] for op in graph.ops if op.module}
    found = resolve_lone_pins({"branches.*": "@*"}, graph, Mesh.parse("dp=2"), lambda op: float(work[op.name]))
    owners = {work[name]: axes[0] for name, axes in found.owners.items()}
    assert owners == {7: 0, 6: 1, 5: 1, 4: 0, 3: 0}


def test_what_pins_name_counts_for_the_balance() -> None:
    """The branch that a user puts on a rank is work of this rank; a branch goes as a whole."""
    found = explained({"b": "@0", "a": "@*", "head": "@*"}).plan
    assert labels(found, ["linear", "tanh", "linear_1"]) == ["@1"] * 3
    assert labels(found, ["linear_4"]) in (["@0"], ["@1"])


@pytest.mark.parametrize(
    ("pins", "options", "message"),
    [
        ({"a": "@2"}, {}, r"rank 2 of the axis dp, but it has 2 ranks, .* @0@dp to @1@dp, or give dp at least 3"),
        ({"c": "@0"}, {}, r"'c' matches no submodule and no op of the model; the 8 submodules"),
        ({"a": "@0", "*": "@1"}, {}, r"'a' \(@0@dp\) and '\*' \(@1@dp\) both match linear"),
        ({"a": "@0"}, {"mesh": {"dp": 1, "tp": 2}}, "but the mesh dp=1,tp=2 has 2 axes; write @0@dp or @0@tp"),
        ({"a": "@0@ep"}, {}, "'a': '@0@ep' cannot hold"),
        ({"a": "@0 k@dp"}, {}, "mixes k@dp, a choice of layouts"),
        ({"a": "@0"}, {"recompute": "full"}, "and recompute='full', which cannot be combined"),
        ({"a": "@0"}, {"recipe": "local:2"}, r"and replicas \(local:2\), which cannot"),
    ],
)
def test_what_cannot_hold(pins: dict[str, str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        explained(pins, **options)


def test_a_mesh_is_given() -> None:
    with pytest.raises(RecipeError, match="give mesh="):
        Request.on(CLUSTER, pins={"a": "@0"})


def test_closed_forms_are_refused() -> None:
    request = Request.on(CLUSTER, mesh={"dp": 2}, pins={"a": "@0"})
    with pytest.raises(RecipeError, match="the pin a=@0 leaves ops to one rank"):
        check_closed_form(request)


def test_no_pins_leave_a_plan_as_it_is() -> None:
    found = resolve_lone_pins({"x": "S(0)@dp"}, explained({}).graph, Mesh.parse("dp=2"), lambda op: 1.0)
    assert found == LonePins({})

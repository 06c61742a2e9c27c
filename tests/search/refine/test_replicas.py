"""Recipes of replicas: opt-in, on the first axis, priced, and refused where replicas cannot be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_model import find_hardware
from autopar.errors import AutoparError, RecipeError
from autopar.ir import Meeting, Mesh
from autopar.ir.note import kind_of
from autopar.search.request.recipes import format_recipe, meeting_of, resolve, split_recipe
from autopar.search.request.request import Request

H100 = find_hardware("h100")
WIDTH, ROWS = 64, 8
PARAMETER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def test_the_first_axis_is_the_first_that_is_placed() -> None:
    mesh = Mesh.parse("far=2,tp=2 order tp,far")
    assert meeting_of({"far": "local:4"}, mesh) == Meeting("far", 2, 4)
    with pytest.raises(RecipeError, match=r"on the mesh {'far': 2, 'tp': 2}: the replicas must be one axis"):
        meeting_of({"tp": "local:4"}, mesh)


@pytest.mark.parametrize("recipe", ["far:diloco:10,dp:zero3", "local:4", "async-server:0", "dp:geo:2,tp:tp+sp"])
def test_the_text_of_a_recipe_reads_back(recipe: str) -> None:
    assert format_recipe(recipe) == recipe


def test_a_recipe_names_replicas_and_the_rest() -> None:
    recipe, mesh = {"far": "diloco:10", "dp": "zero3"}, Mesh.parse("far=2,dp=4")
    assert meeting_of(recipe, mesh) == Meeting("far", 2, 10, "diloco")
    assert split_recipe(recipe) == ("", {"dp": "zero3"})
    assert meeting_of("local:4", Mesh.parse("dp=8")) == Meeting("dp", 8, 4)
    assert split_recipe("local:4") == ("", "auto")
    server = Meeting("dp", 8, 1, "async-server", staleness=2)
    assert meeting_of("async-server:2", Mesh.parse("dp=8")) == server
    assert meeting_of("dp:zero3", mesh) is None and meeting_of("auto", None) is None


@pytest.mark.parametrize(
    ("recipe", "mesh", "says"),
    [
        ("local:0", {"dp": 2}, "synchronise every 0 steps; give a whole number of at least 1, such as local:4"),
        ("local:4", {"dp": 2, "tp": 2}, "recipe={'dp': 'local:4'}"),
        ({"dp": "local:4"}, {"tp": 2, "dp": 2}, "the replicas must be one axis, the first of the mesh"),
        ({"dp": "local:4", "tp": "geo:4"}, {"dp": 2, "tp": 2}, "the replicas must be one axis"),
        ("local:4", None, "Give the axis of the replicas, such as mesh={'dp': 4}, recipe='local:4'"),
        ("local", {"dp": 2}, "for the first axis of a mesh local:K, geo:K, diloco:K, async-server:S"),
        ("async-server:x", {"dp": 2}, "may be ahead of the slowest, but 'x' is not a whole number"),
        ({"far": "async-server:1"}, {"far": 2, "dp": 2}, "Take a mesh of one axis, such as mesh={'far': 4}"),
        ("locl:4", {"dp": 2}, "There is no recipe '4' for the axis 'locl'; choose among auto"),
        ("locl:4", {"dp": 2}, "For replicas that synchronise every 4 steps write local:4, geo:4 or diloco:4."),
        ("local:four", {"dp": 2}, "Cannot read 'local:four': after 'local:' comes the number of steps"),
        ("far:geo:-3,dp:ddp", {"far": 2, "dp": 2}, "Cannot read 'geo:-3'"),
        ("local:2.5", {"dp": 2}, "but '2.5' is not a whole number. Write local:4, for example."),
        ("local:", {"dp": 2}, "but '' is not a whole number"),
        (
            {"dp": "diloco:4:0.9"},
            {"dp": 2},
            "'4:0.9' is not a whole number. Write diloco:4, for example. Other numbers",
        ),
        ("diloco:4,dp:ddp", {"far": 2, "dp": 2}, "not with the axis whose ranks are the replicas"),
        ({"far": "local:4", "dp": "zero3"}, {"far": 2}, "names the axis 'dp', but the mesh far=2 has far."),
        ({"dp": "local:4", "pp": "1f1b"}, {"dp": 2, "pp": 2}, "cannot be run together yet"),
        ("local:4", {"pp": 2}, "cannot be run together yet. Take a mesh without the axis pp, such as mesh={'dp': 2}"),
        ({"dp": "local:4"}, {"pp": 2, "dp": 2}, "such as mesh={'dp': 4}, or a recipe without replicas"),
        (
            {"far": "local:4", "dp": "zero-offload"},
            {"far": 2, "dp": 2},
            "whose parameters are on the host cannot synchronise",
        ),
    ],
)
def test_replicas_that_cannot_be(recipe: Any, mesh: dict[str, int] | None, says: str) -> None:
    with pytest.raises(AutoparError) as caught:
        Request(H100, ranks=4 if mesh is None else None, mesh=mesh, recipe=recipe).of_replica()  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_a_pin_along_the_axis_of_replicas_is_refused() -> None:
    asked = Request(H100, mesh={"dp": 2}, recipe="local:4", pins={"*.weight": "S(0)@dp"})  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="but dp is the axis of the replicas, whose values differ"):
        asked.of_replica()


def test_other_doors_refuse_replicas() -> None:
    with pytest.raises(RecipeError, match="trains replicas that synchronise every K steps"):
        resolve("local:4", Mesh.parse("dp=2"))


def explained(recipe: Any, mesh: dict[str, int] | None = None, **options: Any) -> Any:
    model = nn.Linear(WIDTH, WIDTH)
    return autopar.explain(
        model, torch.empty(ROWS, WIDTH), mesh=mesh or {"dp": 2}, loss_fn=torch.mean, recipe=recipe, **options
    )


def test_the_plan_says_what_is_no_longer_the_result_of_one_device() -> None:
    (note,) = (n for n in explained("local:4").plan.notes if kind_of(n) == "replicas")
    assert note.startswith(
        "Not the result of a single device: 2 replicas along dp train on rows of their own and synchronise every "
        "4 steps local. The parameters of other replicas that one sees are up to 3 steps old. Along dp a rank sends "
        "4.16 kB a step in place of 16.6 kB with data parallelism, in about "
    )
    assert note in " ".join(str(explained("local:4")).split())


def test_the_plan_says_how_stale_a_gradient_may_be_and_what_that_buys() -> None:
    """The server's rank answers each of three others with 16.6 kB; an all-reduce sends 2 * 3/4 of that."""
    (note,) = (n for n in explained("async-server:2", {"dp": 4}).plan.notes if kind_of(n) == "replicas")
    assert note.startswith(
        "Not the result of a single device: 4 replicas along dp train on rows of their own and exchange differences "
        "with a server on O(0)@dp after every step, so that a gradient may lack up to the last 2 steps of each other "
        "rank, by its own count. A rank waits for another only where it is more than 2 exchanges ahead of it. Along dp "
        "the server's rank sends 49.9 kB a step in place of 25.0 kB with data parallelism, in about "
    )
    (waits,) = (n for n in explained("async-server:0").plan.notes if kind_of(n) == "replicas")
    assert "so that no gradient is old. A rank waits for the slowest in every exchange." in waits


def test_gradients_that_are_wider_than_parameters_are_wider_messages() -> None:
    options = {"precision": None, "training_state": "gradients=8"}
    (note,) = (n for n in explained("local:4", **options).plan.notes if kind_of(n) == "replicas")
    assert "sends 4.16 kB a step in place of 33.3 kB with data parallelism" in note


def test_nothing_else_makes_replicas() -> None:
    assert explained("auto").plan.meeting is None and explained("ddp").plan.meeting is None


def test_a_meeting_sends_what_data_parallelism_sends_in_a_step() -> None:
    together, four, eight = (explained(r).traffic.value for r in ("ddp", "local:4", "diloco:8"))
    assert four == PARAMETER_BYTES / 4 and eight == PARAMETER_BYTES / 8
    assert together - PARAMETER_BYTES == pytest.approx(4, abs=8)  # and the loss


def test_the_rank_of_a_server_sends_to_all_others() -> None:
    assert explained("async-server:2", {"dp": 4}).traffic.value == 3 * PARAMETER_BYTES


def test_meetings_are_seconds_of_a_step() -> None:
    once, fourth = (explained(f"geo:{k}").time.part("replicas meeting").value for k in (1, 4))
    assert once == pytest.approx(4 * fourth) and once > 0


def test_memory_has_the_base_and_the_momentum() -> None:
    local, geo, diloco = (explained(f"{r}:4").memory_bytes for r in ("local", "geo", "diloco"))
    assert (geo - local, diloco - local) == (PARAMETER_BYTES, 2 * PARAMETER_BYTES)


def test_replicas_of_several_ranks_are_planned_on_their_own_mesh() -> None:
    found = explained({"far": "diloco:10", "dp": "zero3"}, {"far": 2, "dp": 4}, cluster="h100x8")
    assert found.plan.mesh == Mesh.parse("dp=4") and found.plan.world_mesh == Mesh.parse("far=2,dp=4")
    assert found.plan.recipe == "far:diloco:10,dp:zero3" and found.ranks == 8
    assert all(how.zero_stage(0) == 3 for how in found.plan.parameters.values())


def test_a_loss_that_is_a_sum_is_refused() -> None:
    model = autopar.compile(nn.Linear(8, 2), loss_fn=torch.sum, mesh={"dp": 1}, recipe="local:4")
    with pytest.raises(RecipeError, match="The loss is a sum over rows"):
        model.step(torch.ones(4, 8))


def test_a_plan_with_replicas_is_the_plan_of_one_in_other_respects() -> None:
    plan = explained("local:4").plan
    assert dataclasses.replace(plan, meeting=None).mesh == plan.mesh

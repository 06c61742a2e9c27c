"""What a request refuses at birth, and what follows from its fields."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cost_model import find_hardware
from autopar.errors import AutoparError, MeshError, PlanError, RecipeError
from autopar.ir import Mesh, MixedPrecision
from autopar.search.request.request import Request

H100 = find_hardware("h100")


def test_the_bound_is_the_memory_less_the_headroom_or_what_was_said() -> None:
    assert H100.memory_bytes == 84_932_000_000
    assert Request(H100).bound_bytes == 80_685_400_000
    assert Request(H100, headroom=0.1).bound_bytes == 76_438_800_000
    assert Request(H100, headroom=0.1, memory_bytes=10**9).bound_bytes == 10**9
    assert Request(H100, must_fit=False).search_bound_bytes is None


def test_a_mesh_decides_ranks_and_depth() -> None:
    asked = Request(H100, mesh={"pp": 2, "dp": 8})
    assert asked.mesh == Mesh.of({"pp": 2, "dp": 8}) and asked.ranks == 16
    assert asked.depths == (2,) and asked.has_stages and asked.cluster.nodes == 2
    assert asked.but(mesh={"dp": 4}).ranks == 4
    assert asked.but(mesh={"dp": 4}).depths == (1,)
    assert Request(H100, ranks=8).depths is None


def test_a_recipe_names_the_schedule() -> None:
    assert Request(H100, recipe="1f1b").chosen_schedule == "1f1b"
    naive = Request(H100, recipe="pp:naive-pp,dp:zero1")
    assert naive.chosen_schedule == "gpipe" and naive.chosen_micro_batches == 1
    assert naive.inside == {"dp": "zero1"}


def test_text_is_read() -> None:
    asked = Request(H100, precision="bf16 reduce=fp32", stages=(4, 1, 4), memory_bytes="70GB")
    assert asked.precision == MixedPrecision("bfloat16", "float32")
    assert asked.stages == (1, 4) and asked.bound_bytes == 70 * 10**9


def test_constraints_are_written_as_a_command_line() -> None:
    asked = Request(H100, mesh={"dp": 8}, recipe="zero3", without={"sp"}, pins={"a.*": "dp"})
    assert asked.text == "--mesh dp=8, --recipe zero3, --pin a.*=dp, --no sp"


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"recipe": "1f1b", "schedule": "gpipe"}, RecipeError, "names the pipeline '1f1b'"),
        ({"schedule": "chimera"}, RecipeError, "no schedule 'chimera'; choose among gpipe, 1f1b"),
        ({"recipe": "naive-pp", "micro_batches": 4}, RecipeError, "runs one micro-batch"),
        ({"recipe": "zero4"}, RecipeError, "There is no recipe 'zero4'"),
        ({"schedule": "1f1b", "chunks": 2}, PlanError, "1 stage on each pipeline rank.*chunks=2"),
        ({"schedule": "zbv", "chunks": 4}, PlanError, "2 stages on each pipeline rank"),
        ({"mesh": {"dp": 2}, "schedule": "1f1b"}, MeshError, "has no axis 'pp'"),
        (
            {"mesh": {"dp": 2}, "chunks": 2},
            MeshError,
            "^chunks=2 can only be used with pipeline stages.*dp=2 has no axis 'pp'",
        ),
        ({"mesh": {"dp": 2}, "recipe": "tp:tp"}, RecipeError, "names the axis 'tp'"),
        ({"mesh": {"pp": 2, "dp": 2}, "recipe": "tp:tp"}, RecipeError, "names the axis 'tp'"),
        ({"mesh": {"dp": 2}, "ranks": 4}, MeshError, "dp=2 has 2 ranks, but h100x8x1 has 4"),
        ({"mesh": {"pp": 2}, "stages": (4,)}, MeshError, "2 pipeline ranks, but stages asks for 4"),
        ({"mesh": {"tp": 2}, "without": {"tp"}}, MeshError, "2 ranks along tp, but --no tp"),
        ({"recipe": "fsdp", "without": {"zero3"}}, RecipeError, "'zero3' and --no zero3"),
        ({"recipe": "tp+sp", "without": {"sp"}}, RecipeError, "--no sp exclude each other"),
        ({"recompute": "full", "without": {"recompute"}}, AutoparError, "exclude each other"),
        ({"without": {"zero4"}}, AutoparError, "without names 'zero4' .did you mean zero3 or .*; choose"),
        ({"inside_node": ("pp",)}, AutoparError, "inside_node names 'pp'; choose among dp, tp"),
        ({"recompute": 1.5}, PlanError, "between 0 and 1"),
        ({"recompute": "some"}, PlanError, "'full', 'partitioned', 'offloaded', .* 3, .* 0.5, or .*Selection.of"),
        ({"recompute": True}, PlanError, "no recompute=True: it is 'none'"),
        ({"batch": 3, "micro_batches": 4}, AutoparError, "Of a batch of 3 sequences 4 micro-batches cannot each"),
        ({"micro_batches": 0}, AutoparError, "micro_batches=0 is less than 1"),
        ({"micro_batches": "4"}, AutoparError, "micro_batches='4' is not a whole number"),
        ({"ranks": 2.0}, AutoparError, "ranks=2.0 is not a whole number"),
        ({"memory_bytes": float("nan")}, AutoparError, "memory_bytes=nan is not a whole number"),
        ({"stages": ()}, AutoparError, "allows no number of stages"),
        ({"stages": (0, 2)}, AutoparError, r"stages\[0\]=0 is less than 1"),
        ({"headroom": "x"}, AutoparError, "headroom='x' must be a fraction"),
        ({"memory_bytes": "70 apples"}, AutoparError, "'70 apples' is not a size of a memory; write 70GB"),
        ({"memory_bytes": 0}, AutoparError, "memory_bytes=0 is less than 1"),
        ({"headroom": 1.0}, AutoparError, "headroom=1.0 must be a fraction"),
        ({"precision": "bf16 reduce=fp32 reduce=bf16"}, AutoparError, "names a field twice"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], error: type[AutoparError], words: str) -> None:
    with pytest.raises(error, match=words):
        Request(H100, **fields)

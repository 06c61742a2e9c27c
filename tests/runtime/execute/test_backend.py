"""Ordinary scripts with `torch.compile(..., backend="autopar")` do on many ranks what they do on one device."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from autopar.backend import backend, graphs, recurrence
from autopar.errors import AutoparError, MeshError, RecipeError, StepError
from tests.runtime import scripts
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import difference

EQUAL = [
    "loss_outside",
    "loss_inside",
    "llama",
    "batch_norm",
    "graph_break",
    "other_batches",
    "inference",
    "dropout_off",
    "tied",
    "masked",
    "reshaped",
    "no_module",
    "custom_backward",
    "checkpointed",
    "in_place",
    "autocast",
    "queue",
    "inner_gradient",
    "per_sample_gradients",
]
# float32 in its norms and its loss; bfloat16
BOUND = {"llama": 1e-5, "autocast": 3e-2}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", EQUAL)
def test_on_two_ranks(two_ranks: Ranks, name: str) -> None:
    found = two_ranks.run(scripts.run_compiled, name, {"recipe": "ddp"})
    assert _distance(found, name) < BOUND.get(name, 1e-9)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("loss_inside", "graph_break"))]
)
def test_on_four_ranks(four_ranks: Ranks, name: str) -> None:
    options = {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "ddp", "tp": "tp"}}
    found = four_ranks.run(scripts.run_compiled, name, options)
    assert _distance(found, name) < BOUND.get(name, 1e-9)


def _open_mesh(recipe: Any) -> tuple[list[str], scripts.Result]:
    found = []
    told = _told(lambda: found.append(scripts.run_compiled("graph_break", {"recipe": recipe})))
    return told, found[0]


@pytest.mark.multiprocess
def test_a_mesh_that_nobody_names_is_searched(four_ranks: Ranks) -> None:
    found = four_ranks.run(_open_mesh, {"dp": "ddp", "tp": "tp"})
    assert _distance([result for _, result in found], "graph_break") < 1e-9
    told, _ = found[0]
    assert any(re.search(r"ops on dp=\d,tp=\d .*splits [^;]+ in", line) for line in told)


def _distance(found: list[dict[str, Any]], name: str) -> float:
    """The largest difference of a rank from what the script gives on one device."""
    expected = scripts.run(name)
    return max(difference(each, expected) for each in found)


@pytest.mark.multiprocess
def test_masks_are_the_same_on_all_ranks_and_from_one_seed(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(scripts.run_compiled, "dropout", {"recipe": "ddp"})
    assert first["same"] and first["other"] and first["kept"] == second["kept"]
    assert all(8 <= kept <= 56 for kept in first["kept"])


def _told(run: Callable[..., Any], *args: Any) -> list[str]:
    """What the backend logs on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    graphs.log.addHandler(handler)
    graphs.log.setLevel(logging.INFO)
    try:
        run(*args)
    finally:
        graphs.log.removeHandler(handler)
        graphs.log.setLevel(logging.NOTSET)
    return lines


@pytest.mark.multiprocess
def test_what_was_split_is_logged(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(_told, scripts.run_compiled, "other_batches", {"recipe": "ddp"})
    assert "dp splits batch in" in first[0] and "all_reduce" not in first[0]
    assert any("is not applied to a graph" in line and "size 1" in line for line in first), first
    assert not second


def _recurrent() -> tuple[list[str], scripts.Result]:
    found = []
    told = _told(lambda: found.append(scripts.run_compiled("recurrent", {"recipe": "ddp"})))
    return told, found[0]


@pytest.mark.multiprocess
def test_recurrent_layers_are_split_and_not_skipped(two_ranks: Ranks) -> None:
    (told, first), (_, second) = two_ranks.run(_recurrent)
    assert len(told) == 1 and "dp splits batch in" in told[0]
    expected = scripts.run("recurrent")
    assert max(difference(each, expected) for each in (first, second)) < 1e-9


def _many_lengths() -> None:
    model = torch.compile(nn.Linear(2, 2, bias=False), backend="autopar", dynamic=True, options={"recipe": "ddp"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "KEPT_PROGRAMS", 3)
        patch.setattr(recurrence, "PLANNED_AT_ONCE", 9)
        for length in (4, 6, 8, 4, 2, 4, 6):  # 2 takes the place of 6, and 6 that of 8
            model(torch.ones(length, 2))


@pytest.mark.multiprocess
def test_the_plan_used_longest_ago_makes_room_for_another(two_ranks: Ranks) -> None:
    told, _ = two_ranks.run(_told, _many_lengths)
    assert sum("planned in" in line for line in told) == 5


def _experts() -> tuple[list[str], scripts.Result]:
    found = []
    told = _told(lambda: found.append(scripts.run_compiled("experts_by_mask", {"recipe": "ddp"})))
    return told, found[0]


@pytest.mark.multiprocess
def test_sizes_that_depend_on_values_do_not_plan_for_ever(two_ranks: Ranks) -> None:
    """In 14 steps the experts of two blocks meet about 100 sets of sizes, four of which are planned at once."""
    (told, first), (_, second) = two_ranks.run(_experts)
    expected = scripts.run("experts_by_mask")
    assert max(difference(each, expected) for each in (first, second)) < 1e-9
    assert sum("planned in" in line for line in told) <= 8
    (said,) = (line for line in told if "sets of sizes" in line)
    assert "x[mask]" in said and "experts.py" in said and "in forward: return self.down(" in said


@pytest.mark.multiprocess
def test_what_cannot_be_captured_runs_whole_and_is_named(two_ranks: Ranks) -> None:
    first, _ = two_ranks.run(_told, scripts.run_compiled, "draws_in_backward", {})
    assert "runs whole on every rank: " in first[0]
    assert "Noisy" in first[0] and "draws random numbers in its backward" in first[0]
    assert re.search(r"where: .*scripts\.py:\d+ in .*Noisy\.apply\(model\(x\)\)", first[0])


@pytest.mark.multiprocess
def test_a_custom_backward_is_split(two_ranks: Ranks) -> None:
    first, _ = two_ranks.run(_told, scripts.run_compiled, "custom_backward", {"recipe": "ddp"})
    assert "dp splits batch in" in first[0] and not any("runs whole" in line for line in first)


def _unlike() -> str:
    torch.compiler.reset()
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(AutoparError) as caught:
        torch.compile(nn.Linear(4, 4), backend="autopar")(torch.ones(2, 4))
    return str(caught.value)


@pytest.mark.multiprocess
def test_ranks_with_other_parameters_are_refused(two_ranks: Ranks) -> None:
    assert all("weight is not the same on all 2 ranks" in text for text in two_ranks.run(_unlike))


def _scaled_by_rank() -> str:
    torch.compiler.reset()
    scale = 1.5 + torch.distributed.get_rank()
    with pytest.raises(StepError) as caught:
        torch.compile(lambda x: x * scale, backend="autopar")(torch.ones(4))
    return str(caught.value)


def _with_own_recipe() -> str:
    """What a rank is told where each has another recipe."""
    options = {"recipe": ("auto", "zero3")[torch.distributed.get_rank()]}
    try:
        scripts.run_compiled("loss_inside", options)
    except MeshError as error:
        return str(error)
    return "no error"


@pytest.mark.multiprocess
def test_ranks_with_other_options_are_refused(two_ranks: Ranks) -> None:
    for text in two_ranks.run(_with_own_recipe):
        assert "Rank 1 differs from rank 0 in its options: it has --mesh dp=2, --recipe zero3, and" in text


@pytest.mark.multiprocess
def test_ranks_with_other_numbers_in_a_graph_are_refused_by_the_line(two_ranks: Ranks) -> None:
    for text in two_ranks.run(_scaled_by_rank):
        assert re.search(r"rank 0 computes mul\(1\.5\) \(\S+test_backend\.py:\d+ in ", text), text
        assert "rank 1 mul(2.5)" in text


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"mash": {"dp": 2}}, AutoparError, r"'mash' \(did you mean mesh\?\); it takes mesh, recipe"),
        ({"mesh": {"dp": 2}}, MeshError, "has 2 ranks, but 1 run here"),
        ({"mesh": {"pp": 1}}, MeshError, "pipeline stages need the whole step"),
        ({"recipe": "zero-offload"}, RecipeError, "zero-offload stores parameters on the host"),
        ({"recipe": "data-parallel"}, RecipeError, "data-parallel stores each parameter on one rank"),
        ({"recipe": "zero9"}, RecipeError, "There is no recipe 'zero9'"),
        ({"hardware": "h1000"}, AutoparError, "no GPU 'h1000' in the catalogue"),
        ({"recipe": "1f1b"}, RecipeError, "'1f1b' is for pipeline stages"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: type, sentence: str) -> None:
    graph = torch.fx.symbolic_trace(nn.ReLU())
    refused = backend.autopar(graph, [torch.ones(2)], options=options)
    with pytest.raises(error, match=sentence):
        refused(torch.ones(2))


def test_one_process_runs_as_it_is() -> None:
    found = scripts.run_compiled("graph_break", {})
    assert difference(found, scripts.run("graph_break")) < 1e-12


def _sharded() -> str:
    torch.compiler.reset()
    weight = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(AutoparError) as caught:
        torch.compile(lambda weight: weight * 2, backend="autopar")(weight)
    return str(caught.value)


@pytest.mark.multiprocess
def test_sharded_parameters_are_refused(two_ranks: Ranks) -> None:
    assert all("weight is a DTensor of placements" in text for text in two_ranks.run(_sharded))

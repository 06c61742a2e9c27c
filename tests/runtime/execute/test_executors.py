"""Compiled plans train as eager ones do, and as one device does; masks are the same bit for bit."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.backend.sharding import whole_parameter
from autopar.errors import AutoparError
from autopar.runtime.execute import compiled
from autopar.runtime.execute.compiled import Executor, ExecutorName, Region
from autopar.runtime.model import program_cache
from autopar.runtime.parameters.gather import Gathers
from benchmarks.accelerator.memory import peak_in_trace
from tests.runtime import scripts
from tests.runtime.execute.test_recompute import Made, model_of
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import difference, single, train
from tests.support.staged import captured_once

Case = tuple[str, dict[str, int], str, dict[str, Any]]

AS_ONE_DEVICE: list[Case] = [
    ("gpt", {"tp": 2}, "tp", {}),
    ("gpt", {"dp": 2}, "zero3", {"recompute": "full", "micro_batches": 2}),
]
AS_EAGER: list[Case] = [  # by numbers that one device draws otherwise, or sums otherwise
    ("images", {"dp": 2}, "ddp", {}),
    ("dropout", {"dp": 2}, "zero2", {"micro_batches": 2}),
    ("dropout", {"pp": 2}, "auto", {"recompute": "full", "micro_batches": 2}),
    ("norm", {"pp": 2}, "auto", {"schedule": "zb", "micro_batches": 2}),
]


class Images(nn.Module):
    """A convolution net whose batch norms take statistics over the batch of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.layers(x)).mean((2, 3)))


def made_of(name: str) -> Made:
    """A model by its name, the same in every process."""
    if name != "images":
        return model_of(name)
    torch.manual_seed(0)
    batch = (torch.randn(8, 3, 6, 6).double(), torch.randint(0, 4, (8,)))
    return Images().double(), batch, nn.functional.cross_entropy


@captured_once()
def trained(case: Case, executor: ExecutorName) -> dict[str, Any]:
    """What training gives on this rank, and of `Images` what evaluation does, without autograd."""
    name, mesh, recipe, options = case
    model, batch, loss_fn = made_of(name)
    made = autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=recipe, executor=executor, **options)
    found = train(made, made.step, batch)
    if name == "images":
        made.eval()
        with torch.no_grad():
            found["no_grad"] = made(batch[0])
        with torch.inference_mode():
            found["inference"] = made(batch[0])
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", AS_ONE_DEVICE, ids=lambda case: case[2])
def test_compiled_plans_train_as_one_device_does(two_ranks: Ranks, case: Case) -> None:
    expected = single("gpt", micro_batches=case[3].get("micro_batches", 1))
    for found in two_ranks.run(trained, case, "aot_eager"):
        assert difference(found, expected) < 1e-9


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", AS_EAGER, ids=lambda case: f"{case[0]} {case[2]}")
def test_masks_and_statistics_are_those_of_the_eager_executor(two_ranks: Ranks, case: Case) -> None:
    eager, compiled = (two_ranks.run(trained, case, name) for name in ("eager", "aot_eager"))
    for found, expected in zip(compiled, eager, strict=True):
        assert difference(found, expected) < 1e-12


@pytest.mark.multiprocess
def test_inductor_trains_as_one_device_does(two_ranks: Ranks) -> None:
    case: Case = ("mlp", {"tp": 2}, "tp", {})
    for found in two_ranks.run(trained, case, "inductor"):
        assert difference(found, single("mlp")) < 1e-9


@pytest.mark.multiprocess
def test_masks_under_inductor_are_those_of_the_eager_executor(two_ranks: Ranks) -> None:
    case: Case = ("dropout", {"dp": 2}, "zero3", {"recompute": "full"})
    eager, compiled = (two_ranks.run(trained, case, name) for name in ("eager", "inductor"))
    for found, expected in zip(compiled, eager, strict=True):
        assert difference(found, expected) < 1e-12


@captured_once()
def keeping(executor: ExecutorName) -> tuple[int, int]:
    """Under ZeRO-3: gathered parameters given up until backward, and how many graphs were compiled."""
    given_up, pack = 0, Gathers._pack

    def counted(self: Gathers, x: Tensor) -> Any:
        nonlocal given_up
        kept = pack(self, x)
        given_up += not isinstance(kept, Tensor)
        return kept

    model, batch, loss_fn = made_of("gpt")
    made = autopar.compile(model, loss_fn=loss_fn, mesh={"dp": 2}, recipe="zero3", executor=executor)
    Gathers._pack = counted  # type: ignore[method-assign]
    try:
        made.step(*batch)
    finally:
        Gathers._pack = pack  # type: ignore[method-assign]
    return given_up, made._settings.executor.compiled


@pytest.mark.multiprocess
def test_gathered_parameters_are_not_kept_between_forward_and_backward(two_ranks: Ranks) -> None:
    eager, compiled = (two_ranks.run(keeping, name)[0] for name in ("eager", "aot_eager"))
    assert compiled[0] == eager[0] > 0


def split(names: list[str], executor: ExecutorName, sharded: bool = False) -> dict[str, Any]:
    """What scripts give by name, with plain parameters or after `autopar.shard_`."""

    def compile(function: Any) -> Any:
        cells = getattr(function, "__closure__", None) or ()
        for module in (function, *(cell.cell_contents for cell in cells)):
            if sharded and isinstance(module, nn.Module):
                autopar.shard_(module, "zero3")
        options = {"recipe": "ddp", "executor": executor}
        return torch.compile(function, backend="autopar", options=options)

    found = {}
    for name in names:
        torch.compiler.reset()
        result = scripts.run(name, compile)
        found[name] = {k: whole_parameter(v) for k, v in result.items()}
    return found


def beyond(results: list[dict[str, Any]], names: list[str]) -> dict[str, float]:
    """Scripts whose results are not those of one device -> their largest difference."""
    worst = {}
    for name in names:
        expected = scripts.run(name)
        worst[name] = max(difference(found[name], expected) for found in results)
    return {name: gap for name, gap in worst.items() if not gap < BOUND.get(name, 1e-9)}


# float32 in its norms and its loss, and Adam makes steps of rounding; bfloat16
BOUND = {"llama": 1e-4, "autocast": 3e-2}
OTHERS = ["dropout", "gradient_penalty", "inner_gradient"]  # not as on one device; refused


@pytest.mark.multiprocess
def test_the_backend_compiles_what_it_splits(two_ranks: Ranks) -> None:
    names = ["graph_break", "batch_norm"]
    compiled = two_ranks.run(split, [*names, "dropout"], "aot_eager")
    assert not beyond(compiled, names)
    eager = two_ranks.run(split, ["dropout"], "eager")
    for found in compiled:
        assert found["dropout"]["kept"] == eager[0]["dropout"]["kept"]
    names = ["checkpointed", "in_place"]
    assert not beyond(two_ranks.run(split, names, "aot_eager", True), names)


@pytest.mark.multiprocess
def test_inductor_takes_masks_and_leaves_complex_numbers_to_eager_kernels(two_ranks: Ranks) -> None:
    names = ["complex_weight", "masked"]
    assert not beyond(two_ranks.run(split, names, "inductor"), names)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", [name for name in scripts.SCRIPTS if name not in OTHERS])
def test_every_script(two_ranks: Ranks, name: str, executor: ExecutorName, sharded: bool) -> None:
    if sharded and name == "recurrent":
        pytest.skip("shard_ refuses an LSTM by name")
    if sharded and name == "reshaped":
        pytest.skip("torch takes no norm of DTensors beside a parameter that lies outside of modules")
    assert not beyond(two_ranks.run(split, [name], executor, sharded), [name])


TWO = {"dp": 2, "tp": 2}
STAGES = {"pp": 2, "dp": 2}
ON_FOUR: list[Any] = [
    ("dropout", TWO, {"dp": "ddp", "tp": "tp"}, {}),
    ("dropout", TWO, {"dp": "zero3", "tp": "tp"}, {"recompute": "full", "micro_batches": 2}),
    ("images", TWO, {"dp": "ddp", "tp": "tp"}, {}),
    ("dropout", STAGES, "auto", {"recompute": "full", "micro_batches": 2}),
    ("dropout", STAGES, {"pp": "1f1b", "dp": "zero2"}, {"micro_batches": 2}),
    ("norm", STAGES, "auto", {"schedule": "zb", "micro_batches": 2}),
]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", ON_FOUR, ids=str)
def test_on_four_ranks(four_ranks: Ranks, case: Case, executor: ExecutorName) -> None:
    eager, compiled = (four_ranks.run(trained, case, name) for name in ("eager", executor))
    for found, expected in zip(compiled, eager, strict=True):
        assert difference(found, expected) < 1e-9


def test_a_derivative_of_a_gradient_is_refused() -> None:
    made = autopar.compile(layers(1), mesh={"dp": 1}, executor="aot_eager")
    loss, weights = made(torch.ones(2, 4)).square().sum(), list(made.parameters())
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    with pytest.raises(AutoparError, match="but compiled regions have none: use executor='eag"):
        gradients[0].sum().backward()


def region_of(executor: Executor) -> nn.Module:
    """x @ x, and its exponential."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.mm.default, (x, x))
    graph.output((graph.call_function(torch.ops.aten.exp.default, (y,)),))
    return executor.ready(torch.fx.GraphModule(nn.Module(), graph))


def test_what_was_compiled_under_autocast_is_not_used_outside() -> None:
    executor = Executor("aot_eager")
    region, x = region_of(executor), torch.ones(2, 2)
    seen = []
    for dtype in (torch.bfloat16, torch.float16, None, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            seen.append(region(x)[0].dtype)
    assert seen == [torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
    assert executor.compiled == 3


def test_what_was_compiled_goes_with_the_last_program_that_uses_it() -> None:
    executor, x = Executor("aot_eager"), torch.ones(2, 2)
    first, second = region_of(executor), region_of(executor)
    first(x), second(x), second(torch.ones(3, 3))
    assert executor.compiled == 2
    del second
    gc.collect()
    assert executor.compiled == 1
    del first
    gc.collect()
    assert executor.compiled == 0


def test_dropped_programs_take_along_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "KEPT_PROGRAMS", 2)
    made = autopar.compile(layers(2), mesh={"dp": 1}, executor="aot_eager")
    for rows in range(1, 6):
        made(torch.ones(rows, 4))
    gc.collect()
    alone = autopar.compile(layers(2), mesh={"dp": 1}, executor="aot_eager")
    alone(torch.ones(1, 4))
    assert made._settings.executor.compiled == 2 * alone._settings.executor.compiled > 0


def test_inductor_says_what_it_lacks() -> None:
    from torch._inductor import config

    sentence = "needs a C\\+\\+ compiler .*no-such-compiler.*variable CXX, or use the executor 'aot_eag"
    # torch's own way to change its settings; monkeypatch would delete this one at its end
    with config.patch("cpp.cxx", (None, "no-such-compiler")), pytest.raises(AutoparError, match=sentence):
        region_of(Executor("inductor"))(torch.ones(2, 2))


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)))


def graphs_of(made: autopar.CompiledModule) -> int:
    """Number of graphs that a forward and its backward compile."""
    made(torch.ones(2, 4)).sum().backward()
    return made._settings.executor.compiled


def test_what_is_compiled_does_not_depend_on_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "JOINED_OPS", 4)  # two layers
    runs = [graphs_of(autopar.compile(layers(count), mesh={"dp": 1}, executor="aot_eager")) for count in (4, 8)]
    assert runs[0] == runs[1]


def step_of(name: str, executor: ExecutorName, **options: Any) -> tuple[list[Tensor], autopar.CompiledModule]:
    """Loss and gradients of a step on one rank, and the module that ran it."""
    model, batch, loss_fn = made_of(name)
    made = autopar.compile(model, loss_fn=loss_fn, mesh={"dp": 1}, executor=executor, **options)
    loss = made.step(*batch)
    return [loss, *(p.grad for p in made.parameters() if p.grad is not None)], made


def regions_of(made: autopar.CompiledModule) -> int:
    """Number of regions of the program of a step, outside of recomputed blocks."""
    (ready,) = made._programs.kept.ready[True]
    (graph,) = ready.bound._runner.graphs  # type: ignore[union-attr]
    return sum(isinstance(x, Region) for x in graph.module.children())


@pytest.mark.parametrize("name", ["gpt", "images", "dropout"])
def test_joined_blocks_give_the_bits_of_separate_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, made = step_of(name, "aot_eager")
    monkeypatch.setattr(compiled, "JOINED_OPS", 0)
    separate, other = step_of(name, "aot_eager")
    assert regions_of(made) < regions_of(other)
    assert all(map(torch.equal, joined, separate))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_joined_blocks_hold_no_more_at_the_peak(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for joined_ops in (compiled.JOINED_OPS, 0):
        monkeypatch.setattr(compiled, "JOINED_OPS", joined_ops)
        _, made = step_of("gpt", "aot_eager", recompute=recompute)
        batch = made_of("gpt")[1]
        peaks.append(peak_in_trace(partial(made.step, *batch)))
    assert peaks[0] <= peaks[1]


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"precision": "bf16"}, {"recompute": "full"}], ids=str)
def test_where_gradients_are_waited_for_every_block_is_a_region(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = step_of("gpt", "aot_eager", **options)
    monkeypatch.setattr(compiled, "JOINED_OPS", 0)
    _, other = step_of("gpt", "aot_eager", **options)
    assert made._settings.executor.compiled == other._settings.executor.compiled


def test_an_unknown_executor_is_named() -> None:
    sentence = "no executor 'jit'; executor is one of 'eager', 'aot_eager', 'inductor'"
    with pytest.raises(AutoparError, match=sentence):
        Executor("jit")  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match=sentence):
        autopar.compile(layers(1), executor="jit")  # type: ignore[arg-type]

"""Saved activations as priced, against what autograd keeps; benchmarks/accuracy/saved_activations.py has all 26."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig, loss_fn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.cost_model import SavedTensors, Sizes, find_hardware
from autopar.cost_model.machines.software import AUTOPAR
from autopar.cost_model.pricer import Pricer
from autopar.cost_model.steps.run import Run
from autopar.cost_model.steps.step import Step
from autopar.ir import Mesh, ParameterPlan, Plan, R, S
from autopar.ops.sharding import shard
from autopar.planning.planning import Prepared, make_plan, prepare_step
from autopar.program.program import build_program
from autopar.proof import lockstep
from autopar.search import search
from autopar.search.request.request import Request
from benchmarks.accuracy.saved_activations import (
    eager_kept_bytes,
    kept_bytes,
    measure,
    priced_bytes,
    program_kept_bytes,
    unsplit_plan,
)
from tests.support.llama import Llama
from tests.support.price_oracle import price

HARDWARE = find_hardware("cpu-gloo")
PLENTY_BYTES = 10**15


@pytest.mark.parametrize("name", ["llama", "t5", "swin", "resnet"])
def test_architectures(name: str) -> None:
    row = measure(name)
    assert abs(row.error) < 0.001


def test_in_half_precision() -> None:
    row = measure("bert", torch.bfloat16)
    assert abs(row.error) < 0.005


def llama() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Llama(vocab=32, width=32, inner=48, heads=4, kv_heads=2, layers=3)
    return model, (torch.randint(32, (4, 8)), torch.randint(32, (4, 8)))


def saved_names(prepared: Prepared) -> set[str]:
    graph = prepared.analysis.graph
    return {name for op in graph.ops for name in op.saved}


# The oracle


def test_kept_bytes_by_hand() -> None:
    """sin keeps its operand, 80 bytes; the slice that is multiplied keeps all of w's 160 alive."""
    x, w = torch.randn(10, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    p = nn.Parameter(torch.randn(10, dtype=torch.float64))
    assert kept_bytes(lambda: (p + x).sin(), [p]) == 80
    assert kept_bytes(lambda: p * w[:10], [p]) == 160
    assert kept_bytes(lambda: p * w[:10] + p * w[10:], [p]) == 160
    assert kept_bytes(lambda: p * w[:10], [p, w]) == 0
    assert kept_bytes(lambda: ((p + x).sin().detach(), p)[0], [p]) == 0


# What is wanted


class Adapted(nn.Module):
    """A frozen linear map with a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(x) + self.up(self.down(x))
        return (self.frozen(y) + self.up(self.down(y))).sum()


def test_a_frozen_weight_keeps_no_input() -> None:
    """x and y for `down`, two results of `down` for `up`: all that a gradient needs."""
    model, x = Adapted(), torch.randn(8, 16)
    prepared = prepare_step(model, (x,))
    expected = 2 * x.nbytes + 2 * 8 * 2 * 4
    assert priced_bytes(prepared) == program_kept_bytes(prepared, model, (x,)) == expected


def test_an_optimizer_leaves_a_frozen_weight_alone() -> None:
    """It reads and writes what is trained: two matrices of 2 x 16."""
    graph = prepare_step(Adapted(), (torch.randn(8, 16),)).analysis.graph
    mesh = Mesh.of({"x": 1})
    plan = search(graph, mesh, hardware=HARDWARE)
    pricer = Pricer(graph, plan, sizes=Sizes(mesh), hardware=HARDWARE, links=[HARDWARE.link(mesh, 0)])
    held = [each for each in pricer.holdings() if each.kind == "parameters"]
    assert sum(each.bytes for each in held) == 4 * (16 * 16 + 16 + 2 * 2 * 16)
    assert sum(each.bytes for each in held if each.is_stored) == 4 * 2 * 2 * 16


class Attending(nn.Module):
    """A fused projection of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(16, 48), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v).square().sum()


def test_thirds_of_a_projection_keep_the_whole_once() -> None:
    model, x = Attending(), torch.randn(8, 6, 16)
    prepared = prepare_step(model, (x,))
    graph = prepared.analysis.graph
    saved = SavedTensors(graph)
    (attention,) = [op for op in graph.ops if op.kind == "aten.scaled_dot_product_attention"]
    assert {saved.root(name) for name in attention.operands} == {"linear"}
    assert priced_bytes(prepared) == program_kept_bytes(prepared, model, (x,))


def test_statistics_divide_as_their_op_does() -> None:
    prepared = prepare_step(Attending(), (torch.randn(8, 6, 16),))
    graph = prepared.analysis.graph
    (norm,) = [op for op in graph.ops if op.kind == "aten.layer_norm"]
    assert norm.hidden == ("layer_norm:mean", "layer_norm:rstd")
    mean = graph.tensors["layer_norm:mean"]
    assert mean.shape == (8, 6) and not mean.needs_grad
    (batch,) = [c for c in norm.choices if c.label == "d0"]
    assert batch.results == (S(0), S(0), S(0))
    assert Sizes(Mesh.of({"x": 4})).bytes(mean, (S(0),)) == 8 * 6 * 4 / 4


def test_what_no_gradient_comes_from_keeps_nothing() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.gate(x)
            return y.sum() * (y.sin().exp().argmax() > 1)

    prepared = prepare_step(Routed(), (torch.randn(8, 16),))
    graph = prepared.analysis.graph
    assert {op.kind for op in graph.ops if graph.tensors[op.results[0]].needs_grad}.isdisjoint({"aten.sin", "aten.exp"})
    model = Routed()
    found = program_kept_bytes(prepared, model, (torch.randn(8, 16),))
    assert abs(priced_bytes(prepared) - found) < 8  # the truth value as a number


# Plans that divide


def rank_kept_bytes(prepared: Prepared, model: nn.Module, inputs: tuple[Tensor, ...], plan: Plan) -> float:
    """What each of the simulated ranks of a plan keeps."""
    program = build_program(prepared.captured, prepared.analysis, plan)
    mesh, parameters = plan.mesh, dict(model.named_parameters())
    arguments = [
        [
            shard(parameters[s.name].detach(), s.dims, s.layout, mesh, rank).clone().requires_grad_()
            for rank in range(mesh.size)
        ]
        for s in program.parameters
    ]
    stored = [x for ranks in arguments for x in ranks]
    for s, x in zip(program.inputs, inputs, strict=True):
        shards = [shard(x, s.dims, s.layout, mesh, rank) for rank in range(mesh.size)]
        arguments.append([shard.clone() for shard in shards])
    return kept_bytes(lambda: lockstep.run(program, arguments), stored) / mesh.size


@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    [
        ("ddp", 0.001),
        ("tp", 0.02),  # over split classes the loss is another program, with masks of its own
    ],
)
def test_ranks_keep_what_is_priced(recipe: str, tolerance: float) -> None:
    model = GPT(GPTConfig(seq_len=16, layers=2, heads=4, width=32))
    inputs = (torch.randint(256, (8, 16)), torch.randint(256, (8, 16)))
    prepared = prepare_step(model, inputs, loss_fn=loss_fn)
    graph = prepared.analysis.graph
    plan = make_plan(prepared, Request(HARDWARE, mesh={"x": 2}, recipe=recipe, memory_bytes=PLENTY_BYTES))
    found = rank_kept_bytes(prepared, model, inputs, plan)
    assert price(graph, plan, HARDWARE).saved_bytes == pytest.approx(found, rel=tolerance)


# Blocks that are run again


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def saved_parts(prepared: Prepared, plan: Plan) -> dict[str, float]:
    """What is saved where layers are run again, by part."""
    graph, mesh = prepared.analysis.graph, plan.mesh
    links = [HARDWARE.link(mesh, axis) for axis in range(len(mesh.axes))]
    pricer = Pricer(graph, plan, sizes=Sizes(mesh), hardware=HARDWARE, links=links)
    step = Step(
        list(pricer.items()),
        list(pricer.holdings()),
        Run(recompute="full"),
        HARDWARE,
        AUTOPAR,
        layers=3,
        boundary_bytes=pricer.boundary_bytes(),
    )
    saved = next(term for term in step.memory() if term.name == "saved activations")
    return {part.name: part.value for part in saved.parts}


def test_recomputation_keeps_the_inputs_of_layers() -> None:
    model, inputs = llama()
    prepared = prepare_step(model, inputs)
    plan = unsplit_plan(prepared.analysis.graph, prepared.captured.fingerprint)
    parts = saved_parts(prepared, plan)
    everything = price(prepared.analysis.graph, plan, HARDWARE).saved_bytes
    ends = parts["embedding, head and loss"]
    model.layers = nn.ModuleList(Checkpointed(block) for block in model.layers)
    kept = parts["inputs of layers"] + ends
    assert kept == pytest.approx(eager_kept_bytes(model, inputs), rel=0.001)
    assert kept < 0.4 * everything


def test_recomputation_divides_too() -> None:
    model, inputs = llama()
    prepared = prepare_step(model, inputs)
    graph = prepared.analysis.graph
    whole = unsplit_plan(graph, prepared.captured.fingerprint)
    batch = {op.name: op for op in graph.ops}
    labels = {name: next((c.label for c in op.choices if c.factor == "batch"), "-") for name, op in batch.items()}
    plan = replace(whole, mesh=Mesh.of({"x": 2}), ops={n: (label,) for n, label in labels.items()})
    plan = replace(plan, parameters={n: ParameterPlan((R,), (R,)) for n in graph.parameters})
    halves = {name: held / 2 for name, held in saved_parts(prepared, whole).items()}
    assert saved_parts(prepared, plan) == halves

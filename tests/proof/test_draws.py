"""Models that draw random numbers are proved: a logical element has one draw, on a single device and on all ranks."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import AutoparError
from autopar.ir import Mesh
from autopar.ir.recompute import Selection
from autopar.pipeline.producers import recomputable_names
from autopar.program.program import Program, build_program
from autopar.proof.noise import DrawsFrom
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from autopar.proof.verdict import VerifyReport
from autopar.rules import RULES
from autopar.rules.elementwise import elementwise
from autopar.rules.random import is_key
from tests.rules.test_randomness import COARSE, DRAWS, SHAPE
from tests.support.tables import often

EXACT = 1e-12


def mean_square(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def sum_square(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


def masked_mean(y: Tensor, t: Tensor) -> Tensor:
    weights = (t > 0).to(y.dtype)
    return ((y - t).square() * weights).sum() / weights.sum()


LOSSES = {"mean": mean_square, "sum": sum_square, "ratio": masked_mean}


class Block(nn.Module):
    """A block of a GPT with dropout of attention's weights, of its result and inside of the MLP."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.norm, self.up, self.down = (nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + F.dropout(self.output(y.transpose(1, 2).flatten(2)), 0.1)
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.5))


def blocks(count: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(count)), nn.Linear(8, 8)).double()


def batch_of(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(shape).double(), torch.randn(shape).double()


def proof(loss: str = "mean", model: nn.Module | None = None, **how: Any) -> VerifyReport:
    loss_fn = LOSSES[loss]
    return autopar.verify(model or blocks(), batch_of(4, 4, 8), loss_fn=loss_fn, **how)


def is_exact(report: VerifyReport) -> bool:
    wide = [v.relative_error for v in report.verdicts if v.arithmetic == "float64"]
    return report.passed and max(wide) < EXACT


HOW: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": {"dp": 2}, "recipe": "ddp"},
    "zero3": {"mesh": {"dp": 2}, "recipe": "zero3"},
    "tp": {"mesh": {"tp": 2}, "recipe": "tp"},
    "tp+sp": {"mesh": {"dp": 2, "tp": 2}, "recipe": "tp+sp"},
    "accumulation": {"mesh": {"dp": 2}, "recipe": "ddp", "micro_batches": 2},
    "pipeline": {"mesh": {"pp": 2, "dp": 2}, "recipe": "ddp", "micro_batches": 2},
    "versions": {"mesh": {"pp": 2}, "recipe": "auto", "micro_batches": 4, "schedule": "2bw"},
    "replicas": {"mesh": {"dp": 2}, "recipe": "local:2"},
}


@pytest.mark.parametrize(
    ("how", "loss"),
    often(
        [(how, loss) for how in HOW for loss in LOSSES],
        {
            ("ddp", "mean"),
            ("zero3", "ratio"),
            ("tp+sp", "sum"),
            ("accumulation", "sum"),
            ("pipeline", "ratio"),
            ("versions", "sum"),
            ("replicas", "mean"),
        },
    ),
)
def test_dropout_is_exact_under(how: str, loss: str) -> None:
    report = proof(loss, **HOW[how])
    assert is_exact(report), report


# --- other ops that draw, under plans drawn at random


class Drawing(nn.Module):
    """A weight for every element of a batch, and a function of their products that draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.draw, self.w = draw, nn.Parameter(torch.randn(2, 4, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x * self.w).square().mean()


def normal(x: Tensor) -> Tensor:
    y = x.detach()
    of_means = torch.normal(y, 1.0) + torch.normal(0.0, y.abs()) + torch.normal(y, y.abs())
    return x * (of_means + torch.normal(0.0, 1.0, (2, 4, 1)))


def in_place(x: Tensor) -> Tensor:
    y, z = torch.empty_like(x), x.new_empty(2, 1, 1).bernoulli_(0.5)
    return x * (y.uniform_(0, 2) + y.clone().normal_() + y.clone().log_normal_() + z)


def of_values(x: Tensor) -> Tensor:
    y = x.detach().abs()
    counts = torch.poisson(y) + torch.bernoulli(y.sigmoid())
    picked = torch.multinomial(y.flatten(0, 1), 8).view(2, 4, 8)
    return x * (counts + picked) + torch._standard_gamma(x.abs() + 0.5)


def numbers(x: Tensor) -> Tensor:
    alike = torch.rand_like(x) + torch.randn_like(x) + torch.randint_like(x, 3)
    return x[:, torch.randperm(4)] * (alike + torch.rand(x.shape) + torch.randint(5, (8,)))


def dropped(x: Tensor) -> Tensor:
    x = F.dropout(x, 0.3, inplace=False) + F.alpha_dropout(x, 0.3, training=True)
    return F.dropout(F.dropout1d(x, 0.5), 1.0) + F.feature_alpha_dropout(x, 0.3, training=True)


def run_again(x: Tensor) -> Tensor:
    """A block that draws, recomputed in backward, before another draw."""
    y = checkpoint(lambda z: F.dropout(z, 0.3) * z, x, use_reentrant=False)
    assert isinstance(y, Tensor)
    return F.dropout(y, 0.3)


class Masks(torch.autograd.Function):
    """A dropout of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


def own(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


sprinkled = torch.library.custom_op("draws_test::own", own, mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
sprinkled.register_fake(torch.empty_like)

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": dropped,
    "normal": normal,
    "in place": in_place,
    "of values": of_values,
    "numbers": numbers,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": F.gumbel_softmax,
    "run again": run_again,
    "own": lambda x: F.dropout(x * sprinkled(x.detach()), 0.5),
    "pooling": lambda x: F.fractional_max_pool2d(x, 2, (2, 4)),
    "function": lambda x: F.dropout(Masks.apply(x), 0.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_draw_is_exact_under_random_plans(kind: str) -> None:
    model, x = Drawing(KINDS[kind]), batch_of(2, 4, 8)[0]
    subject = Subject.of(model, (x,))
    captured, graph = subject.prepared.captured, subject.prepared.analysis.graph
    for seed in range(4):
        plan = random_plan(graph, Mesh.parse("a=2,b=2"), seed=seed, fingerprint=captured.fingerprint)
        report = subject.compare(plan)
        assert is_exact(report), (seed, report)


@pytest.mark.parametrize("dtype", often([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_draws_are_the_same_in_every_arithmetic(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to(dtype)
    rows = tuple(x.to(dtype) for x in batch_of(8, 8))
    report = autopar.verify(model, rows, mesh={"dp": 2}, recipe="ddp", loss_fn=mean_square)
    assert report.passed and report.arithmetic == str(dtype).removeprefix("torch."), report


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_from_noise_have_the_distribution_of_the_op(name: str) -> None:
    noise = torch.Generator().manual_seed(0)
    with DrawsFrom(lambda shape: torch.rand(shape, generator=noise, dtype=torch.float64)):
        found = DRAWS[name](torch.ones(SHAPE))
    independent = found.numel() // math.prod(SHAPE[d] for d in COARSE.get(name, ()))
    assert abs(found.mean().item()) < 6 / math.sqrt(independent)
    assert found.square().mean().item() == pytest.approx(1, abs=0.9 if name in COARSE else 0.1)


def test_the_default_generator_is_left_alone() -> None:
    model, rows = blocks(), batch_of(4, 4, 8)
    state = torch.get_rng_state()
    autopar.verify(model, rows, mesh={"dp": 2}, plan="random", loss_fn=mean_square)
    assert torch.equal(state, torch.get_rng_state())


class Recurrent(nn.Module):
    """An LSTM, which drops between its layers inside of one op, and a dropout after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.LSTM(4, 4, 3, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layers(x)[0], 0.5).square().mean()


def test_draws_inside_of_an_op_are_exact() -> None:
    x = torch.ones(3, 4, 4).double()
    report = autopar.verify(Recurrent().double(), (x,), mesh={"a": 2}, plan="random", seed=1)
    assert is_exact(report), report


class Noisy(nn.Module):
    """A block of a GPT, and a draw that has no operand and so no key."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x) * torch.rand(x.shape, dtype=x.dtype)
        return y


@functools.cache
def noisy() -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Noisy(), Noisy(), nn.Linear(8, 8)).double()
    return Subject.of(model, batch_of(4, 4, 8), loss_fn=mean_square)


def recomputing(recompute: str, mesh: str = "a=2", seed: int = 0) -> VerifyReport:
    """The proof of a plan drawn at random that recomputes all of two blocks, or half of their ops."""
    captured, graph = noisy().prepared.captured, noisy().prepared.analysis.graph
    plan = random_plan(graph, Mesh.parse(mesh), seed=seed, fingerprint=captured.fingerprint, lone_ops=False)
    names = recomputable_names(graph, plan)
    half = Selection(tuple((path, tuple(own[::2])) for path, own in names.items()))
    return noisy().compare(replace(plan, recompute=half if recompute == "half" else "full"))


@pytest.mark.parametrize(
    ("recompute", "seed"), often(itertools.product(("full", "half"), (0, 1)), [("full", 0), ("half", 1)])
)
def test_plans_with_recomputed_blocks_are_exact(recompute: str, seed: int) -> None:
    report = recomputing(recompute, seed=seed)
    assert is_exact(report), report


@pytest.mark.parametrize("seed", often(range(3), [0]))
def test_recomputed_blocks_of_stages_are_exact(seed: int) -> None:
    report = recomputing("full", "pp=2,a=2", seed)
    assert is_exact(report), report


@pytest.mark.parametrize("recompute", ["full", "half"])
def test_a_recomputation_that_draws_anew_fails(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.execute.recompute.set_generators", lambda state: None)
    report = recomputing(recompute)
    assert not report.passed and "gradient" in str(report), report


# --- programs in which ranks draw what they should not


def _position(graph: fx.Graph, axis: str) -> fx.Node:
    """The number of a rank along an axis of two, as a tensor of one element."""
    both = graph.call_function(torch.ops.aten.arange.default, (2,))
    return graph.call_function(torch.ops.autopar.shard.default, (both, [0], 2, axis, "all_gather"))


def one_mask_for_two_parts(graph: fx.Graph) -> None:
    """key + position -> key."""
    key = next(node for node in graph.nodes if is_key(node))
    (added,) = key.users
    added.replace_all_uses_with(key)


def two_masks_for_one_tensor(graph: fx.Graph) -> None:
    """key -> key + position along the axis that replicates the op."""
    mask = next(node for node in graph.nodes if node.target is torch.ops.autopar.keep_mask.default)
    with graph.inserting_before(mask):
        other = graph.call_function(torch.ops.aten.add.Tensor, (mask.args[1], _position(graph, "b")))
    mask.update_arg(1, other)


def one_mask_for_two_ops(graph: fx.Graph) -> None:
    """Two keys -> the first of them."""
    first, second = (node for node in graph.nodes if is_key(node))
    second.replace_all_uses_with(first)


FAULTS = (one_mask_for_two_parts, two_masks_for_one_tensor, one_mask_for_two_ops)


def dropping(labels: tuple[str, str]) -> tuple[Subject, Program]:
    """Two dropouts, both run as these labels say on axes `a` and `b` of two ranks."""
    model = Drawing(lambda x: F.dropout(F.dropout(x, 0.5), 0.25))
    subject = Subject.of(model, (batch_of(2, 4, 8)[0],))
    captured, analysis = subject.prepared.captured, subject.prepared.analysis
    plan = random_plan(analysis.graph, Mesh.parse("a=2,b=2"), seed=0, fingerprint=captured.fingerprint)
    masks = {op.name: labels for op in analysis.graph.ops if op.kind == "aten.native_dropout"}
    return subject, build_program(captured, analysis, replace(plan, ops=plan.ops | masks))


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_that_draw_otherwise_fail(fault: Callable[[fx.Graph], None]) -> None:
    subject, program = dropping(("d1", "-"))
    assert is_exact(subject.compare_program(program))
    module = copy.deepcopy(program.module)
    fault(module.graph)
    module.recompile()
    report = subject.compare_program(replace(program, module=module))
    assert not report.passed, report


def test_a_rule_that_splits_an_op_with_one_mask_for_all_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "aten.native_dropout", elementwise)
    subject, program = dropping(("d1", "-"))
    assert any(node.target is torch.ops.aten.native_dropout.default for node in program.module.graph.nodes)
    assert not subject.compare_program(program).passed


# --- what cannot be compared


class Fickle(nn.Module):
    """Drops twice, and once where it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.linear(x), 0.5)
        return (y if torch.compiler.is_compiling() else F.dropout(y, 0.5)).mean()


def test_a_model_that_draws_otherwise_than_its_capture_is_refused() -> None:
    with pytest.raises(AutoparError, match=r"draws 2 random tensors .* captured step 1, .*test_draws\.py"):
        autopar.verify(Fickle(), (torch.ones(4, 8),), mesh={"a": 2}, plan="random", seed=0)

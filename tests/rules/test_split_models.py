"""Whole models with one dim split wherever a rule offers it: loss, every gradient and buffer of one device."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.ir import UNSPLIT, Choice, Mesh, Op, ParameterPlan, Plan, R, S, is_legal
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from tests.support.llama import Llama

Wish = Callable[[Op, Choice], bool]


def check(subject: Subject, mesh: str, *wishes: Wish) -> list[dict[str, str]]:
    """Compares the plan whose ops take, along every axis, the first legal choice that is wished for.

    Returns what they took, by kind of op, for every axis.
    """
    sizes, graph = Mesh.parse(mesh), subject.prepared.analysis.graph
    labels = {op.name: [UNSPLIT] * len(wishes) for op in graph.ops}
    taken: list[dict[str, str]] = [{} for _ in wishes]
    for op in graph.ops:
        for axis, wish in enumerate(wishes):
            for choice in op.choices:
                new = [*labels[op.name][:axis], choice.label, *labels[op.name][axis + 1 :]]
                if choice.splits and wish(op, choice) and is_legal(graph, op, tuple(new), sizes):
                    labels[op.name], taken[axis][op.kind] = new, choice.label
                    break
    whole = ParameterPlan((R,) * len(wishes), (R,) * len(wishes))
    plan = Plan(
        sizes,
        subject.prepared.captured.fingerprint,
        "wished",
        1,
        dict.fromkeys(graph.parameters, whole),
        {name: whole.storage for name in graph.inputs},
        {k: tuple(v) for k, v in labels.items()},
    )
    report = subject.compare(plan)
    assert report.passed, f"{report}\n{plan}"
    return taken


def dim(number: int) -> Wish:
    """Choices with a result, or else an operand, split along a dim."""

    def wish(op: Op, choice: Choice) -> bool:
        return S(number) in choice.results[:1] or S(number) in choice.operands[:1]

    return wish


class ConvNet(nn.Module):
    """Convolutions with groups, depthwise and transposed, every norm, pooling, resizing and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect")
        self.batch_norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.group_norm = nn.GroupNorm(4, 8)
        self.grouped = nn.Conv2d(8, 16, 3, padding=1, groups=2, stride=2)
        self.instance_norm = nn.InstanceNorm2d(16, affine=True, track_running_stats=True)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2, groups=2)
        self.slope = nn.PReLU(8)
        self.wide = nn.Conv2d(8, 16, 1)
        self.last = nn.BatchNorm2d(4, track_running_stats=False)
        self.head = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.batch_norm(self.stem(x)).relu()
        x = x + self.group_norm(self.depthwise(x))
        x = self.slope(self.up(self.instance_norm(self.grouped(x))))
        x = F.max_pool2d(x, 2) + F.interpolate(F.avg_pool2d(x, 4), scale_factor=2, mode="bilinear")
        x = self.last(F.pixel_shuffle(F.pad(self.wide(x), (1, 1, 1, 1)), 2))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), targets)


@pytest.fixture(scope="module")
def conv_net() -> Subject:
    torch.manual_seed(0)
    batch = torch.randn(4, 4, 8, 8, dtype=torch.float64), torch.tensor([0, 5, -100, 2])
    return Subject.of(ConvNet().double(), batch)


def test_convolution_net_over_the_batch(conv_net):
    (taken,) = check(conv_net, "dp=4", dim(0))
    assert {f"aten.{name}" for name in CONVOLUTIONAL} <= taken.keys()


def test_convolution_net_over_channels(conv_net):
    (taken,) = check(conv_net, "tp=2", dim(1))
    assert {f"aten.{name}" for name in CONVOLUTIONAL} <= taken.keys()


def test_convolution_net_over_both(conv_net):
    for taken in (*check(conv_net, "dp=2,tp=2", dim(0), dim(1)), *check(conv_net, "tp=2,dp=2", dim(1), dim(0))):
        assert "aten.conv2d" in taken


CONVOLUTIONAL = [
    "conv2d",
    "conv_transpose2d",
    "group_norm",
    "instance_norm",
    "max_pool2d",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "prelu",
    "pad",
    "upsample_bilinear2d",
    "pixel_shuffle",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit",
]


@pytest.mark.parametrize("seed", range(2))
def test_convolution_net_at_random(conv_net, seed):
    prepared = conv_net.prepared
    plan = random_plan(
        prepared.analysis.graph, Mesh.parse("a=2,b=2"), seed=seed, fingerprint=prepared.captured.fingerprint
    )
    assert conv_net.compare(plan).passed


class TiedHead(nn.Module):
    """A table that embeds tokens and gives the logits, and a loss of one of the forms."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8, padding_idx=3)
        self.mix = nn.Linear(8, 8)
        self.loss = loss

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(F.linear(self.mix(self.table(tokens)).tanh(), self.table.weight), targets)


def flat(**how: object) -> Callable[..., torch.Tensor]:
    return lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), **how)


WEIGHTS = torch.linspace(0.5, 2, 12, dtype=torch.float64)
LOSSES = {
    "mean": flat(),
    "ignored": lambda x, y: flat(ignore_index=2, label_smoothing=0.1)(x, y.clamp(0)),
    "weighted": flat(weight=WEIGHTS, label_smoothing=0.2),
    "summed": lambda x, y: F.cross_entropy(x.mT, y, weight=WEIGHTS, reduction="sum"),
    "of one token at a time": lambda x, y: (F.cross_entropy(x.mT, y, reduction="none") ** 2).mean(),
    "probabilities": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), F.one_hot(y.flatten().clamp(0), 12).double() * 0.7 + 0.025, weight=WEIGHTS
    ),
    "likelihoods": lambda x, y: F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten()),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_vocabulary_over_the_head_and_the_table(loss):
    torch.manual_seed(0)
    tokens, targets = torch.randint(12, (4, 6)), torch.randint(12, (4, 6))
    targets[0, :3] = -100  # the first half of the batch has fewer tokens that count
    subject = Subject.of(TiedHead(loss).double(), (tokens, targets))

    def vocabulary(op: Op, choice: Choice) -> bool:
        return choice.factor == "table.weight[0]"

    over_classes, over_tokens = check(subject, "tp=2,dp=2", vocabulary, dim(0))
    kinds = {"aten.embedding", "aten.linear", "aten.cross_entropy_loss"} & set(over_tokens)
    assert len(kinds) >= 2 and kinds <= set(over_classes)
    check(subject, "tp=4", vocabulary)


def attends(how: str) -> Subject:
    """A tiny Llama with grouped heads: causal by the op itself, or `eager` with products, a mask and softmax."""
    torch.manual_seed(0)
    tokens = torch.randint(32, (2, 8))
    if how == "causal":
        model = Llama(vocab=32, width=16, inner=24, heads=4, kv_heads=2, layers=1)
        return Subject.of(model.double(), (tokens, tokens))
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation=how,
    )
    return Subject.of(LlamaForCausalLM(config).double(), {"input_ids": tokens, "labels": tokens})


def sequence(op: Op, choice: Choice) -> bool:
    """The rows of every op that has them, the queries of attention: never keys, nor what is summed."""
    return choice.factor == "seq" and all(state.kind == "S" for state in choice.results)


@pytest.mark.parametrize("how", ["causal", "eager"])
def test_attention_over_its_queries(how):
    subject = attends(how)
    (taken,) = check(subject, "cp=4", sequence)
    core = {"aten.matmul", "aten.softmax"} if how == "eager" else {ATTENTION}
    assert core <= taken.keys()
    check(subject, "cp=2,dp=2", sequence, dim(0))
    check(subject, "a=2,b=2", sequence, sequence)  # the rows of the second within the first's


ATTENTION = "aten.scaled_dot_product_attention"

"""A loss in tiles under plans of every kind, against the plain loss on one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cost_model import find_hardware
from autopar.errors import StepError
from autopar.ir import Plan
from autopar.planning.planning import make_plan
from autopar.program.program import build_program
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from autopar.search.request.request import Request

WIDTH, CLASSES = 16, 24
MACHINE = find_hardware("h100")
# The logits of six rows in float32, which the model casts them to: a batch of 4 x 6 rows has four tiles.
TILE_BYTES = 3 * CLASSES * 8


class Model(nn.Module):
    """A block with a head, whose loss has what losses of language models have.

    Args:
        words: arguments of the cross-entropy.
        weighs: whether classes have weights.
        bias: whether the head has a bias.
    """

    def __init__(self, weighs=False, bias=False, **words):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.embed = words, nn.Embedding(CLASSES, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.register_buffer("weights", torch.rand(CLASSES) if weighs else None)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        x = x + self.down(F.gelu(self.up(x)))
        logits = self.head(x)[:, :-1].reshape(-1, CLASSES).float()
        return F.cross_entropy(logits, targets[:, 1:].reshape(-1), self.weights, **self.words)


LOSSES = {
    "mean": {},
    "masked": {"ignore_index": 3},
    "sum": {"reduction": "sum", "bias": True},
    "smoothed": {"label_smoothing": 0.1, "bias": True},
    "weighted": {"weighs": True, "label_smoothing": 0.1, "ignore_index": 5},
}


def batch(rows=4):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, CLASSES, (rows, 7), generator=generator) for _ in range(2))


@pytest.mark.parametrize("loss", LOSSES)
def test_random_plans_of_a_loss_in_tiles_are_exact(loss):
    subject = Subject.of(Model(**LOSSES[loss]), batch(), loss_tile_bytes=TILE_BYTES)
    for seed in range(6):
        mesh = autopar.Mesh.parse(("dp=2,tp=2", "pp=2,tp=2", "dp=3", "tp=2,dp=2")[seed % 4])
        plan = random_plan(
            subject.prepared.analysis.graph, mesh, seed=seed, fingerprint=subject.prepared.captured.fingerprint
        )
        report = subject.compare(plan)
        assert report.passed, (loss, seed, str(report))


@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [("dp=2,tp=2", "dp:zero3,tp:tp"), ("tp=2", "tp+sp"), ("pp=2,dp=2", "pp:1f1b,dp:zero1"), ("dp=3", "ddp")],
)
def test_every_recipe_of_a_loss_in_tiles_is_exact(mesh, recipe):
    subject = Subject.of(Model(ignore_index=3), batch(), loss_tile_bytes=TILE_BYTES)
    plan = make_plan(subject.prepared, Request(MACHINE, mesh=autopar.Mesh.parse(mesh), recipe=recipe))
    assert subject.compare(plan).passed
    assert Plan.parse(str(plan)) == plan and plan.loss_tile_bytes == TILE_BYTES


def test_a_tile_has_as_many_rows_as_its_bytes_hold():
    subject = Subject.of(Model(), batch(), loss_tile_bytes=TILE_BYTES)
    plan = make_plan(subject.prepared, Request(MACHINE, mesh=autopar.Mesh.parse("dp=2"), recipe="ddp"))
    program = build_program(subject.prepared.captured, subject.prepared.analysis, plan)
    products = program.module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    # The block has two products. Then there are 2 sequences of 6 targets on each rank, and 6 rows of float32 a tile.
    assert [node.meta.get("tile") for node in products] == [None, None, 0, 1]


def test_logits_that_the_model_returns_are_not_computed_in_tiles():
    class Returns(Model):
        def forward(self, tokens, targets):
            logits = self.head(self.embed(tokens))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits

    with pytest.raises(StepError, match="whose logits nothing else uses"):
        Subject.of(Returns(), batch(), loss_tile_bytes=TILE_BYTES)

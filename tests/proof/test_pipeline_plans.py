"""Plans with pipeline stages from the front door: shapes of models that must split, and what cannot."""

from __future__ import annotations

import pytest
import torch
from gpt import GPT, GPTConfig, loss_fn
from torch import Tensor, nn

import autopar
from autopar.ir import Plan

TOKENS = torch.randint(0, 256, (4, 8), generator=torch.Generator().manual_seed(0))


def gpt(layers: int) -> GPT:
    return GPT(GPTConfig(seq_len=8, layers=layers, heads=2, width=16), seed=0).double()


def explained(mesh: dict[str, int], layers: int = 2, **wishes: object) -> autopar.Explanation:
    return autopar.explain(gpt(layers), (TOKENS, TOKENS), mesh=mesh, loss_fn=loss_fn, **wishes)  # type: ignore[arg-type]


class Down(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x))


class Up(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(2 * width, width, 4, stride=2, padding=1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.relu(self.conv(x)) + skip


class UNet(nn.Module):
    """What goes down is used again on the way up, so that skips cross the cuts between."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList(Down(4 * 2**i) for i in range(3))
        self.middle = nn.Conv1d(32, 32, 3, padding=1)
        self.ups = nn.ModuleList(Up(4 * 2**i) for i in reversed(range(3)))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            skips.append(x)
            x = down(x)
        x = self.middle(x)
        for up in self.ups:
            x = up(x, skips.pop())
        return x.square().mean()


class Seq2Seq(nn.Module):
    """The encoder's result is used by every layer of the decoder, on all stages behind it."""

    def __init__(self) -> None:
        super().__init__()
        layer = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.embedding = nn.Embedding(16, 8)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(3))  # type: ignore[arg-type]
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**layer) for _ in range(3))  # type: ignore[arg-type]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.embedding(source), self.embedding(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return (x @ self.embedding.weight.T).logsumexp(-1).mean()


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        pytest.param({"pp": 2}, "1f1b", marks=pytest.mark.slow),
        ({"pp": 2}, "zb"),
        # with too few blocks for two stages on each rank, which zb needs
        pytest.param({"pp": 4}, "1f1b", marks=pytest.mark.slow),
        ({"pp": 2, "dp": 2}, "1f1b"),
        pytest.param({"pp": 2, "dp": 2}, "zb", marks=pytest.mark.slow),
    ],
)
def test_models_that_are_no_plain_stack_split(mesh: dict[str, int], schedule: str) -> None:
    torch.manual_seed(0)
    source, target = torch.randint(0, 16, (2, 4, 6)).unbind()
    subjects = [(UNet().double(), torch.randn(4, 4, 16, dtype=torch.float64)), (Seq2Seq().double(), (source, target))]
    for model, batch in subjects:
        report = autopar.verify(model, batch, mesh=mesh, schedule=schedule)
        assert report.passed, report


def test_the_same_question_has_the_same_plan() -> None:
    first, second = (explained({"pp": 2, "tp": 2}).plan for _ in range(2))
    assert str(first) == str(second)
    assert Plan.parse(str(first)) == first


def test_naive_placement_is_one_micro_batch() -> None:
    plan = explained({"pp": 2}, recipe="naive-pp").plan
    assert plan.pipeline is not None
    assert (plan.pipeline.schedule, plan.micro_batches) == ("gpipe", 1)


def test_recipes_by_axis() -> None:
    wanted = {"pp": "1f1b", "dp": "zero1", "tp": "tp"}
    plan = explained({"pp": 2, "dp": 2, "tp": 2}, recipe=wanted, micro_batches=2).plan
    assert plan.pipeline is not None and plan.pipeline.schedule == "1f1b"
    weight = plan.parameters["blocks.0.mlp.up.weight"]
    assert weight.zero_stage(0) == 1 and weight.storage[1].kind == "S"


def test_more_stages_than_blocks() -> None:
    with pytest.raises(autopar.SearchError, match=r"has 6 blocks, but 8 pipeline ranks .* take 8 stages"):
        explained({"pp": 8}, layers=4)


def test_a_stage_that_does_not_fit() -> None:
    with pytest.raises(autopar.SearchError, match=r"rank \d takes .*, .* too much \(stage \d from "):
        # 1 GB is reserved on an H100; with less than this it is known without a search that nothing fits.
        explained({"pp": 2}, memory_bytes=1_000_267_000, recompute="none", without="offload")


def test_control_flow_between_stages() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if x.sum() > 0:
                x = self.second(x)
            return x.sum()

    with pytest.raises(autopar.CaptureError, match=r"(?s)where: .*if x.sum\(\) > 0"):
        autopar.explain(Branching(), torch.randn(2, 4), mesh={"pp": 2})


def test_an_unknown_schedule() -> None:
    with pytest.raises(autopar.RecipeError, match=r"There is no schedule 'chimera'; choose among gpipe"):
        explained({"pp": 2}, schedule="chimera")


def test_too_few_micro_batches_for_the_schedule() -> None:
    with pytest.raises(autopar.PlanError, match=r"there are 1 for 2 stages. Take 2 micro-batches"):
        explained({"pp": 2}, schedule="1f1b", micro_batches=1)


class Expert(nn.Module):
    """Rows sorted by the expert that each is routed to, and multiplied group by group."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weight = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = torch.searchsorted(expert[order], torch.arange(4), right=True).to(torch.int32)
        rows = nn.functional.grouped_mm(x[order], self.weight, offs=ends)
        return x + torch.zeros_like(x).index_add(0, order, rows) * share[:, None]


def test_grouped_experts_in_bfloat16_are_proved_with_stages() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Expert(), Expert()).bfloat16()
    inputs = torch.randn(16, 16, dtype=torch.bfloat16)
    report = autopar.verify(model, inputs, mesh={"pp": 2}, loss_fn=lambda output: output.square().mean())
    assert report.passed, report
    assert report.arithmetic == "bfloat16"

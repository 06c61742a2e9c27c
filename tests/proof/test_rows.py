"""Gradients that go to their owners by rows: who sends so, what it costs, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model import find_cluster
from autopar.errors import PlanError
from autopar.ir import Mesh, Plan
from autopar.ir.note import kind_of
from autopar.ops.collectives import LOCAL
from autopar.pipeline.composed import step_of
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from autopar.search.exact.search import search
from autopar.units import format_bytes
from tests.support.tables import often

HARDWARE = find_cluster("h100x2").hardware
ROWS, WIDTH, INDICES = 512, 16, 4 * 6
WHOLE, ROW = ROWS * WIDTH * 8, WIDTH * 8  # bytes in float64


class Table(nn.Module):
    def __init__(self, *, tied: bool = False, rows: int = ROWS, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, **options)
        self.head = nn.Linear(WIDTH, rows if tied else 4, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def subject_of(**options: Any) -> Subject:
    torch.manual_seed(0)
    model = Table(**options).double()
    tokens = torch.randint(0, 8, (4, 6))
    tokens[3] = 3
    batch = (tokens, torch.randint(0, 4, (4, 6)))
    return Subject.of(model, batch, loss_fn=lambda y, target: F.cross_entropy(y.flatten(0, 1), target.flatten()))


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of()


def planned(subject: Subject, mesh: str, recipe: str) -> Plan:
    prepared = subject.prepared
    return search(
        prepared.analysis.graph,
        Mesh.parse(mesh),
        hardware=HARDWARE,
        recipe=recipe,
        fingerprint=prepared.captured.fingerprint,
    )


def gradient_bytes(subject: Subject, plan: Plan) -> float:
    """Bytes of the table's gradient that a rank sends in a step, on average, by price."""
    items = step_of(subject.prepared.analysis.graph, plan, HARDWARE).items
    return sum(i.traffic_bytes for i in items if i.phase == "reduce" and i.of == "table.weight")  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("mesh", "recipe", "indices", "senders"),
    [
        ("dp=2", "parameter-server", INDICES / 2, 1 / 2),
        ("dp=4", "data-parallel", INDICES / 4, 3 / 4),
        ("ps=2", "serve", INDICES, 1 / 2),
    ],
)
def test_a_table_goes_by_rows_and_all_else_whole(
    subject: Subject, mesh: str, recipe: str, indices: float, senders: float
) -> None:
    plan = planned(subject, mesh, recipe)
    assert [name for name, how in plan.parameters.items() if how.by_rows] == ["table.weight"]
    assert gradient_bytes(subject, plan) == senders * (indices * (ROW + 8) + 8)
    assert Plan.parse(str(plan)) == plan and " | step by rows\n" in str(plan)
    (note,) = [str(n) for n in plan.notes if kind_of(n) == "owners" and "by rows" in n]
    message = format_bytes(indices * (ROW + 8) + 8)
    assert note.endswith(f"by rows: at most {message} per rank instead of {format_bytes(WHOLE)}")
    assert subject.compare(plan).passed


WAYS = [
    ("dp=2,tp=2", "dp:parameter-server,tp:tp"),
    ("ps=2,dp=2", "ps:serve,dp:zero1"),
    ("ps=2,dp=2", "ps:serve,dp:parameter-server"),
]
PADDED, SPARSE = {"padding_idx": 3}, {"sparse": True}


@pytest.mark.parametrize(
    ("mesh", "recipe", "options"),
    often(
        [(*way, options) for way in WAYS for options in (PADDED, SPARSE)],
        [(*WAYS[0], PADDED), (*WAYS[1], SPARSE), (*WAYS[2], PADDED)],
    ),
    ids=str,
)
def test_a_step_is_that_of_one_device(mesh: str, recipe: str, options: dict[str, Any]) -> None:
    """With repeated indices, and rows of the batch that are padding alone."""
    subject = subject_of(**options)
    plan = planned(subject, mesh, recipe)
    assert plan.parameters["table.weight"].by_rows
    assert subject.compare(plan).passed


def test_a_tied_table_goes_whole_and_a_note_says_why() -> None:
    subject = subject_of(tied=True)
    plan = planned(subject, "dp=2", "parameter-server")
    assert not plan.parameters["table.weight"].by_rows
    assert gradient_bytes(subject, plan) == WHOLE / 2
    assert any("ops other than lookups use the parameter" in note for note in plan.notes)


def test_a_table_of_which_every_row_may_be_used_goes_whole() -> None:
    subject = subject_of(rows=INDICES // 2)
    plan = planned(subject, "dp=2", "parameter-server")
    assert not plan.parameters["table.weight"].by_rows


@pytest.mark.parametrize("mesh", ["a=2,b=2", "pp=2,a=2,b=2"])
def test_random_plans_have_rows_and_are_exact(subject: Subject, mesh: str) -> None:
    prepared = subject.prepared
    plans = [
        random_plan(prepared.analysis.graph, Mesh.parse(mesh), seed=seed, fingerprint=prepared.captured.fingerprint)
        for seed in range(40)
    ]
    chosen = [p for p in plans if any(how.by_rows for how in p.parameters.values())]
    assert len(chosen) >= 3
    assert all(subject.compare(plan).passed for plan in chosen[:3])


def test_rows_to_no_owner_are_refused(subject: Subject) -> None:
    plan = planned(subject, "dp=2", "parameter-server")
    text = str(plan).replace("O(0)@dp | V@dp | step by rows", "R | V@dp | step by rows")
    with pytest.raises(PlanError, match=r"table.weight by rows, but the conversion from V@dp to R does not end"):
        subject.compare(Plan.parse(text))


def test_a_rank_that_has_nothing_of_a_tensor_sends_nothing() -> None:
    """Along an axis beside an owner; and rows with NaN count, as those that are not zero."""
    nothing = torch.empty(0, 3)
    assert LOCAL["reduce_rows"]([nothing, nothing], 0, [0]).shape == (0, 3)
    x, y = torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 0.0], [0.0, torch.nan, 1.0]])
    found = LOCAL["reduce_rows"]([x, y], 0, [0])
    assert found.isnan().sum() == 1 and torch.equal(found.nan_to_num(), y.nan_to_num())
    assert torch.equal(LOCAL["send_rows"]([found, x], 1, [0, 1]).nan_to_num(), y.nan_to_num())

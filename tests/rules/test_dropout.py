"""Masks: independent across split parts, identical across replicas, right on average."""

import torch
import torch.nn.functional as F
from torch import nn

from autopar.analysis.factors import analyze
from autopar.capture.export import capture_forward
from autopar.ir import Mesh, Plan, R, S
from autopar.passes import clean_up
from autopar.program.program import build_program
from autopar.proof.lockstep import run

MESH = Mesh.of({"dp": 2, "tp": 2})


class Dropped(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.25)


def dropped(labels, layout, seed=0):
    """The results of all ranks on ones of shape (64, 64)."""
    captured = capture_forward(Dropped(), (torch.ones(64, 64),), {})
    clean_up(captured.module)
    analysis = analyze(captured)
    plan = Plan(MESH, captured.fingerprint, "", 1, {}, {"x": layout}, {"native_dropout": labels})
    program = build_program(captured, analysis, plan)
    shape = [64 // (2 if S(d) in layout else 1) for d in (0, 1)]
    torch.manual_seed(seed)
    return run(program, [[torch.ones(shape)] * 4])[0]


def test_parts_differ_and_replicas_agree():
    # rows over dp, replicated over tp: ranks 0 and 1 hold the same rows, ranks 2 and 3 the others
    first, again, other, _ = dropped(("d1", "-"), (S(0), R))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_part_of_two_axes_differs():
    parts = dropped(("d1", "d0"), (S(0), S(1)))
    assert len({tuple(p.flatten().tolist()) for p in parts}) == 4


def test_scale_and_rate():
    out = torch.cat([p.flatten() for p in dropped(("d1", "d0"), (S(0), S(1)))])
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    # of 4096 draws a quarter is dropped, give or take four standard deviations of 28
    assert abs((out == 0).sum().item() - 1024) < 112


def test_one_seed_gives_one_mask():
    labels, layout = ("d1", "-"), (S(0), R)
    assert torch.equal(dropped(labels, layout)[0], dropped(labels, layout)[0])
    assert not torch.equal(dropped(labels, layout)[0], dropped(labels, layout, seed=1)[0])

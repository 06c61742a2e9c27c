"""Plans for several kinds of machines are exact: stages of different lengths, of what each kind can do."""

from __future__ import annotations

import pytest
import torch
from gpt import GPT, GPTConfig, loss_fn

import autopar
from autopar.cost_model import CPU_GLOO
from autopar.cost_model.machines.cluster import Cluster, cluster_of_kinds
from tests.support.machines import times

TOKENS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))
LAYERS = 6


def gpt() -> GPT:
    return GPT(GPTConfig(seq_len=32, layers=LAYERS, heads=2, width=32), seed=0).double()


def explained(fast: float, mesh: dict[str, int], nodes: int) -> autopar.Explanation:
    """The plan for as many ranks that are so many times as fast as others; the fast ones come first."""
    cluster = cluster_of_kinds([Cluster(times(CPU_GLOO, fast), nodes), Cluster(times(CPU_GLOO, 1.0), nodes)])
    return autopar.explain(
        gpt(),
        (TOKENS, TOKENS),
        mesh=mesh,
        cluster=cluster,
        loss_fn=loss_fn,
        micro_batches=4,
        schedule="1f1b",
        recompute="none",
    )


def layers_of(found: autopar.Explanation) -> list[int]:
    assert found.simulated is not None
    return [each.layers for each in found.simulated.stages]


@pytest.mark.parametrize(("mesh", "nodes"), [({"pp": 2}, 1), ({"pp": 2, "dp": 2}, 2)])
def test_stages_of_unequal_length_train_exactly(mesh: dict[str, int], nodes: int) -> None:
    found = explained(4.0, mesh, nodes)
    first, second = layers_of(found)
    assert first + second == LAYERS and first > second
    report = autopar.verify(gpt(), (TOKENS, TOKENS), mesh=mesh, plan=found.plan, loss_fn=loss_fn)
    assert report.passed, str(report)


def test_stages_on_equal_kinds_are_those_on_one_kind() -> None:
    kinds, one = (
        explained(1.0, {"pp": 2}, 1),
        autopar.explain(
            gpt(),
            (TOKENS, TOKENS),
            mesh={"pp": 2},
            cluster=Cluster(times(CPU_GLOO, 1.0), 2),
            loss_fn=loss_fn,
            micro_batches=4,
            schedule="1f1b",
            recompute="none",
        ),
    )
    assert kinds.plan == one.plan and kinds.step_seconds == one.step_seconds

"""`AutoparStrategy` trains LightningModules, by automatic and by manual optimization, as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from autopar.errors import AutoparError
from autopar.integrations import AutoparStrategy
from tests.integrations.small import (
    BATCH,
    PLANS,
    as_launched,
    is_in_shards,
    own_batch,
    trained_then_resumed,
    worst_difference,
)
from tests.runtime.gloo_ranks import Ranks

pytestmark = pytest.mark.multiprocess
RanksOf = Callable[[int], Ranks]
ROWS = 24


class Automatic(LightningModule):
    """Classifies rows; Lightning runs backward, accumulation and clipping."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
        self.losses: dict[str, float] = {}
        self.rows = SumMetric()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x)
        return logits

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        self.losses[f"{self.current_epoch} {number}"] = loss.item()
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        x, y = batch
        self.log("validation", F.cross_entropy(self.network(x), y), sync_dist=True)
        self.rows.update(len(x))
        self.log("rows", self.rows)
        self.log("gathered", float(len(self.all_gather(y))))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Manual(Automatic):
    """Two networks with an optimizer each, of which one reads what the other makes."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.made = nn.Linear(4, 8)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        x, y = batch
        first, second = self.optimizers()
        loss = F.cross_entropy(self.network(x), y)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        again = F.mse_loss(self.made(self.network(x).softmax(-1)), x)
        second.zero_grad()
        self.manual_backward(again)
        second.step()
        self.losses[f"{self.current_epoch} {number}"] = loss.item() + again.item()
        return loss

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.network.parameters(), lr=1e-2, eps=1e-5),
            torch.optim.AdamW(self.made.parameters(), lr=1e-2, eps=1e-5),
        ]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(ROWS, 8, generator=generator), torch.randint(0, 4, (ROWS,), generator=generator))


def fitted(
    module: LightningModule, folder: Path, batch: int, resume: Path | None, *, shuffle: bool = False, **options: Any
) -> dict[str, Any]:
    """Losses, weights and results of two epochs; a checkpoint is saved after each."""
    own = {} if isinstance(module, Manual) else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **own,
        **options,
    )
    # The ranks take the first one's state.
    seeded = torch.Generator().manual_seed(5 + (dist.get_rank() if dist.is_initialized() else 0))
    loader = DataLoader(data(), batch, shuffle=shuffle, generator=seeded)
    checks = DataLoader(data(), batch)
    trainer.fit(module, loader, checks, ckpt_path=None if resume is None else str(resume), weights_only=False)
    shards = is_in_shards(module)
    trainer.save_checkpoint(folder / "last.ckpt")
    found = torch.load(folder / "last.ckpt", weights_only=False)
    return {
        "losses": module.losses,
        "weights": found["state_dict"],
        "in shards": shards,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }


KINDS = {"automatic": Automatic, "manual": Manual}


def on_ranks(kind: str, folder: Path, resume: Path | None, plan: dict[str, Any], epochs: int) -> dict[str, Any]:
    as_launched()
    options = {"devices": dist.get_world_size(), "strategy": AutoparStrategy(**plan)}
    return fitted(KINDS[kind](), folder, own_batch(), resume, max_epochs=epochs, **options)


@pytest.mark.parametrize(
    ("kind", "count", "name", "other"),
    [*trained_then_resumed("tp", kind="automatic"), *trained_then_resumed("zero3", kind="manual")],
)
def test_fitting_and_resuming_under_another_plan_are_those_of_one_process(
    kind: str, count: int, name: str, other: str, ranks_of: RanksOf, tmp_path: Path
) -> None:
    expected = fitted(KINDS[kind](), tmp_path / "plain", BATCH, None, max_epochs=2)
    run, plans = ranks_of(count).run, PLANS[count]
    found, *_ = run(on_ranks, kind, tmp_path / name, None, plans[name], 2)
    assert worst_difference(found["losses"], expected["losses"]) < 1e-5
    assert worst_difference(found["metrics"], expected["metrics"]) < 1e-5
    assert found["metrics"]["rows"] == ROWS, "a metric counts each row once"
    assert worst_difference(found["weights"], expected["weights"]) < 1e-5
    assert found["in shards"] == (name == "zero3")

    run(on_ranks, kind, tmp_path / "half", None, plans[name], 1)
    middle = tmp_path / "half" / "last.ckpt"
    resumed, *_ = run(on_ranks, kind, tmp_path / other, middle, plans[other], 2)
    last = {k: v for k, v in expected["losses"].items() if k.startswith("1")}
    assert worst_difference(resumed["losses"], last) < 1e-5
    assert worst_difference(resumed["weights"], expected["weights"]) < 1e-5


def test_a_checkpoint_of_other_optimizers_is_refused() -> None:
    strategy, module = AutoparStrategy(), Manual()
    strategy._lightning_module = module
    first, second = strategy.optimizers = module.configure_optimizers()
    states = [first.state_dict(), second.state_dict()]
    with pytest.raises(AutoparError, match=r"has the states of 1 optimizers, but configure_optimizers returned 2\. Re"):
        strategy.load_optimizer_state_dict({"optimizer_states": states[:1]})
    with pytest.raises(AutoparError, match=r"groups of \[2\] parameters, but the optimizer here has groups of \[4\]"):
        strategy.load_optimizer_state_dict({"optimizer_states": states[::-1]})


def by_name(folder: Path) -> dict[str, Any]:
    as_launched()
    options = {"devices": 2, "strategy": "autopar"}
    return fitted(Automatic(), folder, own_batch(), None, shuffle=True, max_epochs=1, **options)["losses"]


def test_the_strategy_is_found_by_its_name(framework_ranks: Ranks, tmp_path: Path) -> None:
    plain = fitted(Automatic(), tmp_path / "plain", BATCH, None, shuffle=True, max_epochs=1)
    found, _ = framework_ranks.run(by_name, tmp_path / "ranks")
    assert worst_difference(found, plain["losses"]) < 1e-5

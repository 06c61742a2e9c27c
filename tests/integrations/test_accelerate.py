"""A loop written for accelerate trains, evaluates and resumes under a plan as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autopar.errors import AutoparError, StepError
from autopar.integrations import AutoparAccelerator
from autopar.integrations.batches import JoinedBatches
from tests.integrations.small import as_launched, is_in_shards, rows, small_model, worst_difference
from tests.runtime.ranks import Ranks, equal_on_all

pytestmark = pytest.mark.multiprocess


class Outside(nn.Module):
    """Returns logits, of which the script computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.tanh(self.words(input_ids)))
        return logits


def loss_of(model: nn.Module, batch: dict[str, Tensor], inside: bool) -> Tensor:
    if inside:
        loss: Tensor = model(**batch).loss
        return loss
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def looped(
    accelerator: Accelerator, batch: int, inside: bool, resume: Path | None, save: Path | None
) -> dict[str, Any]:
    """Losses, norms and weights of two epochs with accumulation; saved after one, or resumed from there."""
    torch.manual_seed(3)
    model = small_model() if inside else Outside()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    loader = DataLoader(rows(16), batch_size=batch)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, accelerator.num_processes, 0.9)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume is not None:
        accelerator.load_state(str(resume))
    found: dict[str, Any] = {}
    for epoch in range(0 if resume is None else 1, 2):
        for number, inputs in enumerate(loader):
            with accelerator.accumulate(model):
                loss = loss_of(model, inputs, inside)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    found[f"norm {epoch} {number}"] = float(norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found[f"loss {epoch} {number}"] = accelerator.gather(loss.detach()).mean().item()
        found[f"rate {epoch}"] = schedule.get_last_lr()[0]
        if save is not None and epoch == 0:
            accelerator.save_state(str(save))
    with torch.no_grad():
        guesses = [accelerator.gather_for_metrics(_logits(model, x, inside)) for x in loader]
    weights = accelerator.get_state_dict(model)
    shards = is_in_shards(accelerator.unwrap_model(model))
    return {"found": found, "weights": weights, "logits": torch.cat(guesses), "in shards": shards}


def _logits(model: nn.Module, batch: dict[str, Tensor], inside: bool) -> Tensor:
    logits: Tensor = model(**batch).logits if inside else model(batch["input_ids"])
    return logits


def on_ranks(
    inside: bool, resume: Path | None, save: Path | None, plan: dict[str, Any]
) -> dict[str, Any]:
    as_launched()
    accelerator = AutoparAccelerator(cpu=True, gradient_accumulation_steps=2, **plan)
    return looped(accelerator, 2, inside, resume, save)


PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": {"dp": 2}, "recipe": "ddp"},
    "zero3": {"mesh": {"dp": 2}, "recipe": "zero3"},
    "tp": {"mesh": {"tp": 2}, "recipe": "tp"},
}


@pytest.mark.parametrize(
    ("inside", "name", "other"),
    [(True, "zero3", "tp"), (False, "ddp", "tp"), (False, "zero3", "ddp"), (False, "tp", "zero3")],
)
def test_a_loop_is_that_of_one_process(
    inside: bool, name: str, other: str, framework_ranks: Ranks, tmp_path: Path
) -> None:
    plain = Accelerator(cpu=True, gradient_accumulation_steps=2)
    expected = looped(plain, 4, inside, None, None)
    first, second = framework_ranks.run(on_ranks, inside, None, tmp_path / "state", PLANS[name])
    assert worst_difference(first["found"], expected["found"]) < 1e-5
    assert worst_difference(first["weights"], expected["weights"]) < 1e-5
    assert second["found"] == first["found"] and second["weights"] == {}
    assert torch.allclose(first["logits"], expected["logits"], rtol=1e-4, atol=1e-5)
    assert first["in shards"] == (name != "ddp")

    resumed, _ = framework_ranks.run(on_ranks, inside, tmp_path / "state", None, PLANS[other])
    last = {k: v for k, v in expected["found"].items() if k.split()[1] == "1"}
    assert worst_difference(resumed["found"], last) < 1e-5
    assert worst_difference(resumed["weights"], expected["weights"]) < 1e-5


def test_what_plans_in_another_way_is_refused() -> None:
    with pytest.raises(AutoparError, match="recipe='zero3' stores parameters in shards"):
        AutoparAccelerator(cpu=True, fsdp_plugin=object())


def test_clipping_a_part_of_the_model_is_refused() -> None:
    accelerator = AutoparAccelerator(cpu=True)
    model = accelerator.prepare(Outside())
    with pytest.raises(AutoparError, match="was given 1 parameters"):
        accelerator.clip_grad_norm_([next(model.parameters())], 1.0)


def test_options_that_the_loop_decides_are_refused() -> None:
    accelerator = AutoparAccelerator(cpu=True, options={"outputs": "local"})
    with pytest.raises(AutoparError, match=r"outputs=\.\.\. cannot be given here"):
        accelerator.prepare(Outside())


class Both(Outside):
    """Returns a loss and the logits that a script may compute another one from."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(input_ids)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def gradient_through_logits(loss_outside: bool) -> Tensor:
    accelerator = AutoparAccelerator(cpu=True, loss_outside=loss_outside)
    model = accelerator.prepare(Both())
    tokens = torch.arange(16).view(2, 8)
    results = model(input_ids=tokens, labels=tokens)
    accelerator.backward(results["loss"] + results["logits"].square().mean())
    gradient = accelerator.unwrap_model(model).out.weight.grad
    assert gradient is not None
    return gradient


def test_a_gradient_that_the_planned_step_would_lose_is_refused() -> None:
    with pytest.raises(StepError, match="give loss_outside=True"):
        gradient_through_logits(loss_outside=False)


def test_a_loss_of_the_script_beside_one_of_the_model() -> None:
    plain, tokens = Both(), torch.arange(16).view(2, 8)
    results = plain(input_ids=tokens, labels=tokens)
    (results["loss"] + results["logits"].square().mean()).backward()
    assert plain.out.weight.grad is not None
    assert torch.allclose(gradient_through_logits(loss_outside=True), plain.out.weight.grad)


def test_a_prepared_model_generates() -> None:
    plain, tokens = small_model().eval(), torch.arange(1, 9).view(2, 4)
    expected = plain.generate(tokens, max_new_tokens=4)
    model = AutoparAccelerator(cpu=True).prepare(small_model())
    model(input_ids=tokens, labels=tokens)
    model.eval()
    assert torch.equal(model.generate(tokens, max_new_tokens=4), expected)


def test_joined_batches_are_those_of_ranks_in_turn() -> None:
    batches = torch.utils.data.BatchSampler(range(7), 2, drop_last=True)
    assert list(JoinedBatches(batches, 2)) == [[0, 1, 2, 3]]
    assert len(JoinedBatches(batches, 2)) == 1
    uneven = torch.utils.data.BatchSampler(range(7), 2, drop_last=False)
    assert list(JoinedBatches(uneven, 3)) == [[0, 1, 2, 3, 4, 5], [6]]
    assert len(JoinedBatches(uneven, 3)) == 2


def first_batches() -> dict[str, list[int]]:
    as_launched()
    torch.manual_seed(torch.distributed.get_rank())
    found = {}
    for split in (False, True):
        configuration = DataLoaderConfiguration(split_batches=split)
        accelerator = AutoparAccelerator(cpu=True, dataloader_config=configuration)
        data = torch.arange(16)
        found[f"in order, {split}"] = next(iter(accelerator.prepare(DataLoader(data, 4)))).tolist()
        shuffled = accelerator.prepare(DataLoader(data, 4, shuffle=True))
        found[f"shuffled, {split}"] = next(iter(shuffled)).tolist()
    return found


def test_ranks_read_the_batch_of_all_ranks_and_shuffle_alike(framework_ranks: Ranks) -> None:
    found = equal_on_all(framework_ranks.run(first_batches))
    assert found["in order, False"] == list(range(8))
    assert found["in order, True"] == list(range(4))
    assert len(found["shuffled, False"]) == 8 and len(found["shuffled, True"]) == 4

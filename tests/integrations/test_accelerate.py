"""A loop written for accelerate trains, evaluates and resumes under a plan as in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autopar.errors import AutoparError, MeshError, StepError
from autopar.integrations import AutoparAccelerator
from autopar.integrations.batches import JoinedBatches
from autopar.runtime.checkpoint.checkpoint import read_extra, save_checkpoint
from tests.integrations.small import (
    BATCH,
    PLANS,
    as_launched,
    is_in_shards,
    own_batch,
    rows,
    small_model,
    trained_then_resumed,
    worst_difference,
)
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.support.accelerators import seeming_accelerators

pytestmark = pytest.mark.multiprocess
RanksOf = Callable[[int], Ranks]


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


@dataclass(frozen=True)
class Script:
    """What a loop does.

    Attributes:
        inside: whether the model returns its loss.
        rows: number of rows of the data; the last batch may have fewer than others.
        shuffle: how the loader shuffles: not at all, by torch's generator, by one of its own, or by epoch.
        saved_after: number of batches after which the state is saved.
    """

    inside: bool = False
    rows: int = 16
    shuffle: Literal["", "torch", "own", "epoch"] = ""
    saved_after: int = 4

    @property
    def in_an_epoch(self) -> int:
        """Number of batches of an epoch."""
        return -(-self.rows // BATCH)


def accelerator_of(script: Script, kind: Any, **options: Any) -> Any:
    configuration = DataLoaderConfiguration(use_seedable_sampler=script.shuffle == "epoch")
    return kind(cpu=True, gradient_accumulation_steps=2, dataloader_config=configuration, **options)


def looped(
    accelerator: Accelerator, script: Script, batch: int, resume: Path | None, save: Path | None
) -> dict[str, Any]:
    """Losses, norms and weights of two epochs with accumulation; the state is saved on the way, or resumed."""
    torch.manual_seed(3)
    model = small_model() if script.inside else Outside()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    own = torch.Generator().manual_seed(4) if script.shuffle == "own" else None
    loader: Any = DataLoader(rows(script.rows), batch_size=batch, shuffle=bool(script.shuffle), generator=own)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, accelerator.num_processes, 0.9)
    torch.manual_seed(3)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    epoch, skipped = 0, 0
    if resume is not None:
        torch.manual_seed(9)  # the saved state has to come back
        accelerator.load_state(str(resume))
        epoch, skipped = divmod(script.saved_after, script.in_an_epoch)
    found: dict[str, Any] = {}
    while epoch < 2:
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for number, inputs in enumerate(batches, skipped):
            with accelerator.accumulate(model):
                loss = loss_of(model, inputs, script.inside)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    found[f"norm {epoch} {number}"] = float(norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found[f"loss {epoch} {number}"] = accelerator.gather(loss.detach()).mean().item()
            is_last = number == script.in_an_epoch - 1
            done = epoch * script.in_an_epoch + number + 1
            if save is not None and done == script.saved_after and not is_last:
                accelerator.save_state(str(save))
        found[f"rate {epoch}"] = schedule.get_last_lr()[0]
        epoch, skipped = epoch + 1, 0
        if save is not None and epoch * script.in_an_epoch == script.saved_after:
            accelerator.save_state(str(save))
    with torch.no_grad():
        guesses = [accelerator.gather_for_metrics(_logits(model, x, script.inside)) for x in loader]
    weights = accelerator.get_state_dict(model)
    shards = is_in_shards(accelerator.unwrap_model(model))
    return {"found": found, "weights": weights, "logits": torch.cat(guesses), "in shards": shards}


def _logits(model: nn.Module, batch: dict[str, Tensor], inside: bool) -> Tensor:
    logits: Tensor = model(**batch).logits if inside else model(batch["input_ids"])
    return logits


def on_ranks(script: Script, resume: Path | None, save: Path | None, plan: dict[str, Any]) -> dict[str, Any]:
    as_launched()
    accelerator = accelerator_of(script, AutoparAccelerator, **plan)
    return looped(accelerator, script, own_batch(), resume, save)


def after_saving(script: Script, found: dict[str, float]) -> dict[str, float]:
    """The numbers of batches after the state was saved."""

    def is_later(name: str) -> bool:
        epoch, *number = map(int, name.split()[1:])
        return not number or epoch * script.in_an_epoch + number[0] >= script.saved_after

    first = script.saved_after // script.in_an_epoch
    return {k: v for k, v in found.items() if int(k.split()[1]) >= first and is_later(k)}


SCRIPTS = {
    "ddp": Script(shuffle="torch"),
    # The last batch of an epoch has 3 rows, and the state is saved in the middle of the second epoch.
    "zero3": Script(rows=15, shuffle="epoch", saved_after=6),
    "tp": Script(inside=True, shuffle="own"),
}


@pytest.mark.parametrize(("count", "name", "other"), trained_then_resumed("ddp", "zero3"))
def test_a_loop_is_that_of_one_process(count: int, name: str, other: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    plain = accelerator_of(script, Accelerator)
    expected = looped(plain, script, BATCH, None, None)
    plans, state = PLANS[count], tmp_path / "state"
    first, second, *_ = ranks_of(count).run(on_ranks, script, None, state, plans[name])
    assert worst_difference(first["found"], expected["found"]) < 1e-5
    assert worst_difference(first["weights"], expected["weights"]) < 1e-5
    assert second["found"] == first["found"] and second["weights"] == {}
    assert first["logits"].shape == (script.rows, 8, 32), "each row counts once"
    assert torch.allclose(first["logits"], expected["logits"], rtol=1e-4, atol=1e-5)
    assert first["in shards"] == (name != "ddp")

    resumed, *_ = ranks_of(count).run(on_ranks, script, state, None, plans[other])
    assert worst_difference(resumed["found"], after_saving(script, expected["found"])) < 1e-5
    assert worst_difference(resumed["weights"], expected["weights"]) < 1e-5


def test_what_plans_in_another_way_is_refused() -> None:
    with pytest.raises(AutoparError, match="recipe='zero3' stores parameters in shards"):
        AutoparAccelerator(cpu=True, fsdp_plugin=object())


def test_clipping_a_part_of_the_model_is_refused() -> None:
    accelerator = AutoparAccelerator(cpu=True)
    model = accelerator.prepare(Outside())
    with pytest.raises(AutoparError, match="was given 1 parameters"):
        accelerator.clip_grad_norm_([next(model.parameters())], 1.0)


def test_a_model_goes_where_the_accelerator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = AutoparAccelerator(cpu=True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with seeming_accelerators(1):
        placed = accelerator.prepare(Outside())
        left = accelerator.prepare_model(Outside(), device_placement=False)
    assert [each.module._settings.device.type for each in (placed, left)] == ["cpu", "cpu"]


def test_options_that_the_loop_decides_are_refused() -> None:
    accelerator = AutoparAccelerator(cpu=True, options={"outputs": "local"})
    with pytest.raises(AutoparError, match=r"outputs=\.\.\. cannot be given here"):
        accelerator.prepare(Outside())


def test_what_needs_stages_is_refused_as_by_compile() -> None:
    accelerator = AutoparAccelerator(cpu=True, options={"chunks": 2})
    with pytest.raises(MeshError, match="chunks=2 can only be used with pipeline stages"):
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
    """The first batches of loaders on ranks whose generators have other seeds."""
    as_launched()
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    found = {}
    for split in (False, True):
        configuration = DataLoaderConfiguration(split_batches=split, use_seedable_sampler=split)
        accelerator = AutoparAccelerator(cpu=True, dataloader_config=configuration)
        data, own = torch.arange(16), torch.Generator().manual_seed(rank)
        loaders = {
            "in order": DataLoader(data, 4),
            "shuffled": DataLoader(data, 4, shuffle=True),
            "by its own generator": DataLoader(data, 4, shuffle=True, generator=own),
        }
        for name, loader in loaders.items():
            found[f"{name}, {split}"] = next(iter(accelerator.prepare(loader))).tolist()
    return found


def test_ranks_read_the_batch_of_all_ranks_and_shuffle_alike(framework_ranks: Ranks) -> None:
    found = equal_on_all(framework_ranks.run(first_batches))
    assert found["in order, False"] == list(range(8))
    assert found["in order, True"] == list(range(4))
    assert len(found["shuffled, False"]) == 8 and len(found["shuffled, True"]) == 4
    assert len(found["by its own generator, False"]) == 8


class Unsafe:
    """Has a state that loads by running code."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("here")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_a_folder_without_the_state_of_a_loop_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    with pytest.raises(AutoparError, match="has no state of a loop"):
        AutoparAccelerator(cpu=True).load_state(str(tmp_path / "c"))


def test_a_state_that_could_not_be_loaded_is_refused_and_leaves_the_one_before(tmp_path: Path) -> None:
    accelerator = AutoparAccelerator(cpu=True)
    model = accelerator.prepare(Outside())
    with torch.no_grad():
        model(torch.arange(8)[None])
    accelerator.save_state(str(tmp_path / "state"))
    before = read_extra(tmp_path / "state")
    accelerator.register_for_checkpointing(Unsafe())
    with pytest.raises(AutoparError, match="cannot be saved so that it loads without running code"):
        accelerator.save_state(str(tmp_path / "state"))
    assert [file.name for file in tmp_path.iterdir()] == ["state"]
    assert read_extra(tmp_path / "state")["loop"]["states"] == before["loop"]["states"] == []
    with pytest.raises(AutoparError, match="states of 0 schedulers and registered objects, but there are 1"):
        accelerator.load_state(str(tmp_path / "state"))

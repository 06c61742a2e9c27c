"""Adapters of PEFT train, save and resume under `AutoparTrainer` as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from autopar.integrations import AutoparTrainer
from tests.integrations.small import (
    BATCH,
    PLANS,
    as_launched,
    own_batch,
    rows,
    small_model,
    trained_then_resumed,
    worst_difference,
)
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.multiprocess
RanksOf = Callable[[int], Ranks]


def trained(folder: Path, batch: int, resume: Path | None, **plan: Any) -> list[float]:
    """The losses of four steps."""
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=batch, num_train_epochs=2, learning_rate=1e-2, logging_steps=1,
        save_strategy="epoch", eval_strategy="epoch", per_device_eval_batch_size=batch, adam_epsilon=1e-5,
        load_best_model_at_end=True, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = (AutoparTrainer if plan else Trainer)(
        model=get_peft_model(small_model(), adapters), args=args, train_dataset=rows(8), eval_dataset=rows(4),
        **plan,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def on_ranks(folder: Path, resume: Path | None, plan: dict[str, Any]) -> list[float]:
    as_launched()
    return trained(folder, own_batch(), resume, **plan)


def adapted(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of the plain model with the adapters of a checkpoint."""
    model = PeftModel.from_pretrained(small_model(), str(folder))
    return {name: p.detach() for name, p in model.named_parameters() if p.any()}


@pytest.mark.parametrize(("count", "name", "other"), trained_then_resumed("zero3"))
def test_adapters_are_those_of_one_process(
    count: int, name: str, other: str, ranks_of: RanksOf, tmp_path: Path
) -> None:
    expected = trained(tmp_path / "plain", BATCH, None)
    run, plans = ranks_of(count).run, PLANS[count]
    found, *_ = run(on_ranks, tmp_path / name, None, plans[name])
    assert found == pytest.approx(expected, rel=1e-5)
    middle = tmp_path / name / "checkpoint-2"
    resumed, *_ = run(on_ranks, tmp_path / other, middle, plans[other])
    assert resumed == pytest.approx(expected, rel=1e-5)
    plain = adapted(tmp_path / "plain" / "checkpoint-4")
    for folder in (name, other):
        assert worst_difference(adapted(tmp_path / folder / "checkpoint-4"), plain) < 1e-5

"""trl's supervised fine-tuning under a plan: its loss and metrics are those of one process, with LoRA too."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from autopar.integrations import AutoparSFTTrainer
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
from tests.runtime.gloo_ranks import Ranks

pytestmark = pytest.mark.multiprocess
RanksOf = Callable[[int], Ranks]


def tokenizer() -> PreTrainedTokenizerFast:
    """Makes nothing of text here; the rows are tokens already."""
    words = {f"w{i}": i for i in range(30)} | {"<pad>": 30, "<eos>": 31}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def trained(folder: Path, batch: int, with_adapters: bool, resume: Path | None, **plan: Any) -> dict[str, float]:
    """Every number that two steps log, but times and what is of the training as a whole."""
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows(8)])
    args = SFTConfig(
        str(folder),
        per_device_train_batch_size=batch,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=1,
        adam_epsilon=1e-5,
        save_strategy="steps",
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if with_adapters else None
    trainer = (AutoparSFTTrainer if plan else SFTTrainer)(
        model=small_model(), args=args, train_dataset=data, processing_class=tokenizer(), peft_config=adapters, **plan
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return {
        f"{entry['step']} {name}": value
        for entry in trainer.state.log_history
        for name, value in entry.items()
        if not name.endswith(("runtime", "per_second", "flos", "train_loss"))
    }


def on_ranks(folder: Path, with_adapters: bool, resume: Path | None, plan: dict[str, Any]) -> dict[str, float]:
    as_launched()
    return trained(folder, own_batch(), with_adapters, resume, **plan)


def difference(found: dict[str, float], expected: dict[str, float]) -> float:
    """The largest relative difference of numbers; infinite where one alone is zero."""
    zeros = {k for k, v in expected.items() if v == 0}
    if {k for k, v in found.items() if v == 0} != zeros:
        return math.inf
    compared = expected.keys() - zeros
    return worst_difference({k: found[k] for k in compared}, {k: expected[k] for k in compared})


@pytest.mark.parametrize(
    ("kind", "count", "name", "other"),
    [*trained_then_resumed("zero3", kind="whole"), *trained_then_resumed(kind="lora")],
)
def test_fine_tuning_is_that_of_one_process(
    kind: str, count: int, name: str, other: str, ranks_of: RanksOf, tmp_path: Path
) -> None:
    with_adapters = kind == "lora"
    expected = trained(tmp_path / "plain", BATCH, with_adapters, None)
    run, plans = ranks_of(count).run, PLANS[count]
    found, *_ = run(on_ranks, tmp_path / name, with_adapters, None, plans[name])
    assert difference(found, expected) < 1e-5
    middle = tmp_path / name / "checkpoint-1"
    resumed, *_ = run(on_ranks, tmp_path / other, with_adapters, middle, plans[other])
    # trl counts tokens anew in a resumed run.
    plain = tmp_path / "plain" / "checkpoint-1"
    expected = trained(tmp_path / "again", BATCH, with_adapters, plain)
    assert difference(resumed, expected) < 1e-5

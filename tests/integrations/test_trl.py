"""trl's supervised fine-tuning under a plan: its loss and metrics are those of one process, with LoRA too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from autopar.integrations import AutoparSFTTrainer
from tests.integrations.small import as_launched, rows, small_model, worst_difference
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.multiprocess


def tokenizer() -> PreTrainedTokenizerFast:
    """Makes nothing of text here; the rows are tokens already."""
    words = {f"w{i}": i for i in range(30)} | {"<pad>": 30, "<eos>": 31}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def trained(folder: Path, batch: int, with_adapters: bool, **plan: Any) -> dict[str, float]:
    """Every number that two steps log, but times."""
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows(8)])
    args = SFTConfig(
        str(folder), per_device_train_batch_size=batch, num_train_epochs=1, learning_rate=1e-2, logging_steps=1,
        adam_epsilon=1e-5, save_strategy="epoch", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
        gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if with_adapters else None
    trainer = (AutoparSFTTrainer if plan else SFTTrainer)(
        model=small_model(), args=args, train_dataset=data, processing_class=tokenizer(), peft_config=adapters,
        **plan,
    )  # fmt: skip
    trainer.train()
    return {
        f"{entry['step']} {name}": value
        for entry in trainer.state.log_history
        for name, value in entry.items()
        if not name.endswith(("runtime", "per_second"))
    }


def on_ranks(folder: Path, with_adapters: bool, plan: dict[str, Any]) -> dict[str, float]:
    as_launched()
    return trained(folder, 2, with_adapters, **plan)


@pytest.mark.parametrize(
    ("plan", "with_adapters"),
    [
        ({"mesh": {"dp": 2}, "recipe": "zero3"}, False),
        ({"mesh": {"tp": 2}, "recipe": "tp"}, True),
    ],
    ids=["zero3", "tp with LoRA"],
)
def test_fine_tuning_is_that_of_one_process(
    plan: dict[str, Any], with_adapters: bool, framework_ranks: Ranks, tmp_path: Path
) -> None:
    expected = trained(tmp_path / "plain", 4, with_adapters)
    found, _ = framework_ranks.run(on_ranks, tmp_path / "ranks", with_adapters, plan)
    zeros = {k for k, v in expected.items() if v == 0}
    assert {k for k, v in found.items() if v == 0} == zeros
    counted = [k for k in expected if k not in zeros]
    assert (
        worst_difference({k: found[k] for k in counted}, {k: expected[k] for k in counted}) < 1e-5
    )

"""trl's supervised fine-tuning of LoRA adapters on two ranks: a small model with random weights, no network.

torchrun --standalone --nproc-per-node 2 examples/frameworks/sft_lora.py
"""

from __future__ import annotations

import os
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig

from autopar.integrations import AutoparSFTTrainer


def counting_rows(count: int, length: int = 16) -> Dataset:
    """Token rows that count upwards, which a model learns soon."""
    starts = torch.randint(0, 60, (count, 1))
    rows = (starts + torch.arange(length)) % 60
    return Dataset.from_list([{"input_ids": row.tolist()} for row in rows])


def main() -> None:
    """Trains the adapters for 20 steps, and saves them."""
    set_seed(0)
    words = {f"w{i}": i for i in range(62)} | {"<pad>": 62, "<eos>": 63}
    tokens = Tokenizer(models.WordLevel(words, unk_token="w0"))
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folder = os.path.join(tempfile.gettempdir(), "autopar-sft")
    args = SFTConfig(
        folder,
        per_device_train_batch_size=4,
        max_steps=20,
        learning_rate=5e-2,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = AutoparSFTTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=counting_rows(64),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>"),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        mesh={"dp": int(os.environ.get("WORLD_SIZE", "1"))},
        recipe="zero3",
    )
    trainer.train()
    trainer.save_model(folder)
    if trainer.is_world_process_zero():
        print("adapters:", *sorted(x for x in os.listdir(folder) if x.startswith("adapter")))


if __name__ == "__main__":
    main()

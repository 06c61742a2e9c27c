"""`transformers.Trainer` on two ranks: a small model with random weights, no network.

    torchrun --standalone --nproc-per-node 2 examples/frameworks/trainer.py

The lines with `mesh` and `recipe` are what a plan needs; without them, and with `Trainer`, it runs in one process.
"""

from __future__ import annotations

import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from autopar.integrations import AutoparTrainer


def token_rows(count: int, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Rows that count upwards from a random token, which a model learns soon."""
    starts = torch.randint(0, 64, (count, 1))
    rows = (starts + torch.arange(length)) % 64
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Trains for 20 steps, saves, and reads the weights again."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folder = os.path.join(tempfile.gettempdir(), "autopar-trainer")
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=20,
        learning_rate=1e-2,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = AutoparTrainer(
        model=LlamaForCausalLM(config), args=args, train_dataset=token_rows(64), mesh={"dp": ranks}, recipe="zero3"
    )
    trainer.train()
    trainer.save_model(folder)
    if trainer.is_world_process_zero():
        LlamaForCausalLM.from_pretrained(folder)
        print(f"trained on {ranks} ranks; the weights are in {folder}")


if __name__ == "__main__":
    main()

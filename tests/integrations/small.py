"""A small causal language model, its data, and how ranks run a trainer on it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

Rows = list[dict[str, Tensor]]
BATCH = 4  # rows of all ranks in a step

# Number of ranks -> name -> what is asked of a plan.
PLANS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp": {"mesh": {"dp": 2}, "recipe": "ddp"},
        "zero3": {"mesh": {"dp": 2}, "recipe": "zero3"},
        "tp": {"mesh": {"tp": 2}, "recipe": "tp"},
    },
    4: {
        "ddp": {"mesh": {"dp": 4}, "recipe": "ddp"},
        "zero3": {"mesh": {"dp": 4}, "recipe": "zero3"},
        "tp": {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "ddp", "tp": "tp"}},
    },
}


def trained_then_resumed(*quick: str, kind: str = "") -> list[Any]:
    """Rows of a test: number of ranks, plan of a training, plan that resumes it; all but the quick ones are slow.

    Args:
        quick: plans of two ranks whose rows are not slow.
        kind: value that every row begins with; "" for none.
    """
    first = [kind] if kind else []
    return [
        pytest.param(
            *first,
            count,
            name,
            other,
            id=" ".join([*first, f"{count} ranks {name}"]),
            marks=() if count == 2 and name in quick else pytest.mark.slow,
        )
        for count in PLANS
        for name, other in [("ddp", "zero3"), ("zero3", "tp"), ("tp", "ddp")]
    ]


def own_batch() -> int:
    """The number of rows that a script asks for on this rank."""
    return BATCH // dist.get_world_size()


def as_launched() -> None:
    """Sets what torchrun sets, for frameworks that look for it; the process group is there already."""
    set_as_torchrun(0, dist.get_rank(), dist.get_world_size())


def set_as_torchrun(port: int, rank: int, count: int, store: str = "") -> None:
    """Sets what torchrun sets for ranks that meet at a port of this machine; with a port, a `Join` of ranks."""
    number, world = str(rank), str(count)
    os.environ.update(
        RANK=number,
        LOCAL_RANK=number,
        WORLD_SIZE=world,
        LOCAL_WORLD_SIZE=world,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="tests",
    )


def small_model() -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def rows(count: int) -> Rows:
    """Token rows, of which some begin with positions that do not count."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        tokens = torch.randint(0, 32, (8,), generator=generator)
        labels = tokens.clone()
        labels[: number % 4] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def weights_of(folder: str) -> dict[str, Tensor]:
    """The weights that `from_pretrained` reads."""
    return {k: v.detach() for k, v in LlamaForCausalLM.from_pretrained(folder).named_parameters()}


def worst_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative difference of tensors or numbers under the same names, by the norm of each."""
    assert found.keys() == expected.keys()
    pairs = [(torch.as_tensor(found[k]), torch.as_tensor(expected[k])) for k in expected]
    return max(((a - b).double().norm() / b.double().norm()).item() for a, b in pairs)


def is_in_shards(model: nn.Module) -> bool:
    """Whether some parameter lies on several ranks."""
    return any(any(p.is_shard() for p in getattr(x, "placements", ())) for x in model.parameters())

"""Why `generate` in bfloat16 may pick another token than one device: the two best logits are nearer than the rounding.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.accuracy.generated_tokens [--dtype bfloat16]

A small Llama continues prompts greedily by a plan (zero3) and on one device. At the first place where a prompt's tokens
differ, both have the same tokens before it, so that a model with the same weights in float64 says what the logits there
are. Printed for each: the gap between the two tokens' logits in float64, and the error of this gap on one device and by
the plan. A rounding explains the difference where the gap is no larger than the larger of the two errors.
"""

from __future__ import annotations

import copy
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.runtime.ranks.processes import join_process_group

PROMPTS, LENGTH, VOCAB = 64, 8, 8_000


def model_of(dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama of 4 layers of width 256, with the initial weights of transformers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def prompts() -> Tensor:
    return torch.randint(VOCAB, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(0))


def generated(model: Any, count: int) -> tuple[Tensor, Tensor]:
    """Tokens after the prompts, and the logits that they were picked from, of shape `(prompts, count, vocabulary)`."""
    found = model.generate(
        prompts(),
        attention_mask=torch.ones(PROMPTS, LENGTH),
        max_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences, torch.stack(found.logits, 1).double()


def say_differences(plain: LlamaForCausalLM, count: int, ours: tuple[Tensor, Tensor]) -> None:
    """Prints each first difference, and how many there are."""
    tokens, logits = generated(plain, count)
    with torch.no_grad():
        exact = copy.deepcopy(plain).double()(tokens).logits[:, LENGTH - 1 : -1]
    best = exact.topk(2).values
    gaps = best[..., 0] - best[..., 1]
    same = int((tokens == ours[0])[:, LENGTH:].sum())
    print(f"{same} of {PROMPTS * count} tokens are those of one device")
    print(f"gap of the two best logits in float64: median {gaps.median():.4f} over all tokens")
    explained = 0
    differ = (tokens != ours[0]).any(1).nonzero().flatten().tolist()
    for row in differ:
        place = int((tokens[row] != ours[0][row]).nonzero()[0]) - LENGTH
        pair = [int(x[row, place + LENGTH]) for x in (tokens, ours[0])]
        gap, alone, by_plan = (float(x[row, place, pair[0]] - x[row, place, pair[1]]) for x in (exact, logits, ours[1]))
        errors = abs(alone - gap), abs(by_plan - gap)
        explained += abs(gap) <= max(errors)
        print(
            f"prompt {row}, token {place}: gap {abs(gap):.4f}, of which one device errs by {errors[0]:.4f} and the "
            f"plan by {errors[1]:.4f}"
        )
    print(f"{explained} of {len(differ)} first differences have a gap no larger than an error")


@click.command(help=__doc__)
@click.option("--dtype", default="bfloat16", show_default=True, help="Format of the weights.")
@click.option("--tokens", default=24, show_default=True, help="Tokens to generate.")
def main(dtype: str, tokens: int) -> None:
    join_process_group(torch.device("cpu"))
    model = model_of(getattr(torch, dtype))
    plain = copy.deepcopy(model)
    batch = {"input_ids": prompts(), "labels": prompts()}
    mesh = {"dp": dist.get_world_size() if dist.is_initialized() else 1}
    made = autopar.compile(model, mesh=mesh, recipe="zero3", example_inputs=batch)
    ours = generated(made, tokens)
    if not dist.is_initialized() or dist.get_rank() == 0:
        say_differences(plain, tokens, ours)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

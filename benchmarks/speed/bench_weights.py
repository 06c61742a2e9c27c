"""Memory and time of weights on their way into a plan's shards and out of them.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/speed/bench_weights.py [--layers 16] [--recipe zero3]

The first rank writes a Llama of about a billion parameters as sharded safetensors. Then each rank makes
the model on the meta device, plans it, reads its shards, exports them and generates (`--tokens 0` leaves that out).
Printed per rank: the largest private memory (RssAnon of Linux, watched every 5 ms) above what the process had before,
against the bytes of its shard and of the largest tensor. The exported tensors are compared with the first ones byte for
byte, and the tokens with those of a plain model that reads the exported files.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where it runs as a script

import autopar
from autopar import _torch
from autopar.runtime.ranks.processes import join_process_group

WIDTH, INNER, HEADS, KV_HEADS, VOCAB = 2048, 8192, 32, 8, 32_000


def private_bytes() -> int:
    """Private memory of this process that is in RAM, without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Watch:
    """The largest private memory between `begin` and `end`, above that at `begin`."""

    def __init__(self) -> None:
        self.most_bytes = self.before_bytes = private_bytes()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Looks every 5 ms."""
        done = threading.Event()

        def look() -> None:
            while not done.wait(0.005):
                self.most_bytes = max(self.most_bytes, private_bytes())

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def model_of(layers: int, dtype: torch.dtype, *, on_meta: bool) -> nn.Module:
    """A Llama of transformers; its embedding is tied to its head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device("meta" if on_meta else "cpu"):
        return LlamaForCausalLM(config).to(dtype)


def write(folder: Path, layers: int, dtype: torch.dtype) -> None:
    """The files that are read; buffers are made on the CPU by the class itself."""
    model_of(layers, dtype, on_meta=False).save_pretrained(folder, max_shard_size="500MB")


def read(folder: Path, layers: int, dtype: torch.dtype, recipe: str) -> tuple[autopar.CompiledModule, dict[str, Any]]:
    """The compiled model, and what it took on this rank."""
    tokens = torch.empty(4, 128, dtype=torch.long, device="meta")
    model = model_of(layers, dtype, on_meta=True)
    watch, start = Watch(), time.perf_counter()
    with watch.watching():
        made = autopar.compile(
            model,
            mesh={"dp": dist.get_world_size()},
            recipe=recipe,
            device="cpu",
            weights=folder,
            example_inputs={"input_ids": tokens, "labels": tokens},
        )
    locals_ = [_torch.local_tensor(p) for p in made.parameters()]
    return made, {
        "seconds": time.perf_counter() - start,
        "peak_bytes": watch.most_bytes - watch.before_bytes,
        "shard_bytes": sum(x.nbytes for x in locals_),
        "largest_bytes": max(p.numel() * p.element_size() for p in made.parameters()),
    }


def export(made: autopar.CompiledModule, folder: Path) -> dict[str, Any]:
    """What writing took on this rank."""
    watch, start = Watch(), time.perf_counter()
    with watch.watching():
        made.export(folder)
    return {"export_seconds": time.perf_counter() - start, "export_peak_bytes": watch.most_bytes - watch.before_bytes}


def prompts() -> torch.Tensor:
    """Four prompts of eight tokens each."""
    return torch.randint(VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))


def generate(model: Any, tokens: int) -> tuple[torch.Tensor, float]:
    """Greedy tokens after the prompts, and the seconds that they took."""
    start = time.perf_counter()
    found = model.eval().generate(prompts(), attention_mask=torch.ones(4, 8), max_new_tokens=tokens, do_sample=False)
    return found[:, 8:], time.perf_counter() - start


def say_generated(folder: Path, found: torch.Tensor, seconds: float) -> None:
    """Compares tokens of the ranks with those of one device that reads the exported files."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    expected, alone = generate(plain, found.shape[1])
    print(
        f"{int((found == expected).sum())} of {found.numel()} generated tokens are those of one device, "
        f"{found.unique().numel()} of them different; {seconds:.1f} s, on one device {alone:.1f} s"
    )
    with torch.no_grad():
        logits = plain(torch.cat([prompts(), expected], 1)).logits[:, 7:-1]
    for row in (found != expected).any(1).nonzero().flatten():
        at = int((found[row] != expected[row]).nonzero()[0])
        two = logits[row, at, [int(expected[row, at]), int(found[row, at])]]
        print(f"prompt {int(row)}, token {at}: the two tokens have the logits {two.tolist()}")


def differing(before: Path, after: Path) -> list[str]:
    """Names of the tensors that are not the same byte for byte in both folders."""
    from safetensors import safe_open

    def names_in(file: Path) -> list[str]:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())

    def places(folder: Path) -> dict[str, Path]:
        files = sorted(folder.glob("*.safetensors"))
        return {name: file for file in files for name in names_in(file)}

    here, there = places(before), places(after)
    differ = sorted(set(here) ^ set(there))
    for name in set(here) & set(there):
        one, other = (safe_open(place[name], framework="pt").get_tensor(name) for place in (here, there))
        if one.dtype != other.dtype or not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            differ.append(name)
    return differ


def words(rank: int, row: dict[str, Any]) -> str:
    """One rank's line."""
    allowed = 1.2 * row["shard_bytes"] + row["largest_bytes"]
    return (
        f"rank {rank}: shard {row['shard_bytes'] / 1e9:.3f} GB, largest tensor {row['largest_bytes'] / 1e9:.3f} GB, "
        f"peak while planning and reading {row['peak_bytes'] / 1e9:.3f} GB ({row['peak_bytes'] / allowed:.2f} of 1.2 "
        f"shards and a tensor), {row['seconds']:.1f} s; peak of the export "
        f"{row['export_peak_bytes'] / 1e9:.3f} GB, {row['export_seconds']:.1f} s"
    )


@click.command(help=__doc__)
@click.option("--layers", default=16, show_default=True, help="Layers of the model.")
@click.option("--recipe", default="zero3", show_default=True, help="Recipe of the plan.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Format of the weights.")
@click.option("--tokens", default=6, show_default=True, help="Tokens to generate; 0 for none.")
def main(layers: int, recipe: str, dtype: str, tokens: int) -> None:
    in_dtype = getattr(torch, dtype)
    join_process_group(torch.device("cpu"))
    rank = dist.get_rank()
    root = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(root)
    before, after = Path(root[0], "before"), Path(root[0], "after")
    try:
        if rank == 0:
            write(before, layers, in_dtype)
        dist.barrier()
        made, row = read(before, layers, in_dtype, recipe)
        row |= export(made, after)
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, row)
        if rank == 0:
            print(*(words(*each) for each in enumerate(rows)), sep="\n")
            found = differing(before, after)
            print(f"{len(found)} tensors differ after export: {found[:3]}" if found else "byte for byte the same")
        if tokens:
            found = generate(made, tokens)
            if rank == 0:
                say_generated(after, *found)
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root[0], ignore_errors=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The text the examples train on: the source code of the Python standard library.

Every machine that can run the example has this text, nothing is downloaded, and all processes that
share an interpreter read the same bytes.
"""

from __future__ import annotations

import math
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

# Installed packages and tests are not part of the library, and these modules are tables, not code.
SKIPPED = frozenset({"site-packages", "test", "tests", "encodings", "pydoc_data"})


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_source(root: Path, *, limit_bytes: int) -> bytes:
    """The Python files under `root`, in order of their path, as one text.

    Args:
        root: a folder; parts of it named in `SKIPPED` are left out.
        limit_bytes: the text is cut off here.

    Raises:
        ValueError: there is no Python source under `root`.
    """
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    text = bytearray()
    for name in sorted(paths):
        if SKIPPED.isdisjoint(name.split("/")) and not name.startswith("_sysconfigdata"):
            text += paths[name].read_bytes()
        if len(text) >= limit_bytes:
            break
    if not text:
        raise ValueError(f"There is no Python source under {root}.")
    return bytes(text[:limit_bytes])


def unigram_entropy(text: bytes) -> float:
    """Nats per byte of the best guess that knows how frequent each byte is, and nothing else.

    $H = -\\sum_b p_b \\ln p_b$: what a model gains below it, it gained from the bytes before.
    """
    return -sum(n / len(text) * math.log(n / len(text)) for n in Counter(text).values())


def batches(text: bytes, *, batch_size: int, seq_len: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of passages drawn at random; the same seed gives the same batches.

    Yields:
        tokens and targets, each of shape `(batch_size, seq_len)` and dtype int64; the target of a
        byte is the byte after it.

    Raises:
        ValueError: the text is no longer than one passage.
    """
    if len(text) <= seq_len:
        raise ValueError(f"A text of {len(text)} bytes has no passage of {seq_len} and one more.")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(seq_len + 1)
    while True:
        starts = torch.randint(len(text) - seq_len, (batch_size, 1), generator=generator)
        passages = data[starts + offsets].long()
        yield passages[:, :-1], passages[:, 1:]

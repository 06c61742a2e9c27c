"""The text of the examples: read in order, cut off, measured and drawn from."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from text import batches, read_source, standard_library, unigram_entropy


@pytest.mark.parametrize(
    ("text", "entropy_nats"),
    [
        (b"aaaa", 0.0),
        (b"abab", math.log(2)),
        (bytes(range(256)), math.log(256)),
        (b"aaab", 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
    ],
)
def test_entropy_of_known_distributions(text: bytes, entropy_nats: float) -> None:
    assert unigram_entropy(text) == pytest.approx(entropy_nats)


def test_source_is_sorted_cut_and_without_tests(tmp_path: Path) -> None:
    for name in ["b.py", "a/z.py", "site-packages/x.py", "a/test/y.py", "encodings/cp437.py"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    (tmp_path / "c.txt").write_text("not Python")

    assert read_source(tmp_path, limit_bytes=1000) == b"# a/z.py\n# b.py\n"
    assert read_source(tmp_path, limit_bytes=11) == b"# a/z.py\n# "


def test_folder_without_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python source"):
        read_source(tmp_path, limit_bytes=1000)


def test_standard_library_is_real_text() -> None:
    text = read_source(standard_library(), limit_bytes=1_000_000)

    assert len(text) == 1_000_000
    assert b"def __init__(self" in text
    assert 2.8 < unigram_entropy(text) < 3.5


def test_targets_are_the_next_bytes() -> None:
    # In this text the byte at position i is i, so that every target is its token plus one.
    tokens, targets = next(batches(bytes(range(256)), batch_size=5, seq_len=7, seed=0))

    assert tokens.shape == targets.shape == (5, 7)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)


def test_the_shortest_text_has_one_passage() -> None:
    tokens, targets = next(batches(b"abc", batch_size=3, seq_len=2, seed=0))

    assert tokens.tolist() == [[97, 98]] * 3
    assert targets.tolist() == [[98, 99]] * 3
    with pytest.raises(ValueError, match="no passage of 3"):
        next(batches(b"abc", batch_size=3, seq_len=3, seed=0))


def test_batches_follow_the_seed() -> None:
    def first(seed: int) -> list[list[list[int]]]:
        drawn = batches(bytes(range(256)), batch_size=2, seq_len=4, seed=seed)
        return [tokens.tolist() for tokens, _ in itertools.islice(drawn, 3)]

    assert first(0) == first(0)
    assert first(0) != first(1)

"""Keys and values go round on real ranks: results, gradients and bytes sent."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import _torch
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import compiled, difference, single
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess

BATCH, SEQ, HEADS, KV_HEADS, WIDTH = 2, 16, 4, 2, 8
FLOAT = 8  # bytes of a number


@pytest.mark.parametrize("micro_batches", often([1, 2], [2]))
def test_two_ranks_train_as_one_process(two_ranks: Ranks, micro_batches: int) -> None:
    expected = single("gpt")
    results = two_ranks.run(compiled, "gpt", {"cp": 2}, "cp", micro_batches)
    assert all(difference(found, expected) < 1e-9 for found in results)


@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [
        pytest.param({"cp": 4}, "cp", marks=pytest.mark.slow),
        ({"a": 2, "b": 2}, "cp"),
        ({"dp": 2, "cp": 2}, {"dp": "zero3", "cp": "cp"}),
        ({"cp": 2, "tp": 2}, {"cp": "cp", "tp": "tp"}),
    ],
    ids=["cp", "cp x cp", "dp x cp", "cp x tp"],
)
def test_four_ranks_train_as_one_process(four_ranks: Ranks, mesh: Any, recipe: Any) -> None:
    """Alone, over two axes at once, and beside data and tensor parallelism."""
    expected = single("gpt")
    results = four_ranks.run(compiled, "gpt", mesh, recipe)
    assert all(difference(found, expected) < 1e-9 for found in results)


@pytest.mark.parametrize("options", [{"executor": "aot_eager"}, {"recompute": "full"}], ids=str)
def test_compiled_or_recomputed(two_ranks: Ranks, options: dict[str, Any]) -> None:
    expected = single("gpt")
    results = two_ranks.run(ringed, options)
    assert all(difference(found, expected) < 1e-9 for found in results)


def ringed(options: dict[str, Any]) -> dict[str, Any]:
    return compiled("gpt", {"cp": 2}, "cp", **options)


def test_stages_send_keys_and_values_round(four_ranks: Ranks) -> None:
    expected = single("gpt")
    parts = four_ranks.run(compiled, "gpt", {"pp": 2, "cp": 2}, {"pp": "zb", "cp": "cp"}, 2)
    found = {name: value for part in parts for name, value in part.items()}
    assert difference({name: found[name] for name in expected}, expected) < 1e-9


class Attending(nn.Module):
    """Grouped queries and nothing else, with its loss."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.query = nn.Linear(WIDTH, HEADS * WIDTH, bias=False)
        self.both = nn.Linear(WIDTH, 2 * KV_HEADS * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = self.both(x).unflatten(-1, (2, KV_HEADS, -1)).transpose(1, 3).unbind(2)
        return (
            F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal, enable_gqa=True).square().mean()
        )


@captured_once()
def sent_and_priced(mesh: dict[str, int], is_causal: bool) -> tuple[list[int], dict[str, float]]:
    """Bytes that this rank sends to others forward and in all, and the price's of every kind, in a phase."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ, WIDTH, dtype=torch.float64)
    model = Attending(is_causal).double()
    made = autopar.compile(model, example_inputs=(x,), mesh=mesh, recipe="cp")
    sent: list[int] = []
    start = _torch.start_exchange_rows

    def counted(x: Tensor, parts: list[int], received: list[int], group: str) -> Any:
        away = sum(parts) - parts[_torch.resolve_group(group).rank()]
        sent.append(away * x.itemsize)
        return start(x, parts, received, group)

    with mock.patch.object(_torch, "start_exchange_rows", counted):
        with torch.no_grad():
            made.step(x)
        forward = sum(sent)
        sent.clear()
        made.step(x)
    priced: Counter[str] = Counter()
    for item in made.explain().step.items:
        if "inside" in item.name and "attention" in item.name:
            priced[f"{item.kind} {item.phase}"] += item.count * item.traffic_bytes
    return [forward, sum(sent)], dict(priced)


MESHES = [{"cp": 4}, {"a": 2, "b": 2}]
KEYS = BATCH * KV_HEADS * SEQ * WIDTH * FLOAT  # of all ranks; values are as many, queries twice
ROTATED = 2 * KEYS * 3 // 4


@pytest.mark.parametrize("mesh", often(MESHES, MESHES[1:]), ids=str)
def test_a_rank_sends_what_is_priced(four_ranks: Ranks, mesh: dict[str, int]) -> None:
    """n - 1 of n parts of all keys and values forward, and twice that backward."""
    for sent, priced in four_ranks.run(sent_and_priced, mesh, False):
        assert sent == [ROTATED, 3 * ROTATED]
        assert priced == {"rotate forward": ROTATED, "rotate_back backward": 2 * ROTATED}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_causal_rows_are_dealt_out_as_priced(four_ranks: Ranks, mesh: dict[str, int]) -> None:
    """Query, key, value, result and log-sum-exp; backward these and four gradients. Ranks send this on average."""
    moving = sum((size - 1) / size for size in mesh.values()) / 4
    tensors, logsumexp = 2 * (KEYS + 2 * KEYS), 2 * KEYS / WIDTH
    forward, backward = (moving * (each * tensors + logsumexp) for each in (1, 2))
    found = four_ranks.run(sent_and_priced, mesh, True)
    for i, expected in enumerate([ROTATED + forward, 3 * ROTATED + forward + backward]):
        assert sum(sent[i] for sent, _ in found) / 4 == expected
    assert found[0][1] == {
        "rotate forward": ROTATED,
        "rotate_back backward": 2 * ROTATED,
        "all_to_all forward": forward,
        "all_to_all backward": backward,
    }

"""batch="local": every rank gives rows of its own, as DistributedSampler hands them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.runtime.model.test_shapes import cross_entropy, distance, reader, tokens
from tests.runtime.models import make
from tests.runtime.training import difference, single, train
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

# mesh, recipe, micro-batches: parts that are computed with where they are given, and parts that are gathered
PLANS: list[tuple[dict[str, int], str, int]] = [
    ({"dp": 2}, "ddp", 1),
    ({"dp": 2}, "zero3", 2),
    ({"tp": 2}, "tp", 1),
    ({"pp": 2}, "gpipe", 2),
]


@captured_once()
def trained(mesh: dict[str, int], recipe: str, micro_batches: int) -> dict[str, Any]:
    """What training gives where each rank has a part of the model's batch, in the order of the ranks."""
    model, batch, loss_fn = make("gpt")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=recipe, micro_batches=micro_batches, batch="local")
    own = tuple(x.chunk(dist.get_world_size())[dist.get_rank()] for x in batch)
    return train(made, made.step, own)


@pytest.mark.parametrize(("mesh", "recipe", "micro_batches"), PLANS)
def test_parts_train_as_the_whole_batch_does(
    two_ranks: Ranks, mesh: dict[str, int], recipe: str, micro_batches: int
) -> None:
    expected = single("gpt")
    for found in two_ranks.run(trained, mesh, recipe, micro_batches):
        held = {name: expected[name] for name in found}  # a stage has its own parameters alone
        assert "losses" in held and difference(found, held) < 1e-9


def test_parts_on_a_mesh_of_two_axes(four_ranks: Ranks) -> None:
    found = four_ranks.run(trained, {"dp": 2, "tp": 2}, "dp:zero2,tp:tp", 1)
    assert max(difference(each, single("gpt")) for each in found) < 1e-9


@captured_once()
def sampled() -> tuple[list[float], list[float]]:
    """Losses of an epoch, the ranks' samplers giving each its rows, and of one process that has all of them."""
    data = TensorDataset(*tokens((16, 8)))
    sampler = DistributedSampler(data, shuffle=True, seed=3, drop_last=True)
    made = autopar.compile(reader(), loss_fn=cross_entropy, recipe="ddp", batch="local")
    found = [made.step(*batch).item() for batch in DataLoader(data, 4, sampler=sampler)]
    samplers = [DistributedSampler(data, 2, rank, shuffle=True, seed=3) for rank in range(2)]
    loaders = [DataLoader(data, 4, sampler=each) for each in samplers]
    expected = [
        cross_entropy(reader()(torch.cat([a[0], b[0]])), torch.cat([a[1], b[1]])).item()
        for a, b in zip(*loaders, strict=True)
    ]
    return found, expected


def test_the_rows_of_a_distributed_sampler(two_ranks: Ranks) -> None:
    found, expected = equal_on_all(two_ranks.run(sampled))
    assert len(found) == 2
    assert found == pytest.approx(expected, rel=1e-12)


def shapes() -> tuple[list[float], str]:
    """Distances for several shapes of parts, and what is said of parts that differ in shape."""
    made = autopar.compile(
        reader(),
        loss_fn=cross_entropy,
        mesh={"dp": 2},
        recipe="ddp",
        batch="local",
        example_inputs=tuple(x[:2] for x in tokens((4, 8))),
    )

    def own(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(2)[dist.get_rank()]

    found = [distance(made, reader(), tokens(shape), part=own) for shape in ((4, 8), (2, 8), (4, 6))]
    with pytest.raises(autopar.StepError) as refused:
        made.step(*tokens((3 + dist.get_rank(), 8)))
    return found, str(refused.value)


def test_parts_of_several_shapes(two_ranks: Ranks) -> None:
    found, refused = equal_on_all(two_ranks.run(shapes))
    assert max(found) < 1e-12
    assert "rank 0 [3, 8], [3, 8]; rank 1 [4, 8], [4, 8]" in refused


@captured_once()
def mixed() -> list[float]:
    """The losses of a whole batch, of its parts, and of whole tokens beside parts of targets, in two micro-batches."""
    made = autopar.compile(reader(), loss_fn=cross_entropy, mesh={"dp": 2}, recipe="ddp", micro_batches=2)
    whole = tokens((8, 8))
    parts = tuple(x.chunk(2)[dist.get_rank()] for x in whole)
    return [made.step(*batch).item() for batch in (whole, parts, (whole[0], parts[1]))]


def test_a_part_beside_a_whole_input_is_gathered_over_micro_batches(two_ranks: Ranks) -> None:
    for whole, parts, both in two_ranks.run(mixed):
        assert whole == pytest.approx(parts, rel=1e-9) and whole == pytest.approx(both, rel=1e-9)


@captured_once()
def different() -> str:
    """What is said where parts are given and the whole batch is expected."""
    made = autopar.compile(reader(), loss_fn=cross_entropy, mesh={"dp": 2}, recipe="ddp")
    with pytest.raises(autopar.StepError) as refused:
        made.step(*tokens((4, 8), seed=dist.get_rank()))
    return str(refused.value)


def test_parts_without_a_word_are_refused(two_ranks: Ranks) -> None:
    said = equal_on_all(two_ranks.run(different))
    assert 'autopar.compile(..., batch="local")' in said


def test_another_word_is_refused() -> None:
    with pytest.raises(autopar.AutoparError, match="'mine' is neither 'global' nor 'local'"):
        autopar.compile(reader(), batch="mine")  # type: ignore[arg-type]
    with pytest.raises(autopar.AutoparError, match="'logits' is neither 'local', 'whole' nor 'dtensor'"):
        autopar.compile(reader(), outputs="logits")  # type: ignore[arg-type]


def test_on_one_rank_the_part_is_the_batch() -> None:
    made = autopar.compile(reader(), loss_fn=cross_entropy, batch="local")
    assert distance(made, reader(), tokens((4, 8))) < 1e-12

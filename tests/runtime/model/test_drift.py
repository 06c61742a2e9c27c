"""Ranks that hold the same parameters but no longer the same bits of them notice it, and say which and where."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import _torch
from autopar.checkpoint import Checkpoints, save_checkpoint
from autopar.errors import StepError
from autopar.runtime.model.drift import digests_of
from autopar.runtime.ranks.comparison import Comparison
from tests.runtime.gloo_ranks import RankFailed, Ranks, equal_on_all
from tests.runtime.models import MLP, Normed, Tied, mean_square


@torch.library.custom_op("tests_drift::unsteady", mutates_args=())
def unsteady(x: Tensor, backward: bool) -> Tensor:
    """The identity, of which the last rank gets other last bits: of the result, or of the gradient."""
    return x.clone() if backward else _rounded_elsewhere(x)


def _rounded_elsewhere(x: Tensor) -> Tensor:
    is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
    return torch.nextafter(x, x + 1) if is_last else x.clone()


unsteady.register_fake(lambda x, backward: torch.empty_like(x))
unsteady.register_autograd(
    lambda ctx, gradient: (_rounded_elsewhere(gradient) if ctx.backward else gradient, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "backward", inputs[1]),
)


class OnePath(nn.Module):
    """Norms around two maps, and an op of a replicated path that is not steady."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        x = unsteady(self.before(x), self.backward)
        return self.after(x + self.down(torch.relu(self.up(x))))


def compiled(model: nn.Module, mesh: dict[str, int], recipe: Any, **options: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """A model for the ranks of a mesh, and its batch."""
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    if isinstance(model, Tied):
        x, y = torch.randint(16, (2, 8, 4), generator=torch.Generator().manual_seed(0))
        options["loss_fn"] = lambda logits, words: nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())
    options = {"loss_fn": mean_square, "drift": "error", **options}
    return autopar.compile(model, mesh=mesh, recipe=recipe, example_inputs=(x, y), **options), (x, y)


def trained(made: Any, batch: tuple[Tensor, ...], steps: int) -> str:
    """Trains so many steps; returns the error of one, after its number."""
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        try:
            made.step(*batch)
        except StepError as error:
            return f"{step}: {error}"
        optimizer.step()
        optimizer.zero_grad()
    return "no error"


def spoil(x: Tensor, rank: int) -> None:
    """Gives one rank another last bit of the first element of a parameter or buffer."""
    local = _torch.local_tensor(x).view(-1)
    if dist.get_rank() == rank:
        local[:1] = torch.nextafter(local[:1], local[:1] + 1)


def of_unsteady(backward: bool) -> str:
    return trained(*compiled(OnePath(backward), {"tp": 2}, "tp"), 2)


def test_an_unsteady_backward_is_noticed_in_step_2_and_named(two_ranks: Ranks) -> None:
    said = equal_on_all(two_ranks.run(of_unsteady, True))
    assert said.startswith("2: ") and "found in step 2, and they were equal in step 1" in said
    assert "before.bias, which layer_norm of module before takes: ranks [0] against ranks [1]" in said


def test_an_unsteady_forward_is_noticed_in_step_2_and_named(two_ranks: Ranks) -> None:
    said = equal_on_all(two_ranks.run(of_unsteady, False))
    assert said.startswith("2: ") and "after.bias, which layer_norm_1 of module after takes" in said


def mended(folder: str) -> tuple[list[str], str, list[float]]:
    """Warnings and the error of seven steps, and the values of a parameter after a save."""
    made, batch = compiled(OnePath(backward=True), {"tp": 2}, "tp", drift="mend")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(made, batch, 7)
        made.export(folder)
    said = [str(each.message) for each in caught if "other bits" in str(each.message)]
    return said, found, _torch.local_tensor(made.get_parameter("before.bias")).tolist()


def test_a_drift_is_mended_where_that_is_asked_for(two_ranks: Ranks, tmp_path: Path) -> None:
    (said, found, first), (silent, also_found, second) = two_ranks.run(mended, str(tmp_path / "weights"))
    assert found == also_found == "no error" and first == second and not silent
    assert [re.findall("That was found (.*?),", text) for text in said] == [
        ["in step 2"],
        ["in step 4"],
        ["before weights were exported"],
    ]


SAVES: dict[str, Callable[[Any, str], object]] = {
    "save_checkpoint": lambda made, folder: save_checkpoint(f"{folder}/last", made),
    "Checkpoints": lambda made, folder: Checkpoints(folder).save(1, made),
    "export": lambda made, folder: made.export(f"{folder}/weights"),
}


def saved(how: str, folder: str) -> tuple[str, bool]:
    """The error of a save after rank 1 has another bit of a buffer, and whether there is a file."""
    made, batch = compiled(Normed(), {"dp": 2}, "ddp")
    trained(made, batch, 1)
    spoil(made.get_buffer("first.running_mean"), 1)
    with pytest.raises(StepError) as caught:
        SAVES[how](made, folder)
    return str(caught.value), any(Path(folder).iterdir())


@pytest.mark.parametrize("how", SAVES)
def test_a_save_notices_a_drift_before_it_writes(two_ranks: Ranks, how: str, tmp_path: Path) -> None:
    said, has_files = equal_on_all(two_ranks.run(saved, how, str(tmp_path)))
    assert not has_files and "first.running_mean, which" in said and "ranks [0] against ranks [1]" in said


def spoiled(case: str) -> str:
    """What is said in step 2 of a drift that one rank of four begins after step 1."""
    model, mesh, recipe, name = CASES[case]
    made, batch = compiled(model(), dict(mesh), dict(recipe), **({"micro_batches": 2} if "pp" in mesh else {}))
    assert trained(made, batch, 1) == "no error"
    if name in dict(made.named_parameters()):
        spoil(made.get_parameter(name), 3)
    return trained(made, batch, 1)


CASES: dict[str, tuple[Callable[[], nn.Module], Mapping[str, int], Mapping[str, str], str]] = {
    "one line of two": (MLP, {"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tp"}, "down.bias"),
    "both axes": (MLP, {"dp": 2, "tp": 2}, {"dp": "ddp", "tp": "tp"}, "down.bias"),
    "two stages": (Tied, {"pp": 2, "dp": 2}, {"pp": "1f1b", "dp": "zero3"}, "embedding.weight"),
}
SIDES = {"one line of two": "ranks [2] against ranks [3]", "both axes": "ranks [0, 1, 2] against ranks [3]"}


@pytest.mark.parametrize("case", CASES)
def test_only_ranks_with_the_same_part_are_compared(four_ranks: Ranks, case: str) -> None:
    said = equal_on_all(four_ranks.run(spoiled, case))
    assert f"{CASES[case][3]}, which" in said and SIDES.get(case, "ranks [1] against ranks [3]") in said


def comparisons(recipe: str) -> list[int]:
    """The steps of nine in which ranks compare what they hold."""
    made, batch = compiled(MLP(), {"x": 2}, recipe)
    with mock.patch.object(Comparison, "gather", autospec=True, side_effect=Comparison.gather) as gather:
        found = []
        for step in range(1, 10):
            before = sum(call.kwargs.get("kind") == "replicas" for call in gather.mock_calls)
            made.step(*batch)
            found += [step] * (sum(call.kwargs.get("kind") == "replicas" for call in gather.mock_calls) - before)
    return found


@pytest.mark.parametrize("recipe", ["ddp", "zero3"])
def test_other_steps_than_powers_of_two_do_nothing_for_it(two_ranks: Ranks, recipe: str) -> None:
    assert equal_on_all(two_ranks.run(comparisons, recipe)) == [1, 2, 4, 8]


def of_own_loop(drift: str) -> list[float]:
    """The values of a parameter after a loop of the script's own, in which it drifts before the second forward."""
    made, (x, _) = compiled(MLP(), {"tp": 2}, "tp", drift=drift)
    made(x).sum().backward()
    spoil(made.get_parameter("down.bias"), 1)
    with warnings.catch_warnings(record=True):
        made(x).sum().backward()
    return _torch.local_tensor(made.get_parameter("down.bias")).tolist()


def warned() -> list[str]:
    """What three steps of an unsteady model say by default."""
    made, batch = compiled(OnePath(backward=True), {"tp": 2}, "tp", drift="warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert trained(made, batch, 3) == "no error"
    return [str(each.message) for each in said if "other bits" in str(each.message)]


def test_a_drift_is_a_warning_by_default(two_ranks: Ranks) -> None:
    first, others = two_ranks.run(warned)
    assert len(first) == 1 and "That was found in step 2" in first[0] and not others


def test_a_loop_of_ones_own_notices_a_drift(two_ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"down.bias, which .* in a forward with autograd"):
        two_ranks.run(of_own_loop, "error")
    equal_on_all(two_ranks.run(of_own_loop, "mend"))


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_is_another_where_one_bit_is(dtype: torch.dtype) -> None:
    x = torch.arange(6).remainder(2).view(2, 3).to(dtype)
    own = digests_of([x, x.clone(), x.t().contiguous().t()])
    assert own == [own[0]] * 3
    for byte in range(x.nbytes):
        other = x.clone()
        other.view(-1).view(torch.uint8)[byte] ^= 1
        assert digests_of([other]) != own[:1]


def test_a_digest_sees_bits_and_not_values() -> None:
    nan, other = torch.full((3,), torch.nan), torch.full((3,), -torch.nan)
    assert digests_of([nan]) == digests_of([nan.clone()]) and digests_of([nan]) != digests_of([other])
    assert digests_of([torch.zeros(3)]) != digests_of([-torch.zeros(3)])
    assert digests_of([torch.empty(0, 4)]) == ["0"] and digests_of([]) == []


def test_a_digest_of_many_numbers_sees_the_last_and_their_order() -> None:
    x = torch.zeros((1 << 21) + 3, dtype=torch.int8)
    last, swapped = x.clone(), x.clone()
    last[-1], swapped[0], swapped[-2] = 1, 1, 1
    assert len({*digests_of([x, last, swapped])}) == 3

"""All parameters of a model are there on every rank of a pipeline, and numbers of them are those of one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.parameters.adafactor import Adafactor
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import Tied
from tests.support.loop import batches, mlp, summed, whole
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess
PP = {"mesh": {"pp": 2}}
Observe = Callable[[Any], list[float]]


def backward(model: Any) -> Tensor:
    ((x, y),) = batches(1)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss


def looked_at(model: Any) -> list[float]:
    """Sizes, norms, sums, vectors and penalties of all parameters and gradients."""
    backward(model)
    every = list(model.parameters())
    found = [float(sum(p.numel() for p in every)), float(len(model.state_dict()) > 0), float(len(every))]
    found += [float(p.grad.norm()) for p in every] + [p.detach().abs().max().item() for p in every]
    total = torch.zeros((), dtype=torch.float64)
    for p in every:
        total = total + p.detach().norm() ** 2
    found += [total.item(), float(sum(p.grad.norm() ** 2 for p in every) ** 0.5)]
    in_place = every[0].grad.square().sum()
    for p in every[1:]:
        in_place += p.grad.square().sum()
    found.append(float(in_place))
    found += [x.item() for x in torch.stack([p.grad.norm() for p in every])]
    found.append(max(float(p.detach().abs().max()) for p in every))
    for kind in (2.0, math.inf):
        found += [float(torch.nn.utils.clip_grad_norm_(every, 0.1, kind)), float(every[-1].grad.norm())]
    found.append(float(torch.nn.utils.clip_grad_norm_(every[:1], 1e9)))
    if torch.__version__ >= "2.12":  # 2.11 flattens no weight that is split by columns
        vector = torch.nn.utils.parameters_to_vector(every).detach()
        torch.nn.utils.vector_to_parameters(vector * 0.5, every)
        found.append(float(whole(vector).sum()))
    return [*found, summed(model)]


def penalised(model: Any) -> list[float]:
    """A penalty of all weights, and noise on all gradients."""
    ((x, y),) = batches(1)
    loss = F.mse_loss(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    torch.manual_seed(3)
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.1)
        p.data -= 0.1 * p.grad
    return [loss.item(), *(float(p.grad.norm()) for p in model.parameters()), summed(model)]


def averaged(model: Any) -> list[float]:
    """Moving averages in plain tensors and in those of the plan, and lookahead over copies of the parameters."""
    teacher = mlp(6, 8, 3).double()
    slow = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, q in zip(model.parameters(), slow, strict=True):
            p.mul_(1.5)
            q.lerp_(p, 0.5)
            p.copy_(q)
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            old.zero_().add_(whole(new), alpha=0.1)
            old.add_(new, alpha=0.2).lerp_(new * 2, 0.25).mul_(new.norm())
        torch._foreach_lerp_(list(teacher.parameters()), list(model.parameters()), 0.5)
    return [summed(teacher), summed(model), *(float(q.sum()) for q in slow)]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "Adafactor": lambda p: Adafactor(p, lr=1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=2),
}


def optimized(model: Any) -> list[float]:
    """Two steps of each optimizer, the second with its state from `state_dict`."""
    found = []
    for make in OPTIMIZERS.values():
        first = make(model.parameters())
        second = make(model.parameters())
        for optimizer in (first, second):
            if optimizer is second:
                second.load_state_dict(copy.deepcopy(first.state_dict()))

            def closure(optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                return backward(model)

            found.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
        found.append(summed(model))
    return found


def scaled(model: Any) -> list[float]:
    """GradScaler with a gradient on one stage that is not finite, and clipping after `unscale_`."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    found = []
    for broken in (False, True, False):
        ((x, y),) = batches(1)
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        if broken:
            model[0].weight.grad.mul_(math.inf)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        found += [scaler.get_scale(), summed(model)]
    return found


LOOPS: dict[str, Observe] = {
    "looked at": looked_at,
    "penalised": penalised,
    "averaged": averaged,
    "optimized": optimized,
    "scaled": scaled,
}


@captured_once()
def on_a_rank(name: str, options: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    ((x, _),) = batches(1)
    return LOOPS[name](autopar.compile(mlp(6, 8, 3).double(), example_inputs=(x,), **options))


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_all_parameters_does_what_it_does_in_one_process(two_ranks: Ranks, name: str) -> None:
    torch.manual_seed(0)
    expected = LOOPS[name](mlp(6, 8, 3).double())
    for found in two_ranks.run(on_a_rank, name, PP):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_what_is_sharded_in_its_stage_is_whole_for_all(four_ranks: Ranks) -> None:
    torch.manual_seed(0)
    expected = looked_at(mlp(6, 8, 3).double())
    for found in four_ranks.run(on_a_rank, "looked at", {"mesh": {"pp": 2, "dp": 2}, "recipe": "zero3"}):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def tied_norms(model: Any, step: Callable[[], Any]) -> list[float]:
    step()
    every = list(model.parameters())
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in every]))
    clipped = torch.nn.utils.clip_grad_norm_(every, 0.1)
    penalty = sum(p.square().sum() for p in every)
    penalty.backward()
    return [float(norm), float(clipped), float(penalty), *(float(p.grad.norm()) for p in every)]


def tied_batch() -> tuple[Tensor, Tensor]:
    return torch.arange(8).view(2, 4), torch.arange(8).view(2, 4) + 3


def tied_loss(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


@captured_once()
def tied_on_a_rank() -> list[float]:
    torch.manual_seed(0)
    made = autopar.compile(Tied().double(), loss_fn=tied_loss, example_inputs=tied_batch(), **PP)
    return tied_norms(made, lambda: made.step(*tied_batch()))


def test_a_weight_that_two_stages_share_counts_once(two_ranks: Ranks) -> None:
    torch.manual_seed(0)
    plain = Tied().double()
    tokens, targets = tied_batch()
    expected = tied_norms(plain, lambda: tied_loss(plain(tokens), targets).backward())
    for found in two_ranks.run(tied_on_a_rank):
        assert found == pytest.approx(expected, rel=1e-9)


@captured_once()
def asked_on_one_rank() -> str:
    ((x, _),) = batches(1)
    made: Any = autopar.compile(mlp(6, 8, 3).double(), example_inputs=(x,), timeout_seconds=1.0, **PP)
    if dist.get_rank():
        return ""
    with pytest.raises(autopar.PeerError) as error:
        float(made[2].weight.norm())
    return str(error.value)


def test_a_number_that_one_rank_alone_asks_for_is_said_to_be_that() -> None:
    ranks = Ranks(2)  # which have lost each other afterwards
    try:
        first, _ = ranks.run(asked_on_one_rank)
    finally:
        ranks.stop()
    assert first.startswith("A number of parameters or gradients") and "not under `if rank == 0`" in first


@captured_once()
def refused() -> list[str]:
    ((x, _),) = batches(1)
    made: Any = autopar.compile(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double(), example_inputs=(x,), **PP)
    first, second = made[0].weight.detach(), made[1].weight.detach()
    found = []
    for do in (
        lambda: first + second,
        lambda: max(first.sum(), second.sum()),
        lambda: first * second.sum(),
        lambda: float((first if dist.get_rank() else second[0]).sum() + made[0].bias.sum()),
        lambda: float(torch.stack([first.sum()] * (1 + dist.get_rank())).sum()),
    ):
        with pytest.raises(autopar.StepError) as error:
            do()
        found.append(str(error.value))
    assert torch.equal(first.full_tensor() + second.full_tensor(), (second.full_tensor() + first.full_tensor()))
    assert torch.equal(first, first.clone()) and not torch.equal(first, first + 1) and not first.equal(second)
    assert torch.allclose(second, second + 1e-12) and not second.allclose(second * 2)
    return found


def test_tensors_of_two_stages_are_not_mixed_and_all_ranks_say_so(two_ranks: Ranks) -> None:
    for one, most, product, read, stacked in two_ranks.run(refused):
        assert one.startswith("add takes a tensor of shape [6, 6], of pipeline position")
        assert "t takes a tensor" in most and "mul takes" in product
        assert all("x.full_tensor() gives a tensor to all ranks" in x for x in (one, most, product))
        assert "ask for other tensors" in stacked and "ask for other tensors" in read


@captured_once()
def followed_into_plain() -> str:
    ((x, _),) = batches(1)
    made: Any = autopar.compile(mlp(6, 8, 3).double(), example_inputs=(x,), timeout_seconds=5.0, **PP)
    found, averages = [], [p.detach().full_tensor() for p in made.parameters()]
    for average, p in zip(averages, made.parameters(), strict=True):
        for write in (lambda: average.lerp_(p, 0.5), lambda: average.addcmul_(p.detach(), p.detach())):  # noqa: B023
            with pytest.raises((RuntimeError, autopar.StepError)) as error:
                write()
            found.append(type(error.value).__name__)
    return " ".join(found)


def test_a_write_into_a_plain_tensor_that_is_refused_is_so_on_every_rank(two_ranks: Ranks) -> None:
    assert all("PeerError" not in found for found in two_ranks.run(followed_into_plain))


class Idle(nn.Module):
    """A map that is trained, and others whose results are detached, made without autograd, or not there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.detached, self.frozen, self.unused = (nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.frozen(x)
        return self.inner(x) + self.detached(x).detach() + shift


def without_gradients(model: nn.Module) -> list[str]:
    backward(model)
    return [name for name, p in model.named_parameters() if p.grad is None]


@captured_once()
def without_gradients_on_a_rank() -> list[list[str]]:
    ((x, y),) = batches(1)
    found = []
    for loss_fn, examples in ((None, (x,)), (F.mse_loss, (x, y))):
        model = nn.Sequential(Idle(), nn.Tanh(), nn.Linear(3, 3)).double()
        made: Any = autopar.compile(model, loss_fn=loss_fn, example_inputs=examples, **PP)
        if loss_fn is None:
            found.append(without_gradients(made))
        else:
            made.step(x, y)
            found.append([name for name, p in made.named_parameters() if p.grad is None])
    return found


def test_parameters_have_gradients_on_all_ranks_or_on_none(two_ranks: Ranks) -> None:
    expected = without_gradients(nn.Sequential(Idle(), nn.Tanh(), nn.Linear(3, 3)).double())
    assert len(expected) == 6
    assert two_ranks.run(without_gradients_on_a_rank) == [[expected] * 2] * 2


@captured_once()
def loaded(folder: Path) -> list[dict[str, dict[str, float]]]:
    """Steps and momenta of every parameter: trained, loaded, and after a step more."""
    ((x, y),) = batches(1)
    found = []
    model: Any = autopar.compile(mlp(6, 8, 3).double(), loss_fn=F.mse_loss, example_inputs=(x, y), **PP)
    for number in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if number:
            autopar.checkpoint.load_checkpoint(str(folder), model, optimizer)
            found.append(states_of(model, optimizer))
        for _ in range(3 - 2 * number):
            model.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
        found.append(states_of(model, optimizer))
        if not number:
            autopar.checkpoint.save_checkpoint(str(folder), model, optimizer)
    return found


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float]]:
    return {n: {k: float(v.abs().sum()) for k, v in optimizer.state[p].items()} for n, p in model.named_parameters()}


def test_an_optimizer_goes_on_from_a_checkpoint_on_every_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    one, other = two_ranks.run(loaded, tmp_path / "saved")
    saved, read, later = one
    assert one == other and saved == read and len(saved) == 4
    assert {v["step"] for v in saved.values()} == {3} and {v["step"] for v in later.values()} == {4}


@captured_once()
def written() -> list[str]:
    ((x, _),) = batches(1)
    model: Any = autopar.compile(mlp(6, 8, 3).double(), example_inputs=(x,), **PP)
    found = []
    with torch.no_grad():
        for p in model.parameters():
            p[0] = torch.ones(p.shape[1:], dtype=torch.float64)
            p[1:] = 0.5
            p[p > 0.7] = 2.0
            with pytest.raises(autopar.StepError) as error:
                p[torch.tensor([0, 1])] = 0.0
            found.append(str(error.value))
    return [*found, str([whole(p).mean().item() for p in model.parameters()])]


def test_slices_are_written_on_every_rank_and_other_indices_refused(two_ranks: Ranks) -> None:
    for *errors, means in two_ranks.run(written):
        assert len(errors) == 4 and all("whole = x.detach().full_tensor(); whole[index] = value" in e for e in errors)
        assert means == str([(2 + 0.5 * (n - 1)) / n for n in (8, 8, 3, 3)])


@captured_once()
def replaced_on_a_rank() -> str:
    """What a step says where a parameter of the first stage became another object."""
    torch.manual_seed(0)
    ((x, y),) = batches(1)
    made = autopar.compile(mlp(6, 8, 3).double(), loss_fn=F.mse_loss, example_inputs=(x, y), **PP)
    made.step(x, y)
    first = next(each for each in made.modules() if isinstance(each, nn.Linear))
    first.weight = nn.Parameter(torch.full_like(first.weight, 0.1))
    with pytest.raises(autopar.StepError) as caught:
        made.step(x, y)
    return str(caught.value)


def test_a_parameter_of_one_stage_that_was_replaced_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    """The first stage alone refused, and the other waited for it until the timeout."""
    first, second = two_ranks.run(replaced_on_a_rank)
    assert first == second
    assert "was replaced by another" in first

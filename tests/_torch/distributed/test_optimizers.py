"""Optimizers of torch that update local shards: the bits of DTensors, and nothing else is another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.sgd import sgd
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import _torch
from autopar._torch.distributed import optimizers
from autopar.errors import StepError

Make = Callable[[list[nn.Parameter]], optim.Optimizer]

MAKES: dict[str, Make] = {
    "Adadelta": lambda p: optim.Adadelta(p, weight_decay=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr_decay=0.1),
    "Adam": lambda p: optim.Adam(p, weight_decay=0.1, amsgrad=True),
    "Adam foreach": lambda p: optim.Adam(p, foreach=True, maximize=True),
    "AdamW": lambda p: optim.AdamW(p, lr=torch.tensor(0.1)),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "Adamax": lambda p: optim.Adamax(p),
    "ASGD": lambda p: optim.ASGD(p, t0=1),
    "ASGD foreach": lambda p: optim.ASGD(p, t0=1, foreach=True),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p, weight_decay=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "Rprop": lambda p: optim.Rprop(p),
    "SGD": lambda p: optim.SGD(p),
    "SGD momentum": lambda p: optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: optim.SGD(p, momentum=0.9, foreach=True),
}


def _of_dtensors(name: str) -> Any:
    fails = name == "Rprop" and torch.__version__ < "2.13"
    skip = pytest.mark.skipif(fails, reason="torch 2.11 has no Rprop for DTensors to compare with")
    return pytest.param(MAKES[name], id=name, marks=skip)


@pytest.fixture
def parameters(group) -> list[nn.Parameter]:
    """Two DTensors of 2 x 4 numbers, in shards and replicated, and a plain one."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    cut = [nn.Parameter(distribute_tensor(x.clone(), mesh, [p])) for p in (Shard(1), Replicate())]
    return [*cut, nn.Parameter(x.clone())]


@pytest.fixture
def own(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The same, which optimizers update by shards."""
    end = _torch.update_by_shards(lambda p: any(p is each for each in parameters))
    yield parameters
    end()


class _Ops(TorchDispatchMode):
    """Counts ops on DTensors."""

    on_dtensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.on_dtensors += any(issubclass(each, DTensor) for each in types)
        return func(*args, **(kwargs or {}))


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
    for p in parameters:
        p.grad = None
        _torch.accumulate_gradient(p, x.clone())


def step(optimizer: optim.Optimizer, seed: int) -> int:
    """A step with gradients of this seed; returns the number of ops on DTensors."""
    give_gradients(optimizer.param_groups[0]["params"], seed)
    with _Ops() as ops:
        optimizer.step()
    return ops.on_dtensors


def bits(optimizer: optim.Optimizer) -> list[Any]:
    """Local values of parameters and states with their classes and placements."""
    states = [(key, x) for p in optimizer.param_groups[0]["params"] for key, x in optimizer.state[p].items()]
    named = [*(("", p.detach()) for p in optimizer.param_groups[0]["params"]), *states]
    return [(key, type(x), getattr(x, "placements", None), _torch.local_tensor(x).tolist()) for key, x in named]


@pytest.mark.parametrize("make", [_of_dtensors(name) for name in MAKES])
def test_shards_are_updated_to_the_same_bits_and_states_are_dtensors(make: Make, own: list[nn.Parameter]) -> None:
    others = copy.deepcopy(own)
    on_shards, on_dtensors = make(own[:2]), make(others[:2])
    for seed in range(3):
        counts = step(on_shards, seed), step(on_dtensors, seed)
    assert bits(on_shards) == bits(on_dtensors)
    assert counts[0] == 0 < counts[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, momentum=0.9, fused=True),
        lambda p: optim.Adagrad(p, fused=True),
        lambda p: optim.Rprop(p),  # torch 2.11 has none
    ],
    ids=["SGD", "Adagrad", "Rprop"],
)
def test_updates_that_torch_has_for_no_dtensor(make: Make, own: list[nn.Parameter]) -> None:
    on_shards, plain = make(own[:2]), make(own[2:])
    for seed in range(2):
        step(on_shards, seed), step(plain, seed)
    assert all(torch.equal(_torch.local_tensor(p), own[2]) for p in own[:2])
    states = (x for p in own[:2] for x in on_shards.state[p].values() if x.ndim)
    assert all(isinstance(x, DTensor) for x in states)


def test_plain_parameters_may_be_in_the_same_group(own: list[nn.Parameter]) -> None:
    optimizer = optim.SGD(own, momentum=0.9)
    assert [step(optimizer, seed) for seed in range(2)][1] == 0
    values = [_torch.local_tensor(p) for p in own]
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])


def test_what_others_own_is_left_to_torch(parameters: list[nn.Parameter]) -> None:
    end = _torch.update_by_shards(lambda p: p is parameters[0])
    optimizer = optim.SGD(parameters[:2], momentum=0.9)
    step(optimizer, 0)
    assert step(optimizer, 1) > 0
    end()


def test_an_owner_that_ended_owns_nothing(parameters: list[nn.Parameter]) -> None:
    _torch.update_by_shards(lambda _: True)()
    optimizer = optim.SGD(parameters[:2])
    assert step(optimizer, 0) > 0


@pytest.mark.parametrize("option", ["differentiable", "gradient", "state"])
def test_what_shards_do_not_say_is_left_to_torch(option: str, own: list[nn.Parameter]) -> None:
    p = own[0]
    p.requires_grad_(option != "differentiable")  # torch writes no leaf that autograd follows
    optimizer = optim.Adam([p], differentiable=option == "differentiable")
    with torch.no_grad():
        step(optimizer, 0)
        give_gradients([p], 1)
        if option == "gradient":
            p.grad = p.grad.redistribute(placements=[Replicate()])  # type: ignore[union-attr, attr-defined]
        if option == "state":
            state = optimizer.state[p]
            state["exp_avg"] = state["exp_avg"].redistribute(placements=[Replicate()])
        with _Ops() as ops:
            update_anyway(optimizer)
    assert ops.on_dtensors > 0


def update_anyway(optimizer: optim.Optimizer) -> None:
    """A step, or the refusal of torch to write a shard where all is replicated."""
    try:
        optimizer.step()
    except RuntimeError as error:
        assert "placement" in str(error)


def test_autograd_sees_that_a_parameter_was_written(own: list[nn.Parameter]) -> None:
    p = own[0]
    optimizer = optim.SGD([p])
    give_gradients([p], 0)
    square = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_hooks_and_closures_see_dtensors(own: list[nn.Parameter]) -> None:
    optimizer = optim.AdamW(own[:2])
    seen: list[Tensor] = []

    def look(*_: Any) -> None:
        seen.extend(x for group in optimizer.param_groups for x in group["params"])
        seen.extend(x.grad for x in own[:2] if x.grad is not None)

    optimizer.register_step_pre_hook(look)  # type: ignore[arg-type]
    optimizer.register_step_post_hook(look)  # type: ignore[arg-type]
    give_gradients(own[:2], 0)
    optimizer.step(look)  # type: ignore[arg-type]
    assert len(seen) == 12 and all(isinstance(x, DTensor) for x in seen)


def test_a_compiled_step_is_torch_s(own: list[nn.Parameter]) -> None:
    plain = nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([plain])
    plain.grad = torch.ones(4)
    torch.compile(optimizer.step, backend="eager")()
    assert bool((plain < 1).all())


def test_a_scaler_skips_a_step_that_overflows_on_another_rank(group) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer, scaler = optim.SGD([p], lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    seen: list[optim.Optimizer] = []
    end = _torch.share_overflows(lambda asked: seen.append(asked) or torch.distributed.group.WORLD)
    scaler.scale(p.sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert seen == [optimizer] and p.tolist() == [1, 1] and scaler.get_scale() == 2.0
    p.grad = None
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    end()
    assert p.tolist() == [0, 0] and len(seen) == 2


def test_data_that_is_assigned_gets_into_shards(own: list[nn.Parameter]) -> None:
    cut, replicated, _ = own
    x = torch.arange(8.0).view(2, 4)
    cut.data = x
    replicated.data = cut.data * 2
    assert [p._local_tensor.tolist() for p in (cut, replicated)] == [x.tolist(), (x * 2).tolist()]  # type: ignore[attr-defined]
    nn.utils.vector_to_parameters(torch.ones(24), own)
    assert all(p.detach().eq(1).all() for p in own)
    assert x.ne(1).any()
    with pytest.raises(StepError, match=r"shape \[3\], torch.float32 on cpu, but the parameter has"):
        cut.data = torch.zeros(3)
    other = distribute_tensor(torch.zeros(2, 4), cut.device_mesh, [Replicate()])  # type: ignore[attr-defined]
    other.data = x  # it is of someone else, for whom torch goes on to lose it
    assert other._local_tensor.eq(0).all()


def test_data_that_was_kept_is_assigned_again(own: list[nn.Parameter]) -> None:
    cut = own[0]
    before, values = cut.data, cut.detach().full_tensor().clone()  # type: ignore[attr-defined]
    cut.data = torch.zeros(2, 4)
    cut.data = before
    assert cut.detach().full_tensor().equal(values)  # type: ignore[attr-defined]


def test_a_fused_update_of_columns_leaves_their_neighbours_alone():
    """torch's own kernel goes through memory and not by strides, so that it would write into the other columns."""
    torch.manual_seed(0)
    whole, gradient = torch.randn(4, 6).double(), torch.randn(4, 2).double()
    others, part = whole[:, 2:].clone(), whole[:, :2]
    alone = torch.nn.Parameter(part.clone())
    plain = torch.optim.SGD([alone], lr=0.1, momentum=0.9)
    momentum = [None]
    for _ in range(3):
        alone.grad = gradient.clone()
        plain.step()
        optimizers._update(
            sgd,
            [[part], [gradient], momentum],
            {
                "has_sparse_grad": False,
                "foreach": False,
                "fused": True,
                "weight_decay": 0.0,
                "momentum": 0.9,
                "lr": 0.1,
                "dampening": 0.0,
                "nesterov": False,
                "maximize": False,
            },
        )
    assert torch.equal(part, alone.detach())
    assert torch.equal(whole[:, 2:], others)


def test_states_that_were_loaded_whole_lie_as_their_parameters(own: list[nn.Parameter]) -> None:
    parameters, others = own[:2], copy.deepcopy(own)[:2]
    optimizer, reference = optim.Adam(parameters), optim.Adam(others)
    for each in (optimizer, reference):
        step(each, 0)
    plain = {k: {n: _torch.local_tensor(x) for n, x in s.items()} for k, s in optimizer.state_dict()["state"].items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": plain})
    _torch.cut_loaded_states(optimizer, lambda _: True)
    for each in (optimizer, reference):
        step(each, 1)
    assert bits(optimizer) == bits(reference)

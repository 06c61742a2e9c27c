"""`Elsewhere`, a parameter without values in the place of one that other ranks hold."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.errors import StepError


@pytest.fixture
def absent(parameter):
    return _torch.elsewhere(parameter, parameter.device_mesh, frozenset({1}), torch.device("cpu"))


def test_it_is_a_parameter_of_the_same_kind_without_memory(parameter, absent):
    assert isinstance(absent, nn.Parameter) and isinstance(absent, DTensor) and absent.requires_grad
    assert (absent.shape, absent.dtype, absent.device) == (parameter.shape, parameter.dtype, parameter.device)
    assert absent._local_tensor.is_meta and "pipeline position 1" in repr(absent)
    torch.utils.swap_tensors(parameter, absent)
    assert _torch.is_elsewhere(parameter) and not _torch.is_elsewhere(absent)


def test_what_is_made_of_it_is_elsewhere_and_what_is_written_to_it_is_not_kept(absent):
    absent.square().sum().backward()
    made = [absent.grad, absent * 2, torch.zeros_like(absent), absent.detach()[1:], copy.deepcopy(absent), absent.data]
    assert all(map(_torch.is_elsewhere, made)) and isinstance(made[4], nn.Parameter)
    with torch.no_grad():
        assert absent.add_(torch.ones(4)) is absent
        absent[0] = 3
    absent.data = torch.ones(4)
    nn.init.normal_(absent)
    with pytest.raises(StepError, match=r"whose|of shape \[3\]"):
        absent.data = torch.ones(3)


@pytest.mark.parametrize(
    "draw", [torch.randn_like, lambda x: torch.bernoulli(x / 9), lambda x: torch.multinomial(x, 2), nn.init.normal_]
)
def test_random_numbers_are_drawn_as_where_it_is(parameter, absent, draw):
    _torch.draw_whole_on_processors()
    torch.manual_seed(0)
    draw(parameter.detach())
    expected = torch.rand(3)
    torch.manual_seed(0)
    draw(absent.detach())
    assert torch.equal(torch.rand(3), expected)


def test_what_needs_its_values_is_refused(parameter, absent):
    others = _torch.elsewhere(parameter, parameter.device_mesh, frozenset({2}), torch.device("cpu"))
    x, y = absent.detach(), parameter.detach()
    for do in (
        lambda: x.sum().item(),
        lambda: torch.equal(x, x),
        lambda: x.nonzero(),
        lambda: torch.poisson(x),
        lambda: nn.functional.rrelu(x, training=True),
        lambda: x + y,
        lambda: y.add_(x),
        lambda: torch.ones(4).copy_(x),
        lambda: x + others.detach(),
        lambda: torch._foreach_add([y, x], [x, y]),
    ):
        with pytest.raises(StepError, match=r"pipeline position 1.*x\.full_tensor\(\)"):
            do()


def test_lists_are_taken_entry_by_entry(parameter, absent):
    x, y = absent.detach(), parameter.detach()
    found = torch._foreach_mul([y, x], [2.0, 3.0])
    assert found[0].full_tensor().tolist() == [0, 2, 4, 6] and _torch.is_elsewhere(found[1])
    torch._foreach_add_([x, y], 1.0)
    assert y.full_tensor().tolist() == [1, 2, 3, 4]


def test_an_optimizer_counts_its_steps_and_makes_its_momentum(absent):
    _torch.update_by_shards(lambda _: False)()
    absent.grad = absent.detach()
    kinds = [torch.optim.SGD([absent], 0.1), torch.optim.SGD([absent], 0.1, momentum=0.9)]
    kinds += [torch.optim.NAdam([absent]), torch.optim.AdamW([absent], fused=True)]
    for optimizer in kinds:
        optimizer.step()
        optimizer.step()
    _, momentum, nadam, fused = (optimizer.state[absent] for optimizer in kinds)
    assert _torch.is_elsewhere(momentum["momentum_buffer"])
    assert nadam["step"].item() == fused["step"].item() == 2
    kinds[-1].found_inf = torch.ones(())
    kinds[-1].step()
    assert fused["step"].item() == 2, "a step that is skipped is not counted"


def test_anomaly_detection_leaves_it_to_the_ranks_that_have_it(absent):
    with torch.autograd.set_detect_anomaly(True):
        absent.square().sum().backward()
    assert _torch.is_elsewhere(absent.grad)


def test_a_plain_operand_is_refused_as_where_it_is(parameter, absent):
    for x in (parameter, absent):
        for make in (lambda x: x * torch.ones(4), lambda x: torch.nn.functional.linear(torch.ones(2, 4), x[None])):
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                make(x.detach())
        assert isinstance(x.detach() * torch.tensor(2.0), DTensor)

"""Frozen weights in four bits, as tensors of tensors: stored as they are, split where no block is cut, or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.quantized import inner_tensors_stored
from autopar.errors import CaptureError

aten = torch.ops.aten
BLOCK = 8


class FourBits(Tensor):
    """Two codes a byte of shape (out, in / 2), and a scale for each block of 8 of a row, (out, in / 8)."""

    @staticmethod
    def __new__(cls, codes, scales, shape, dtype):
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scales, shape, dtype):
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, x):
        blocks = x.unflatten(-1, (-1, BLOCK))
        scales = blocks.abs().amax(-1)
        codes = ((blocks / scales.unsqueeze(-1) + 1) * 7.5).round().to(torch.uint8).flatten(-2)
        return cls(codes[..., ::2] * 16 + codes[..., 1::2], scales, x.shape, x.dtype)

    def __tensor_flatten__(self):
        return ["codes", "scales"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner, dtype, size, stride):
        return cls(inner["codes"], inner["scales"], size, dtype)

    def dequantize(self):
        codes = torch.stack([self.codes // 16, self.codes % 16], -1).flatten(-2)
        blocks = (codes.to(self.dtype) / 7.5 - 1).unflatten(-1, (-1, BLOCK))
        return (blocks * self.scales.unsqueeze(-1)).flatten(-2)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            x = args[0]
            return cls(func(x.codes), func(x.scales), x.shape, x.dtype)
        given = torch.utils._pytree.tree_map_only(cls, lambda x: x.dequantize(), (args, kwargs or {}))
        return func(*given[0], **given[1])


class Coarse(FourBits):
    """One whose product rounds what it is multiplied with."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return F.linear(args[0].round(), args[1].dequantize())
        return super().__torch_function__(func, types, args, kwargs or {})


class Strict(FourBits):
    """One whose constructor takes scales of 32 bits alone, as those of torchao do."""

    def __init__(self, codes, scales, shape, dtype):
        assert scales.dtype == torch.float32
        super().__init__(codes, scales, shape, dtype)


class Adapted(nn.Module):
    def __init__(self, inputs, outputs, kind=FourBits):
        super().__init__()
        weight = torch.randn(outputs, inputs, dtype=torch.float64) / inputs**0.5
        weight = weight.float() if kind is Strict else weight
        self.weight = nn.Parameter(kind.of(weight), requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, inputs, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(outputs, 2, dtype=torch.float64))

    def forward(self, x):
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.a), self.b)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = Adapted(16, 32), Adapted(32, 16)

    def forward(self, x):
        return (x + self.down(torch.tanh(self.up(x)))).square().mean()


BATCH = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_plans_give_the_loss_and_gradients_of_one_device():
    model = Model()
    report = autopar.verify(model, BATCH, mesh={"dp": 2, "tp": 2}, recipe="dp:zero3,tp:tp")
    assert report.passed
    assert isinstance(model.up.weight, FourBits)  # as it was
    assert [n for n, _ in model.named_parameters()] == [
        f"{side}.{name}" for side in ("up", "down") for name in ("weight", "a", "b")
    ]


def test_a_proof_widens_scales_beyond_what_their_constructor_takes():
    model = Adapted(16, 16, Strict).float()
    assert autopar.verify(model, BATCH.float(), mesh={"dp": 2}, recipe="zero3", loss_fn=torch.mean).passed


def test_codes_are_stored_and_gathered_in_their_format():
    plan = autopar.explain(Model(), BATCH, mesh={"dp": 2, "tp": 2}, recipe="dp:zero3,tp:tp").plan
    for side, first in (("up", "floor_divide"), ("down", "floor_divide_1")):
        by_dp, by_tp = plan.parameters[f"{side}.parametrizations.weight.original0"].resident
        assert by_dp.kind == by_tp.kind == "S"
        assert plan.ops[first][0] == "-"  # the op that reads codes has them whole along dp: they are gathered as codes
        assert plan.ops[first][1] != "-"  # and stay split by tp


def test_one_rank_trains_the_adapters_alone():
    plain, model = Model(), Model()
    loss = plain(BATCH)
    loss.backward()
    compiled = autopar.compile(model, example_inputs=BATCH)
    torch.testing.assert_close(compiled.step(BATCH), loss.detach())
    torch.testing.assert_close(model.up.a.grad, plain.up.a.grad)
    stored = model.up.parametrizations.weight
    assert stored.original0.dtype == torch.uint8
    assert stored.original0.grad is None


def test_what_a_plan_cannot_hold_is_refused():
    model = nn.Sequential(Adapted(16, 16), Adapted(16, 16, Coarse))
    with pytest.raises(CaptureError, match=r"weight is quantized.*rounds what it is multiplied with"):
        autopar.explain(model, BATCH, mesh={"dp": 2})
    assert isinstance(model[0].weight, FourBits)
    assert "parametrizations" not in model[0]._modules
    model = Adapted(16, 16)
    model.weight = nn.Parameter(FourBits.of(torch.randn(16, 16)), requires_grad=True)
    with pytest.raises(CaptureError, match=r"takes a gradient.*Freeze it"), inner_tensors_stored(model):
        pass

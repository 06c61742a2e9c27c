"""A mixed-precision policy at capture: placeholders stand for the cast copies, and nothing else changes."""

import pytest
import torch
from torch import nn

import autopar
from autopar.ir import MixedPrecision
from autopar.planning.planning import prepare_step

FLOAT32, BFLOAT16 = MixedPrecision("float32"), MixedPrecision("bf16", "fp32")
ATEN = torch.ops.aten


class Net(nn.Module):
    """Batch statistics, an explicit cast, a tied weight and a frozen one."""

    def __init__(self):
        super().__init__()
        self.up, self.again, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.again.weight = self.up.weight
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return torch.softmax(self.norm(self.again(self.frozen(self.up(x)))).float(), -1)


def loss_fn(result, target):
    return (result * target).sum()


def prepared(policy, model=None):
    torch.manual_seed(0)
    batch = torch.randn(4, 8), torch.randn(4, 8)
    return prepare_step(model or Net(), batch, loss_fn=loss_fn, precision=policy)


def test_placeholders_are_the_cast_copies():
    captured = prepared(BFLOAT16).captured
    found = {
        captured.parameters[node.name]: node.meta["val"].dtype
        for node in captured.module.graph.find_nodes(op="placeholder")
        if node.name in captured.parameters
    }
    cast = {name for name, dtype in found.items() if dtype is torch.bfloat16}
    assert cast == {"up.weight", "up.bias", "again.bias", "frozen.weight", "frozen.bias"}
    assert found["norm.weight"] is torch.float32  # as its statistics
    assert captured.stored == dict.fromkeys(cast, torch.float32)
    casts = captured.module.graph.find_nodes(op="call_function", target=ATEN._to_copy.default)
    assert [str(node.args[0]) for node in casts] == ["batch_0", "getitem"]  # the input, and .float()


def test_a_policy_is_part_of_the_fingerprint():
    policies = (None, BFLOAT16, MixedPrecision("bf16", "bf16"), MixedPrecision("fp16", "fp32"))
    assert len({prepared(policy).captured.fingerprint for policy in policies}) == len(policies)


def test_parameters_in_the_format_of_use_are_not_cast():
    found = prepared(FLOAT32)
    assert not found.captured.stored
    assert all(not tensor.is_cast for tensor in found.analysis.graph.tensors.values())


def test_outputs_are_cast_where_the_policy_says():
    policy = MixedPrecision("bf16", output_dtype="float64")
    (loss,) = prepared(policy, nn.Linear(8, 8)).captured.module.graph.find_nodes(op="output")[0].args[0]
    assert loss.meta["val"].dtype is torch.float64


# --- plans under a policy, all ranks simulated


def llama_batch():
    from tests.support.llama import Llama

    torch.manual_seed(0)
    model = Llama(vocab=32, width=32, inner=48, heads=4, kv_heads=2, layers=2).double()
    return model, (torch.randint(32, (4, 8)), torch.randint(32, (4, 8)))


@pytest.mark.parametrize("mesh", [{"a": 2, "b": 2}, {"pp": 2, "a": 2}])
def test_random_plans_are_one_device_that_casts(mesh):
    model, batch = llama_batch()
    report = autopar.verify(model, batch, mesh=mesh, plan="random", seed=1, precision=FLOAT32)
    assert report.arithmetic == "float32" and report.passed, report


def test_a_plan_brings_its_policy_and_refuses_another():
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 8), (torch.randn(4, 8), torch.randn(4, 8))
    made = autopar.compile(model, loss_fn=loss_fn, example_inputs=batch, precision="bf16 reduce=fp32")
    assert made.plan.precision == BFLOAT16
    again = autopar.compile(nn.Linear(8, 8), loss_fn=loss_fn, example_inputs=batch, plan=made.plan)
    assert again.plan == made.plan
    with pytest.raises(autopar.AutoparError, match="made for the precision bfloat16 reduce=float32"):
        autopar.compile(nn.Linear(8, 8), loss_fn=loss_fn, plan=made.plan, precision="fp16")


def small(result: torch.Tensor, target: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (result.float() - target).square().mean() * 1e-8 * scale


def test_a_scale_keeps_gradients_of_float16():
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8)
    expected = torch.autograd.grad(small(model(x), y, torch.tensor(1.0)), model.weight)[0]
    model = autopar.compile(model, loss_fn=small, precision="fp16", loss_scale=1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    model.step(x, y, torch.tensor(1.0))
    assert not model.weight.grad.any()
    model.weight.grad = None
    model.step(x, y, scaler.scale(torch.tensor(1.0)))
    scaler.unscale_(optimizer)
    assert torch.allclose(model.weight.grad, expected, rtol=0.05, atol=1e-12)


def test_a_gradient_accumulates_in_the_format_that_its_leaf_names():
    """What the runtime builds on: `Tensor.grad_dtype`."""
    leaf = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    leaf.grad_dtype = torch.float32
    for scale in (1.0, 2**-12):  # the sum has 13 bits, more than bfloat16 holds
        (leaf.sum() * scale).backward()
    assert leaf.grad.dtype is torch.float32 and leaf.grad.tolist() == [1 + 2**-12] * 2


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.HuberLoss(reduction="sum")])
def test_a_loss_of_two_dtypes_has_a_gradient(loss):
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    policy = MixedPrecision("bf16")
    captured = prepare_step(nn.Linear(8, 8), (x, target), loss_fn=loss, precision=policy).captured
    weight, bias = (torch.randn(*n, dtype=torch.bfloat16, requires_grad=True) for n in ((8, 8), (8,)))
    (found,) = captured.module(weight, bias, x, target)
    found.backward()
    gradient = weight.grad.clone()
    weight.grad = None
    loss(nn.functional.linear(x.bfloat16(), weight, bias).float(), target).backward()
    assert torch.equal(gradient, weight.grad)

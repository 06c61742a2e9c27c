"""What scripts may expect of a module, each as a small function of the module and a batch.

A behaviour gets a module, plain or made ready for several ranks, with inputs and targets, and returns what can be
compared: numbers, words, lists of them. Nothing in it knows of autopar. Each is asked of a fresh module, and of one
that has been trained for a step.
"""

from __future__ import annotations

import copy
import functools
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.remedies import remedy_of_operands
from tests.support.odd.odd_scripts import Verdict
from tests.support.own_loops import by_compile, plainly, whole

Behaviour = Callable[[Any, Tensor, Tensor], Any]
Ready = Callable[[nn.Module], Any]
BEHAVIOURS: dict[str, Behaviour] = {}


class Model(nn.Module):
    """Linear layers, a norm with statistics, a tied weight, a frozen weight, a buffer, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.again, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        self.again.weight = self.second.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((), 1.5))
        self.kind = "small"

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        h = self.second(self.norm(torch.tanh(self.first(x))))
        out: Tensor = self.head(torch.tanh(self.again(h))) * self.scale
        return out if shift is None else out + shift

    def described(self) -> str:
        return f"a {self.kind} model"


def behaviour(function: Behaviour) -> Behaviour:
    """Lists a behaviour under its name."""
    BEHAVIOURS[function.__name__.replace("_", " ").strip()] = function
    return function


def number(x: Any) -> float:
    """A number that all elements of a tensor change."""
    values = whole(x).double()
    return float((values.cos() + 0.1 * values).sum())


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def named(model: Any) -> dict[str, float]:
    """The parameters by name."""
    return {name: number(p) for name, p in model.named_parameters()}


def grads(model: Any) -> dict[str, Any]:
    """The gradients by name."""
    return {name: None if p.grad is None else number(p.grad) for name, p in model.named_parameters()}


def trained(model: Any, optimizer: Any, x: Tensor, y: Tensor, steps: int = 2) -> Any:
    """Losses and parameters of a few steps."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, named(model)


# --- what a module says of itself


@behaviour
def names_of_parameters(model: Any, x: Tensor, y: Tensor) -> Any:
    return [name for name, _ in model.named_parameters()]


@behaviour
def names_of_buffers(model: Any, x: Tensor, y: Tensor) -> Any:
    return [name for name, _ in model.named_buffers()]


@behaviour
def names_of_modules(model: Any, x: Tensor, y: Tensor) -> Any:
    return [name for name, _ in model.named_modules()], [name for name, _ in model.named_children()]


@behaviour
def names_with_prefix(model: Any, x: Tensor, y: Tensor) -> Any:
    return [name for name, _ in model.named_parameters(prefix="net", recurse=False)], [
        name for name, _ in model.first.named_parameters(prefix="first")
    ]


@behaviour
def count_of_parameters(model: Any, x: Tensor, y: Tensor) -> Any:
    return sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters() if p.requires_grad)


@behaviour
def shapes_dtypes_devices(model: Any, x: Tensor, y: Tensor) -> Any:
    return [(list(p.shape), str(p.dtype), str(p.device), p.requires_grad, p.is_leaf) for p in model.parameters()]


@behaviour
def values_of_parameters(model: Any, x: Tensor, y: Tensor) -> Any:
    return named(model)


@behaviour
def values_of_buffers(model: Any, x: Tensor, y: Tensor) -> Any:
    return {name: number(b) for name, b in model.named_buffers()}


@behaviour
def is_an_instance(model: Any, x: Tensor, y: Tensor) -> Any:
    return (
        isinstance(model, Model),
        isinstance(model, nn.Module),
        all(isinstance(p, nn.Parameter) for p in model.parameters()),
    )


@behaviour
def own_attributes_and_methods(model: Any, x: Tensor, y: Tensor) -> Any:
    before = model.described()
    model.kind = "large"
    return before, model.described(), model.kind, hasattr(model, "missing")


@behaviour
def counts_modules_by_type(model: Any, x: Tensor, y: Tensor) -> Any:
    return sum(isinstance(m, nn.Linear) for m in model.modules()), "Linear(in_features=6" in repr(model)


@behaviour
def looks_a_parameter_up(model: Any, x: Tensor, y: Tensor) -> Any:
    return number(model.get_parameter("first.weight")), number(model.first.weight), number(model.get_buffer("scale"))


@behaviour
def parameters_are_the_same_objects(model: Any, x: Tensor, y: Tensor) -> Any:
    before = [*model.parameters()]
    loss_of(model, x, y).backward()
    after = [*model.parameters()]
    return [a is b for a, b in zip(before, after, strict=True)], len({*before}), after[0] in {*before}


@behaviour
def tied_weight_is_one(model: Any, x: Tensor, y: Tensor) -> Any:
    return model.again.weight is model.second.weight, len([*model.parameters()])


# --- modes, formats, freezing


@behaviour
def training_and_evaluation(model: Any, x: Tensor, y: Tensor) -> Any:
    first = number(model(x))
    model.eval()
    second, flags = number(model(x)), [m.training for m in model.modules()]
    model.train()
    return first, second, flags, model.training, number(model(x)), number(model.norm.running_mean)


@behaviour
def evaluates_one_submodule(model: Any, x: Tensor, y: Tensor) -> Any:
    model.norm.eval()
    return number(model(x)), model.training, number(model.norm.running_mean)


@behaviour
def freezes_a_layer(model: Any, x: Tensor, y: Tensor) -> Any:
    model.first.requires_grad_(False)
    loss_of(model, x, y).backward()
    return [name for name, p in model.named_parameters() if p.grad is None], grads(model)


@behaviour
def freezes_all(model: Any, x: Tensor, y: Tensor) -> Any:
    model.requires_grad_(False)
    return model(x).requires_grad, number(model(x))


@behaviour
def thaws_a_parameter(model: Any, x: Tensor, y: Tensor) -> Any:
    model.head.bias.requires_grad_(True)
    loss_of(model, x, y).backward()
    return grads(model)


@behaviour
def becomes_float32(model: Any, x: Tensor, y: Tensor) -> Any:
    model.float()
    out = model(x.float())
    return str(out.dtype), round(number(out), 3), str(model.first.weight.dtype)


@behaviour
def becomes_bfloat16_by_to(model: Any, x: Tensor, y: Tensor) -> Any:
    model.to(torch.bfloat16)
    return str(model(x.bfloat16()).dtype), {str(b.dtype) for b in model.buffers()} == {"torch.bfloat16", "torch.int64"}


@behaviour
def moves_to_the_processor(model: Any, x: Tensor, y: Tensor) -> Any:
    return number(model.to("cpu")(x)), number(model.cpu()(x))


@behaviour
def applies_a_function(model: Any, x: Tensor, y: Tensor) -> Any:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)

    model.apply(fill)
    return named(model), number(model(x))


@behaviour
def draws_new_weights_by_seed(model: Any, x: Tensor, y: Tensor) -> Any:
    torch.manual_seed(3)
    nn.init.normal_(model.first.weight, std=0.2)
    nn.init.kaiming_uniform_(model.head.weight)
    return named(model), number(model(x))


@behaviour
def resets_parameters(model: Any, x: Tensor, y: Tensor) -> Any:
    torch.manual_seed(4)
    model.first.reset_parameters()
    model.norm.reset_running_stats()
    return named(model), number(model(x)), number(model.norm.running_mean)


# --- writes


@behaviour
def writes_in_place_without_grad(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9).add_(0.01)
    return named(model), number(model(x))


@behaviour
def copies_a_whole_tensor(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        model.first.weight.copy_(torch.arange(48.0, dtype=torch.float64).view(8, 6) / 48)
    return number(model.first.weight), number(model(x))


@behaviour
def fills_data(model: Any, x: Tensor, y: Tensor) -> Any:
    model.first.weight.data.fill_(0.2)
    return number(model.first.weight), number(model(x))


@behaviour
def assigns_data(model: Any, x: Tensor, y: Tensor) -> Any:
    model.first.weight.data = torch.arange(48.0, dtype=torch.float64).view(8, 6) / 48
    return number(model.first.weight), number(model(x))


@behaviour
def assigns_a_parameter(model: Any, x: Tensor, y: Tensor) -> Any:
    model.first.weight = nn.Parameter(torch.ones(8, 6, dtype=torch.float64) / 10)
    return number(model.first.weight), number(model(x))


@behaviour
def replaces_a_layer(model: Any, x: Tensor, y: Tensor) -> Any:
    torch.manual_seed(5)
    model.head = nn.Linear(8, 4).double()
    return number(model(x)), [name for name, _ in model.named_parameters()]


@behaviour
def writes_a_buffer(model: Any, x: Tensor, y: Tensor) -> Any:
    model.scale.mul_(2)
    first = number(model(x))
    model.scale = torch.full((), 0.5, dtype=torch.float64)
    return first, number(model(x))


@behaviour
def registers_a_buffer(model: Any, x: Tensor, y: Tensor) -> Any:
    model.register_buffer("extra", torch.ones(2))
    return "extra" in model.state_dict(), number(model.extra), number(model(x))


@behaviour
def registers_a_parameter(model: Any, x: Tensor, y: Tensor) -> Any:
    model.register_parameter("extra", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    loss = loss_of(model, x, y) + model.extra.square().sum()
    loss.backward()
    return loss.item(), number(model.extra.grad)


# --- state


@behaviour
def keys_of_the_state(model: Any, x: Tensor, y: Tensor) -> Any:
    return [*model.state_dict()], [*model.first.state_dict(prefix="first.")]


@behaviour
def state_into_a_plain_model(model: Any, x: Tensor, y: Tensor) -> Any:
    plain = Model().double()
    said = plain.load_state_dict({k: whole(v) for k, v in model.state_dict().items()})
    return str(said), named(plain), number(plain(x))


@behaviour
def state_of_a_plain_model(model: Any, x: Tensor, y: Tensor) -> Any:
    torch.manual_seed(8)
    plain = Model().double()
    said = model.load_state_dict(plain.state_dict())
    return str(said), named(model), number(model(x))


@behaviour
def state_through_a_file(model: Any, x: Tensor, y: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.first.weight.data.zero_()
    model.load_state_dict(torch.load(file, weights_only=True))
    return named(model), number(model(x))


def _refused(run: Callable[[], Any], *words: str) -> Any:
    try:
        run()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return [word in str(error) for word in words]
    return "no error"


@behaviour
def a_missing_key_is_an_error(model: Any, x: Tensor, y: Tensor) -> Any:
    state = Model().double().state_dict()
    del state["first.weight"]
    found = _refused(lambda: model.load_state_dict(state), "Missing key", "first.weight")
    return found, str(model.load_state_dict(state, strict=False).missing_keys)


@behaviour
def an_unexpected_key_is_an_error(model: Any, x: Tensor, y: Tensor) -> Any:
    state = {**Model().double().state_dict(), "other": torch.ones(1)}
    found = _refused(lambda: model.load_state_dict(state), "Unexpected key", "other")
    return found, str(model.load_state_dict(state, strict=False).unexpected_keys)


@behaviour
def a_wrong_shape_is_an_error(model: Any, x: Tensor, y: Tensor) -> Any:
    state = {**Model().double().state_dict(), "first.weight": torch.ones(3, 6)}
    return _refused(lambda: model.load_state_dict(state), "size mismatch", "first.weight")


@behaviour
def loads_into_a_layer(model: Any, x: Tensor, y: Tensor) -> Any:
    torch.manual_seed(9)
    model.first.load_state_dict(nn.Linear(6, 8).double().state_dict())
    return number(model.first.weight), number(model(x))


@behaviour
def a_deep_copy_is_another_model(model: Any, x: Tensor, y: Tensor) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.first.weight.zero_()
    return number(model(x)), number(other(x))


# --- forward


@behaviour
def forward_without_grad(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        out = model(x)
    return number(out), out.requires_grad, list(out.shape), str(out.dtype)


@behaviour
def forward_in_inference_mode(model: Any, x: Tensor, y: Tensor) -> Any:
    model.eval()
    with torch.inference_mode():
        out = number(model(x))
    return out, number(model(x))


@behaviour
def forward_with_keywords(model: Any, x: Tensor, y: Tensor) -> Any:
    return number(model(x, shift=y)), number(model(x=x))


@behaviour
def forward_with_other_batches(model: Any, x: Tensor, y: Tensor) -> Any:
    model.eval()
    return [number(model(x[:rows])) for rows in (8, 4, 6, 3, 2)]


@behaviour
def forward_with_one_row(model: Any, x: Tensor, y: Tensor) -> Any:
    model.eval()
    return number(model(x[:1])), list(model(x[:1]).shape)


@behaviour
def forward_with_no_rows(model: Any, x: Tensor, y: Tensor) -> Any:
    model.eval()
    return list(model(x[:0]).shape)


@behaviour
def a_wrong_shape_of_input_is_an_error(model: Any, x: Tensor, y: Tensor) -> Any:
    return _refused(lambda: model(x[:, :5])) != "no error", number(model(x))


@behaviour
def result_is_read(model: Any, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    best = out.argmax(-1)
    return [*map(int, best)], out.detach().numpy().round(9).tolist(), out.max().item(), len(out), number(out[2:5])


@behaviour
def result_in_arithmetic(model: Any, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    mixed = torch.cat([out, y]).mean(0) + out.T @ y / 8 + torch.stack([out, y]).sum((0, 1))
    return number(mixed), number(F.softmax(out, -1) * y), number(torch.where(out > 0, out, y))


@behaviour
def result_has_a_gradient_function(model: Any, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    return out.grad_fn is not None, out.requires_grad, out.is_leaf


@behaviour
def two_evaluations_are_equal(model: Any, x: Tensor, y: Tensor) -> Any:
    model.eval()
    return torch.equal(whole(model(x)), whole(model(x)))


@behaviour
def inside_another_module(model: Any, x: Tensor, y: Tensor) -> Any:
    outer = nn.Sequential(nn.Linear(6, 6).double(), model)
    nn.init.eye_(outer[0].weight)
    nn.init.zeros_(outer[0].bias)
    loss = F.mse_loss(outer(x), y)
    loss.backward()
    return loss.item(), number(outer[0].weight.grad), grads(model)


@behaviour
def a_functional_call(model: Any, x: Tensor, y: Tensor) -> Any:
    halves = {name: p.detach() / 2 for name, p in model.named_parameters()}
    return number(torch.func.functional_call(model, halves, (x,))), number(model(x))


@behaviour
def under_autocast(model: Any, x: Tensor, y: Tensor) -> Any:
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x.float())
    return str(out.dtype), str(model(x.float()).dtype)


@behaviour
def an_error_of_the_model_is_its_own(model: Any, x: Tensor, y: Tensor) -> Any:
    handle = model.register_forward_pre_hook(lambda module, args: [][0])
    try:
        model(x)
        found = "no error"
    except IndexError as error:
        found = str(error)
    handle.remove()
    return found, number(model(x))


# --- hooks


@behaviour
def hooks_of_the_module(model: Any, x: Tensor, y: Tensor) -> Any:
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(list(args[0].shape)))
    handle = model.register_forward_hook(lambda module, args, out: seen.append(number(out)))
    model(x)
    handle.remove()
    model(x)
    return seen


@behaviour
def a_hook_that_changes_the_result(model: Any, x: Tensor, y: Tensor) -> Any:
    model.register_forward_hook(lambda module, args, out: out * 2)
    loss = loss_of(model, x, y)
    loss.backward()
    return loss.item(), grads(model)


@behaviour
def a_hook_of_a_layer(model: Any, x: Tensor, y: Tensor) -> Any:
    seen: list[Any] = []
    model.second.register_forward_hook(lambda module, args, out: seen.append(list(out.shape)))
    model(x)
    model(x)
    return seen


@behaviour
def a_hook_of_a_gradient(model: Any, x: Tensor, y: Tensor) -> Any:
    model.first.weight.register_hook(lambda g: g * 2)
    loss_of(model, x, y).backward()
    return grads(model)


@behaviour
def a_hook_after_accumulation(model: Any, x: Tensor, y: Tensor) -> Any:
    seen: list[Any] = []
    model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(number(p.grad)))
    loss_of(model, x, y).backward()
    return seen


@behaviour
def a_hook_of_the_result(model: Any, x: Tensor, y: Tensor) -> Any:
    out, seen = model(x), list[Any]()
    out.register_hook(lambda g: seen.append(number(g)))
    F.mse_loss(out, y).backward()
    return seen, grads(model)


@behaviour
def a_backward_hook_of_the_module(model: Any, x: Tensor, y: Tensor) -> Any:
    seen: list[Any] = []
    model.register_full_backward_hook(lambda module, inputs, outputs: seen.append(number(outputs[0])))
    loss_of(model, x.requires_grad_(), y).backward()
    return seen, number(x.grad)


@behaviour
def hooks_of_the_state(model: Any, x: Tensor, y: Tensor) -> Any:
    seen: list[str] = []
    model.register_state_dict_pre_hook(lambda *args: seen.append("state"))
    model.register_load_state_dict_post_hook(lambda *args: seen.append("load"))
    model.load_state_dict({k: whole(v) for k, v in model.state_dict().items()})
    return seen


# --- backward


@behaviour
def gradients_of_a_step(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    return grads(model)


@behaviour
def gradient_of_the_input(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x.requires_grad_(), y).backward()
    return number(x.grad), grads(model)


@behaviour
def gradients_by_autograd_grad(model: Any, x: Tensor, y: Tensor) -> Any:
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [number(g) for g in torch.autograd.grad(loss_of(model, x, y), wanted)], grads(model)


@behaviour
def gradient_of_results_with_weights(model: Any, x: Tensor, y: Tensor) -> Any:
    model(x).backward(y)
    return grads(model)


@behaviour
def a_second_backward_is_an_error(model: Any, x: Tensor, y: Tensor) -> Any:
    loss = loss_of(model, x, y)
    loss.backward()
    return _refused(loss.backward, "second time")


@behaviour
def a_second_backward_of_a_retained_graph(model: Any, x: Tensor, y: Tensor) -> Any:
    loss = loss_of(model, x, y)
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(model)


@behaviour
def a_derivative_of_a_gradient(model: Any, x: Tensor, y: Tensor) -> Any:
    model.eval()
    slope = torch.autograd.grad(model(x.requires_grad_()).square().sum(), x, create_graph=True)[0]
    slope.square().sum().backward()
    return grads(model)


@behaviour
def two_forwards_and_one_backward(model: Any, x: Tensor, y: Tensor) -> Any:
    loss = loss_of(model, x, y) + loss_of(model, x + 0.5, y)
    loss.backward()
    return loss.item(), grads(model)


@behaviour
def a_loss_of_a_part_of_the_result(model: Any, x: Tensor, y: Tensor) -> Any:
    model(x)[:3, 1].sum().backward()
    return grads(model)


@behaviour
def a_loss_that_parameters_are_part_of(model: Any, x: Tensor, y: Tensor) -> Any:
    loss = loss_of(model, x, y) + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    return loss.item(), grads(model)


@behaviour
def a_loss_of_parameters_alone(model: Any, x: Tensor, y: Tensor) -> Any:
    loss = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
    loss.backward()
    return loss.item(), grads(model)


@behaviour
def a_loss_of_statistics_of_the_batch(model: Any, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    loss = out.var(0).sum() + torch.logsumexp(out, 0).mean() + (out @ out.T).sigmoid().mean()
    loss.backward()
    return loss.item(), grads(model)


@behaviour
def a_loss_of_nothing_required(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        loss = loss_of(model, x, y)
    return _refused(loss.backward, "does not require grad")


@behaviour
def gradients_add_up(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    loss_of(model, x + 1, y).backward()
    return grads(model)


@behaviour
def gradients_are_scaled_and_dropped(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    first = grads(model)
    model.first.weight.grad = None
    loss_of(model, x, y).backward()
    return first, grads(model)


@behaviour
def gradients_are_zeroed(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    model.zero_grad(set_to_none=False)
    first = grads(model)
    model.zero_grad()
    return first, grads(model)


@behaviour
def a_gradient_is_assigned(model: Any, x: Tensor, y: Tensor) -> Any:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    loss_of(model, x, y).backward()
    return grads(model)


@behaviour
def anomalies_are_detected(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        loss_of(model, x, y).backward()
    return grads(model)


@behaviour
def an_error_in_backward_is_its_own(model: Any, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    handle = out.register_hook(lambda g: [][0])
    try:
        F.mse_loss(out, y).backward()
        found = "no error"
    except IndexError as error:
        found = str(error)
    handle.remove()
    model.zero_grad()
    loss_of(model, x, y).backward()
    return found, grads(model)


# --- norms and clipping


@behaviour
def clips_by_norm(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    return number(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)), grads(model)


@behaviour
def clips_by_value(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return grads(model)


@behaviour
def clips_a_layer(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    return number(torch.nn.utils.clip_grad_norm_(model.first.parameters(), 0.01)), grads(model)


@behaviour
def a_norm_by_hand(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return number(torch.stack(norms).norm()), number(
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    )


@behaviour
def a_norm_of_parameters_by_hand(model: Any, x: Tensor, y: Tensor) -> Any:
    return sum(p.detach().square().sum().item() for p in model.parameters()) ** 0.5


@behaviour
def parameters_as_a_vector(model: Any, x: Tensor, y: Tensor) -> Any:
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(vector * 0.9, model.parameters())
    return list(vector.shape), number(vector), number(model(x))


# --- optimizers


def _with_optimizer(kind: str, **options: Any) -> Behaviour:
    def run(model: Any, x: Tensor, y: Tensor) -> Any:
        return trained(model, getattr(torch.optim, kind)(model.parameters(), **options), x, y)

    return run


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "foreach": True},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "ASGD": {"lr": 0.1},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "centered": True},
    "Rprop": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},
}
BEHAVIOURS |= {f"trains with {kind}": _with_optimizer(kind, **options) for kind, options in OPTIMIZERS.items()}
BEHAVIOURS["trains with fused AdamW"] = _with_optimizer("AdamW", lr=0.01, fused=True)


@behaviour
def trains_with_groups(model: Any, x: Tensor, y: Tensor) -> Any:
    flat = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.ndim > 1], 0.01, weight_decay=0.1)
    optimizer.add_param_group({"params": flat, "weight_decay": 0.0, "lr": 0.02})
    return trained(model, optimizer, x, y)


@behaviour
def trains_a_part(model: Any, x: Tensor, y: Tensor) -> Any:
    return trained(model, torch.optim.SGD(model.head.parameters(), 0.1), x, y)


@behaviour
def trains_by_names(model: Any, x: Tensor, y: Tensor) -> Any:
    optimizer = torch.optim.AdamW(model.named_parameters(), 0.01)
    found = trained(model, optimizer, x, y)
    return found, optimizer.state_dict()["param_groups"][0]["param_names"]


@behaviour
def trains_by_hand(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    return named(model)


@behaviour
def state_of_the_optimizer_goes_on(model: Any, x: Tensor, y: Tensor) -> Any:
    first = torch.optim.AdamW(model.parameters(), 0.01)
    trained(model, first, x, y)
    second = torch.optim.AdamW(model.parameters(), 0.5)
    second.load_state_dict(first.state_dict())
    return trained(model, second, x, y), second.param_groups[0]["lr"]


@behaviour
def rates_by_a_schedule(model: Any, x: Tensor, y: Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4)
    found = []
    for _ in range(3):
        found.append(trained(model, optimizer, x, y, 1))
        schedule.step()
    return found, schedule.get_last_lr()


@behaviour
def a_closure(model: Any, x: Tensor, y: Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(2)], named(model)


@behaviour
def an_average_of_the_model(model: Any, x: Tensor, y: Tensor) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        trained(model, optimizer, x, y, 1)
        average.update_parameters(model)
    return named(average.module), number(average.eval()(x))


@behaviour
def a_moving_average_beside(model: Any, x: Tensor, y: Tensor) -> Any:
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained(model, torch.optim.SGD(model.parameters(), 0.1), x, y, 1)
    for name, p in model.named_parameters():
        shadow[name].lerp_(p.detach(), 0.5)
    return {name: number(p) for name, p in shadow.items()}


@behaviour
def scaled_losses(model: Any, x: Tensor, y: Tensor) -> Any:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(loss_of(model, x, y)).backward()
    scaler.unscale_(optimizer)
    norm = number(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    scaler.step(optimizer)
    scaler.update()
    return norm, named(model), scaler.get_scale()


@behaviour
def nothing_learns_at_rate_zero(model: Any, x: Tensor, y: Tensor) -> Any:
    before = named(model)
    trained(model, torch.optim.SGD(model.parameters(), 0.0), x, y)
    return before == named(model)


# --- doors


def by_shards(module: nn.Module) -> Any:
    """The module with sharded parameters, which runs op by op."""
    module = module.double()
    autopar.shard_(module, "zero3", mesh={"dp": 2})
    return module


def by_backend(module: nn.Module) -> Any:
    """The module, whose calls go through torch.compile."""
    torch.compiler.reset()
    module = module.double()
    module.compile(backend="autopar", options={"mesh": {"dp": 2}, "recipe": "ddp"})
    return module


CONTRACT_DOORS: dict[str, Ready] = {
    "ddp": by_compile({"recipe": "ddp"}),
    "zero3": by_compile({"recipe": "zero3"}),
    "tp": by_compile({"mesh": {"tp": 2}, "recipe": "tp"}),
    "stages": by_compile({"mesh": {"pp": 2}}),
    "shard_": by_shards,
    "backend": by_backend,
}
MOMENTS = ("fresh", "trained")


def found_of(name: str, ready: Ready, moment: str) -> Any:
    """What a behaviour finds, from one seed, of a fresh module or of one that was trained for a step."""
    torch.manual_seed(0)
    model = ready(Model())
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6).sin()
    y = torch.linspace(0, 1, 32, dtype=torch.float64).view(8, 4)
    if moment == "trained":
        trained(model, torch.optim.SGD(model.parameters(), 0.1), x, y, 1)
        model.zero_grad()
    return BEHAVIOURS[name](model, x.clone(), y.clone())


def differences(found: Any, expected: Any) -> list[str]:
    """Where two findings are not equal: numbers within 1e-9, all else exactly."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return [f"{key}: {each}" for key in expected for each in differences(found[key], expected[key])]
    is_list = isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple))
    if is_list and len(found) == len(expected):
        return [each for a, b in zip(found, expected, strict=True) for each in differences(a, b)]
    if isinstance(expected, float) and isinstance(found, float):
        is_close = abs(found - expected) <= 1e-9 * max(1.0, abs(expected)) or (found != found and expected != expected)
        return [] if is_close else [f"{found}, and plainly {expected}"]
    return [] if found == expected else [f"{found}, and plainly {expected}"]


def verdict_of_behaviour(name: str, door: str) -> Verdict:
    """Asks a behaviour of a plain model and of one at a door, at both moments, over all ranks of the process group."""
    label, said = f"{name}, {door}", []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for moment in MOMENTS:
            word, text = _outcome(functools.partial(found_of, name, moment=moment), CONTRACT_DOORS[door])
            said.append((word, f"{moment}: {text}" if text else ""))
    order = ("breaks", "differs", "refused", "equal")
    word, text = min(said, key=lambda each: order.index(each[0]))
    return Verdict(label, word, text)


def _outcome(find: Callable[..., Any], ready: Ready) -> tuple[str, str]:
    expected = find(ready=plainly)
    try:
        found = find(ready=ready)
    except autopar.AutoparError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:  # whatever a script would meet
        has_our_words = re.search(r"autopar|docs/", str(error)) or remedy_of_operands(error)
        return "refused" if has_our_words else "breaks", f"{type(error).__name__}: {error}"
    apart = differences(found, expected)
    return ("differs", "; ".join(apart)[:600]) if apart else ("equal", "")

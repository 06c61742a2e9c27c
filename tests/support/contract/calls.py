"""Calls of a module, and hooks."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.contract.behaviour import behaviour, grads, loss_of, number, refused
from tests.support.loop import whole

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
    return refused(lambda: model(x[:, :5])) != "no error", number(model(x))


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


# --- around a call


@behaviour
def forward_of_a_transposed_input(model: Any, x: Tensor, y: Tensor) -> Any:
    return number(model(x.T.contiguous().T)), number(model(x[::2]))


@behaviour
def inputs_stay_as_they_are(model: Any, x: Tensor, y: Tensor) -> Any:
    before = x.clone()
    loss_of(model, x, y).backward()
    return torch.equal(before, x), x.requires_grad, x.grad is None


@behaviour
def statistics_without_grad(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        model(x)
        model(x + 1)
    return number(model.norm.running_mean), int(model.norm.num_batches_tracked), number(model.norm.running_var)


@behaviour
def random_numbers_stay_as_they_are(model: Any, x: Tensor, y: Tensor) -> Any:
    torch.manual_seed(6)
    before = torch.rand(1).item()
    loss_of(model, x, y).backward()
    return before, torch.rand(2).tolist(), torch.is_grad_enabled(), str(torch.get_default_dtype())


@behaviour
def an_unknown_keyword_is_an_error(model: Any, x: Tensor, y: Tensor) -> Any:
    return refused(lambda: model(x, other=1), "other"), number(model(x))


@behaviour
def results_stay_when_weights_change(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        first = model(x)
        before = number(first)
        model.head.weight.mul_(2)
        second = number(model(x))
    return before, number(first), second


@behaviour
def a_result_is_saved(model: Any, x: Tensor, y: Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"out": model(x).detach()}, file)
    file.seek(0)
    return number(torch.load(file, weights_only=True)["out"])


@behaviour
def a_method_of_a_layer_is_replaced(model: Any, x: Tensor, y: Tensor) -> Any:
    before, own = number(model(x)), model.head.forward
    model.head.forward = lambda h: own(h) * 2
    return before, number(model(x))


@behaviour
def a_hook_of_all_modules(model: Any, x: Tensor, y: Tensor) -> Any:
    seen: list[bool] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, given, out: seen.append(isinstance(m, nn.Linear)))
    try:
        found = number(model(x))
    finally:
        handle.remove()
    return found, seen.count(True), number(model(x))


@behaviour
def a_hook_is_removed(model: Any, x: Tensor, y: Tensor) -> Any:
    handle = model.head.register_forward_hook(lambda module, given, out: out + 1)
    first = number(model(x))
    handle.remove()
    return first, number(model(x))


@behaviour
def a_layer_by_itself(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        return number(model.first(x)), number(F.linear(x, model.first.weight))

"""Gradients, their norms and clipping."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.contract.behaviour import behaviour, grads, loss_of, number, refused

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
    return refused(loss.backward, "second time")


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
    return refused(loss.backward, "does not require grad")


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

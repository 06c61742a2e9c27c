"""Gradients, their norms and clipping."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from tests.support.contract.behaviour import behaviour, grads, loss_of, named, number, refused
from tests.support.loop import whole

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


# --- what is left of a backward


@behaviour
def gradients_are_like_their_parameters(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    return [(list(p.grad.shape), str(p.grad.dtype), str(p.grad.device)) for p in model.parameters() if p.requires_grad]


@behaviour
def a_result_keeps_its_gradient(model: Any, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    out.retain_grad()
    F.mse_loss(out, y).backward()
    return number(out.grad), grads(model)


@behaviour
def a_backward_to_some_parameters(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward(inputs=[model.first.weight, model.head.weight])
    return grads(model)


@behaviour
def a_backward_of_several_results(model: Any, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    torch.autograd.backward([out.square().mean(), out[:, 0].sum()])
    return grads(model)


@behaviour
def gradients_of_some_that_may_be_unused(model: Any, x: Tensor, y: Tensor) -> Any:
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    found = torch.autograd.grad(loss_of(model, x, y), [model.first.bias, model.unused], allow_unused=True)
    return [None if g is None else number(g) for g in found]


@behaviour
def a_parameter_without_use_has_no_gradient(model: Any, x: Tensor, y: Tensor) -> Any:
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    loss_of(model, x, y).backward()
    optimizer.step()
    return model.unused.grad is None, number(model.unused), named(model)


@behaviour
def a_loss_times_zero(model: Any, x: Tensor, y: Tensor) -> Any:
    (loss_of(model, x, y) * 0).backward()
    return grads(model)


@behaviour
def a_product_with_a_jacobian(model: Any, x: Tensor, y: Tensor) -> Any:
    model.eval()
    out, found = torch.autograd.functional.vjp(model, x, y)
    return number(out), number(found)


@behaviour
def batches_of_different_sizes_add_up(model: Any, x: Tensor, y: Tensor) -> Any:
    for rows in (slice(0, 4), slice(4, 6), slice(6, 8)):
        (loss_of(model, x[rows], y[rows]) * len(x[rows]) / 8).backward()
    return grads(model)


@behaviour
def a_forward_under_a_checkpoint(model: Any, x: Tensor, y: Tensor) -> Any:
    model.eval()
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    F.mse_loss(out, y).backward()
    return number(out), grads(model)


@behaviour
def a_write_before_backward_is_an_error_or_without_effect(model: Any, x: Tensor, y: Tensor) -> Any:
    model.eval()
    loss_of(model, x, y).backward()
    expected = grads(model)
    model.zero_grad()
    loss = loss_of(model, x, y)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    is_error = refused(loss.backward, "inplace operation") != "no error"
    return is_error or all(g is None or abs(g - expected[n]) < 1e-9 for n, g in grads(model).items())


@behaviour
def a_gradient_that_is_not_finite_is_an_error(model: Any, x: Tensor, y: Tensor) -> Any:
    (loss_of(model, x, y) * float("inf")).backward()
    clip = torch.nn.utils.clip_grad_norm_
    return refused(lambda: clip(model.parameters(), 1.0, error_if_nonfinite=True), "non-finite")


@behaviour
def clips_by_the_largest(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
    return number(found), grads(model)


@behaviour
def clips_by_a_norm_taken_before(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return number(norm), grads(model)


@behaviour
def the_share_of_zeros_in_gradients(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    return sum((whole(p.grad) == 0).sum().item() for p in trained) / sum(p.numel() for p in trained)

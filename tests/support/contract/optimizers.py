"""Optimizers of a module, averages and scales."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from tests.support.contract.behaviour import BEHAVIOURS, Behaviour, behaviour, loss_of, named, number, trained

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


# --- what scripts do with an optimizer besides


@behaviour
def gradients_of_zero_move_momenta(model: Any, x: Tensor, y: Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trained(model, optimizer, x, y, 1)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    return named(model)


@behaviour
def a_rate_that_is_a_tensor(model: Any, x: Tensor, y: Tensor) -> Any:
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    first = trained(model, optimizer, x, y, 1)
    rate.mul_(0.5)
    return first, trained(model, optimizer, x, y, 1)


@behaviour
def an_objective_that_grows(model: Any, x: Tensor, y: Tensor) -> Any:
    return trained(model, torch.optim.SGD(model.parameters(), 0.01, maximize=True, weight_decay=0.1), x, y)


@behaviour
def hooks_of_an_optimizer(model: Any, x: Tensor, y: Tensor) -> Any:
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), list[float]()
    optimizer.register_step_pre_hook(lambda *_: seen.append(number(model.first.weight)))
    optimizer.register_step_post_hook(lambda *_: seen.append(number(model.first.weight)))
    trained(model, optimizer, x, y)
    return seen


@behaviour
def states_of_an_optimizer_are_read(model: Any, x: Tensor, y: Tensor) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trained(model, optimizer, x, y)
    found = [(key, number(v)) for p in model.parameters() for key, v in optimizer.state.get(p, {}).items()]
    return found, len(optimizer.state), len(optimizer.param_groups[0]["params"])


@behaviour
def another_optimizer_goes_on(model: Any, x: Tensor, y: Tensor) -> Any:
    first = trained(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), x, y, 1)
    return first, trained(model, torch.optim.Adam(model.parameters(), 0.01), x, y)


@behaviour
def rates_of_groups_are_set(model: Any, x: Tensor, y: Tensor) -> Any:
    groups = [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(model.parameters())]
    optimizer = torch.optim.SGD(groups)
    first = trained(model, optimizer, x, y, 1)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    return first, trained(model, optimizer, x, y, 1), len(optimizer.state_dict()["param_groups"])


@behaviour
def an_optimizer_of_those_with_gradients(model: Any, x: Tensor, y: Tensor) -> Any:
    loss_of(model, x, y).backward()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.grad is not None], 0.01)
    optimizer.step()
    return named(model), len(optimizer.param_groups[0]["params"])


@behaviour
def gradients_that_are_not_finite_are_skipped(model: Any, x: Tensor, y: Tensor) -> Any:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.Adam(model.parameters(), 0.1)
    before = named(model)
    scaler.scale(loss_of(model, x, y) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    return before == named(model), scaler.get_scale(), len(optimizer.state)


@behaviour
def an_average_with_buffers(model: Any, x: Tensor, y: Tensor) -> Any:
    inner = getattr(model, "original", model)
    average = torch.optim.swa_utils.AveragedModel(
        inner, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        trained(model, optimizer, x, y, 1)
        average.update_parameters(model)
    return named(average.module), [number(b) for b in average.module.buffers()]


@behaviour
def an_optimizer_through_a_file(model: Any, x: Tensor, y: Tensor) -> Any:
    first = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trained(model, first, x, y)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    second.load_state_dict(torch.load(file, weights_only=True))
    return trained(model, second, x, y), second.param_groups[0]["lr"]

"""Writes into a module, and its state."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.contract.behaviour import Model, behaviour, loss_of, named, number, refused
from tests.support.own_loops import whole

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


@behaviour
def a_missing_key_is_an_error(model: Any, x: Tensor, y: Tensor) -> Any:
    state = Model().double().state_dict()
    del state["first.weight"]
    found = refused(lambda: model.load_state_dict(state), "Missing key", "first.weight")
    return found, str(model.load_state_dict(state, strict=False).missing_keys)


@behaviour
def an_unexpected_key_is_an_error(model: Any, x: Tensor, y: Tensor) -> Any:
    state = {**Model().double().state_dict(), "other": torch.ones(1)}
    found = refused(lambda: model.load_state_dict(state), "Unexpected key", "other")
    return found, str(model.load_state_dict(state, strict=False).unexpected_keys)


@behaviour
def a_wrong_shape_is_an_error(model: Any, x: Tensor, y: Tensor) -> Any:
    state = {**Model().double().state_dict(), "first.weight": torch.ones(3, 6)}
    return refused(lambda: model.load_state_dict(state), "size mismatch", "first.weight")


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

"""Writes into a module, and its state."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.support.contract.behaviour import Model, behaviour, loss_of, named, number, refused
from tests.support.loop import whole


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that all ranks see."""
    with tempfile.TemporaryDirectory() as own:
        first = [own]
        dist.broadcast_object_list(first, src=0)
        yield first[0]
        dist.barrier()


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


@behaviour
def a_copy_of_the_state_brings_a_model_back(model: Any, x: Tensor, y: Tensor) -> Any:
    before, kept = named(model), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    said = model.load_state_dict(kept)
    return before == named(model), str(said), list(kept) == list(model.state_dict())


@behaviour
def a_state_is_averaged_with_another(model: Any, x: Tensor, y: Tensor) -> Any:
    one = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    two = model.state_dict()
    model.load_state_dict({k: (v + two[k]) / 2 if v.is_floating_point() else v for k, v in one.items()})
    return named(model), number(model(x))


@behaviour
def states_are_stacked(model: Any, x: Tensor, y: Tensor) -> Any:
    states = [{k: v.clone() for k, v in model.state_dict().items()} for _ in range(3)]
    mean = {k: torch.stack([each[k] for each in states]).double().mean(0) for k in states[0]}
    said = model.load_state_dict(mean)
    return str(said), named(model), number(model(x))


@behaviour
def the_state_is_the_model(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        model.state_dict()["first.weight"].mul_(2)
    kept = model.state_dict(keep_vars=True)
    return number(model.first.weight), kept["first.weight"] is model.first.weight, kept["head.weight"].requires_grad


@behaviour
def keys_with_a_prefix(model: Any, x: Tensor, y: Tensor) -> Any:
    found: dict[str, Any] = {}
    model.state_dict(destination=found, prefix="net.")
    return list(found), [*model.norm.state_dict()]


@behaviour
def versions_in_the_state(model: Any, x: Tensor, y: Tensor) -> Any:
    return {name: each.get("version") for name, each in model.state_dict()._metadata.items()}


@behaviour
def a_hook_renames_keys(model: Any, x: Tensor, y: Tensor) -> Any:
    def rename(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [k for k in state if k.startswith("old.")]:
            state[name.replace("old.", "")] = state.pop(name)

    model.register_load_state_dict_pre_hook(rename)
    torch.manual_seed(8)
    said = model.load_state_dict({f"old.{k}": v for k, v in Model().double().state_dict().items()})
    return str(said), named(model), number(model(x))


@behaviour
def a_state_of_another_format(model: Any, x: Tensor, y: Tensor) -> Any:
    torch.manual_seed(8)
    model.load_state_dict(Model().state_dict())
    return named(model), str(model.first.weight.dtype), number(model(x))


@behaviour
def a_state_in_another_order_with_more(model: Any, x: Tensor, y: Tensor) -> Any:
    torch.manual_seed(8)
    state = dict(reversed(Model().double().state_dict().items()))
    said = model.load_state_dict({"more": torch.ones(2), **state}, strict=False)
    return str(said), named(model)


@behaviour
def a_buffer_that_is_not_saved(model: Any, x: Tensor, y: Tensor) -> Any:
    model.register_buffer("table", torch.ones(2), persistent=False)
    return "table" in model.state_dict(), "table" in dict(model.named_buffers()), number(model(x))


@behaviour
def a_checkpoint_of_torch(model: Any, x: Tensor, y: Tensor) -> Any:
    expected = named(model)
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    return expected == named(model), number(model(x))


@behaviour
def the_whole_state_by_torch(model: Any, x: Tensor, y: Tensor) -> Any:
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    plain = Model().double()
    said = plain.load_state_dict(found)
    return str(said), {type(v) is Tensor for v in found.values()}, named(plain)


@behaviour
def entries_by_name(model: Any, x: Tensor, y: Tensor) -> Any:
    state = model.state_dict()
    return number(state["head.weight"]), "nothing" in state, len(state), list(state["first.bias"].shape), len({*state})


@behaviour
def writes_a_row(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        model.first.weight[0] = torch.arange(6.0, dtype=torch.float64)
        model.head.weight[1, 2] = 0.5
        model.first.weight[2:4, 1] = 0.25
    return named(model), number(model(x))


@behaviour
def writes_where_a_mask_says(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        model.head.weight[model.head.weight.abs() < 0.1] = 0.0
        model.first.weight.masked_fill_(model.first.weight < 0, 0.01)
        model.first.bias.copy_(torch.where(model.first.bias > 0, model.first.bias, 0.0))
    return named(model), number(model(x))

"""What a module says of itself, its modes, formats and frozen parts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.contract.behaviour import Model, behaviour, grads, loss_of, named, number, trained

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


@behaviour
def values_are_read(model: Any, x: Tensor, y: Tensor) -> Any:
    weight = model.first.weight.detach()
    return weight[0, 0].item(), weight.flatten()[:3].tolist(), number(weight.cpu()), number(weight.double().T)


@behaviour
def values_are_compared(model: Any, x: Tensor, y: Tensor) -> Any:
    weight = model.first.weight.detach()
    copy_of = weight.clone()
    same = bool(torch.equal(weight, copy_of)), bool(torch.allclose(weight, copy_of + 1e-12))
    copy_of.mul_(2)
    return same, bool(torch.equal(weight, copy_of)), model.first.weight.requires_grad


@behaviour
def values_as_an_array(model: Any, x: Tensor, y: Tensor) -> Any:
    return float(model.head.bias.detach().cpu().numpy().sum()), model.head.weight.detach().numpy().shape


@behaviour
def freezes_and_thaws_between_steps(model: Any, x: Tensor, y: Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = []
    for frozen in (True, False, True):
        model.first.requires_grad_(not frozen)
        found.append(trained(model, optimizer, x, y, 1))
    return found


@behaviour
def a_layer_is_copied(model: Any, x: Tensor, y: Tensor) -> Any:
    twin = copy.deepcopy(model.first)
    with torch.no_grad():
        twin.weight.zero_()
    return number(twin.weight), number(model.first.weight), isinstance(twin, nn.Linear)


@behaviour
def a_module_is_added(model: Any, x: Tensor, y: Tensor) -> Any:
    torch.manual_seed(5)
    model.add_module("extra", nn.Linear(2, 2).double())
    return [name for name, _ in model.named_parameters()][-2:], number(model(x)), model.get_submodule("extra").bias.ndim

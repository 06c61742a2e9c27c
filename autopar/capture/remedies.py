"""Errors for code that no graph can express, with the line of the model, the reason and the remedy."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable

import torch
from torch import fx, nn

from autopar import _torch
from autopar.capture.guards.guards import Guard
from autopar.errors import CaptureError

_OURS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
_GENERATED = "<eval_with_key>"  # the file of the code that torch.fx makes of a graph
_OWN_FORWARD = "autopar/capture/export.py"  # the forward that calls the model, and then the loss
MODEL = "model."  # path of the model in the captured module, which also holds the loss


def uncaptured(line: str, reason: str, remedy: str) -> CaptureError:
    """The error for a line of the model that cannot be captured."""
    return CaptureError(
        f"The model cannot be captured as a graph.\n  where:  {line}\n  reason: {reason}\n"
        f'  remedy: {remedy}. What export refuses, torch.compile(model, backend="autopar") '
        "may run: it breaks the graph there, with parameters whole on every rank."
    )


def traced_line(node: fx.Node) -> str:
    """The innermost forward that a node comes from, outside torch if any: `file:line in function: code`.

    Export notes only forwards of modules, so an op of a loss function has no line. One of a no_grad region, which was
    traced from generated code, has the line of what comes out of the region.
    """
    place = r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)'
    found = list(re.finditer(place, str(node.meta.get("stack_trace", ""))))
    if not found:
        return str(node.target)
    if found[-1]["file"].endswith(_OWN_FORWARD):
        return "in the loss function"
    follower = next((user for user in node.users if user.op == "call_function"), None)
    if found[-1]["file"].startswith(_GENERATED) and follower is not None:
        return traced_line(follower)
    found = [each for each in found if not each["file"].startswith(_OURS)] or found
    return "{file}:{line} in {function}: {code}".format(**found[-1].groupdict())


def explained(error: Exception, wrapper: nn.Module) -> CaptureError:
    """An error that names the line of the model and the remedy."""
    text = str(error).strip().splitlines()
    reason = text[0] if text else type(error).__name__
    if isinstance(error, _torch.SizeDependsOnValues):  # says its name alone
        reason += " has no kernel that export takes: the size of a result depends on values"
    if _torch.is_transformed(error):
        reason = f"torch.func transforms (vmap, grad, jvp) compute here, which export does not follow ({reason})"
    line = _torch.user_line(error) or _module_named_in(reason, wrapper)
    remedy = _remedy(error, line, wrapper) or "Write this line so that torch.export takes it"
    return uncaptured(line, reason, remedy)


def has_remedy(error: Exception, wrapper: nn.Module) -> bool:
    """Whether there is a remedy for an error of a trace."""
    return _remedy(error, _torch.user_line(error) or "", wrapper) is not None


def _module_named_in(reason: str, wrapper: nn.Module) -> str:
    """The place of the forward of the module whose path an error names, for errors without a line of the model."""
    modules = dict(wrapper.named_modules())
    for path in re.findall(r"[\w.]+\.\w+", reason):
        module = modules.get(path.rpartition(".")[0])
        if module is not None and module is not wrapper:
            code = inspect.unwrap(type(module).forward).__code__
            return (
                f"{code.co_filename}:{code.co_firstlineno}, in the forward of {type(module).__name__} "
                f"({path.rpartition('.')[0].removeprefix(MODEL)}) or of what it calls"
            )
    return "a line that torch.export does not name"


def _expert_remedy(wrapper: nn.Module) -> str:
    """The remedy for a loop over experts with rows; `experts_implementation` is the option of transformers."""
    configs = (getattr(module, "config", None) for module in wrapper.modules())
    if any(getattr(x, "_experts_implementation", None) == "eager" for x in configs):
        return 'Choose the grouped form of the experts, model.set_experts_implementation("grouped_mm")'
    return (
        "Sort the rows by expert and multiply them with torch.nn.functional.grouped_mm, or run every expert "
        "on all rows and mask the rows of other experts"
    )


def _remedy_of_control_flow(wrapper: nn.Module) -> str:
    return (
        "Keep Python control flow independent of tensor values (use torch.where or torch.cond instead of "
        "`if`, and avoid .item())"
    )


# What a line says that needs the values of a tensor -> what to do. The first that fits counts; the last always does.
_LINES: tuple[tuple[str, Callable[[nn.Module], str]], ...] = (("expert", _expert_remedy), ("", _remedy_of_control_flow))

# What an error says -> what to do. The first that fits counts.
_REMEDIES = (
    (
        "NoneType",
        "Give the optional inputs that are None here, such as attention_mask: some models fill them in "
        "only where they are not traced",
    ),
    (
        r"Unsupported input type .*BlockMask",
        "Make the mask in the forward, by create_block_mask, from tensors that are inputs, or keep one in the model",
    ),
    (
        "fake tensor in the exported program constant",
        "Read x.detach() where this forward reads x.data, which no graph follows, and change parameters after "
        "optimizer.step()",
    ),
    (
        "no fake impl registered",
        "Give the op a fake kernel, with register_fake, which states the shape of its result; a gradient needs "
        "register_autograd too",
    ),
    (
        r"is not an instance of torch\.nn\.Parameter",
        "torch.func.functional_call puts other tensors in place of parameters here: copy these into the parameters "
        "(with torch.no_grad(): parameter.copy_(...)), and call the model itself",
    ),
    (
        r"Constant \S+ is mutated in the forward",
        "The loss changes a tensor that is not a buffer of the model: make one module that holds both and whose "
        "forward returns the loss, and give that without loss_fn",
    ),
)


def _remedy(error: Exception, line: str, wrapper: nn.Module) -> str | None:
    remedy = _remedy_of_values(error, line, wrapper)
    if remedy is None and _torch.is_transformed(error):
        return 'Take torch.compile(model, backend="autopar"), which runs such a graph whole on every rank'
    for said, known in _REMEDIES:
        remedy = remedy or (known if re.search(said, str(error)) else None)
    return remedy or _remedy_of_arguments(error, wrapper)


def _remedy_of_values(error: Exception, line: str, wrapper: nn.Module) -> str | None:
    """The remedy for code that needs the values of a tensor."""
    if isinstance(error, _torch.SizeDependsOnValues):
        return (
            "Compute this outside of the captured code, such as a CTC loss of the model's result; "
            'torch.compile(model, backend="autopar") compiles only the model'
        )
    if "data-dependent" not in str(error).lower() and "DataDependent" not in type(error).__name__:
        return None
    if _torch.validates_distribution(error):
        return "Make the distribution with validate_args=False: its checks read values"
    if any(isinstance(m, _torch.BatchNormBase) and m.momentum is None for m in wrapper.modules()):
        return (
            "A batch norm with momentum=None reads how many batches it has seen: give it a momentum, which "
            "bn.momentum = 1 / (int(bn.num_batches_tracked) + 1) before each call makes the same average. "
            "torch.optim.swa_utils.update_bn sets None, and takes a plain copy: plain.load_state_dict({name: "
            "x.full_tensor() if hasattr(x, 'full_tensor') else x for name, x in model.state_dict().items()})"
        )
    return next(remedy(wrapper) for said, remedy in _LINES if said in line)


def _remedy_of_arguments(error: Exception, wrapper: nn.Module) -> str | None:
    """The remedy for arguments that a trace does not take."""
    shared = _shared_buffers(wrapper)
    if isinstance(error, AssertionError) and shared:
        return f"Give the buffer a single name: {' and '.join(shared)} are the same tensor, which forward may change"
    if isinstance(error, TypeError) and f"{_forward_name(wrapper)}()" in str(error):
        return "Call it with the arguments that the model's forward takes"
    if isinstance(error, TypeError) and "FakeTensor" in str(error):
        return (
            "Use no tensor as a Python number here. Packed sequences do: give the recurrent layer the padded batch, "
            "and mask the positions after the lengths"
        )
    return None


def _forward_name(wrapper: nn.Module) -> str:
    """The name of the model's forward in Python's message about wrong arguments."""
    return getattr(wrapper.model.forward, "__qualname__", "forward")  # type: ignore[union-attr]


def _shared_buffers(wrapper: nn.Module) -> list[str]:
    """All names of the first buffer with several names, such as a buffer of a module that is used under two names."""
    names: dict[int, list[str]] = {}
    for name, buffer in wrapper.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name.removeprefix(MODEL))
    return next((found for found in names.values() if len(found) > 1), [])


# What a model has read in its capture, and its value -> how to make it the model of a plan for another graph.
_READ = (
    (
        "use_cache",
        True,
        "the plan was made from a config.json, for a model without a cache of keys and values: set {words} = False",
    ),
)


def remedy_of_other_graph(guards: Iterable[Guard]) -> str | None:
    """The change to a model that would let the plan be used, given the values that its capture read."""
    for guard in guards:
        for name, value, remedy in _READ:
            if guard.place.key == name and guard.before is value:
                return remedy.format(words=guard.place.words)
    return None


# What torch says of operands that do not fit -> what to change. Groups of the pattern fill the remedy.
_OPERANDS = (
    (
        r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)",
        "give this layer {1} features, or make it for {0} (in_features={0})",
    ),
    (
        r"same reduction dim, but got \[(?:\d+, )*(\d+)\] X \[(?:\d+, )*?(\d+), \d+\]",
        "give this layer {1} features, or make it for {0} (in_features={0})",
    ),
    (
        r"same dtype|[Ee]xpected (?:scalar type|m1 and m2)|should be the same",
        "convert one to the other's dtype: the batch by x.to(dtype), such as x.float(), or the model by "
        "model.to(dtype)",
    ),
    (
        r"same device|expected device",
        "move both to one device: make tensors inside forward with device=x.device, keep others as buffers "
        "(register_buffer), and move batch and model by .to(device)",
    ),
    (
        r"got mixed torch\.Tensor and DTensor",
        "a term of the loss that is made of parameters, which are DTensors, is added to results, which are plain "
        "tensors: gather it first, on all ranks (penalty.full_tensor() + loss). A layer that is called by itself takes "
        "whole parameters: torch.func.functional_call(layer, {{name: p.full_tensor() for name, p in "
        "layer.named_parameters()}}, (x,)); an optimizer of your own that mixes them has whole parameters under "
        "torch.compile(model, backend='autopar')",
    ),
    (
        r"on inputs with different meshes",
        "a copy that was made of a parameter before the first step lies elsewhere than the parameter does now: make "
        "such copies after the first step, or gather both, on all ranks (x.full_tensor())",
    ),
    (
        r"SparseAdam does not support dense gradients",
        "gradients of tables are dense here, whatever sparse= says (docs/rules.md): take torch.optim.Adagrad, which "
        "leaves rows without a gradient alone, or torch.optim.Adam",
    ),
    (
        r"in-place operations that require placement changes are not supported",
        "an optimizer that takes norms over whole parameters has to take them over all ranks: in place of "
        "torch.optim.Adafactor take autopar.runtime.parameters.adafactor.Adafactor; docs/precision.md lists "
        "what is right",
    ),
)


def remedy_of_operands(error: BaseException) -> str | None:
    """A remedy for operands that differ in shape, dtype, device or layout; None for any other error.

    >>> remedy_of_operands(RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x12 and 16x32)"))
    'give this layer 16 features, or make it for 12 (in_features=12)'
    """
    for said, remedy in _OPERANDS:
        found = re.search(said, str(error))
        if found:
            return remedy.format(*found.groups())
    return None


def changed_in_place(parameter: str) -> CaptureError:
    """The error for a forward that changes a parameter in place."""
    return CaptureError(
        f"The forward changes the parameter {parameter} in place; do that outside, after "
        "optimizer.step() (an embedding's max_norm is such a change)."
    )

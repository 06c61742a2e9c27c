"""Models to plan, by the name that a user gives: a preset, a Hugging Face configuration, or a function.

Planning must not grow with depth. A `Target` says which stacks of layers repeat and builds few of each;
the middle one of those it builds stands for all that it leaves out.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar import _torch
from autopar.capture.export import LossFunction
from autopar.errors import AutoparError, StepError, did_you_mean
from autopar.ir import Stack
from autopar.models import (
    PRESETS,
    Preset,
    VisionTransformer,
    build,
    check_sequence,
    example_inputs,
    find_preset,
    longest,
    repeated_layers,
)
from autopar.models.adapted import SUFFIX, adapted
from autopar.models.hugging_face import Pretrained, alike_stacks
from autopar.models.importing import importing, staying

CAPTURED_LAYERS = 3  # a first, a middle and a last one
DEFAULT_SEQ = 8192  # tokens, where a longer sequence would be the model's own

# model, args, kwargs, loss function or None
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any], LossFunction | None]


def stack(path: str, layers: int) -> Stack:
    """Layers that are alike, of which a capture has at most `CAPTURED_LAYERS`."""
    return Stack(path, layers, min(layers, CAPTURED_LAYERS))


def weight_of(path: str, stacks: tuple[Stack, ...]) -> int:
    """The number of times that the part at this path of the captured model occurs in the whole model."""
    for each in stacks:
        if each.index(path) == each.middle:
            return each.layers - each.captured + 1
    return 1


@dataclass(frozen=True)
class Target:
    """A model to plan.

    Attributes:
        name: as the user wrote it.
        build: from the most layers of every stack, or None for all of them, to model, args, kwargs and
            loss function (None where the model returns its loss).
        stacks: the layers that repeat; none where layers differ, or where nobody knows.
        source: where the sizes come from.
        own_batch: whether the batch of its example inputs is its own and cannot be chosen.
        is_function: whether it is built on the default device, with weights unless that is "meta".
        words: size -> what people call it, such as 4096 -> "hidden".
    """

    name: str
    build: Callable[[int | None], Built]
    stacks: tuple[Stack, ...]
    source: str
    own_batch: bool = False
    is_function: bool = False
    words: Mapping[int, str] = field(default_factory=dict)

    def build_few(self) -> Built:
        """The model with so few layers of every stack as `stacks` says."""
        return self.build(CAPTURED_LAYERS if self.stacks else None)


def resolve_target(
    text: str | Preset, *, batch: int | None = None, seq: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Target:
    """The model that a text names.

    Args:
        text: a preset or the name of one (`autopar.models.PRESETS`), path of a Hugging Face config.json
            or of a directory that has one, or package.module:function. With `+qlora` behind it: with adapters on
            layers that are frozen in 4 bits (`autopar.models.adapted`).
        batch: sequences or images of a micro-batch; 1 if None.
        seq: tokens of a sequence; None for the longest the model is known for, at most `DEFAULT_SEQ`.
        dtype: element type of the parameters of a preset or configuration.

    Raises AutoparError where there is no such model, or it cannot take such a batch.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and value < 1:
            raise AutoparError(f"{name}={value} is less than 1.")
    if isinstance(text, str) and text.endswith(SUFFIX):
        return _adapted(resolve_target(text.removesuffix(SUFFIX), batch=batch, seq=seq, dtype=dtype))
    if isinstance(text, Preset):
        return _of_preset(text, batch or 1, seq, dtype)
    if text in PRESETS:
        return _of_preset(PRESETS[text], batch or 1, seq, dtype)
    path = Path(text)
    # Of a name that is too long, or in a folder that nobody may enter, `Path.exists` raises an OSError.
    if os.path.exists(path):
        return _of_configuration(text, path, batch or 1, seq, dtype)
    if ":" in text:
        return _of_function(text, batch, seq)
    if path.suffix == ".json" or os.sep in text:
        raise AutoparError(
            f"There is no file or directory {text}: give the path of a Hugging Face config.json, or of a "
            "directory that has one."
        )
    return _of_preset(find_preset(text), batch or 1, seq, dtype)


def _adapted(target: Target) -> Target:
    """A target with adapters on layers that are frozen in 4 bits."""

    def make(layers: int | None) -> Built:
        model, args, kwargs, loss_fn = target.build(layers)
        return adapted(model, tuple(each.path for each in target.stacks)), args, kwargs, loss_fn

    if not target.stacks:
        raise AutoparError(f"{target.name} has no layers that are alike, of which {SUFFIX} would make adapters.")
    return replace(target, name=target.name + SUFFIX, build=make)


# --- presets


def _of_preset(preset: Preset, batch: int, seq: int | None, dtype: torch.dtype) -> Target:
    description = preset.description
    check_sequence(description, seq)
    if seq is None and not isinstance(description, VisionTransformer):
        seq = min(longest(description), DEFAULT_SEQ)

    def make(layers: int | None) -> Built:
        with torch.device("meta"):
            model = build(description, dtype=dtype, layers=layers)
        return model, example_inputs(description, batch, seq, dtype=dtype), {}, None

    stacks = tuple(stack(path, count) for path, count in repeated_layers(description).items())
    return Target(preset.name, make, stacks, preset.source, words=_words(vars(description)))


# --- configurations


def _of_configuration(text: str, path: Path, batch: int, seq: int | None, dtype: torch.dtype) -> Target:
    if path.suffix == ".py":
        raise AutoparError(f"{text} is a Python file: name a function in it, as {path.stem}:example.")
    # transformers imports what a model needs when the model is first named.
    with importing(f"What transformers needs for {path}"):
        pretrained = Pretrained.read(path, dtype=dtype)
        length = _sequence_of(pretrained, seq)
        found = alike_stacks(pretrained.build, pretrained.full, CAPTURED_LAYERS)

    def make(layers: int | None) -> Built:
        model = pretrained.build(layers if found else None)
        return model, (), pretrained.example_inputs(batch, length), None

    stacks = tuple(stack(path, layers) for path, layers in found.items())
    words = _words(pretrained.config.to_dict())
    return Target(text, make, stacks, str(pretrained.path), words=words)


def _sequence_of(pretrained: Pretrained, seq: int | None) -> int:
    if pretrained.task.of_images:
        if seq is not None:
            raise AutoparError(f"{pretrained.path} takes images; leave seq={seq} out.")
        return 1
    if seq is None:
        return min(pretrained.positions or DEFAULT_SEQ, DEFAULT_SEQ)
    if pretrained.longest is not None and seq > pretrained.longest:
        raise AutoparError(
            f"A sequence of {seq} tokens is longer than the {pretrained.longest} positions that the model "
            f"of {pretrained.path} learns."
        )
    return seq


# --- functions


def _of_function(text: str, batch: int | None, seq: int | None) -> Target:
    function = _function(text)
    given = {name: value for name, value in (("batch", batch), ("seq", seq)) if value is not None}
    unknown = [name for name in given if name not in inspect.signature(function).parameters]
    if unknown:
        raise AutoparError(
            f"{text} takes no {unknown[0]}: its example inputs are its own. Give it a parameter of that "
            f"name to use {unknown[0]}={given[unknown[0]]}."
        )

    def make(layers: int | None) -> Built:
        with staying(f"The function {text}"):
            return _unpack(function(**given), text)

    own = "batch" not in inspect.signature(function).parameters
    return Target(text, make, (), text, own_batch=own, is_function=True)


def _function(text: str) -> Callable[..., Any]:
    module_name, _, function_name = text.partition(":")
    if os.getcwd() not in sys.path:
        # as `python -m` does: users name modules of where they stand
        sys.path.insert(0, os.getcwd())
    # Models of transformers import torchao.
    what = f"The module {module_name}"
    with importing(what), staying(what), _torch.quiet_torchao():
        module = _imported(module_name, function_name)
    function = getattr(module, function_name, None)
    if function is None:
        own = [name for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module_name]
        raise AutoparError(
            f"The module {module_name} has no function {function_name!r}{did_you_mean(function_name, own)}; write one "
            "that returns (model, example_inputs)."
        )
    return function


def _imported(module_name: str, function_name: str) -> ModuleType:
    """The module of a function. Raises AutoparError where it is not in the current folder, nor on Python's path."""
    if not module_name or module_name.startswith("."):
        raise AutoparError(
            f"{module_name!r} is not a name of a module; write package.module:{function_name or 'function'}."
        )
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
    if module_name.endswith(".py"):
        parts = Path(module_name).with_suffix("").parts
        raise AutoparError(f"{module_name!r} is a file: name its module, as {'.'.join(parts)}:{function_name}.")
    file = f"{module_name.replace('.', os.sep)}.py"
    raise AutoparError(
        f"There is no module {module_name!r} in {os.getcwd()} or on Python's path: start the command in the folder "
        f"that has {file}, or name a function of a file here, such as train:example."
    )


def _unpack(made: Any, text: str) -> Built:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise StepError(f"{text} must return (model, example_inputs) or (model, example_inputs, loss_fn).")
    model, inputs, *loss = made
    loss_fn = loss[0] if loss else None
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs), loss_fn
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return model, args, {}, loss_fn


# --- words for sizes

# What descriptions and configurations call the sizes that people speak of.
_WORDS = {
    "hidden": ("hidden", "hidden_size", "n_embd", "d_model"),
    "ffn": ("ffn", "intermediate_size", "n_inner", "d_ff"),
    "vocab": ("vocab", "vocab_size"),
    "heads": ("heads", "num_attention_heads", "n_head", "num_heads"),
    "kv heads": ("kv_heads", "num_key_value_heads"),
    "head dim": ("head_dim", "d_kv"),
    "experts": ("experts", "num_local_experts", "num_experts"),
}


def _words(sizes: Mapping[str, Any]) -> dict[int, str]:
    """Size -> word, for the sizes that only one word has."""
    found: dict[int, list[str]] = {}
    for word, names in _WORDS.items():
        for size in (sizes[name] for name in names if isinstance(sizes.get(name), int) and sizes[name] > 1):
            found.setdefault(size, []).append(word)
    return {size: words[0] for size, words in found.items() if len(set(words)) == 1}

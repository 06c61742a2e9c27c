"""A Hugging Face `config.json` as a model on the meta device: sizes alone, no weights, no network.

How deep the model is does not matter to a plan where its layers are alike. Which are is found by
building it twice, in full and with few layers, and comparing layer by layer (see `alike_stacks`).
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from autopar import _torch
from autopar.errors import AutoparError, first_line
from autopar.ir.files import read_json

# Keys of a configuration that count layers, in all of transformers' spellings.
LAYER_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "depth",
    "depths",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)
MOST_LAYERS = 200  # the deepest models have about 130; at 200 an answer takes half a minute and a gigabyte
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
MOST_EXPERTS = 4096  # of a layer; published models have up to 512, and 10 million have no answer in two minutes
MOST_MODULES = 100_000  # of one model; unfused experts of the largest are 75,000, and building so many takes seconds
_NUMBERED = ("idx", "index", "layer_id", "layer_number")  # in names of attributes that count layers

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A task that a model is trained for.

    Attributes:
        name: ends the name of an auto class and of a mapping of transformers.
        mapping: name of the mapping from configuration classes to model classes.
        ends: how the names of such architectures end.
        of_images: whether inputs are pixels.
    """

    name: str
    mapping: str
    ends: tuple[str, ...]
    of_images: bool = False


# Tried in this order where a configuration names no architecture.
TASKS = (
    Task("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", ("ForConditionalGeneration",)),
    Task("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", ("ForMaskedLM", "ForPreTraining")),
    Task("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", ("ForCausalLM", "LMHeadModel")),
    Task(
        "AutoModelForImageClassification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
        ("ForImageClassification",),
        of_images=True,
    ),
)


@dataclass(frozen=True)
class Pretrained:
    """A configuration and the task that it is trained for.

    Attributes:
        path: path of the configuration file.
        config: the configuration object of transformers.
        task: what the model is trained for.
        dtype: element type of its parameters.
    """

    path: Path
    config: Any
    task: Task
    dtype: torch.dtype

    @classmethod
    def read(cls, path: Path, *, dtype: torch.dtype = torch.bfloat16) -> Pretrained:
        """Reads a config.json, or the one in a directory. Raises AutoparError for a model that cannot be built."""
        path = path / "config.json" if path.is_dir() else path
        config = _read_config(path)
        return cls(path, config, _task_of(config, path), dtype)

    def build(self, layers: int | None = None) -> nn.Module:
        """The model on the meta device, in training mode; at most this many layers in every stack."""
        config = self.config if layers is None else _with_layers(self.config, layers)
        transformers = _transformers(self.path)
        with _torch.quiet_torchao():  # which the module of a model imports
            auto = getattr(transformers, self.task.name)
            found = getattr(transformers, self.task.mapping)[type(config)]
        classes = found if isinstance(found, (list, tuple)) else (found,)
        sdpa = all(getattr(each, "_supports_sdpa", False) for each in classes)
        try:
            with torch.device("meta"), _few_modules(self.path):
                model = auto.from_config(
                    copy.deepcopy(config), dtype=self.dtype, attn_implementation="sdpa" if sdpa else "eager"
                )
        except (ImportError, AutoparError):  # the first of a package that the model needs, which is said elsewhere
            raise
        except Exception as error:  # whatever sizes make of building it, such as a negative one
            raise AutoparError(
                f"transformers cannot build the model of {self.path}. {type(error).__name__}: {first_line(error)}. "
                "Correct its sizes."
            ) from error
        return model.train()

    @cached_property
    def full(self) -> nn.Module:
        """The model with all its layers."""
        return self.build()

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that learned positions allow; None where there are none."""
        rows = [
            table.num_embeddings - _reserved_rows(table)
            for name, table in self.full.named_modules()
            if isinstance(table, nn.Embedding) and _is_of_positions(name)
        ]
        return min(rows, default=None)

    @property
    def positions(self) -> int | None:
        """The longest sequence that the configuration speaks of."""
        text = self.config.get_text_config()
        return self.longest or getattr(text, "max_position_embeddings", None)

    def example_inputs(self, batch: int, seq: int) -> Inputs:
        """Keyword inputs of one micro-batch on the meta device."""
        if self.task.of_images:
            labels = torch.empty(batch, dtype=torch.long, device="meta")
            return {"pixel_values": self._pixels(batch), "labels": labels}
        names = ("input_ids", "labels")
        return {n: torch.empty(batch, seq, dtype=torch.long, device="meta") for n in names}

    def _pixels(self, batch: int) -> Tensor:
        size = getattr(self.config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(self.config, "num_channels", 3)
        return torch.empty(batch, channels, height, width, dtype=self.dtype, device="meta")


@contextlib.contextmanager
def _few_modules(path: Path) -> Iterator[None]:
    """Context in which building more than `MOST_MODULES` modules raises AutoparError, whatever asks for so many."""
    built = itertools.count(1)

    def count(*_: Any) -> None:
        if next(built) > MOST_MODULES:
            raise AutoparError(
                f"The model of {path} has more than {MOST_MODULES:,} modules, the most that autopar builds: lower its "
                "numbers of layers or experts."
            )

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _transformers(path: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise AutoparError(
            f"To build {path} autopar needs transformers: pip install 'autopar[transformers]'."
        ) from error
    return transformers


def _read_config(path: Path) -> Any:
    try:
        values = read_json(path)
    except OSError as error:
        raise AutoparError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise AutoparError(f"{path} is not JSON: {error}.") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise AutoparError(f"{path} has no model_type, as a config.json of Hugging Face has.")
    _check_values(values, path)
    known = _transformers(path).CONFIG_MAPPING
    if kind not in known:
        near = difflib.get_close_matches(kind, list(known.keys()), n=3)
        hint = f"; near are {', '.join(near)}" if near else ""
        raise AutoparError(f"transformers knows no model_type {kind!r} of {path}{hint}.")
    try:
        config = known[kind].from_dict(values)
    except Exception as error:  # each model checks its own sizes, with errors of its own
        raise AutoparError(f"transformers refuses {path}: {error}") from error
    for each in (config, config.get_text_config()):
        each.use_cache = False
    return config


def _check_values(values: Mapping[str, Any], path: Path) -> None:
    """Raises AutoparError for numbers of layers or experts that cannot be built, and architectures without names."""
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith("config"):
            _check_values(value, path)
        elif name in LAYER_COUNTS and value is not None:
            # Some models have a number of layers for each of their parts.
            for each in value if isinstance(value, list) else [value]:
                _check_count(name, each, path, "layers", 1, MOST_LAYERS)
        elif name in EXPERT_COUNTS and value is not None:
            _check_count(name, value, path, "experts", 0, MOST_EXPERTS)
    named = values.get("architectures")
    named = [] if named is None else named
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise AutoparError(
            f'{path} has architectures {named!r}; they are a list of names such as ["LlamaForCausalLM"].'
        )


def _check_count(name: str, value: object, path: Path, of: str, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise AutoparError(
            f"{path} has {name} {value!r}; it is a whole number of {of} from {least} to {most}, which is the most that "
            "autopar builds."
        )


def _task_of(config: Any, path: Path) -> Task:
    transformers = _transformers(path)
    possible = [t for t in TASKS if type(config) in getattr(transformers, t.mapping)]
    named = tuple(getattr(config, "architectures", None) or ())
    for task in possible:
        if any(name.endswith(task.ends) for name in named):
            return task
    # A bare `LlamaModel` says nothing of the task; `WhisperForConditionalGeneration` says one not here.
    if possible and not any("For" in name for name in named):
        return possible[0]
    kind = " ".join(named) or config.model_type
    raise AutoparError(
        f"{kind} ({path}) is not a causal, masked or sequence-to-sequence language model of transformers, and "
        "no image classifier: write a function that returns the model and its inputs, and give "
        "package.module:function."
    )


def _with_layers(config: Any, layers: int) -> Any:
    """The same configuration with at most this many layers; lists of one entry a layer are cut alike."""
    values = config.to_dict()
    _cut(values, layers)
    return type(config).from_dict(values)


def _cut(values: dict[str, Any], layers: int) -> None:
    counts = {values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)}
    deep = {count for count in counts if count > layers}
    for name, value in values.items():
        if isinstance(value, dict):
            _cut(value, layers)
        elif name in LAYER_COUNTS and isinstance(value, int):
            values[name] = min(value, layers)
        elif isinstance(value, list) and len(value) in deep:
            values[name] = [*value[: layers - 1], value[-1]]


def _is_of_positions(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last == "wpe" or ("position" in last and "relative" not in last)


def _reserved_rows(table: nn.Embedding) -> int:
    """Rows before position 0: RoBERTa counts from behind its padding row, OPT and BART from an offset."""
    padding = 0 if table.padding_idx is None else table.padding_idx + 1
    return max(padding, getattr(table, "offset", 0))


# --- which layers are alike


def alike_stacks(build: Callable[[int | None], nn.Module], full: nn.Module, layers: int) -> dict[str, int]:
    """Path of every stack of layers -> how many it has, if a middle layer can stand for all but two.

    Args:
        build: makes the model with at most this many layers in every stack.
        full: the model with all of them.
        layers: how many to build; at least 3.

    Empty where layers differ (attention windows on every second one, a router on some), or where fewer
    layers change anything else.
    """
    few = build(layers)
    cut = dict(_repeated(few))
    deep = {path: stack for path, stack in _repeated(full) if path in cut and len(cut[path]) == layers < len(stack)}
    inside = tuple(f"{path}." for path in deep)
    if _outside(full, inside) != _outside(few, inside):
        return {}
    if not all(_middle_stands_for_all(stack, cut[path]) for path, stack in deep.items()):
        return {}
    return {path: len(stack) for path, stack in deep.items()}


def _repeated(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len({type(each) for each in module}) == 1:
            yield path, module


def _outside(model: nn.Module, inside: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    named = model.named_parameters()
    return {name: tuple(p.shape) for name, p in named if not name.startswith(inside)}


def _middle_stands_for_all(stack: nn.ModuleList, few: nn.ModuleList) -> bool:
    first, *middle, last = map(_signature, stack)
    few_first, *few_middle, few_last = map(_signature, few)
    alike = all(each == middle[0] for each in [*middle, *few_middle])
    return alike and first == few_first and last == few_last


def _signature(layer: nn.Module) -> list[tuple[str, type, Mapping[str, object]]]:
    """All of a layer that its cost depends on: modules, shapes, and settings that are no numbering."""
    return [(path, type(module), _settings(module)) for path, module in layer.named_modules()]


def _settings(module: nn.Module) -> dict[str, object]:
    found: dict[str, object] = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, str, tuple, type(None))) and not _is_numbering(name)
    }
    return found | {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}


def _is_numbering(name: str) -> bool:
    return any(word in name for word in _NUMBERED)

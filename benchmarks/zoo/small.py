"""Small models of every architecture of `transformers`, derived from their default configurations.

`make` picks a model class, shrinks its configuration (config.py), draws inputs (inputs.py), and takes
the first that run. Nothing is downloaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from benchmarks.zoo.config import DEGREES, NARROW, shrink
from benchmarks.zoo.inputs import NoImage, image_and_words, input_sets
from benchmarks.zoo.models import BATCH, perturb_constants

MOST_PARAMETERS = 10**8  # of a model whose widths are not shrunk

# Tasks in the order in which a model is wanted; the last has no loss of its own.
TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "SEQUENCE_CLASSIFICATION",
)


class Step(nn.Module):
    """A model as a function from positional inputs to a scalar loss.

    The model's own if labels are among the inputs; else the mean squared distance of every floating
    output to a fixed random target, which no symmetry (of a norm, of a softmax) makes constant.
    """

    def __init__(self, model: nn.Module, inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.finite: tuple[int, ...] = ()  # the outputs that count

    def outputs(self, *args: Tensor) -> Any:
        return self.model(**dict(zip(self.inputs, args, strict=True)))

    def draw_targets(self, *args: Tensor) -> None:
        """A target for every finite output, the same for all rows of a batch.

        Logits of what is masked are minus infinity.
        """
        found = _floating(self.outputs(*args))
        self.finite = tuple(i for i, value in enumerate(found) if value.isfinite().all())
        for i in self.finite:
            value = found[i]
            rows = value.shape[0] if value.ndim else 1
            shape = value.shape[1:] if rows == BATCH else value.shape
            self.register_buffer(f"target{i}", torch.randn(shape, dtype=value.dtype))

    def forward(self, *args: Tensor) -> Tensor:
        output = self.outputs(*args)
        if "labels" in self.inputs:
            return output["loss"]
        values = _floating(output)
        losses = [(values[i] - getattr(self, f"target{i}")).square().mean().to(torch.float64) for i in self.finite]
        return torch.stack(losses).sum()


def _floating(output: Any) -> list[Tensor]:
    """Every floating tensor with a gradient in a nested output, each once."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.requires_grad else []
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if not isinstance(output, (tuple, list)):
        return []
    found = [tensor for item in output for tensor in _floating(item)]
    return list({id(tensor): tensor for tensor in found}.values())


@dataclass(frozen=True)
class Small:
    """A model that runs, and how.

    Attributes:
        step: the model with its loss.
        args: its positional inputs.
        kind: text, vision, audio or several of them, by its inputs.
        config: the model's configuration.
        left_out: what of its inputs is not given, and why, "" where nothing is.
        draws: whether two runs in training mode differ, because they draw random numbers.
    """

    step: Step
    args: tuple[Tensor, ...]
    kind: str
    config: Any
    left_out: str = ""
    draws: bool = False

    @property
    def description(self) -> str:
        """`BertForMaskedLM(input_ids, labels)`."""
        return f"{type(self.step.model).__name__}({', '.join(self.step.inputs)})"

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.step.model.parameters())


def make(name: str, *, seed: int = 0, masked: bool = False) -> Small:
    """A small model of an architecture, in float64 and training mode where it runs so.

    Args:
        name: its model type.
        seed: seed of weights and inputs.
        masked: whether an attention mask must be among the inputs.

    Raises ValueError with the first error where no choice of sizes, class and inputs gives a loss with
    gradients, ImportError for a model of a package that is not installed.
    """
    errors: list[Exception] = []
    torch.manual_seed(seed)
    for degree in DEGREES:
        try:
            config = shrink(name, degree)
            if degree not in NARROW:
                _require_moderate(config)
        except ImportError:
            raise
        except Exception as error:  # told below where no degree is right
            errors.append(error)
            continue
        small = _first_running(config, seed, masked, errors)
        if small is not None:
            return small
    first = errors[0]
    raise ValueError(f"no inputs run: {type(first).__name__}: {first}") from first


def _require_moderate(config: Any) -> None:
    model_class, _ = next(_classes(config))
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"with the widths of its default it has {count / 1e6:,.0f} million parameters")


def _first_running(config: Any, seed: int, masked: bool, errors: list[Exception]) -> Small | None:
    """The first class and inputs that run; `errors` is added to where one does not."""
    for model_class, labelled in _classes(config):
        try:
            pictured, left_out = _pictured(model_class, config, labelled)
            models = {d: _built(model_class, config, d, seed) for d in (torch.float64, torch.float32)}
        except ImportError:
            raise
        except Exception as error:  # of this class; there may be another
            errors.append(error)
            continue
        sets = itertools.chain(pictured, input_sets(model_class, config, labelled))
        for inputs, dtype in itertools.product(sets, models):
            if masked and "attention_mask" not in inputs:
                continue
            try:
                with torch.no_grad():  # what does not run at all is found out without building it again
                    models[dtype](**_cast(inputs, dtype))
                return _checked(_built(model_class, config, dtype, seed), config, inputs, dtype, left_out)
            except Exception as error:  # the next may be what it wants
                errors.append(error)
    return None


def _pictured(model_class: Any, config: Any, labelled: bool) -> tuple[list[dict[str, Tensor]], str]:
    """Inputs of words and an image where the model has a loss of them; what stood in the way, or ""."""
    if not labelled:
        return [], ""
    try:
        found = image_and_words(model_class, config)
    except NoImage as error:
        return [], f"image left out: {error}"
    return ([{**found, "labels": found["input_ids"].clone()}] if found else []), ""


def _built(model_class: Any, config: Any, dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = model_class(config).to(dtype)
    perturb_constants(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # whose probability is not in the configuration
            module.p = 0.0
    return model.train()


def _cast(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}


def _checked(model: nn.Module, config: Any, inputs: Mapping[str, Tensor], dtype: torch.dtype, left_out: str) -> Small:
    """Runs it, forward and backward, and finds out whether two runs draw different numbers."""
    step = Step(model, tuple(inputs))
    args = tuple(_cast(inputs, dtype).values())
    if "labels" not in inputs:
        step.draw_targets(*args)
    draws = not torch.equal(step(*args), step(*args))
    loss = step(*args)
    if not loss.isfinite():
        raise ValueError(f"the loss is {loss.item()}")
    loss.backward()
    model.zero_grad()
    return Small(step, args, _kind(inputs), config, left_out, draws)


def _classes(config: Any) -> Iterator[tuple[type, bool]]:
    """The model classes of a configuration, one with a loss of its own first."""
    for task in TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")
        half = task == "IMAGE_CLASSIFICATION" and hasattr(config, "text_config")
        if type(config) in mapping and not half:
            yield _one(mapping[type(config)]), True
            break
    if type(config) in modeling_auto.MODEL_MAPPING:
        yield _one(modeling_auto.MODEL_MAPPING[type(config)]), False
    if type(config) in modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING:
        yield _one(modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING[type(config)]), False


def _one(found: Any) -> type:
    return found[0] if isinstance(found, (tuple, list)) else found


def _kind(inputs: Mapping[str, Tensor]) -> str:
    kinds = {
        "text": {"input_ids"},
        "vision": {"pixel_values", "pixel_values_videos"},
        "audio": {"input_values", "input_features"},
    }
    found = [kind for kind, names in kinds.items() if names & set(inputs)]
    return " + ".join(found) or "other"

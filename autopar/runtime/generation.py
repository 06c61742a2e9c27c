"""`generate` of a compiled model: the model's own method, whose forwards run by the plan of training.

    tokens = model.generate(prompts, max_new_tokens=8)      # every rank calls it, and gets all tokens

The method of transformers picks tokens and decides when to stop. The object that it calls as the model is a copy
whose forward is `PlannedForward`. All ranks have whole logits and one state of the generator, so they pick alike.

[Note: few lengths] Each shape of a forward takes seconds to capture and plan. So prompts are padded on the right to a
power of two. A causal model gives the same logits with any padding; each call checks this for each length. The keys
and values of earlier positions lie in as many slots, in the layouts of the plan: where it splits heads, each rank has
those of its heads. A forward of one new token takes them as inputs, and returns them with the token's own.

Nothing here imports transformers; the names of arguments and of the cache's methods are those of its version 5.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch import pytree
from autopar.errors import StepError

SHORTEST = 32  # length that shorter prompts are padded to
# Implementations of attention that take a mask of each query and key.
_KEPT_WHERE = ("sdpa", "eager")
Run = Callable[[Mapping[str, Any]], Any]


def generate(
    model: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, keeps: bool
) -> Any:
    """Calls a model's `generate`, whose forwards are those of `run`.

    Args:
        model: user's own model.
        run: runs a forward by the plan, given keyword arguments; tensors of its result are whole or DTensors.
        args: positional arguments of `generate`.
        kwargs: keyword arguments of `generate`.
        keeps: whether keys and values may be kept from token to token.

    Raises StepError for a model without such a method or of another kind than a causal language model, and for
    arguments that the forward cannot serve.
    """
    if callable(getattr(model, "get_base_model", None)):  # PEFT: the forward is that with adapters
        model = model.get_base_model()  # type: ignore[operator]
    if not callable(getattr(model, "generate", None)):
        raise StepError(
            f"{type(model).__name__} has no method generate; the models of transformers have one."
        )
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise StepError(
            f"{type(model).__name__} has an encoder, which its generate runs by itself. Export the weights "
            "(model.export), and generate with a plain model."
        )
    keeps = keeps and _can_keep(model, kwargs)
    forward = PlannedForward(model, run)
    sampled = copy.copy(model)
    # Hooks of the model are in the captured forward.
    vars(sampled).update(forward=forward, _forward_hooks={}, _forward_pre_hooks={})
    past = {"past_key_values": Past()} if keeps else {"use_cache": False}
    return sampled.generate(*args, **{**kwargs, **past})  # type: ignore[operator]


def _can_keep(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether keys and values can be kept: in full attention under a mask, for one sequence of a row."""
    config: Any = getattr(model, "config", None)
    defaults = getattr(model, "generation_config", None)

    def asked(name: str) -> Any:
        chosen = kwargs.get("generation_config") or defaults
        return kwargs.get(name, getattr(chosen, name, None))

    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    names = {"past_key_values", "attention_mask", "position_ids"}
    return (
        asked("use_cache") is not False
        and asked("num_beams") in (None, 1)
        and getattr(config, "_attn_implementation", "") in _KEPT_WHERE
        and set(kinds) == {"full_attention"}
        and getattr(config, "sliding_window", None) is None
        and names <= {*inspect.signature(model.forward).parameters}
    )


class PlannedForward:
    """The forward of a causal language model for its own `generate`, see [Note: few lengths]."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        """Takes the model, for what it tells of itself, and what runs its forward by the plan."""
        self._run, config = run, getattr(model, "config", None)
        self._limit: int | None = getattr(config, "max_position_embeddings", None)
        self._adds_masks = getattr(config, "_attn_implementation", "") == "eager"
        self._format = next((p.dtype for p in model.parameters()), torch.float32)
        self.__signature__ = inspect.signature(model.forward)
        self._takes_positions = "logits_to_keep" in self.__signature__.parameters
        self._checked: set[tuple[int, ...]] = set()

    def __call__(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Past | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """The model's result with the logits of the last position, whole, of shape `(batch, 1, vocabulary)`.

        Args:
            input_ids: all tokens so far, of shape `(batch, length)`; with a filled cache the last alone.
            attention_mask: mask of all tokens so far, of shape `(batch, length)`; None if all count.
            position_ids: position of each of `input_ids`.
            past_key_values: cache; None to compute all positions again.
            use_cache: not used, as the cache says it.
            logits_to_keep: not used; the last position is the one that is asked for.
            return_dict: not used; the result has names.
            others: arguments that there must be none of.
        """
        given = sorted(
            name for name, value in others.items() if value is not None and value is not False
        )
        if given:
            raise StepError(
                f"generate gives the model {', '.join(given)}, and by a plan it runs on input_ids, attention_mask and "
                "position_ids alone. Export the weights (model.export), and generate with a plain model."
            )
        own = {"attention_mask": attention_mask, "position_ids": position_ids}
        if past_key_values is None or past_key_values.slots is None:
            return self._from_first(input_ids, own, past_key_values)
        return self._next(input_ids, own, past_key_values)

    def _from_first(
        self, tokens: Tensor, own: Mapping[str, Tensor | None], past: Past | None
    ) -> Any:
        """The result of a forward of all tokens, padded; fills the cache if there is one."""
        count = tokens.shape[1]
        more = padded_length(count + 1, self._limit) - count
        given: dict[str, Any] = {
            k: F.pad(x, (0, more), value=1) for k, x in own.items() if x is not None
        }
        if past is not None:
            given["past_key_values"] = Slots({}, {}, None)

        def run(padding: int) -> tuple[Tensor, Any]:
            padded = F.pad(tokens, (0, more), value=padding)
            return self._logits(
                {**given, "input_ids": padded, "use_cache": past is not None}, count - 1
            )

        logits, results = run(0)
        if more and (len(tokens), count + more) not in self._checked:
            _refuse_difference(logits, run(1)[0])
            self._checked.add((len(tokens), count + more))
        if past is not None:
            past.slots, past.length = results["past_key_values"], count
        return type(results)(logits=logits, past_key_values=past)

    def _next(self, tokens: Tensor, own: Mapping[str, Tensor | None], past: Past) -> Any:
        """The result of a forward of one new token, whose key and value go to the next free slot."""
        assert past.slots is not None, "a forward of the prompt has filled it"
        if past.length == past.slots.count:
            past.slots = past.slots.longer(padded_length(past.length + 1, self._limit))
        given = {
            "input_ids": tokens,
            "attention_mask": self._mask(own["attention_mask"], len(tokens), past),
            "position_ids": own["position_ids"],
            "past_key_values": Slots(
                past.slots.keys, past.slots.values, torch.tensor([past.length])
            ),
            "use_cache": True,
        }
        logits, results = self._logits(given, 0)
        past.slots, past.length = results["past_key_values"], past.length + 1
        return type(results)(logits=logits, past_key_values=past)

    def _mask(self, of_tokens: Tensor | None, rows: int, past: Past) -> Tensor:
        """The mask of one query and all slots, of shape `(batch, 1, 1, slots)`."""
        assert past.slots is not None, "a forward of the prompt has filled it"
        free = past.slots.count - past.length - 1
        filled = torch.ones(rows, past.length + 1) if of_tokens is None else of_tokens
        mask = F.pad(filled.bool(), (0, free))[:, None, None]
        if not self._adds_masks:
            return mask
        zeros = torch.zeros(mask.shape, dtype=self._format, device=mask.device)
        lowest = torch.finfo(zeros.dtype).min
        return zeros.masked_fill(~mask, lowest)

    def _logits(self, given: dict[str, Any], position: int) -> tuple[Tensor, Any]:
        """The logits of a position, and all results of the forward."""
        if self._takes_positions:
            results = self._run({**given, "logits_to_keep": torch.tensor([position])})
            return _whole(results["logits"]), results
        results = self._run(given)
        return _whole(results["logits"])[:, position : position + 1], results


class Past:
    """The cache as `generate` holds it.

    Attributes:
        slots: keys and values; None before the first forward.
        length: number of positions that they have.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.slots: Slots | None = None
        self.length = 0

    def get_seq_length(self, *_: Any) -> int:
        """The number of positions that the cache has."""
        return self.length


class Slots:
    """Keys and values of a fixed number of positions, as the layers of a captured forward take and leave them.

    Attributes:
        keys: number of a layer -> keys, of shape `(batch, heads, slots, head size)`.
        values: the same of values.
        place: slot of the new token, of shape `(1,)`; None where the forward has all positions.
    """

    is_compileable = False

    def __init__(
        self, keys: Mapping[int, Tensor], values: Mapping[int, Tensor], place: Tensor | None
    ) -> None:
        self.keys, self.values, self.place = dict(keys), dict(values), place

    @property
    def count(self) -> int:
        """The number of slots."""
        return next(iter(self.keys.values())).shape[2]

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer with the new ones among them."""
        if self.place is not None:
            is_new = (torch.arange(self.count, device=keys.device) == self.place)[:, None]
            keys = torch.where(is_new, keys, self.keys[layer])
            values = torch.where(is_new, values, self.values[layer])
        self.keys[layer], self.values[layer] = keys, values
        return keys, values

    def get_seq_length(self, *_: Any) -> Any:
        """The number of positions before those of the forward."""
        return 0 if self.place is None else self.place

    def get_query_offset(self, *_: Any) -> Any:
        """The position of the first query."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """Number of keys, and position of the first."""
        return query_length if self.place is None else self.count, 0

    def longer(self, count: int) -> Slots:
        """As many slots as asked, of which the further ones are empty."""

        def pad(x: Tensor) -> Tensor:
            return F.pad(_whole(x), (0, 0, 0, count - self.count))

        keys = {layer: pad(x) for layer, x in self.keys.items()}
        return Slots(keys, {layer: pad(x) for layer, x in self.values.items()}, self.place)


pytree.register_container(Slots, ("keys", "values", "place"))


def padded_length(count: int, limit: int | None) -> int:
    """The length that this many tokens are padded to: a power of two, or the model's limit if that is less.

    >>> padded_length(5, None), padded_length(33, None), padded_length(33, 48), padded_length(49, 48)
    (32, 64, 48, 64)
    """
    length = max(SHORTEST, 1 << (count - 1).bit_length())
    return length if limit is None or count > limit else min(length, limit)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _refuse_difference(logits: Tensor, others: Tensor) -> None:
    """Raises StepError if logits depend on what follows their position."""
    if not torch.allclose(logits, others, rtol=1e-3, atol=1e-3):
        worst = (logits - others).abs().max().item()
        raise StepError(
            f"The model's logits differ by {worst:.2g} with other tokens behind the prompt, so that prompts cannot be "
            "padded to a fixed length. Export the weights (model.export), and generate with a plain model."
        )

"""`generate` of a compiled model: the model's own method, whose forwards run by the plan of training.

    tokens = model.generate(prompts, max_new_tokens=8)      # every rank calls it, and gets all tokens

The method of transformers picks tokens and decides when to stop. The object that it calls as the model is a copy
whose forward is `PlannedForward`. All ranks have whole logits and one state of the generator, so they pick alike.

[Note: few lengths] Each shape of a forward takes seconds to capture and plan. So prompts are padded on the right to a
power of two. A causal model gives the same logits with any padding. Each call compares, at the first prompt of each
padded length, the last token's logits with two paddings, of tokens 0 and of tokens 1; other paddings are not tried.
The keys and values of earlier positions lie in as many slots, in the layouts of the plan: where it splits heads, each
rank has those of its heads. A forward of one new token takes them as inputs, and returns them with the token's own.

[Note: checked slots] A model may take the number of slots for the number of tokens, for example in a mask of its own,
and then gives other logits without an error. So only models that transformers lists as able to use a cache of fixed
size keep keys and values. As some of these differ too, each call compares, at the first further token of each number
of slots, its logits with those of a forward of all tokens. Where they differ, a warning says so, and each token takes
a forward of all tokens from there on.

Nothing here imports transformers; the names of arguments and of the cache's methods are those of its version 5.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import StepError
from autopar.runtime.model.slots import Past, Slots, whole

SHORTEST = 32  # length that shorter prompts are padded to
# Implementations of attention that take a mask of each query and key.
_KEPT_WHERE = ("sdpa", "eager")
# Options of `generate` that need forwards of another kind.
_REFUSED = ("assistant_model", "prompt_lookup_num_tokens", "past_key_values", "cache_implementation")
_LIBRARIES = ("torch", "transformers", "peft")  # whose methods take the model apart
Run = Callable[[Mapping[str, Any]], Any]


def generate(model: nn.Module, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls a model's `generate`, whose forwards are those of `run`.

    Args:
        model: user's own model.
        run: function that runs a forward by the plan; tensors of its result are whole or DTensors.
        args: positional arguments of `generate`.
        kwargs: keyword arguments of `generate`.

    Raises StepError for a model without such a method or of another kind than a causal language model, and for
    arguments that the forward cannot serve.
    """
    _refuse_prompt_learning(model)
    if callable(getattr(model, "get_base_model", None)):  # PEFT: the forward is that with adapters
        model = model.get_base_model()  # type: ignore[operator]
    if not callable(getattr(model, "generate", None)):
        raise StepError(f"{type(model).__name__} has no method generate, as models of transformers have.")
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise StepError(
            f"{type(model).__name__} has an encoder, which its generate runs by itself. Export the weights "
            "(model.export), and generate with a plain model."
        )
    asked = _Asked(model, args, kwargs)
    asked.refuse_unserved()
    keeps = _can_keep(model, asked)
    forward = PlannedForward(model, run)
    sampled = copy.copy(model)
    # Hooks of the model are in the captured forward.
    vars(sampled).update(forward=forward, _forward_hooks={}, _forward_pre_hooks={})
    past = {"past_key_values": Past()} if keeps else {"use_cache": False}
    return sampled.generate(*args, **{**kwargs, **past})  # type: ignore[operator]


def is_of_script(found: Any) -> bool:
    """Whether a value is a method that neither torch nor a library of models has written."""
    return inspect.ismethod(found) and found.__func__.__module__.partition(".")[0] not in _LIBRARIES


def _refuse_prompt_learning(model: nn.Module) -> None:
    """Raises StepError for a PEFT model that puts learned positions before the prompt in its own `generate`."""
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    learned = [type(each).__name__ for each in configs.values() if getattr(each, "is_prompt_learning", False)]
    if learned:
        raise StepError(
            f"generate was called for a model with {', '.join(learned)}, whose learned prompt is not part of the "
            "forward of the wrapped model. Save the adapters (autopar.integrations.save_adapters), and generate with "
            "a plain model."
        )


class _Asked:
    """The options of a call of `generate`: its arguments, its generation_config, and the model's own.

    Args:
        model: model that generates.
        args: positional arguments of `generate`.
        kwargs: keyword arguments of `generate`.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        names = inspect.signature(model.generate).parameters  # type: ignore[arg-type]
        self._given = {**dict(zip(names, args, strict=False)), **kwargs}
        defaults = getattr(model, "generation_config", None)
        self._config = self._given.get("generation_config") or defaults

    def __call__(self, name: str) -> Any:
        """The value of an option, None for none."""
        value = self._given.get(name)
        return getattr(self._config, name, None) if value is None else value

    def refuse_unserved(self) -> None:
        """Raises StepError for options that need forwards of another kind than those by the plan."""
        found = [name for name in _REFUSED if self(name) is not None]
        if self("guidance_scale") not in (None, 1):
            found.append("guidance_scale")
        if found:
            raise StepError(
                f"generate was given {', '.join(found)}, which forwards by the plan do not support. Leave these "
                "arguments out, or export the weights (model.export), and generate with a plain model."
            )


def _can_keep(model: nn.Module, asked: Callable[[str], Any]) -> bool:
    """Whether keys and values can be kept: in full attention under a mask, for one sequence of a row."""
    config: Any = getattr(model, "config", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    names = {"past_key_values", "attention_mask", "position_ids"}
    return (
        asked("use_cache") is not False
        and asked("num_beams") in (None, 1)
        and getattr(model, "_can_compile_fullgraph", False)
        and not getattr(model, "_is_stateful", False)
        and getattr(config, "_attn_implementation", "") in _KEPT_WHERE
        and set(kinds) == {"full_attention"}
        and getattr(config, "sliding_window", None) is None
        and names <= {*inspect.signature(model.forward).parameters}
    )


class PlannedForward:
    """The forward of a causal language model for its own `generate`, see [Note: few lengths]."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        """Takes the model, whose configuration it reads, and the function that runs its forward by the plan."""
        self._run, config = run, getattr(model, "config", None)
        self._limit: int | None = getattr(config, "max_position_embeddings", None)
        self._adds_masks = getattr(config, "_attn_implementation", "") == "eager"
        self._format = next((p.dtype for p in model.parameters()), torch.float32)
        self.__signature__ = inspect.signature(model.forward)
        parameters = self.__signature__.parameters
        self._takes_positions = "logits_to_keep" in parameters
        takes_any = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
        self._names = {"return_dict": True} if takes_any or "return_dict" in parameters else {}
        self._checked: set[tuple[int, ...]] = set()
        self._checked_slots: set[tuple[int, ...]] = set()

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
            use_cache: not used; keys and values are cached if there is a cache.
            logits_to_keep: not used; only the logits of the last position are returned.
            return_dict: not used; the result always has names.
            others: arguments that are not supported.
        """
        given = sorted(name for name, value in others.items() if value is not None and value is not False)
        if given:
            raise StepError(
                f"generate gives the model {', '.join(given)}, but under a plan it takes only input_ids, "
                "attention_mask and position_ids. Export the weights (model.export), and generate with a plain model."
            )
        own = {"attention_mask": attention_mask, "position_ids": position_ids}
        if past_key_values is None:
            return self._from_first(input_ids, own, None)
        past_key_values.note(input_ids, position_ids)
        if past_key_values.slots is None:
            return self._from_first(input_ids, own, past_key_values)
        return self._next(input_ids, own, past_key_values)

    def _from_first(self, tokens: Tensor, own: Mapping[str, Tensor | None], past: Past | None) -> Any:
        """The result of a forward of all tokens, padded; fills the cache if there is one."""
        count = tokens.shape[1]
        more = padded_length(count + 1, self._limit) - count
        given: dict[str, Any] = {k: F.pad(x, (0, more), value=1) for k, x in own.items() if x is not None}
        if past is not None:
            given["past_key_values"] = Slots({}, {}, None)

        def run(padding: int) -> tuple[Tensor, Any]:
            padded = F.pad(tokens, (0, more), value=padding)
            return self._logits({**given, "input_ids": padded, "use_cache": past is not None}, count - 1)

        logits, results = run(0)
        if more and (len(tokens), count + more) not in self._checked:
            refuse_difference(logits, run(1)[0])
            self._checked.add((len(tokens), count + more))
        if past is not None:
            past.slots, past.length = results["past_key_values"], count
        return type(results)(logits=logits, past_key_values=past)

    def _next(self, tokens: Tensor, own: Mapping[str, Tensor | None], past: Past) -> Any:
        """The result of a forward of one new token, see [Note: checked slots]."""
        found = self._with_slots(tokens, own, past) if past.serves else None
        assert past.slots is not None and past.tokens is not None, "the prompt has filled it"
        past.length += 1
        key = (len(tokens), past.slots.count)
        if found is not None and key in self._checked_slots:
            return found
        every = {"attention_mask": own["attention_mask"], "position_ids": past.positions}
        expected = self._from_first(past.tokens, every, Past())
        if found is not None:
            past.serves = _are_alike(found.logits, expected.logits)
            self._checked_slots.add(key)
        logits = found.logits if found is not None and past.serves else expected.logits
        return type(expected)(logits=logits, past_key_values=past)

    def _with_slots(self, tokens: Tensor, own: Mapping[str, Tensor | None], past: Past) -> Any:
        """The result of a forward of one new token, whose key and value go to the next free slot."""
        assert past.slots is not None, "a forward of the prompt has filled it"
        if past.length == past.slots.count:
            past.slots = past.slots.longer(padded_length(past.length + 1, self._limit))
        given = {
            "input_ids": tokens,
            "attention_mask": self._mask(own["attention_mask"], len(tokens), past),
            "position_ids": own["position_ids"],
            "past_key_values": Slots(past.slots.keys, past.slots.values, torch.tensor([past.length])),
            "use_cache": True,
        }
        logits, results = self._logits(given, 0)
        past.slots = results["past_key_values"]
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
        given = {**given, **self._names}
        if self._takes_positions:
            results = self._run({**given, "logits_to_keep": torch.tensor([position])})
            return whole(results["logits"]), results
        results = self._run(given)
        return whole(results["logits"])[:, position : position + 1], results


def padded_length(count: int, limit: int | None) -> int:
    """The length that this many tokens are padded to: a power of two, or the model's limit if that is less.

    >>> padded_length(5, None), padded_length(33, None), padded_length(33, 48), padded_length(49, 48)
    (32, 64, 48, 64)
    """
    length = max(SHORTEST, 1 << (count - 1).bit_length())
    return length if limit is None or count > limit else min(length, limit)


def refuse_difference(logits: Tensor, others: Tensor) -> None:
    """Raises StepError if logits depend on what follows their position."""
    if not torch.allclose(logits, others, rtol=1e-3, atol=1e-3):
        worst = (logits - others).abs().max().item()
        raise StepError(
            f"The model's logits differ by {worst:.2g} with other tokens after the prompt, so prompts cannot be padded "
            "to a fixed length. Export the weights (model.export), and generate with a plain model."
        )


def _are_alike(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits with slots equal those of a forward of all tokens up to rounding; warns if they do not.

    The two forwards sum in different orders. So rows may differ by ten roundings of the logits' format, and at least
    by a thousandth of their norm.
    """
    allowed = max(1e-3, 10 * torch.finfo(expected.dtype).eps)
    apart = (logits - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    worst = apart.max().item()
    if worst <= allowed:
        return True
    warnings.warn(
        f"With cached keys and values the model's logits differ from those of a forward of all tokens by {worst:.2g} "
        f"of their norm, where {allowed:.2g} is allowed. generate goes on without the cache, as with use_cache=False, "
        "and each token takes a forward of all tokens.",
        stacklevel=2,
    )
    return False

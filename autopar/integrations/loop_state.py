"""The state of a hand-written loop besides model and optimizer: random generators, data loaders, schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from autopar.errors import AutoparError
from autopar.runtime.ranks.seeds import random_states, set_random_states


def loop_state(accelerator: Accelerator) -> dict[str, Any]:
    """The state of an accelerator's loop as plain values, which load without running code."""
    return {
        "step": accelerator.step,
        "states": [each.state_dict() for each in _stateful(accelerator)],
        "loaders": [_loader_state(loader) for loader in accelerator._dataloaders],
        "random": random_states(),
    }


def load_loop_state(accelerator: Accelerator, state: dict[str, Any]) -> None:
    """Gives schedulers, registered objects, data loaders and generators the state that `loop_state` returned.

    Raises AutoparError where there are others than were saved.
    """
    stateful, loaders = _stateful(accelerator), accelerator._dataloaders
    _refuse_others("schedulers and registered objects", state["states"], stateful)
    _refuse_others("data loaders", state["loaders"], loaders)
    accelerator.step = state["step"]
    for each, own in zip(stateful, state["states"], strict=True):
        each.load_state_dict(own)
    for loader, own in zip(loaders, state["loaders"], strict=True):
        _load_loader_state(loader, own)
    set_random_states(state["random"])


def _stateful(accelerator: Accelerator) -> list[Any]:
    return [*accelerator._schedulers, *accelerator._custom_objects]


def _loader_state(loader: Any) -> dict[str, Any]:
    """The number of passes that a loader has made, and how it shuffles."""
    generator, sampler = loader.synchronized_generator, loader.get_sampler()
    return {
        "passes": loader.iteration,
        "generator": None if generator is None else generator.get_state(),
        "seed": getattr(sampler, "initial_seed", None),
    }


def _load_loader_state(loader: Any, state: dict[str, Any]) -> None:
    loader.iteration = state["passes"]
    if loader.synchronized_generator is not None and state["generator"] is not None:
        loader.synchronized_generator.set_state(state["generator"])
    if state["seed"] is not None and hasattr(loader.get_sampler(), "initial_seed"):
        loader.get_sampler().initial_seed = state["seed"]


def _refuse_others(what: str, saved: Sequence[Any], live: Sequence[Any]) -> None:
    if len(saved) != len(live):
        raise AutoparError(
            f"The checkpoint has the states of {len(saved)} {what}, but there are {len(live)}. Prepare and register "
            "the same ones, in the same order, before load_state."
        )

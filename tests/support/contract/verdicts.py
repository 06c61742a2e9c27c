"""Whether what scripts may expect of a module holds at each door, fresh and trained."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autopar
from autopar.capture.remedies import remedy_of_operands
from tests.support.contract import calls, gradients, of_itself, optimizers, state  # noqa: F401  (they list behaviours)
from tests.support.contract.behaviour import BEHAVIOURS, Model, trained
from tests.support.odd.odd_scripts import Verdict
from tests.support.own_loops import by_compile, plainly

Ready = Callable[[nn.Module], Any]


def by_shards(module: nn.Module) -> Any:
    """The module with sharded parameters, which runs op by op."""
    module = module.double()
    autopar.shard_(module, "zero3", mesh={"dp": 2})
    return module


def by_backend(module: nn.Module) -> Any:
    """The module, whose calls go through torch.compile."""
    torch.compiler.reset()
    module = module.double()
    module.compile(backend="autopar", options={"mesh": {"dp": 2}, "recipe": "ddp"})
    return module


CONTRACT_DOORS: dict[str, Ready] = {
    "ddp": by_compile({"recipe": "ddp"}),
    "zero3": by_compile({"recipe": "zero3"}),
    "tp": by_compile({"mesh": {"tp": 2}, "recipe": "tp"}),
    "stages": by_compile({"mesh": {"pp": 2}}),
    "shard_": by_shards,
    "backend": by_backend,
}
MOMENTS = ("fresh", "trained")


def found_of(name: str, ready: Ready, moment: str) -> Any:
    """What a behaviour finds, from one seed, of a fresh module or of one that was trained for a step."""
    torch.manual_seed(0)
    model = ready(Model())
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6).sin()
    y = torch.linspace(0, 1, 32, dtype=torch.float64).view(8, 4)
    if moment == "trained":
        trained(model, torch.optim.SGD(model.parameters(), 0.1), x, y, 1)
        model.zero_grad()
    return BEHAVIOURS[name](model, x.clone(), y.clone())


def differences(found: Any, expected: Any) -> list[str]:
    """Where two findings are not equal: numbers within 1e-9, all else exactly."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return [f"{key}: {each}" for key in expected for each in differences(found[key], expected[key])]
    is_list = isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple))
    if is_list and len(found) == len(expected):
        return [each for a, b in zip(found, expected, strict=True) for each in differences(a, b)]
    if isinstance(expected, float) and isinstance(found, float):
        is_close = abs(found - expected) <= 1e-9 * max(1.0, abs(expected)) or (found != found and expected != expected)
        return [] if is_close else [f"{found}, and plainly {expected}"]
    return [] if found == expected else [f"{found}, and plainly {expected}"]


def verdict_of_behaviour(name: str, door: str) -> Verdict:
    """Asks a behaviour of a plain model and of one at a door, at both moments, over all ranks of the process group."""
    label, said = f"{name}, {door}", []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for moment in MOMENTS:
            word, text = _outcome(functools.partial(found_of, name, moment=moment), CONTRACT_DOORS[door])
            said.append((word, f"{moment}: {text}" if text else ""))
    order = ("breaks", "differs", "refused", "equal")
    word, text = min(said, key=lambda each: order.index(each[0]))
    return Verdict(label, word, text)


def _outcome(find: Callable[..., Any], ready: Ready) -> tuple[str, str]:
    expected = find(ready=plainly)
    try:
        found = find(ready=ready)
    except autopar.AutoparError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:  # whatever a script would meet
        has_our_words = re.search(r"autopar|docs/", str(error)) or remedy_of_operands(error)
        return "refused" if has_our_words else "breaks", f"{type(error).__name__}: {error}"
    apart = differences(found, expected)
    return ("differs", "; ".join(apart)[:600]) if apart else ("equal", "")

"""The table of parts, and what a part is given."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from benchmarks.accelerator.figures import Figure, Picture, Sentence

Found = Figure | Picture | Sentence
Scope = Literal["slice", "whole"]
T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """What a part measures on.

    Attributes:
        device: the device of a single rank.
        scope: "whole" for all subjects of a part; "slice" for the first one, in a minute for all parts.
        folder: the folder of results, where parts leave files for later ones.
    """

    device: torch.device
    scope: Scope
    folder: Path

    @property
    def on_accelerator(self) -> bool:
        return self.device.type != "cpu"

    @property
    def processes(self) -> Any:
        """How a part starts ranks, a context of multiprocessing.

        On a processor the part is itself a fork of a server that has imported everything, and so are its ranks, if
        they start before the part computes. Nothing that has asked for an accelerator may fork.
        """
        return multiprocessing.get_context("spawn" if self.on_accelerator else "fork")

    def size(self, cpu: T, accelerator: T) -> T:
        """The size for this kind of device."""
        return accelerator if self.on_accelerator else cpu

    def subjects(self, every: Sequence[T]) -> Sequence[T]:
        """Every subject, or the first one in a slice."""
        return every if self.scope == "whole" else every[:1]


@dataclass(frozen=True)
class Part:
    """One part of the command.

    Attributes:
        name: what `--only` calls it.
        question: what it answers, for the page.
        home: module and function, `module:function`, a generator over what it finds.
        share: its share of the time; what earlier parts leave goes to later ones in proportion.
    """

    name: str
    question: str
    home: str
    share: float

    def run(self, context: Context) -> Iterator[Found]:
        """Imports the part and runs it, finding by finding."""
        module, _, function = self.home.partition(":")
        made: Any = getattr(importlib.import_module(module), function)
        return cast(Callable[[Context], Iterator[Found]], made)(context)


def _part(name: str, module: str, share: float, question: str) -> Part:
    return Part(name, question, f"benchmarks.accelerator.{module}:run", share)


PARTS: tuple[Part, ...] = (
    _part("calibrate", "calibration", 0.08, "What can this machine do?"),
    _part("start", "start", 0.03, "Does a model on the host go to its accelerators by itself?"),
    _part("one-rank", "one_rank", 0.2, "Does a compiled model cost what the plain model costs?"),
    _part("truth", "truth", 0.15, "Does the cost model tell the truth about this device?"),
    _part("recomputation", "recomputation", 0.1, "What does recomputation of ops cost here?"),
    _part("several-ranks", "several_ranks", 0.25, "Are all plans exact on this device's kernels?"),
    _part("collectives", "own_collectives", 0.2, "Are plans exact over the device's own collectives?"),
    _part("links", "links", 0.25, "What do recipes and schedules take over the links between devices?"),
    _part("tiers", "tiers", 0.06, "Is training exact with parameters on the host?"),
    _part("overlap", "overlap", 0.08, "How much communication lies beside compute?"),
    _part("precision", "precision", 0.08, "Is every number format computed as it is defined?"),
    _part("faults", "faults", 0.06, "What does a user see when a step fails?"),
    _part("determinism", "determinism", 0.1, "Does a plan give the same bits twice?"),
)

"""`torch.finfo`, the limits of a type, as a model's code asks for it: noted in one run, and given alike in another."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch

from autopar._torch.arithmetic import widened_dtype
from autopar._torch.contexts import replaced

_Place = tuple[types.CodeType, int]  # code, and the position in it of the call
_Answer = Callable[[_Place, torch.dtype], torch.dtype]  # place and type asked for -> type to answer
_FINFO = torch.finfo


class AskedLimits:
    """The types whose limits a model's code asks for, by the place in the code.

    `torch.finfo(x.dtype).eps` is a constant of the model, as its captured program has it. In a run in float64 x has
    another type, and the model would be given another constant: another model, not the same one in another arithmetic.
    A place that asks several times is given its types in turn, over and over.
    """

    def __init__(self) -> None:
        self._noted: defaultdict[_Place, list[torch.dtype]] = defaultdict(list)

    def noted(self) -> AbstractContextManager[None]:
        """Context in which questions are noted and answered."""
        return _answered_by(self._note)

    def given(self) -> AbstractContextManager[None]:
        """Context in which a noted place that asks for float64, where it had asked for a lower type, is given that."""
        turns = {place: itertools.cycle(asked) for place, asked in self._noted.items()}
        return _answered_by(functools.partial(_type_in_turn, turns))

    def _note(self, place: _Place, asked: torch.dtype) -> torch.dtype:
        self._noted[place].append(asked)
        return asked


def _type_in_turn(turns: Mapping[_Place, Iterator[torch.dtype]], place: _Place, asked: torch.dtype) -> torch.dtype:
    noted = next(turns.get(place, iter(())), asked)
    return noted if widened_dtype(noted) == asked else asked


def _answered_by(answer: _Answer) -> AbstractContextManager[None]:
    return replaced(torch, finfo=_Finfo(answer))


class _Finfo:
    """Replaces `torch.finfo`, also in `isinstance` checks."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer

    def __call__(self, type: torch.dtype | None = None) -> torch.finfo:
        asked = torch.get_default_dtype() if type is None else type
        frame = sys._getframe(1)
        return _FINFO(self._answer((frame.f_code, frame.f_lasti), asked))

    def __instancecheck__(self, x: object) -> bool:
        return isinstance(x, _FINFO)

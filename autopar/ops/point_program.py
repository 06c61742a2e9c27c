"""Functions of one score, or of one place in a mask, as text: what `flex_attention` takes as score_mod and mask_mod.

    {"inputs": ["b", "h", "q", "k", "x0"],
     "lines": [["aten.index.Tensor", [{"at": 4}, [{"at": 0}, {"at": 2}]], {}],
               ["aten.ge.Tensor", [{"at": 2}, {"at": 3}], {}]],
     "result": 6}

The inputs are scalars (a score, and the indices b, h, q and k of batch, head, query and key) and then tensors that the
function reads. Every line calls an operator of torch; `{"at": i}` is input or line number i.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar import _torch
from autopar._torch import pytree

INDICES = ("b", "h", "q", "k")
SCORE = "score"
LOOKUP = "aten.index.Tensor"
Line = tuple[str, Any, Any]  # name of an operator, its arguments, its keyword arguments


@dataclass(frozen=True)
class At:
    """An input or line of a program, by its number."""

    number: int


@dataclass(frozen=True)
class PointProgram:
    """A function of scalars.

    Attributes:
        inputs: names of the inputs: perhaps `score`, then b, h, q, k, then those of tensors.
        lines: calls of operators, in order.
        result: number of the input or line that is the result.
    """

    inputs: tuple[str, ...]
    lines: tuple[Line, ...]
    result: int

    @property
    def scalars(self) -> int:
        """Number of the inputs before the tensors."""
        return len(INDICES) + (self.inputs[0] == SCORE)

    def number(self, name: str) -> int:
        """The number of an input."""
        return self.inputs.index(name)

    def __call__(self, *given: Tensor) -> Tensor:
        """The result for the values of all inputs."""
        values: list[Any] = list(given)
        for name, args, kwargs in self.lines:
            args, kwargs = pytree.tree_map_only(At, lambda at: values[at.number], (args, kwargs))
            values.append(_operator(name)(*args, **kwargs))
        found: Tensor = values[self.result]
        return found

    def lookups(self, tensor: int) -> list[tuple[int | None, ...]] | None:
        """For every read of a tensor input, the inputs that index its dims, None for an index that is computed.

        None if it is also read in another way than `x[i, j, ...]` with an index for every dim.
        """
        found = []
        for name, args, kwargs in self.lines:
            if At(tensor) not in pytree.tree_leaves((args, kwargs)):
                continue
            if name != LOOKUP or args[0] != At(tensor) or At(tensor) in pytree.tree_leaves(args[1]):
                return None
            found.append(tuple(i.number if isinstance(i, At) else None for i in args[1]))
        return None if self.result == tensor else found

    def shifted(self, index: str, tensors: frozenset[int]) -> PointProgram:
        """The program with one more tensor input, which is added to an index wherever it is read.

        Args:
            index: name of the index.
            tensors: numbers of the tensor inputs that are split by the index: it is not shifted where it looks them up.
        """
        own, last = self.number(index), len(self.inputs)
        moved = At(last + 1)  # the number of the new first line, behind the new input

        def renumbered(at: At) -> At:
            return at if at.number < last else At(at.number + 2)

        def line(name: str, args: Any, kwargs: Any) -> Line:
            is_local = name == LOOKUP and isinstance(args[0], At) and args[0].number in tensors
            new = (
                (lambda at: renumbered(at)) if is_local else (lambda at: moved if at.number == own else renumbered(at))
            )
            return name, *pytree.tree_map_only(At, new, (args, kwargs))

        first: Line = "aten.add.Tensor", (At(own), At(last)), {}
        lines = (first, *(line(*each) for each in self.lines))
        result = moved.number if self.result == own else renumbered(At(self.result)).number
        return PointProgram((*self.inputs, f"first_{index}"), lines, result)

    def reads_beyond_lookups(self, index: str, tensors: frozenset[int]) -> bool:
        """Whether an index is read elsewhere than to look up these tensors."""
        own = self.number(index)
        return self.result == own or any(
            At(own) in pytree.tree_leaves((args, kwargs))
            and not (name == LOOKUP and isinstance(args[0], At) and args[0].number in tensors)
            for name, args, kwargs in self.lines
        )

    def text(self) -> str:
        """The program as JSON. Raises ValueError for an argument that has no text."""
        lines = [[name, _written(list(args)), _written(dict(kwargs))] for name, args, kwargs in self.lines]
        return json.dumps({"inputs": self.inputs, "lines": lines, "result": self.result})


@functools.cache
def read_program(text: str) -> PointProgram:
    """The program that `PointProgram.text` has written."""
    document = json.loads(text)
    lines = tuple((name, _read(args), _read(kwargs)) for name, args, kwargs in document["lines"])
    return PointProgram(tuple(document["inputs"]), lines, document["result"])


@functools.cache
def _operator(name: str) -> Callable[..., Any]:
    found = _torch.operator_named(name)
    if found is None:
        raise ValueError(f"There is no operator {name}.")
    return found


def _written(x: Any) -> Any:
    if isinstance(x, At):
        return {"at": x.number}
    if isinstance(x, torch.dtype):
        return {"dtype": str(x).removeprefix("torch.")}
    if isinstance(x, (list, tuple)):
        return [_written(each) for each in x]
    if isinstance(x, dict):
        return {"named": {key: _written(each) for key, each in x.items()}}
    if type(x) not in (type(None), bool, int, float):
        raise ValueError(f"an argument is a {type(x).__name__}")
    return x


def _read(x: Any) -> Any:
    if isinstance(x, list):
        return [_read(each) for each in x]
    if not isinstance(x, dict):
        return x
    ((kind, value),) = x.items()
    if kind == "at":
        return At(value)
    return getattr(torch, value) if kind == "dtype" else {key: _read(each) for key, each in value.items()}


def over_all(
    program: PointProgram, score: Tensor | None, indices: Sequence[Tensor], tensors: Sequence[Tensor]
) -> Tensor:
    """The values of a program at all points of a grid, of shape (b, h, q, k).

    Args:
        program: the program.
        score: scores of that shape, for a program that takes one.
        indices: batches, heads, queries and keys of the grid, each of one dim.
        tensors: tensors that the program reads.
    """
    if not all(map(len, indices)):  # a rank without rows has no points, and vmap takes none
        return indices[0].new_empty([*map(len, indices)], dtype=torch.bool) if score is None else score
    scores = [] if score is None else [score]
    call: Callable[..., Any] = program
    for dim in reversed(range(4)):
        lanes = [0 if i == dim else None for i in range(4)]
        call = torch.vmap(call, in_dims=(*(0 for _ in scores), *lanes, *(None for _ in tensors)))
    found: Tensor = call(*scores, *indices, *tensors)
    return found

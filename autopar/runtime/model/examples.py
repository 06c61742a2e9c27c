"""Batches without values, of the shapes that a caller lists: what `model.prepare(shapes=[...])` prepares for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import StepError
from autopar.runtime.execute.inputs import Arguments, Shape, shape_words


class Examples:
    """The first batch that a module was given, which shows the model's inputs."""

    def __init__(self) -> None:
        self._first: Arguments | None = None

    def note(self, arguments: Arguments) -> Arguments:
        """Remembers the first arguments without their values, and returns those it is given."""
        if self._first is None:
            self._first = arguments.without_values()
        return arguments

    def at(self, shapes: Sequence[Any], given: Arguments) -> list[Arguments]:
        """A batch for each entry.

        Args:
            shapes: list of shapes, see `at_shape`.
            given: arguments beside the list, without tensors if there are none.

        Raises StepError for an entry that is not a shape of such a batch, and where no batch is known.
        """
        example = given if given.tensors else self._first
        if example is None:
            raise StepError(
                "prepare(shapes=...) was called before any batch, so the model's inputs are not known. Give a batch "
                "with it, such as prepare(tokens, labels, shapes=...), or give example_inputs to autopar.compile."
            )
        return [at_shape(example, shape) for shape in shapes]


def at_shape(example: Arguments, wanted: Any) -> Arguments:
    """The inputs of a batch with other shapes, and without values.

    Args:
        example: inputs of some batch.
        wanted: shape of the first tensor, which all tensors of the same shape take too, while the others take its
            number of rows if they had as many; or a mapping from names of keyword arguments to shapes; or a list with
            the shape of every tensor.

    >>> import torch
    >>> example = Arguments.of((torch.ones(4, 8), torch.ones(4, 8), torch.ones(4), torch.ones(2)), {})
    >>> at_shape(example, (6, 16)).shapes
    ((6, 16), (6, 16), (6,), (2,))

    Raises StepError for anything else.
    """
    own = example.shapes
    if isinstance(wanted, Mapping):
        found = _by_name(example, wanted)
    elif _is_shape(wanted) and own and len(wanted) == len(own[0]):
        found = [_followed(shape, own[0], tuple(wanted)) for shape in own]
    elif isinstance(wanted, Sequence) and all(map(_is_shape, wanted)):
        found = [tuple(shape) for shape in wanted]
    else:
        found = []
    if list(map(len, found)) != list(map(len, own)):
        raise StepError(
            f"prepare was given the shape {wanted!r} for a batch of shapes {shape_words(own)}. An entry of shapes is "
            f"the shape of the first tensor, as {own[0] if own else ()!r} is, a dict of keywords with their shapes, or "
            "a list with the shape of every tensor."
        )
    return example.of_shapes(found).without_values()


def _is_shape(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(size, int) for size in value)


def _followed(shape: Shape, first: Shape, wanted: Shape) -> Shape:
    """The shape of a tensor beside the first one, whose shape changes from `first` to `wanted`."""
    if shape == first:
        return wanted
    has_rows = bool(shape and first) and shape[0] == first[0]
    return (wanted[0], *shape[1:]) if has_rows else shape


def _by_name(example: Arguments, wanted: Mapping[Any, Sequence[int]]) -> list[Shape]:
    """The shapes of all tensors, of which some are given by keyword; none for a keyword that is not a tensor."""
    given = {f"[1][{name!r}]": tuple(shape) for name, shape in wanted.items()}
    if not given.keys() <= set(example.paths):
        return []
    pairs = zip(example.paths, example.shapes, strict=True)
    return [given.get(path, shape) for path, shape in pairs]

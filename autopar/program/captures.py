"""Captures of one model at many sizes: a graph for the first sizes, and one with open sizes for all that follow.

The first batch is captured as it is. At the second, the dims in which the two differ are left open, and the graph of
every further batch is that one with its sizes put in (`autopar.passes.close_sizes`): no Python of the model runs
again. A graph with open sizes is taken only where it is proved right:

- with the sizes of an earlier batch put in, it is, node by node, the graph that was captured for that batch;
- the sizes that are put in meet every condition that the trace has noted, such as `tokens.shape[1] <= 512`.

If this fails, each size is captured separately, as long as the model is the same.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar._torch import OtherSizes, pytree
from autopar.capture.captured import Captured
from autopar.capture.open_sizes import OpenDims
from autopar.passes import clean_up, close_sizes

Shapes = tuple[tuple[int, ...], ...]
Capture = Callable[[OpenDims], Captured]  # runs the model, with these dims of its inputs open


class Captures:
    """The captures of a model while its Python values stayed the same.

    Attributes:
        count: how often the model was run to capture it.
        why_closed: the reason why a size was captured by itself; "" if none was but for the first of its kind.
    """

    def __init__(self) -> None:
        self._by_parts: dict[tuple[int, bool], SizedCaptures] = defaultdict(SizedCaptures)

    @property
    def count(self) -> int:
        return sum(each.count for each in self._by_parts.values())

    @property
    def why_closed(self) -> str:
        return next((s.why_closed for s in self._by_parts.values() if s.why_closed), "")

    def captured(self, micro_batches: int, shapes: Shapes, capture: Capture, *, is_smaller: bool = False) -> Captured:
        """The cleaned graph for inputs of these shapes.

        Args:
            micro_batches: number of parts of a batch, of which the inputs are one.
            shapes: shapes of the tensors among the inputs.
            capture: function that runs the model.
            is_smaller: whether the first micro-batches of the batch have more rows, and a capture of their own: where
                both sizes are new, two plain captures are cheaper than one with open sizes.
        """
        try:
            return self._by_parts[micro_batches, is_smaller].captured(shapes, capture)
        except Exception as error:
            if micro_batches > 1:
                error.add_note(
                    f"The batch is run in {micro_batches} micro-batches, and the model raised this error for one of "
                    f"them, of the shapes {', '.join(str(list(shape)) for shape in shapes)}."
                )
            raise


class SizedCaptures:
    """The captures of a model for one number of micro-batches, at many sizes.

    Attributes:
        count: how often the model was run to capture it.
        why_closed: the reason why a size was captured by itself; "" if none was but for the first.
    """

    def __init__(self) -> None:
        self.count, self.why_closed = 0, ""
        self._found: dict[Shapes, str] = {}  # shapes -> digest of the capture at these shapes
        self._open: Captured | None = None
        self._tried: set[OpenDims] = set()

    def captured(self, shapes: Shapes, capture: Capture) -> Captured:
        """The cleaned graph for inputs of these shapes."""
        dims = self._dims(shapes)
        try:
            if self._open is not None:
                return at_sizes(self._open, shapes)
        except OtherSizes as error:
            self.why_closed = str(error) if dims in self._tried else self.why_closed
        try:
            if any(dims) and dims not in self._tried:
                self._tried.add(dims)
                return self._opened(shapes, dims, capture)
        except Exception as error:  # whatever the model raises for a size that is not a number
            self.why_closed = str(error).strip() or type(error).__name__
        found = self._run(capture, ())
        self._found[shapes] = _digest(found)
        return found

    def _dims(self, shapes: Shapes) -> OpenDims:
        """The dims to leave open: those in which batches differ; none if one has size 0 or 1, which are special."""
        alike = [s for s in self._found if list(map(len, s)) == list(map(len, shapes))]
        dims = tuple(
            tuple(d for d, size in enumerate(own) if any(s[i][d] != size for s in alike))
            for i, own in enumerate(shapes)
        )
        sizes = [own[d] for own, open_ in zip(shapes, dims, strict=True) for d in open_]
        return dims if all(size > 1 for size in sizes) else ()

    def _opened(self, shapes: Shapes, dims: OpenDims, capture: Capture) -> Captured:
        """The graph for these shapes from a new capture with open sizes. Raises OtherSizes if that is not right."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the capture of the first batch has warned
            made = self._run(capture, dims)
        for earlier in reversed(self._found):
            try:
                is_same = _digest(at_sizes(made, earlier)) == self._found[earlier]
            except OtherSizes:
                continue
            if not is_same:
                raise OtherSizes("with open sizes the model gives another graph")
            found = at_sizes(made, shapes)
            self._open = made
            return found
        at_sizes(made, next(reversed(self._found)))  # raises the reason
        raise AssertionError("it was not the graph of any earlier batch")

    def _run(self, capture: Capture, dims: OpenDims) -> Captured:
        self.count += 1  # also where the model raises
        found = capture(dims)
        self.count -= found.is_stored
        if found.is_clean:
            return found
        clean_up(found.module)
        return replace(found, is_clean=True)


def at_sizes(captured: Captured, shapes: Sequence[Sequence[int]]) -> Captured:
    """A capture with open sizes, for inputs of these shapes. Raises OtherSizes if it is not right for them."""
    module = close_sizes(captured.module, list(captured.inputs), shapes)
    return replace(captured, module=module)


def _digest(captured: Captured) -> str:
    """A hash of everything in which two captures of the same Python code may differ."""
    parts: list[object] = [captured.fingerprint]
    for node in captured.module.graph.nodes:
        values = pytree.tree_leaves(node.meta.get("val"))
        parts.append((node.name, [x.stride() for x in values if hasattr(x, "stride")]))
    parts.append([(w.name, type(w.value), repr(w.value), w.adds) for w in captured.writes])
    parts += [captured.mutated, captured.has_more, captured.forms, len(captured.numbers)]
    parts += [captured.out_spec, list(captured.inputs.items()), list(captured.constants)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()

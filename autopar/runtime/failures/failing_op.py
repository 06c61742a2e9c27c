"""Errors of single ops in a running graph: PyTorch's own, with notes of the op's line and module in the model.

Where memory runs out, notes say what the plan was priced to take, and what to change.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import fx

from autopar.capture.remedies import traced_line
from autopar.errors import AutoparError, PeerError
from autopar.ops.generated import graph_of, node_of_line, op_words
from autopar.ops.nodes import module_path
from autopar.units import format_bytes

_NAMES = 3  # of the tensors of a collective that a message has
_NO_MEMORY = "can't allocate memory"  # of PyTorch's allocator for the CPU, which raises a RuntimeError
_REMEDY = (
    "remedy: ask for a plan that needs less memory per rank: a bound (memory_bytes=...), more micro_batches, "
    "recompute='full', a recipe that stores parameters in shards (recipe='zero3'), or a smaller batch. "
    "model.explain() shows the peak that was priced."
)


@contextlib.contextmanager
def naming_line() -> Iterator[None]:
    """Adds to an error of an op the line and the module of the model, and a remedy if memory ran out."""
    try:
        yield
    except AutoparError:
        raise
    except PeerError as error:
        node = _failed_node(error)
        if node is not None and not error.op:
            error.op = op_words(node)
        raise
    except Exception as error:
        node = _failed_node(error)
        if node is not None:
            error.add_note(f"where:  {traced_line(node)}")
            if path := module_path(node):
                error.add_note(f"module: {path}")
        _add_remedy(error)
        raise


@contextlib.contextmanager
def naming_op(words: str) -> Iterator[None]:
    """Adds the purpose of the collective, such as "the loss", to a PeerError."""
    try:
        yield
    except PeerError as error:
        error.op = error.op or words
        raise


def naming_tensors(what: str, names: Sequence[str]) -> AbstractContextManager[None]:
    """A context that says in a PeerError of which tensors the collective was.

    Args:
        what: what they are: "gradients".
        names: their names, of which the first few are said.
    """
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return naming_op(f"the {what} of {', '.join(names[:_NAMES])}{more}")


@contextlib.contextmanager
def naming_plan(predicted: Callable[[], tuple[float, float]]) -> Iterator[None]:
    """Adds the predicted memory per rank and a remedy to the out-of-memory error of a step.

    A step also runs out of memory while no op of a graph runs: in backward, or in the buckets of gradients.

    Args:
        predicted: predicted seconds of a step and peak bytes of a rank, asked for after an error alone.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            size = format_bytes(predicted()[1])
            error.add_note(f"planned: a peak of {size} per rank, including optimizer states")
        _add_remedy(error)
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of a device or of the host did not suffice."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _NO_MEMORY in str(error)


def _add_remedy(error: Exception) -> None:
    """Says once in an error of memory that ran out what to change."""
    if is_out_of_memory(error) and _REMEDY not in getattr(error, "__notes__", ()):
        error.add_note(_REMEDY)


def _failed_node(error: BaseException) -> fx.Node | None:
    """The node of the innermost graph that was running, by the line of its code; None in compiled code."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = graph_of(frame)
        if module is not None:
            text = traceback.StackSummary.extract([(frame, line)])[0].line or ""
            found = node_of_line(module, text)
    return found

"""Captures of models, kept in a folder for the next start of a script.

A capture is stored under a hash of all that it depends on: the Python of the model in reach, code and values
(`autopar.capture.stored.python_state`); the arguments; the precision; the switches of torch; the code of autopar and
the version of torch. A capture that may depend on anything else is not stored (`autopar.capture.stored.cacheable`), and
a file that is damaged, or that another user owns or can write, is not used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar._torch import pytree
from autopar.capture.captured import Captured
from autopar.capture.export import LossFunction
from autopar.capture.guards.guards import Place
from autopar.capture.open_sizes import OpenDims
from autopar.capture.stored.cacheable import refuse_unportable
from autopar.capture.stored.captured_text import read_captured, write_captured
from autopar.capture.stored.graph_text import sizes_of
from autopar.capture.stored.python_state import NoText, PythonState
from autopar.ir import MixedPrecision
from autopar.ir.files import MOST_BYTES, parse_json
from autopar.passes import clean_up
from autopar.planning.cache_files import read_cached, write_cached
from autopar.planning.stored_plans import code_version, text_of

log = logging.getLogger("autopar")

_ENDING = ".capture"


@dataclasses.dataclass(frozen=True)
class CaptureQuestion:
    """A model with its inputs, as a key for stored captures.

    Attributes:
        model: the model.
        args, kwargs: arguments of one call.
        loss_fn: the loss function; None where the model returns its loss, and for a forward.
        is_step: whether the loss is captured, too.
        precision: mixed-precision policy.
        open_dims: dims of inputs whose sizes are left open.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: LossFunction | None
    is_step: bool
    precision: MixedPrecision | None
    open_dims: OpenDims

    def _tensors(self) -> list[Tensor]:
        """The tensors of the arguments and of the model."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        held = (*self.model.parameters(), *self.model.buffers())
        return [x for x in (*leaves, *held) if isinstance(x, Tensor)]

    def state(self) -> PythonState:
        """The Python values that the capture could read now."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        others = {f"argument {i}": x for i, x in enumerate(leaves) if not isinstance(x, Tensor)}
        return PythonState({"model": self.model, "loss": self.loss_fn} | others)

    def key(self, state: PythonState) -> str:
        """A hash of everything that the answer depends on. Raises NoText where it is not known."""
        if state.obstacle or _torch.modes_above():
            raise NoText(state.obstacle or "a mode or hook of torch that changes ops is active")
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        tensors = [_likeness(x) if isinstance(x, Tensor) else None for x in leaves]
        casts = [
            (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))
            for kind in sorted(_torch.autocast_kinds())
        ]
        # By the kind of a GPU torch picks its kernels of attention.
        kinds = sorted({_torch.device_model(x.device) for x in self._tensors()})
        question = (
            code_version(),
            sys.version,
            kinds,
            state.digest,
            str(spec),
            tensors,
            self.is_step,
            self.precision,
            [list(dims) for dims in self.open_dims],
            casts,
            list(map(str, _torch.switches().items())),
        )
        return hashlib.sha256(text_of(question).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class StoredCaptures:
    """A folder of captures.

    Attributes:
        folder: folder of the files, made when the first capture is stored; None to store nothing.
    """

    folder: Path | None

    def captured(self, question: CaptureQuestion, capture: Callable[[], Captured]) -> Captured:
        """The stored capture for a question, or else that of `capture()`, which is then stored if it can be.

        Captures are cleaned before they are stored, since that takes longer than reading them.
        """
        if self.folder is None:
            return capture()
        try:
            state = question.state()
            key = question.key(state)
        except Exception as error:  # also of the user's own: values are asked for their attributes and texts
            log.info("The capture is not stored: %s.", error)
            return capture()
        path = self.folder / f"{key}{_ENDING}"
        found = self._read(path, state, question)
        if found is None:
            found = capture()
            clean_up(found.module)
            found = dataclasses.replace(found, is_clean=True)
            self._write(path, state, question, found)
        return found

    def _read(self, path: Path, state: PythonState, question: CaptureQuestion) -> Captured | None:
        """The capture in a file; None, with a line in the log, for a file that cannot be used."""
        try:
            arguments = question.args, question.kwargs
            found = read_captured(parse_json(read_cached(path)), state, arguments, question.precision)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever torch raises for a graph that somebody else has written
            log.info("The stored capture %s is not used; the model is captured again: %s", path, error)
            return None
        log.info("The capture was stored by an earlier start (%s).", path)
        return dataclasses.replace(found, is_stored=True)

    def _write(self, path: Path, state: PythonState, question: CaptureQuestion, captured: Captured) -> None:
        """Stores a capture that is right for every process with the same key; else a line in the log says why not."""
        try:
            refuse_unportable(captured, state)
            if question.state().digest != state.digest:
                raise NoText("the capture has changed objects of Python")
            body, document = _text(write_captured(captured, state))
            arguments = question.args, question.kwargs
            again = read_captured(document, state, arguments, question.precision)
            if not is_same_capture(captured, again):
                raise NoText("its text does not say all of it")
            write_cached(body, path)
        except NoText as error:
            log.info("The capture is not stored: %s.", error)
        except OSError as error:
            log.warning("The capture is not stored in %s: %s.", path.parent, error.strerror)


def is_same_capture(captured: Captured, other: Captured) -> bool:
    """Whether two captures of one model are equal in everything that is computed from them."""
    apart = ("module", "constants", "guards", "ran", "is_stored")  # compared in a way of their own
    names = [f.name for f in dataclasses.fields(Captured) if f.name not in apart]
    return (
        all(getattr(captured, name) == getattr(other, name) for name in names)
        and list(map(_said, captured.module.graph.nodes)) == list(map(_said, other.module.graph.nodes))
        and sizes_of(captured.module) == sizes_of(other.module)
        and captured.constants.keys() == other.constants.keys()
        and all(_is_equal(x, other.constants[name]) for name, x in captured.constants.items())
        and [_where(g.place) for g in captured.guards] == [_where(g.place) for g in other.guards]
        and other.guards.hold()
    )


def _where(place: Place) -> tuple[object, ...]:
    """A place, for comparison; of a class, Python makes a new view of the attributes at each reading."""
    holder = type(place.holder) if isinstance(place.holder, MappingProxyType) else id(place.holder)
    return holder, place.key, place.words, place.line


def _said(node: Any) -> str:
    """Everything that is computed from a node."""
    values = [
        (x.requires_grad, isinstance(x, nn.Parameter), x.stride(), x.dtype, x.shape, x.device)
        if isinstance(x, Tensor)
        else x
        for x in pytree.tree_leaves(node.meta.get("val"))
    ]
    kinds = [type(x).__name__ for x in pytree.tree_leaves((node.args, node.kwargs))]
    stack, line = node.meta.get("nn_module_stack"), node.meta.get("stack_trace")
    said = (node.op, node.name, str(node.target), node.args, node.kwargs, kinds, values)
    return repr((*said, stack, line))


def _is_equal(x: Tensor, other: Tensor) -> bool:
    if x is other:
        return True
    alike = (x.shape, x.dtype, x.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(x.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def _likeness(x: Tensor) -> list[str]:
    """The properties of an argument that a trace knows. Raises NoText for a tensor of a subclass."""
    if type(x) not in (Tensor, nn.Parameter, _torch.FakeTensor):
        raise NoText(f"an argument is a {type(x).__name__}")
    said = (tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad, x.layout, x.is_leaf)
    return list(map(str, said))


def _text(document: Any) -> tuple[str, Any]:
    """The JSON of a capture, and what is read from it. Raises NoText for one that `parse_json` would refuse."""
    try:
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
        again = parse_json(text)
    except ValueError as error:
        raise NoText(f"the capture has no text that can be read back ({error})") from None
    if len(text) > MOST_BYTES // 2:  # a character may take more than one byte
        raise NoText(f"its text has {len(text)} characters")
    return text, again

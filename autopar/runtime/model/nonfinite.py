"""The op that made the first NaN or infinity of a step, on whatever rank.

Every op of a step is watched, in forward and in backward. One whose operands hold no NaN and whose result does has made
it; so has one that makes an infinity of finite operands and finite arguments. What arrives from other ranks was made
there: all ranks run the step to its end, and then compare.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import math
import re
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar import _torch
from autopar._torch import pytree
from autopar.capture.remedies import traced_line
from autopar.errors import StepError
from autopar.ops.generated import GENERATED, graph_of, node_of_line
from autopar.ops.nodes import module_path
from autopar.program.program import Program
from autopar.runtime.execute.inputs import Arguments
from autopar.runtime.failures.finite import FiniteLoss, described
from autopar.runtime.model.module import CompiledModule
from autopar.runtime.parameters.loss_scale import gradients_of
from autopar.runtime.parameters.weight_stashing import refuse_gradients
from autopar.runtime.ranks.all_ranks import AllRanks

_PHASES = ("input or parameter", "forward", "backward", "sum over ranks")
# Their results are memory as it was found.
_UNINITIALISED = ("aten::empty", "aten::new_empty")


@dataclass(frozen=True)
class NonFinite:
    """Where the first NaN or infinity of a step comes from; prints as a few lines.

    Attributes:
        what: "NaN" or "infinity".
        phase: "forward" or "backward" of the op; "input or parameter" where the value was there before the step,
            "sum over ranks" where every op on every rank gave finite values of finite ones.
        rank: the rank that it came from.
        op: the operator, such as "aten.log.default"; the name of the input or parameter.
        line: line of the model that the op comes from; "" where it has none.
        module: path of the innermost module that the op belongs to; "" for the model itself.
        operands: shape, format and range of each operand.
        order: number of ops that the rank had run in the step before it.
        before: the first infinity on that rank, where it came before the NaN.
    """

    what: str
    phase: str
    rank: int
    op: str
    line: str = ""
    module: str = ""
    operands: tuple[str, ...] = ()
    order: int = 0
    before: NonFinite | None = None

    def __str__(self) -> str:
        rows = (
            ("module", self.module),
            ("line", self.line),
            ("of", "; ".join(self.operands)),
            ("after", "" if self.before is None else str(self.before).replace("\n", "\n    ")),
        )
        lines = [f"rank {self.rank}, {self.phase}: {self.op} gives the first {self.what}"]
        return "\n".join(lines + [f"  {name + ':':8}{text}" for name, text in rows if text])


def find_nan(model: CompiledModule, *batch: Any, **kwargs: Any) -> NonFinite | None:
    """Finds the op of the model that makes the first NaN or infinity in a step.

    Every rank calls this with what it gives to `model.step`. The step runs op by op and is looked at everywhere, which
    takes several times as long; gradients, buffers, and random generators are afterwards as they were. A NaN is
    reported before an infinity, because masks make infinities on purpose. NaNs that were there before the step are
    reported by the name of their input or parameter.

    Args:
        model: a compiled module, with `executor="eager"`.
        batch: batch of the step.
        kwargs: keyword arguments of the model.

    Returns:
        The place, the same on every rank; None where loss and gradients are finite.

    Raises StepError for another executor or module; PeerError if another rank died or hangs.

    >>> import autopar, torch
    >>> class Log(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = torch.nn.Parameter(torch.ones(2))
    ...     def forward(self, x):
    ...         return (self.weight - x).log().sum()
    >>> found = autopar.find_nan(autopar.compile(Log()), torch.tensor([0.5, 2.0]))
    >>> found.what, found.op, found.phase
    ('NaN', 'aten.log.default', 'forward')
    """
    _check(model)
    arguments = model._programs.rows_of_step(Arguments.of(batch, kwargs))
    watch, given = _NonFiniteWatch(), _given(model, arguments)
    is_finite = _is_finite(model, arguments, watch)
    # Replicas that synchronise every K steps each have a loss of their own, so that one alone may be NaN.
    every = AllRanks("Looking for NaN").everyones((is_finite, given or watch.found()))
    if all(finite for finite, _ in every):
        return None
    found = [replace(each, rank=rank) for rank, (finite, each) in enumerate(every) if each is not None and not finite]
    first = min(found, key=_position, default=None)
    return first or NonFinite("NaN or infinity", _PHASES[-1], 0, "a collective")


def _position(found: NonFinite) -> tuple[int, bool, int, int]:
    return _PHASES.index(found.phase), found.what != "NaN", found.order, found.rank


def _is_finite(model: CompiledModule, arguments: Arguments, watch: _NonFiniteWatch) -> bool:
    """Runs a step that changes nothing under watch; whether its loss and gradients are finite.

    All ranks of a replica find the same. Gradients that overflow under a loss scale are gone after the step, which was
    skipped then.
    """
    ready = model._program(arguments, is_step=True)
    refuse_gradients(ready.bound.program.plan.pipeline, "find_nan")

    def run() -> bool:
        skipped = model._runs.scaler.skipped
        with _torch.noting_forward(), watch:
            loss = model._runs.step(ready, arguments)[-1]
        is_finite = loss.isfinite().all() & model._runs.gradient_norm(math.inf).isfinite()
        return bool(is_finite) and model._runs.scaler.skipped == skipped

    with _unchanged(model, ready.bound.program):
        return gradients_of(run, model._runs.trained())[0]


@contextlib.contextmanager
def _unchanged(model: CompiledModule, program: Program) -> Iterator[None]:
    """Afterwards buffers, random generators and all that counts steps are as they were."""
    buffers = {name: model.original.get_buffer(name) for name in program.mutated.values()}
    values = {name: x.clone() for name, x in buffers.items()}
    runs = model._runs
    counts = _torch.replaced(runs, steps=runs.steps, scaler=copy.copy(runs.scaler), finite=FiniteLoss())
    try:
        with counts, _torch.forked_random_state([model._settings.device]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the loss, about which the caller knows
            yield
    finally:
        with torch.no_grad():
            for name, x in buffers.items():
                x.copy_(values[name])


def _check(model: object) -> None:
    if not isinstance(model, CompiledModule):
        raise StepError(
            f"find_nan was given a {type(model).__name__}, and looks at the steps of what autopar.compile returns."
        )
    if model._settings.executor.compiles:
        raise StepError(
            "find_nan looks at single ops, but this model was compiled with another executor, whose regions hide them; "
            'compile it with executor="eager" to find the op.'
        )


def _given(model: CompiledModule, arguments: Arguments) -> NonFinite | None:
    """An input or a parameter that is not finite before the step."""
    inputs = ((f"input {i}", x) for i, x in enumerate(arguments.tensors))
    parameters = ((f"parameter {n}", p) for n, p in model.original.named_parameters() if not _torch.is_elsewhere(p))
    for name, x in (*inputs, *parameters):
        if words := described("", [(name, x)]):
            return NonFinite("NaN or infinity", _PHASES[0], 0, name, operands=(words.strip(" ."),))
    return None


# --- watching


class _At(NamedTuple):
    """Where an op runs: in forward or in the backward of a node."""

    phase: str
    node: fx.Node | None


class _NonFiniteWatch(_torch.TorchDispatchMode):
    """Notes the first op that makes a NaN, and the first that makes an infinity."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[str, NonFinite] = {}
        self._graphs: dict[str, fx.GraphModule] = {}  # by the names of their generated files
        self._count = 0

    def found(self) -> NonFinite | None:
        """The first NaN that this rank computed, with the infinity before it; without a NaN, the first infinity."""
        nan, infinity = self._first.get("NaN"), self._first.get("infinity")
        if nan is None or infinity is None or infinity.order > nan.order:
            return nan or infinity
        return replace(nan, before=infinity)

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        place = self._running()  # of every op, because a backward needs the graphs of the forward
        operands = pytree.tree_leaves((args, kwargs or {}))
        before = _kinds(operands)
        words = _words(operands) if _torch.schema(func).is_mutable else None
        result = func(*args, **(kwargs or {}))
        new = _kinds(pytree.tree_leaves(result)) - before - self._first.keys()
        if new and not _torch.schema(func).name.startswith(_UNINITIALISED):
            for what in new - ({"infinity"} if "NaN" in before else set()):
                self._first[what] = self._made(what, func, place, words or _words(operands))
        self._count += 1
        return result

    def _made(self, what: str, func: Any, place: _At, words: tuple[str, ...]) -> NonFinite:
        line = "" if place.node is None else traced_line(place.node)
        path = "" if place.node is None else module_path(place.node)
        return NonFinite(what, place.phase, 0, str(func), line, path, words, self._count)

    def _running(self) -> _At:
        """The node whose forward or backward is running."""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            graph = graph_of(frame)
            if graph is not None:
                name = frame.f_code.co_filename
                self._graphs[name] = graph
                text = linecache.getline(name, frame.f_lineno).strip()
                return _At("forward", node_of_line(graph, text))
            frame = frame.f_back
        lines = _torch.forward_of_running_node()
        return _At("forward" if lines is None else "backward", self._of_traceback(lines or ()))

    def _of_traceback(self, lines: Sequence[str]) -> fx.Node | None:
        """The node to which the innermost generated line of a traceback belongs."""
        for text in reversed(lines):
            match = re.match(rf'\s*File "({re.escape(GENERATED)}[^"]*)".*\n\s*(.*)', text)
            if match:
                graph = self._graphs.get(match[1])
                return None if graph is None else node_of_line(graph, match[2])
        return None


def _kinds(values: Iterable[object]) -> set[str]:
    """The kinds of non-finite values, "NaN" and "infinity", that some tensors and numbers hold."""
    found = set()
    for value in values:
        x = _floating(value)
        if x is not None and not bool(x.isfinite().all()):
            found |= {"NaN"} if bool(x.isnan().any()) else set()
            found |= {"infinity"} if bool(x.isinf().any()) else set()
    return found


def _words(values: Iterable[object]) -> tuple[str, ...]:
    """Shape, format and range of tensors."""
    found = []
    for x in map(_floating, values):
        if x is not None and x.numel():
            low, high = (float(v) for v in x.abs().aminmax()) if x.is_complex() else x.aminmax()
            found.append(f"{list(x.shape)} {str(x.dtype)[6:]} from {low:.3g} to {high:.3g}")
    return tuple(found)


def _floating(value: object) -> Tensor | None:
    """A tensor of numbers that may be NaN: this rank's part of one, or a number."""
    if isinstance(value, float):
        return torch.tensor(value)
    if not isinstance(value, Tensor) or value.is_meta or _torch.is_elsewhere(value):
        return None
    x = _torch.local_tensor(value)
    return x if x.is_floating_point() or x.is_complex() else None

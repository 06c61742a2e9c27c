"""Plans with pipeline stages for tests, without a search for them."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from torch import Tensor, fx, nn

from autopar.api import planner
from autopar.capture.captured import Captured
from autopar.capture.export import capture_forward, capture_step
from autopar.capture.open_sizes import OpenDims
from autopar.cost_model import find_hardware
from autopar.ir import PLACEMENTS, Graph, MixedPrecision, Pipeline, Plan
from autopar.passes import clean_up
from autopar.pipeline.parts import block_starts
from autopar.planning.garbage import collecting_rarely
from autopar.planning.planning import Prepared, make_plan, prepare_step, prepared_of
from autopar.planning.stored_captures import CaptureQuestion, StoredCaptures
from autopar.program import captures
from autopar.runtime.parameters.adoption import refuse_plain
from autopar.search import RecipeLike
from autopar.search.request.request import Request
from tests.support.shared_captures import SharedCaptures


def block_cuts(graph: Graph, stages: int) -> tuple[str, ...]:
    """Cuts between blocks, into stages of about equally many."""
    starts = block_starts(graph)
    assert len(starts) >= stages, f"{len(starts)} blocks for {stages} stages"
    return tuple(starts[i * len(starts) // stages] for i in range(1, stages))


def pipeline_of(graph: Graph, schedule: str, ranks: int) -> Pipeline:
    """The schedule with two stages a rank where it takes several, cut between blocks."""
    chunks = 1 if PLACEMENTS[schedule] == "one" else 2
    return Pipeline(ranks, schedule, block_cuts(graph, chunks * ranks))


def with_stages(
    prepared: Prepared,
    pipeline: Pipeline,
    micro_batches: int,
    mesh: Mapping[str, int] | None = None,
    recipe: RecipeLike = "auto",
) -> Plan:
    """A plan for the mesh of one stage, with a pipeline added."""
    plan = make_plan(
        prepared, Request(find_hardware("cpu-gloo"), mesh=mesh or {"dp": 1}, recipe=recipe, micro_batches=micro_batches)
    )
    return replace(plan, pipeline=pipeline)


@dataclass(frozen=True)
class _Step:
    """A step to capture; two steps are equal if their keys are."""

    key: Hashable
    capture: Callable[[], Prepared] = field(compare=False)


@functools.cache
def _prepared(step: _Step) -> Prepared:
    return step.capture()


# Copies of graphs that are cleaned already -> the steps of which they are copies, with their analysis.
_COPIES: weakref.WeakKeyDictionary[fx.GraphModule, Prepared] = weakref.WeakKeyDictionary()


def _clean_up(module: fx.GraphModule) -> None:
    if module not in _COPIES:
        clean_up(module)


def _prepared_of(captured: Captured) -> Prepared:
    known = _COPIES.get(captured.module)
    if known is None or known.captured.differentiable != captured.differentiable:
        return prepared_of(captured)
    return replace(known, captured=captured)


_PLAIN = (str, int, float, bool, type(None))


def _kind(x: Any) -> Hashable:
    """What a capture sees of an entry of a batch; a value that is not a tensor is itself a part of the graph."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device, x.requires_grad
    return type(x), repr(x)


def _key(
    model: nn.Module,
    batch: Sequence[Any],
    loss_fn: Any,
    precision: MixedPrecision | None,
    kwargs: Mapping[str, Any] | None = None,
) -> Hashable:
    """The modules with their attributes, and the kinds of parameters, buffers and inputs."""
    named = [*model.named_parameters(), *model.named_buffers(), *enumerate(batch)]
    kinds = tuple((name, _kind(x)) for name, x in [*named, *(kwargs or {}).items()])
    attributes = tuple(
        (name, key, _attribute(key, value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules", *_NUMBERED)
    )
    return (type(model), repr(model), attributes, _hooks(model), kinds, loss_fn, precision)


# Attributes that hold hooks by numbers that count up over all modules of a process.
_NUMBERED = tuple(key for key, value in vars(nn.Module()).items() if "_hooks" in key)


def _hooks(model: nn.Module) -> Hashable:
    """The functions that modules call beside `forward`, but for the one by which a compiled module guards itself."""
    return tuple(
        (name, key, hook)
        for name, module in model.named_modules()
        for key in _NUMBERED
        for hook in getattr(module, key).values()
        if callable(hook) and hook is not refuse_plain
    )


def _attribute(key: str, value: Any) -> Hashable:
    """An attribute of a module, equal for two modules only if a capture sees the same in both."""
    if key == "config" or not isinstance(value, Hashable):
        return repr(value)
    try:
        hash(value)
    except TypeError:  # a tuple of lists
        return repr(value)
    return type(value), value


def _captured(question: CaptureQuestion) -> Captured:
    """The capture that answers a question, made by any process of the session."""
    model, args, kwargs = question.model, question.args, dict(question.kwargs)
    options = {"precision": question.precision, "open_dims": question.open_dims}

    def capture() -> Captured:
        if question.is_step:
            return capture_step(model, args, kwargs, question.loss_fn, **options)
        return capture_forward(model, args, kwargs, **options)

    return SharedCaptures.of_session().captured(question, capture)


@collecting_rarely()
def _analyzed(question: CaptureQuestion) -> Prepared:
    """The same, cleaned and analyzed."""
    found = _captured(question)
    if not found.is_clean:
        clean_up(found.module)
    return prepared_of(found)


def prepared_once(model: nn.Module, batch: Sequence[Any], loss_fn: Any) -> Prepared:
    """The analyzed step, read or captured once in a process for all models of this text, parameters and shapes.

    For plans alone: were two models wrongly taken for one, `compile` would refuse the plan by its fingerprint.
    """

    def capture() -> Prepared:
        # A copy: a capture leaves weak references on what it saw.
        return _analyzed(CaptureQuestion(copy.deepcopy(model), tuple(batch), {}, loss_fn, True, None, ()))

    return _prepared(_Step(_key(model, batch, loss_fn, None), capture))


@contextlib.contextmanager
def captured_once(caller: types.ModuleType = planner) -> Iterator[None]:
    """Inside, `autopar.compile` takes the capture and analysis of an equal step that this process has captured before.

    So does another `caller` of `prepare_step`.

    For tests of what a plan makes of a captured step, with models that are told apart by their text, parameters
    and inputs: ranks that train one small model by many plans would spend most of their time on captures of it.
    Also a decorator of a rank's task.
    """

    def prepared(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        loss_fn: Any,
        precision: MixedPrecision | None,
        numbers: Sequence[Any] = (),
        **how: Any,
    ) -> Prepared:
        def capture() -> Prepared:
            return _analyzed(CaptureQuestion(model, args, kwargs, loss_fn, True, precision, ()))

        inputs = (*args, *kwargs.values())
        if numbers or any(how.values()) or not all(isinstance(x, (Tensor, *_PLAIN)) for x in inputs):
            return prepare_step(model, args, kwargs, loss_fn=loss_fn, precision=precision, numbers=numbers, **how)
        return _prepared(_Step(_key(model, args, loss_fn, precision, kwargs), capture))

    def captured(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss_fn: Any,
        precision: MixedPrecision | None,
        numbers: Sequence[Any] = (),
        open_dims: OpenDims = (),
    ) -> Captured:
        if any(open_dims) and not numbers:
            return _captured(CaptureQuestion(model, args, kwargs, loss_fn, True, precision, open_dims))
        if any(open_dims):
            return capture_step(model, args, kwargs, loss_fn, precision, numbers, open_dims)
        options = {"loss_fn": loss_fn, "precision": precision, "numbers": numbers}
        return copied(prepared(model, args, kwargs, **options))

    def captured_forward(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        precision: MixedPrecision | None,
        numbers: Sequence[Any] = (),
        open_dims: OpenDims = (),
    ) -> Captured:
        if any(open_dims) or numbers or not all(isinstance(x, Tensor) for x in args) or kwargs:
            return capture_forward(model, args, kwargs, precision, numbers, open_dims)

        def capture() -> Prepared:
            return _analyzed(CaptureQuestion(model, args, {}, None, False, precision, ()))

        return copied(_prepared(_Step(_key(model, args, "forward", precision), capture)))

    def copied(found: Prepared) -> Captured:
        module = fx.GraphModule(found.captured.module, copy.deepcopy(found.captured.module.graph))
        _COPIES[module] = found
        return replace(found.captured, module=module)

    with contextlib.ExitStack() as stack:
        if caller is planner:
            replaced: list[tuple[types.ModuleType, str, Any]] = [
                (planner, "StoredCaptures", StoredCaptures),
                (planner, "capture_step", captured),
                (planner, "capture_forward", captured_forward),
                (planner, "prepared_of", _prepared_of),
                (captures, "clean_up", _clean_up),
            ]
        else:
            replaced = [(caller, "prepare_step", prepared)]
        for module, name, mine in replaced:
            stack.enter_context(mock.patch.object(module, name, mine))
        yield


def plan_for(
    model: nn.Module,
    batch: Sequence[Any],
    loss_fn: Any,
    schedule: str,
    ranks: int,
    micro_batches: int,
    mesh: Mapping[str, int] | None = None,
    recipe: RecipeLike = "auto",
) -> Plan:
    """A plan for a global batch, cut between blocks."""
    part = tuple(x[: len(x) // micro_batches] for x in batch)
    prepared = prepared_once(model, part, loss_fn)
    pipeline = pipeline_of(prepared.analysis.graph, schedule, ranks)
    return with_stages(prepared, pipeline, micro_batches, mesh, recipe)

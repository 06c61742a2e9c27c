"""The calls of `calls.txt`: each a line of Python, carried out up to the point where a model would be captured.

    compile(8, recipe="zero3")         `autopar.compile` on the first of 8 ranks
    explain(cluster="h100x8")          `autopar.explain`
    verify(mesh={"dp": 2})             `autopar.verify`
    cli("explain gpt2 --ranks 8")      the command line
    flags("explain")                   the options of one of its commands
    backend(8, {"recipe": "tp"})       `torch.compile(backend="autopar", options=...)`
    launch(recipe="ddp")               the lines that launch a plan, and the call of `compile` that they have

What is recorded is the `Request` of a call, in its fields that differ from the defaults, with the settings of a
compiled module; or the error, in words.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from autopar import _torch
from autopar.api.planner import Planner
from autopar.backend import backend as torch_backend
from autopar.backend.graphs import SplitGraph
from autopar.calibrate.at_start import measured_at_start
from autopar.cli import main
from autopar.cost_model import Cluster, find_cluster, find_hardware
from autopar.cost_model.items import TrainingState
from autopar.explanation.advice import Question
from autopar.explanation.costs import run_of
from autopar.explanation.explanation import Explanation
from autopar.explanation.launch import launch as launch_lines
from autopar.explanation.launch import settings
from autopar.ir import Mesh, MixedPrecision, Pipeline, Plan
from autopar.ir.graph import Stack
from autopar.planning.planning import prepare_step
from autopar.runtime.execute.compiled import Executor
from autopar.runtime.model.module import CompiledModule
from autopar.runtime.parameters.loss_scale import LossScaling
from autopar.search.request.request import Request

HERE = Path(__file__).parent
CALLS = tuple(line for line in (HERE / "calls.txt").read_text().splitlines() if line)

_SETTINGS = (
    "micro_batches",
    "device",
    "init_fn",
    "seed",
    "outputs",
    "bucket_bytes",
    "executor",
    "batch",
    "returns_loss",
    "has_stages",
    "timeout_seconds",
    "skip_nonfinite",
    "loss_scaling",
    "weights",
    "replicas",
)

Outcome = dict[str, Any]


class _Reached(BaseException):
    """The point where a door would capture a model; what it has made by then."""

    def __init__(self, *made: Any) -> None:
        super().__init__()
        self.made = made


def outcome_of(call: str) -> Outcome:
    """What a call makes of its arguments, or its error."""
    try:
        return dict(eval(call, dict(_NAMES)))
    except Exception as error:
        text, _, _ = f"{type(error).__name__}: {error}".partition("; it takes ")
        return {"error": text}  # without the names of all arguments


# --- what is compared


def _fields(value: Any) -> Outcome:
    """The fields of a dataclass that differ from their defaults, as text."""
    found = {}
    for field in dataclasses.fields(value):
        here, usual = getattr(value, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            usual = field.default_factory()
        if here is not None and here != usual:
            found[field.name] = _text(here)
    return found


def _text(value: Any) -> str:
    if hasattr(value, "memory_bytes") and hasattr(value, "name"):  # hardware, whose figures may be measured anew
        return str(value.name)
    if isinstance(value, (frozenset, set)):
        return str(sorted(value))
    if isinstance(value, Executor):
        return value.name
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if isinstance(value, (Plan, Mesh, MixedPrecision, TrainingState)):
        return str(value)
    return repr(value)


# --- the doors


def _compile(ranks: int, **options: Any) -> Outcome:
    """What the compiled module is made with, on the first of so many ranks."""

    def module(_: Any, model: nn.Module, planner: Planner, settings: Any) -> None:
        raise _Reached(planner, settings)

    model = options.pop("model", None) or nn.Linear(8, 8)
    unmeasured = _replaced(measured_at_start, lambda hardware, folder: hardware)
    with _ranks(ranks), unmeasured, mock.patch.object(CompiledModule, "__init__", module):
        try:
            autopar.compile(model, **options)
        except _Reached as reached:
            planner, chosen = reached.made
    given = planner._plan
    return {
        "request": _fields(planner._request),
        "settings": {name: _text(getattr(chosen, name)) for name in _SETTINGS},
        "planner": {
            "plan": None if given is None else given.recipe,
            "device": str(planner.device),
            "timeout_seconds": planner._timeout_seconds,
            "assumed": list(planner._assumed),
            "files": planner._files is not None,
            "stored": str(planner._stored.folder),
            "loss_fn": None if planner._loss_fn is None else _text(planner._loss_fn),
        },
    }


def _explain(**options: Any) -> Outcome:
    """The last request that is made before the model is captured."""
    example = options.pop("example_inputs", torch.empty(8, 8, device="meta"))
    model = nn.Linear(8, 8, device="meta")
    return _last_request(lambda: autopar.explain(model, example, **options))


def _verify(**options: Any) -> Outcome:
    return _last_request(lambda: autopar.verify(nn.Linear(8, 8), torch.ones(8, 8), **options))


def _last_request(door: Callable[[], object]) -> Outcome:
    with _requests() as made, _replaced(prepare_step, _stop), suppress(_Reached):
        door()
    return {"request": _fields(made[-1])}


def _cli(line: str) -> Outcome:
    """The question of a command, or what it prints."""

    def posed(self: Question, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        raise _Reached(self)

    build = Question.__init__
    with mock.patch.object(Question, "__init__", posed), _replaced(prepare_step, _stop), _requests() as made:
        try:
            with mock.patch.dict(os.environ, {"COLUMNS": "100", "TERMINAL_WIDTH": "100"}):
                result = CliRunner().invoke(main, shlex.split(line), terminal_width=100)
        except _Reached as reached:
            found = reached.made
            if not found:
                return {"request": _fields(made[-1])}
            (asked,) = found
            return {
                "request": _fields(asked.request),
                "target": asked.target,
                "seq": asked.seq,
                "training_state": asked.training_state,
                "text": asked.request.text,
            }
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        raise error
    return {"exit": result.exit_code, "output": result.output}


def _flags(command: str) -> Outcome:
    """The options of a command: how each is written, what it takes, and its default."""
    found = [each for each in main.commands[command].params if isinstance(each, click.Option)]
    return {
        " ".join(each.opts): [
            each.metavar or each.type.name,
            each.multiple,
            each.is_flag,
            each.hidden,
            _usual(each),
            *getattr(each.type, "choices", ()),
        ]
        for each in sorted(found, key=lambda each: each.opts)
    }


def _usual(flag: click.Option) -> str:
    """The default of a flag; "" for none, which click writes in several ways."""
    text = str(flag.default)
    return "" if text == "None" or "UNSET" in text else text


def _backend(ranks: int, options: Mapping[str, Any], mode: str | None = None) -> Outcome:
    """What a graph of torch.compile is planned with."""

    def split(_: Any, module: Any, names: Any, request: Request, world_on: Any, executor: Any, *__: Any) -> None:
        raise _Reached(request, executor)

    module = torch.fx.GraphModule(nn.Module(), torch.fx.Graph())
    x = module.graph.placeholder("x")
    module.graph.output((module.graph.call_function(torch.relu, (x,)),))
    outside_of_dynamo: Any = mock.patch.object(_torch, "traced_modules", lambda graph: set())
    with _ranks(ranks), outside_of_dynamo, mock.patch.object(SplitGraph, "__init__", split):
        try:
            torch_backend.autopar(module, [torch.ones(8, 8)], options=options, mode=mode)()
        except _Reached as reached:
            request, executor = reached.made
    return {"request": _fields(request), "executor": executor.name}


def _launch(changes: Mapping[str, Any] | None = None, few: bool = True, **asked: Any) -> Outcome:
    """The launch lines of a plan, and the request of the call that they have."""
    graph = _prepared().analysis.graph
    stacks = (Stack("layers", 4, 1),) if few else ()
    plan = dataclasses.replace(_PLANS["plan"], **(changes or {}))
    cluster = asked.pop("cluster", find_cluster("h100x8"))
    request = Request(cluster.hardware, mesh=plan.world_mesh, **asked).of_replica()
    explanation = Explanation(
        dataclasses.replace(graph, stacks=stacks),
        plan,
        cluster,
        run_of(plan, request.training_state),
        memory_bound_bytes=request.bound_bytes,
        request=request,
    )
    call = settings(explanation)
    made = _compile(plan.world_mesh.ranks, hardware="h100", **call)
    return {"lines": list(launch_lines(explanation)), "request": made["request"], "text": request.text}


@functools.cache
def _prepared() -> Any:
    layers = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(8, 8))})
    layers.forward = lambda x: layers["layers"](x)
    return prepare_step(layers, (torch.ones(8, 8),), {}, loss_fn=torch.mean)


# --- how a door is stopped


@contextmanager
def _ranks(count: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _stop(*_: Any, **__: Any) -> None:
    raise _Reached


@contextmanager
def _replaced(function: Callable[..., Any], by: Callable[..., Any]) -> Iterator[None]:
    """Another function in every module of autopar that has this one."""
    places = [
        (module, name)
        for key, module in list(sys.modules.items())
        if key.startswith("autopar")
        for name, value in vars(module).items()
        if value is function
    ]
    for module, name in places:
        setattr(module, name, by)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, function)


@contextmanager
def _requests() -> Iterator[list[Request]]:
    """The requests that are made meanwhile."""
    made: list[Request] = []
    build = Request.__init__

    def noted(self: Request, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        made.append(self)

    with mock.patch.object(Request, "__init__", noted):
        yield made


def _plan(mesh: str, **fields: Any) -> Plan:
    recipe, count = fields.pop("recipe", "zero3"), fields.pop("micro_batches", 1)
    return Plan(Mesh.parse(mesh), "0", recipe, count, {}, {}, {}, **fields)


def init_fn(module: nn.Module) -> None:
    """Initial values of the user's own."""


_PLANS = {
    "plan": _plan("dp=8"),
    "parted": _plan("dp=2,tp=4", recipe="dp:zero3,tp:tp", micro_batches=4, recompute="full"),
    "decomposed": _plan("dp=2,tp=4", recipe="dp:zero3,tp:tp+sp", decomposed=("tp",)),
    "overlapped": _plan("dp=8", micro_batches=4, overlap_batches=2),
    "half": _plan("dp=8", precision=MixedPrecision.of("bf16")),
}
_NAMES = {
    "compile": _compile,
    "explain": _explain,
    "verify": _verify,
    "cli": _cli,
    "flags": _flags,
    "backend": _backend,
    "launch": _launch,
    "autopar": autopar,
    "torch": torch,
    "nn": nn,
    "init_fn": init_fn,
    "Mesh": Mesh,
    "MixedPrecision": MixedPrecision,
    "Pipeline": Pipeline,
    "TrainingState": TrainingState,
    "Cluster": Cluster,
    "LossScaling": LossScaling,
    "find_hardware": find_hardware,
    "find_cluster": find_cluster,
    **_PLANS,
}

"""The captured step of a target, with few of its layers in the graph where those stand for all."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autopar._torch import pytree
from autopar.cost_model.items import FULL, MIXED_FLOAT32_GRADIENTS, TrainingState
from autopar.errors import CaptureError
from autopar.ir import Graph, MixedPrecision
from autopar.models.targets import Built, Target
from autopar.passes.unroll_layers import unroll_layers
from autopar.planning.planning import Prepared, prepare_step


def capture_target(
    target: Target,
    rows: tuple[int, int] | None = None,
    *,
    precision: MixedPrecision | None,
    loss_tile_bytes: int | None = None,
    whole: bool = False,
) -> tuple[Prepared, Graph]:
    """The step of a target, with few layers in its graph and all of them in its capture.

    With `rows`, an example of that many rows is cut to that many. All layers are captured where few cannot stand for
    the others, and with `whole`.
    """

    def prepared_by(build: Callable[[], Built]) -> Prepared:
        return _prepared_few(target, rows, build, precision=precision, loss_tile_bytes=loss_tile_bytes)

    prepared = prepared_by((lambda: target.build(None)) if whole else target.build_few)
    if whole or not target.stacks:
        return prepared, prepared.analysis.graph
    try:
        captured, copies = unroll_layers(prepared.captured, target.stacks)
    except CaptureError:
        prepared = prepared_by(lambda: target.build(None))
        return prepared, prepared.analysis.graph
    graph = replace(prepared.analysis.graph, stacks=target.stacks, copies=copies)
    return replace(prepared, captured=captured), graph


def _prepared_few(target: Target, rows: tuple[int, int] | None, build: Callable[[], Built], **how: Any) -> Prepared:
    with torch.device("meta") if target.is_function else contextlib.nullcontext():
        model, args, kwargs, loss_fn = build()
        if rows is not None:
            args, kwargs = first_rows((args, kwargs), *rows)
    return prepare_step(model, args, kwargs, loss_fn=loss_fn, **how)


def first_rows(inputs: Any, own: int, wanted: int) -> Any:
    """The first few rows of inputs with a batch of `own` rows."""

    def cut(x: Any) -> Any:
        has_rows = isinstance(x, torch.Tensor) and x.ndim > 0 and x.shape[0] == own
        return x[:wanted] if has_rows else x

    return pytree.tree_map(cut, inputs)


def with_graph(prepared: Prepared, graph: Graph) -> Prepared:
    return replace(prepared, analysis=replace(prepared.analysis, graph=graph))


def training_state_of(graph: Graph) -> TrainingState:
    """The usual training state for the graph's dtypes: 16-bit parameters have float32 master copies."""
    tensors = (graph.tensors[name] for name in graph.parameters.values())
    sizes = [t.at_rest.itemsize_bytes for t in tensors if t.needs_grad]
    return MIXED_FLOAT32_GRADIENTS if min(sizes, default=4) <= 2 else FULL


def tokens_of(graph: Graph) -> int | None:
    """Number of tokens in a micro-batch: entries of the first int64 input with two dims; None without such an input."""
    inputs = (graph.tensors[name] for name in graph.inputs.values())
    tokens = (t for t in inputs if t.itemsize_bytes == 8 and not t.needs_grad and len(t.shape) == 2)
    return next((math.prod(t.shape) for t in tokens), None)

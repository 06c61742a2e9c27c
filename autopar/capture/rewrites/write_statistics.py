"""Writes out the updates of running statistics that an op's schema does not mark.

[Note: silent writes] A schema marks what an op writes to, `Tensor(a!)`, and export keeps such a write as a new value
of the buffer. Some ops write to running statistics that their schema gives as plain tensors. Export then keeps the op,
which on a rank that holds a part of the channels writes to a part that nobody reads, or drops it where nobody reads its
results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.capture.remedies import traced_line, uncaptured
from autopar.ops.nodes import bound_arguments, is_operator, schema

aten = torch.ops.aten

# All of ATen that takes `running_mean` and writes to it unmarked (native_functions.yaml of torch 2.13; of the samples
# of PyTorch's operator database no other op does such a thing), less what export makes functional: batch_norm,
# _batch_norm_impl_index and native_batch_norm.
_SILENT = frozenset(
    f"aten::{name}"
    for name in (
        "instance_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm_update_stats",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
    )
)


def write_statistics(module: fx.GraphModule) -> None:
    """instance_norm(x, .., mean, var, True, momentum, ..) -> mean.mul_(1 - momentum).add_(momentum * that of x), var
    alike, and instance_norm(x, .., None, None, True, ..).

    Those of x are means over the batch, of every sample's mean and unbiased variance (`instance_norm` in
    aten/src/ATen/native/Normalization.cpp, which repeats the statistics for every sample and takes the mean).

    Before decomposition, which drops a call that nobody reads the results of. Raises CaptureError for other ops that
    write unmarked.
    """
    for part in module.modules():  # and the regions of it
        if isinstance(part, fx.GraphModule):
            for node in list(filter(_writes, part.graph.nodes)):
                _refuse_other(node)
                _update(node)
            part.recompile()


def _refuse_other(node: fx.Node) -> None:
    if node.target is not aten.instance_norm.default:
        raise uncaptured(
            traced_line(node),
            f"{node.target} writes to running statistics, but its schema does not say so, and a graph would lose the "
            "write",
            "Call torch.nn.functional.batch_norm or instance_norm, or give it no running statistics",
        )


def _update(node: fx.Node) -> None:
    given, call = bound_arguments(node), partial(_call, node)
    with node.graph.inserting_before(node):
        found = _moments(call, given["input"], given["running_mean"].meta["val"].dtype)
        for i, name in enumerate(("running_var", "running_mean")):
            new = call(aten.mean.dim, call(operator.getitem, found, i), [0])
            kept = call(aten.mul_.Tensor, given[name], 1 - given["momentum"])
            call(aten.add_.Tensor, kept, new, alpha=given["momentum"])
    node.args = tuple((given | {"running_mean": None, "running_var": None}).values())
    node.kwargs = {}


def _moments(call: Callable[..., fx.Node], x: fx.Node, held: torch.dtype) -> fx.Node:
    """Unbiased variance and mean of every sample and channel."""
    value, x = x.meta["val"], call(aten.detach.default, x)
    if value.dtype != held:
        # Where x is of lower precision the op rounds to it the statistics of every step; these stay in their own.
        x = call(aten._to_copy.default, x, dtype=held)
    return call(aten.var_mean.correction, x, list(range(2, value.ndim)), correction=1)


def _call(beside: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A call that comes from the same place of the model."""
    made = beside.graph.call_function(target, args, kwargs)
    origin = ("nn_module_stack", "stack_trace")
    made.meta = {name: beside.meta[name] for name in origin if name in beside.meta}
    return made


def _writes(node: fx.Node) -> bool:
    if not is_operator(node) or schema(node).name not in _SILENT:
        return False
    given = bound_arguments(node)
    trains = given.get("training", given.get("use_input_stats", True))
    return bool(trains) and given["running_mean"] is not None

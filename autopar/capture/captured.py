"""The result of a capture: the functional graph of a forward, with the meaning of its placeholders and results."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch import pytree
from autopar.capture.casts import dtype_of
from autopar.capture.guards.guards import Guards, NumberInput
from autopar.capture.guards.writes import Write
from autopar.ir import MixedPrecision


@dataclass(frozen=True)
class Captured:
    """A captured forward.

    Attributes:
        module: the functional graph; placeholders in the order parameters, buffers, constants, inputs.
        parameters: placeholder name -> qualified name in the user's model; tied names share one
            placeholder and stand under the first name.
        tied: every further name of a tied parameter -> its first name.
        frozen: names of parameters that require no gradient.
        buffers: placeholder name -> qualified name.
        constants: placeholder name -> the tensor that the model's code holds.
        inputs: placeholder name -> readable name; tensors only, in pytree order of (args, kwargs).
        in_spec: pytree of (args, kwargs).
        literals: leaf position -> value that was built into the graph, for inputs that are not tensors.
        out_spec: pytree of the result.
        mutated: output position -> qualified name of the buffer whose new value the output is; such outputs come before
            the model's own ones.
        is_step: whether the last output is the loss; those before it are the step's extra results.
        training: whether the model was in training mode.
        has_loss_fn: whether a loss function computes the loss from the model's results.
        has_more: whether the model returned the loss of a step among other things, as those of transformers do.
        precision: mixed-precision policy of the capture; None for none.
        loss_tile_bytes: bytes of logits of a tile of the loss (`autopar.passes.join_losses`); None without tiles.
        stored: name of a parameter -> dtype in which it is stored, for parameters of which the graph takes a cast copy.
        differentiable: placeholders of inputs that require a gradient.
        whole_outputs: whether the results are to be whole on every rank.
        guards: the Python values that the graph was made from.
        numbers: numbers of Python that are inputs of the graph, through constants of it.
        writes: changes of attributes of modules by the forward, which the runtime repeats after every step.
        forms: a line for every class of modules that was captured in another form (`autopar.capture.forms`).
        ran: the code of the user's and of installed libraries that the capture has run, each with its globals.
        is_clean: whether the passes that clean a graph up (`autopar.passes.CLEANUP`) have run over this one.
        is_stored: whether an earlier start has made the capture, so that the model's Python has not run.
        sets_up: whether a library has noted something in the model that stays (`autopar.capture.guards.writes`).
    """

    module: fx.GraphModule
    parameters: Mapping[str, str]
    tied: Mapping[str, str]
    frozen: frozenset[str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, str]
    in_spec: pytree.TreeSpec
    literals: Mapping[int, Any]
    out_spec: pytree.TreeSpec
    mutated: Mapping[int, str]
    is_step: bool
    training: bool
    has_loss_fn: bool = False
    has_more: bool = False
    precision: MixedPrecision | None = None
    loss_tile_bytes: int | None = None
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)
    differentiable: frozenset[str] = frozenset()
    whole_outputs: bool = False
    forms: tuple[str, ...] = ()
    guards: Guards = field(default_factory=Guards)
    writes: tuple[Write, ...] = ()
    numbers: tuple[NumberInput, ...] = ()
    ran: tuple[tuple[CodeType, Mapping[str, Any]], ...] = ()
    is_clean: bool = False
    is_stored: bool = False
    sets_up: bool = False

    def gradient_dtype(self, name: str, used: torch.dtype) -> torch.dtype:
        """The dtype in which the gradient of a parameter is accumulated, if ops use the parameter as `used`."""
        if self.precision is None or not used.is_floating_point:
            return used
        asked = self.precision.reduce_dtype
        return self.stored.get(name, used) if asked is None else dtype_of(asked)

    @property
    def edge_dtypes(self) -> dict[str, str]:
        """Dtypes of inputs, and those in which parameters are stored, by keys as those of `Graph.edge_shapes`."""
        values = {x.name: x.meta["val"] for x in self.module.graph.nodes if x.op == "placeholder"}
        found = {name: x.dtype for name, x in values.items() if isinstance(x, Tensor)}
        dtypes = {f"input {name}": found[x] for x, name in self.inputs.items()}
        dtypes |= {f"parameter {name}": self.stored.get(name, found[x]) for x, name in self.parameters.items()}
        return {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters as the graph takes them, whole."""
        placeholders = (x for x in self.module.graph.nodes if x.op == "placeholder" and x.name in self.parameters)
        return sum(x.meta["val"].nbytes for x in placeholders)

    @property
    def fingerprint(self) -> str:
        """A hash of the program: ops with their arguments, shapes, dtypes, names of parameters and inputs, precision.

        Devices and values are left out, so that a plan made from a model on the meta device fits the real one.
        """
        digest = hashlib.sha256()
        for line in _lines(self.module.graph):
            digest.update(line.encode())
        digest.update(repr(sorted(self.parameters.items())).encode())
        if self.precision is not None:
            digest.update(str(self.precision).encode())
        return digest.hexdigest()[:16]


def _lines(graph: fx.Graph) -> Iterator[str]:
    """A line per node with what it computes, followed by those of a graph that it stands for (joined experts)."""
    for node in graph.nodes:
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory")}
        yield f"{node.op} {node.target} {node.args} {kwargs}"
        yield results_of(node)
        body = getattr(node.target, "body", None)
        if isinstance(body, fx.GraphModule):
            yield from _lines(body.graph)


def results_of(node: fx.Node) -> str:
    """Shapes and dtypes of what a node computes, as text."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return repr([(tuple(x.shape), x.dtype) for x in values if isinstance(x, Tensor)])

"""Executors: what runs the plain ops of a bound graph.

[Note: compiled regions] A bound graph is ops of ATen and of `torch.ops.autopar`, and between them calls of
Python objects: gathers of parameters (ZeRO-3), blocks that run again, sums that are waited for.
`autopar.passes.cut_regions` makes every run of ops between those a submodule, one or several for each
block of the model, and a backend of torch.compile compiles it. Eager autograd joins the regions, so that
all that hangs on it (hooks of leaves, saved tensors that are gathered again, checkpoints) works as it does
without a compiler, and gradients arrive, and leave for other ranks, block by block. Regions that do the
same, such as those of equal layers, are compiled once.

What a region compiles to is the same on every rank but for names of process groups, so that caches may be
shared and the collectives of all ranks stay in one order: AOTAutograd sees the collectives that move data
as `torch.ops._c10d_functional`, whose order Inductor keeps, and what depends on the rank (`shard`, `pad`,
`partial`) as one op. The keys of random ops are drawn outside the regions, which makes the masks those of
the eager executor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn

from autopar import _torch
from autopar.errors import AutoparError
from autopar.passes.cut_regions import cut_regions

ExecutorName = Literal["eager", "aot_eager", "inductor"]


class Executor:
    """Makes bound graphs run; one is shared by all programs of a model.

    Args:
        name: "eager" runs op by op; "aot_eager" and "inductor" are the backends of torch.compile that
            each region is compiled with.

    Raises AutoparError for another name.
    """

    def __init__(self, name: ExecutorName = "eager") -> None:
        if name not in get_args(ExecutorName):
            known = ", ".join(map(repr, get_args(ExecutorName)))
            raise AutoparError(f"There is no executor {name!r}; executor is one of {known}.")
        self.name = name
        self._regions: dict[str, Region] = {}  # by code

    @property
    def compiles(self) -> bool:
        """Whether the ops of a region share one node of autograd's graph."""
        return self.name != "eager"

    def ready(self, module: fx.GraphModule) -> fx.GraphModule:
        """The graph, with every region compiled at its first run."""
        return cut_regions(module, self._compiled) if self.compiles else module

    def _compiled(self, region: fx.GraphModule) -> nn.Module:
        return self._regions.setdefault(region.code, Region(region, self.name))


class Region(nn.Module):
    """A graph that is compiled at the first call of each kind of arguments.

    Dynamo, which traces Python, has no part in it: a region is a graph already, whose shapes are numbers.
    """

    def __init__(self, graph: fx.GraphModule, backend: str) -> None:
        super().__init__()
        self._graph, self._backend = graph, backend
        self._runs: dict[Any, Callable[..., Sequence[Tensor]]] = {}

    def forward(self, *arguments: Tensor) -> Sequence[Tensor]:
        key = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(_kind, arguments))
        if key not in self._runs:
            self._runs[key] = _torch.compile_graph(self._graph, arguments, self._backend)
        return self._runs[key](*arguments)


def _kind(x: Tensor) -> Any:
    """What compiled code depends on."""
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad

"""Adding calls to a captured graph."""

from __future__ import annotations

from typing import Any

from torch import fx


def call_like(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call with an example value, and with the origin of the node it stands for."""
    new = graph.call_function(target, args, kwargs)
    values, named = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    new.meta = {**like.meta, "val": target(*values, **named)}
    return new

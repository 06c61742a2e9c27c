"""The node of a graph whose generated code a frame runs, in words."""

from __future__ import annotations

import re
import types

from torch import fx

from autopar.ops.nodes import module_path

GENERATED = "<eval_with_key>"  # how torch.fx names the files of generated code


def op_words(node: fx.Node) -> str:
    """A node in words: its name, and the module of the model that it or its operands are of."""
    paths = (module_path(each) for each in (node, *node.all_input_nodes))
    path = next((path for path in paths if path), "")
    return f"{node.name}" + (f" of module {path}" if path else "")


def graph_of(frame: types.FrameType) -> fx.GraphModule | None:
    """The graph whose generated code a frame runs; None of any other frame."""
    module = frame.f_locals.get("self")
    is_generated = frame.f_code.co_filename.startswith(GENERATED)
    return module if is_generated and isinstance(module, fx.GraphModule) else None


def node_of_line(module: fx.GraphModule, line: str) -> fx.Node | None:
    """The node that a line of a graph's generated code runs."""
    name = re.match(r"\w+", line)
    nodes = {node.name: node for node in module.graph.nodes}
    return nodes.get(name[0]) if name else None

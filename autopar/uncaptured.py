"""The error for what no graph can stand for: the line of the model, the reason and the remedy."""

from __future__ import annotations

import re

from torch import fx

from autopar.errors import CaptureError


def uncaptured(line: str, reason: str, remedy: str) -> CaptureError:
    """An error for what a line of the model does."""
    return CaptureError(
        f"The model cannot be captured as a graph.\n  where:  {line}\n  reason: {reason}\n"
        f'  remedy: {remedy}. What export refuses, torch.compile(model, backend="autopar") '
        "may run: it breaks the graph there, with parameters whole on every rank."
    )


def traced_line(node: fx.Node) -> str:
    """The innermost forward that a node comes from: `file:line in function: code`."""
    place = r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)'
    found = list(re.finditer(place, str(node.meta.get("stack_trace", ""))))
    return (
        "{file}:{line} in {function}: {code}".format(**found[-1].groupdict())
        if found
        else str(node.target)
    )

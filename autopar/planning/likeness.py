"""Properties that must be equal on all ranks before they share a plan: options, model, code, versions, settings."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping, Sequence

from autopar import _torch
from autopar.planning.planning import Prepared
from autopar.planning.stored_plans import code_version

# Variables by which NVIDIA's libraries and torch choose other arithmetic.
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def likeness_of_options(options: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Subject -> what a rank says of itself before it has captured a model; its options are given as words."""
    code, *versions = code_version()
    return {
        "versions": [f"Python {platform.python_version()}", *versions],
        "code of autopar": [code[:12]],
        "options": options,
    }


def likeness_of_model(found: Prepared | Exception) -> Mapping[str, Sequence[str]]:
    """Subject -> what a rank says of itself once it has captured a model, or has failed to.

    Seeds of random states may differ, since those of the first rank are taken.
    """
    model = ["no graph"]
    if isinstance(found, Prepared):
        captured = found.captured
        model = [captured.fingerprint, _text_hash(captured.frozen), _text_hash(captured.differentiable)]
    return {
        "environment": [f"{name}={os.environ.get(name, '')}" for name in _VARIABLES],
        "settings of torch": [f"{name} {value}" for name, value in _torch.switches().items()],
        "model": model,
    }


def _text_hash(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:12]


def model_lines(found: Prepared | Exception) -> list[str]:
    """A captured model as lines, for the first one in which two differ; one line where there is none."""
    if isinstance(found, Exception):
        return [f"no graph of it ({type(found).__name__}: {found})"]
    graph, captured = found.analysis.graph, found.captured
    edges = [
        f"{name} of shape {list(shape)} and {captured.edge_dtypes[name]}" for name, shape in graph.edge_shapes.items()
    ]
    formats = [f"parameter {name} of {dtype}" for name, dtype in captured.stored.items()]
    frozen = [f"parameter {name} without a gradient" for name in sorted(captured.frozen)]
    inputs = [f"input {captured.inputs[name]} with a gradient" for name in sorted(captured.differentiable)]
    return ["a graph of it", *edges, *formats, *(f"op {op.name}" for op in graph.ops), *frozen, *inputs]

"""What has to be alike on all ranks before they share a plan: options, the model, the code, versions and settings."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping

from autopar import _torch
from autopar.options import options_of
from autopar.planning.planning import Prepared
from autopar.planning.stored_plans import code_version
from autopar.search.request.options import PlanOptions

# Variables by which NVIDIA's libraries and torch choose other arithmetic.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def likeness(prepared: Prepared, asked: PlanOptions) -> Mapping[str, str]:
    """Subject -> what a rank says of itself. Seeds may differ, since the first rank's is taken.

    So may bounds on memory, of which each rank may ask its own device: the first rank's counts.
    """
    captured = prepared.captured
    code, *versions = code_version()
    options = [
        text
        for name, each in options_of(PlanOptions).items()
        if name != "memory_bytes"
        for text in each.words(getattr(asked, name))
    ]
    return {
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "code of autopar": code[:12],
        "environment": ", ".join(f"{name}={os.environ.get(name, '')}" for name in _VARIABLES),
        "settings of torch": ", ".join(f"{name} {value}" for name, value in _torch.switches().items()),
        "options": ", ".join(options) or "none",
        "model": f"fingerprint {captured.fingerprint}, {len(captured.frozen)} frozen {_text_hash(captured.frozen)}",
    }


def _text_hash(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:12]


def model_lines(prepared: Prepared) -> list[str]:
    """A captured model as lines, for the first one in which two differ."""
    graph, captured = prepared.analysis.graph, prepared.captured
    edges = [
        f"{name} of shape {list(shape)} and {captured.edge_dtypes[name]}" for name, shape in graph.edge_shapes.items()
    ]
    formats = [f"parameter {name} of {dtype}" for name, dtype in captured.stored.items()]
    frozen = [f"parameter {name} without a gradient" for name in sorted(captured.frozen)]
    return [*edges, *formats, *(f"op {op.name}" for op in graph.ops), *frozen]

"""What has to be alike on all ranks before they share a plan: the model, the code, versions and settings."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from autopar import _torch
from autopar.planning.planning import Prepared
from autopar.planning.stored_plans import code_version

# Variables by which NVIDIA's libraries and torch choose other arithmetic.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip


def likeness(prepared: Prepared) -> Mapping[str, str]:
    """Subject -> what a rank says of itself. Seeds may differ, since the first rank's is taken."""
    code, *versions = code_version()
    return {
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "code of autopar": code[:12],
        "environment": ", ".join(f"{name}={os.environ.get(name, '')}" for name in _VARIABLES),
        "settings of torch": ", ".join(map(str, _torch.switches())),
        "model": f"fingerprint {prepared.captured.fingerprint}",
    }


def model_lines(prepared: Prepared) -> list[str]:
    """A captured model as lines, for the first one in which two differ."""
    graph = prepared.analysis.graph
    edges = [f"{name} of shape {list(shape)}" for name, shape in graph.edge_shapes.items()]
    formats = [f"parameter {name} of {dtype}" for name, dtype in prepared.captured.stored.items()]
    return [*edges, *formats, *(f"op {op.name}" for op in graph.ops)]

"""autopar: an auto-parallelization compiler for PyTorch.

model = autopar.compile(model, loss_fn=loss_fn)     under torchrun, or alone
loss = model.step(tokens, targets)                  forward and backward; gradients are ready
print(model.plan)                                   what was chosen and why
autopar.explain(model, inputs, mesh=..., cluster="h100x8x16")      what it would cost there
"""

import importlib as _importlib
from types import ModuleType as _ModuleType

from autopar.api import compile, explain
from autopar.backend.sharding import shard_
from autopar.capture.forms import register_form
from autopar.errors import (
    AutoparError,
    CaptureError,
    LayoutError,
    MeshError,
    PeerError,
    PlanError,
    RecipeError,
    SearchError,
    StepError,
)
from autopar.ir import Mesh, MixedPrecision, ParameterPlan, Plan
from autopar.proof.verify import VerifyReport, verify
from autopar.rules.registered import register_rule
from autopar.runtime.module import CompiledModule

__all__ = [
    "AutoparError", "CaptureError", "CompiledModule", "LayoutError", "Mesh", "MeshError", "MixedPrecision",
    "ParameterPlan",
    "PeerError", "Plan", "PlanError", "RecipeError", "SearchError", "StepError", "VerifyReport", "compile",
    "explain", "register_form", "register_rule", "shard_", "verify",
]  # fmt: skip


def __getattr__(name: str) -> _ModuleType:
    """`autopar.checkpoint` is imported at its first use: torch.distributed.checkpoint takes half a second."""
    if name == "checkpoint":
        return _importlib.import_module("autopar.runtime.checkpoint")
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")

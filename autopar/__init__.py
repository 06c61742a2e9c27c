"""autopar: an auto-parallelization compiler for PyTorch.

model = autopar.compile(model, loss_fn=loss_fn)     under torchrun, or alone
loss = model.step(tokens, targets)                  forward and backward; gradients are ready
print(model.plan)                                   what was chosen and why
autopar.explain(model, inputs, mesh=..., cluster="h100x8x16")      what it would cost there
"""

import importlib as _importlib
import random as _random
from typing import TYPE_CHECKING
from typing import Any as _Any

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
from autopar.versions import VERSION as __version__
from autopar.versions import check_torch as _check_torch

if TYPE_CHECKING:
    from autopar import checkpoint
    from autopar.api import compile, explain
    from autopar.backend.sharding import shard_
    from autopar.capture.forms import register_form
    from autopar.proof.served import replay
    from autopar.proof.verdict import VerifyReport
    from autopar.proof.verify import verify
    from autopar.rules.registered import register_rule
    from autopar.runtime.model.module import CompiledModule
    from autopar.runtime.model.nonfinite import find_nan
    from autopar.runtime.parameters.loss_scale import LossScaling
    from autopar.runtime.ranks.launch import launch

# [Note: lazy names] `import autopar` costs no more than the plain data above. Names that need torch, a solver or
# the symbolic formulas are imported at their first use, from the module listed here.
_HOMES = {
    "CompiledModule": "autopar.runtime.model.module",
    "LossScaling": "autopar.runtime.parameters.loss_scale",
    "VerifyReport": "autopar.proof.verdict",
    "checkpoint": "autopar.checkpoint",
    "compile": "autopar.api",
    "explain": "autopar.api",
    "find_nan": "autopar.runtime.model.nonfinite",
    "launch": "autopar.runtime.ranks.launch",
    "register_form": "autopar.capture.forms",
    "register_rule": "autopar.rules.registered",
    "replay": "autopar.proof.served",
    "shard_": "autopar.backend.sharding",
    "verify": "autopar.proof.verify",
}

__all__ = [
    "AutoparError",
    "CaptureError",
    "CompiledModule",
    "LayoutError",
    "LossScaling",
    "Mesh",
    "MeshError",
    "MixedPrecision",
    "ParameterPlan",
    "PeerError",
    "Plan",
    "PlanError",
    "RecipeError",
    "SearchError",
    "StepError",
    "VerifyReport",
    "checkpoint",
    "compile",
    "explain",
    "find_nan",
    "launch",
    "register_form",
    "register_rule",
    "replay",
    "shard_",
    "verify",
]


def __getattr__(name: str) -> _Any:
    """Imports a public name at its first use; see [Note: lazy names]."""
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    _check_torch()
    drawn = _random.getstate()  # modules may draw while they are imported (rich does), and the script has seeded by now
    home = _importlib.import_module(_HOMES[name])
    _random.setstate(drawn)
    value = home if name == "checkpoint" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

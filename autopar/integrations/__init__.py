"""Classes for training frameworks. Each needs an extra, and the rest of autopar imports none of them.

AutoparTrainer          transformers.Trainer             pip install 'autopar[trainer]'
AutoparSFTTrainer       trl.SFTTrainer                   pip install 'autopar[trl]'
AutoparAccelerator      loops written for accelerate     pip install 'autopar[accelerate]'
AutoparStrategy         lightning.Trainer                pip install 'autopar[lightning]'
save_adapters           adapters of PEFT, out of shards  pip install 'autopar[peft]'
"""

import importlib as _importlib
from typing import Any as _Any

# Name -> module of this room, and the extra that brings what the module imports.
_HOMES = {
    "AutoparAccelerator": ("accelerate", "accelerate"),
    "AutoparMixin": ("transformers", "trainer"),
    "AutoparSFTTrainer": ("trl", "trl"),
    "AutoparStrategy": ("lightning", "lightning"),
    "AutoparTrainer": ("transformers", "trainer"),
    "save_adapters": ("peft", "peft"),
}

__all__ = [
    "AutoparAccelerator",
    "AutoparMixin",
    "AutoparSFTTrainer",
    "AutoparStrategy",
    "AutoparTrainer",
    "save_adapters",
]


def __getattr__(name: str) -> _Any:
    """Imports a class at its first use. Raises ImportError, which names the extra, if a framework is missing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar.integrations' has no attribute {name!r}")
    module, extra = _HOMES[name]
    from autopar._torch import quiet_torchao

    try:
        with quiet_torchao():
            home = _importlib.import_module(f"autopar.integrations.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("autopar"):
            raise
        raise ImportError(
            f"autopar.integrations.{name} needs the package {error.name}, which is not installed: "
            f"pip install 'autopar[{extra}]'"
        ) from error
    return getattr(home, name)

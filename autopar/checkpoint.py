"""Checkpoints under their public name: `from autopar.checkpoint import save_checkpoint`."""

from autopar.runtime.checkpoint.checkpoint import (
    Checkpoints,
    LastCheckpoint,
    load_checkpoint,
    load_optimizer_state,
    read_extra,
    save_checkpoint,
)

__all__ = ["Checkpoints", "LastCheckpoint", "load_checkpoint", "load_optimizer_state", "read_extra", "save_checkpoint"]

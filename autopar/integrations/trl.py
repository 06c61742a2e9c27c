"""trl: its `SFTTrainer` by a plan, which computes its loss from the log-probabilities that the model gives."""

from __future__ import annotations

from autopar._torch import quiet_torchao
from autopar.integrations.transformers import AutoparMixin

with quiet_torchao():  # which these import
    from trl import SFTTrainer


class AutoparSFTTrainer(AutoparMixin, SFTTrainer):
    """trl's `SFTTrainer` over all ranks, by a plan; see `AutoparMixin` for the options of the plan.

    `SFTConfig` asks for activation checkpointing unless told otherwise: give `gradient_checkpointing=False`, and
    `options={"recompute": "full"}` if memory is short.
    """

"""The options of a compiled module, as the runtime uses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.compiled import Executor
from autopar.runtime.initialise import InitFunction
from autopar.runtime.loss_scale import LossScaling
from autopar.runtime.processes import world_size
from autopar.runtime.weights import WeightFiles
from autopar.runtime.world import Replicas

Outputs = Literal["local", "whole", "dtensor"]
Batch = Literal["global", "local"]


@dataclass(frozen=True)
class Settings:
    """Options of a compiled module.

    Attributes:
        micro_batches: number of micro-batches that `step` cuts its batch into; None leaves it to the planner.
        device: the device of this rank.
        device_mesh: any mesh over all ranks, for parameters to become DTensors before there is a plan;
            None for a single rank without process groups.
        init_fn: initialises one meta-device module in place of its `reset_parameters`.
        seed: seed for the initial values of a meta-device model.
        outputs: what `model(...)` returns: local tensors, whole ones, or DTensors.
        batch: what a rank gives: the batch of all ranks, or its own part of it.
        bucket_bytes: about how much one collective carries.
        executor: what runs the ops of a program.
        returns_loss: whether the model is to return its loss itself, as there is no loss function.
        has_stages: whether a mesh with pipeline stages was asked for.
        timeout_seconds: how long ranks wait for each other where they compare shapes; None for as long
            as the process group does.
        skip_nonfinite: whether a step whose loss or gradients are not finite leaves no gradients.
        loss_scaling: how the loss is scaled for backward; None where it is not.
        weights: files of the initial values; None for the model's own.
        replicas: the place of this rank among replicas that meet every so many steps, if there are any.
    """

    micro_batches: int | None
    device: torch.device
    device_mesh: DeviceMesh | None
    init_fn: InitFunction | None
    seed: int
    outputs: Outputs
    bucket_bytes: int
    executor: Executor
    batch: Batch = "global"
    returns_loss: bool = False
    has_stages: bool = False
    timeout_seconds: float | None = None
    skip_nonfinite: bool = False
    loss_scaling: LossScaling | None = None
    weights: WeightFiles | None = None
    replicas: Replicas | None = None

    @property
    def batch_ranks(self) -> int:
        """Number of ranks that train on one batch in step: all, or those of a replica."""
        return world_size() if self.replicas is None else len(self.replicas.ranks)

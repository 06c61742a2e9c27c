"""The options of a run, and the settings of a compiled module that are made of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost_model.machines.hardware import Hardware
from autopar.errors import AutoparError
from autopar.options import option, options_of
from autopar.runtime.execute.compiled import Executor
from autopar.runtime.formats.weights import WeightFiles
from autopar.runtime.parameters.initialise import InitFunction
from autopar.runtime.parameters.loss_scale import LossScaling
from autopar.runtime.ranks.files import Files
from autopar.runtime.ranks.processes import world_size
from autopar.runtime.ranks.world import Replicas

Outputs = Literal["local", "whole", "dtensor"]
Batch = Literal["global", "local"]
Drift = Literal["warn", "error", "mend"]


def _name_of(function: InitFunction) -> list[str]:
    return [getattr(function, "__qualname__", type(function).__name__)]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run, in addition to those of its plan.

    Attributes:
        hardware: machine to price for: a name such as h100 or h100x8x2+a100x8x2, the path of a TOML file such as
            `autopar calibrate` writes, or figures; by default a guess from the kind of the device.
        init_fn: called with each meta-device module that owns tensors, in place of its `reset_parameters()`.
        weights: folder or file of safetensors with initial values under the names of `state_dict()`, such as
            `save_pretrained` of transformers writes; each rank reads its own shards alone.
        nvme: folder on a disk of this machine, for a plan or recipe that keeps parameters in the tier nvme; files there
            have no names, and their space is free again when the process ends (docs/memory.md).
        cache: folder where the plans that the first rank searches and the captures of the model are kept, as JSON, for
            the next start of the script; by default what the environment variable AUTOPAR_CACHE names, and nothing is
            kept without it (docs/search.md). They are taken again only for the same model, Python code and values,
            sizes, request and versions.
        seed: seed for the initial values of a meta-device model.
        batch: what every rank gives to `step` and `model(...)`: `global`, the same whole batch, or `local`, rows of its
            own, as DistributedSampler hands them out; `example_inputs` is given likewise.
        outputs: what `model(...)` returns: `whole`, all of it on every rank, of which all ranks compute the same loss;
            `local`, this rank's part in the layout of the plan, where the gradients are those of the mean of the ranks'
            losses, as under DDP; or `dtensor`. By default `whole`, and `local` with `batch="local"` (docs/training.md).
        timeout_seconds: time that a collective may wait for the other ranks before the step ends with an error; by
            default the timeout of the process groups. Gloo notices a dead process at once.
        skip_nonfinite: whether a step whose loss or gradients hold a NaN or an infinity is skipped on all ranks alike:
            it leaves no gradients, so that torch's optimizers change nothing, and the buffers as they were
            (docs/training.md).
        drift: what is done where ranks that hold the same parameters or buffers no longer have the same bits of them,
            which they compare in steps 1, 2, 4, 8 and so on and before a save: `warn`, `error`, or `mend`, by which all
            take the values of the first of these ranks (docs/training.md).
        loss_scale: number that the backward of `step` begins with, so that small gradients of float16 are not zero: an
            `autopar.LossScaling`, by which it changes, or a number that stays. By default the scaling of
            `torch.amp.GradScaler` where `precision` has float16, and none elsewhere (docs/precision.md).
        executor: `eager` runs the plan op by op; `inductor` and `aot_eager` compile the ops between gathers of
            parameters, block by block, with these backends of torch.compile.

    Raises AutoparError for a word that an option does not take, and for files that are not there.
    """

    # The first rank makes the plan, with its own hardware and cache; files and limits of time are each rank's own.
    hardware: Hardware | str | os.PathLike[str] | None = option(None, serves_backend=True, may_differ=True)
    init_fn: InitFunction | None = option(None, write=_name_of)
    # What was made of an option before stays what it is: Settings are made of RunOptions.
    weights: WeightFiles | None = option(
        None,
        parse=lambda given: WeightFiles.at(given) if isinstance(given, str | os.PathLike) else given,
        write=lambda given: [given.words],
    )
    nvme: Files | None = option(
        None,
        parse=lambda given: given if given is None or isinstance(given, Files) else Files.at(given),
        may_differ=True,
    )
    cache: str | os.PathLike[str] | None = option(None, may_differ=True)
    seed: int = option(0)
    batch: Batch = option("global", choices=get_args(Batch))
    outputs: Outputs = option(None, choices=get_args(Outputs))
    timeout_seconds: float | None = option(None, serves_backend=True, may_differ=True)
    skip_nonfinite: bool = option(False)
    drift: Drift = option("warn", choices=get_args(Drift))
    loss_scale: LossScaling | float | None = option(None)
    executor: Executor = option(
        "eager",
        parse=lambda given: given if isinstance(given, Executor) else Executor(given),
        write=lambda given: [given.name],
        serves_backend=True,
    )

    def __post_init__(self) -> None:
        for name, each in options_of(RunOptions).items():
            given = getattr(self, name)
            if each.choices and given not in (*each.choices, each.default):
                *words, last = map(repr, each.choices)
                raise AutoparError(f"{name}={given!r} is neither {', '.join(words)} nor {last}.")
            object.__setattr__(self, name, each.parse(given))
        usual: Outputs = "whole" if self.batch == "global" else "local"
        object.__setattr__(self, "outputs", vars(self)["outputs"] or usual)


@dataclass(frozen=True, kw_only=True)
class Settings(RunOptions):
    """The options of a run, with the values that this rank has derived from them.

    Attributes:
        micro_batches: number of micro-batches that `step` cuts its batch into; None leaves it to the planner.
        device: the device of this rank.
        device_mesh: any mesh over all ranks, for parameters to become DTensors before there is a plan;
            None for a single rank without process groups.
        returns_loss: whether the model is to return its loss itself, as there is no loss function.
        has_stages: whether a mesh with pipeline stages was asked for.
        loss_scaling: how the loss is scaled for backward; None where it is not.
        bucket_bytes: bytes of a bucket that were asked for; None where the plan has its own, or the usual size.
        replicas: the place of this rank among replicas that synchronise every K steps, if there are any.
    """

    micro_batches: int | None
    bucket_bytes: int | None
    device: torch.device
    device_mesh: DeviceMesh | None
    returns_loss: bool = False
    has_stages: bool = False
    loss_scaling: LossScaling | None = None
    replicas: Replicas | None = None

    @property
    def batch_ranks(self) -> int:
        """Number of ranks that train on one batch in step: all, or those of a replica."""
        return world_size() if self.replicas is None else len(self.replicas.ranks)

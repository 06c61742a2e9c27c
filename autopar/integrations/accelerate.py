"""accelerate: an `Accelerator` whose models run by a plan.

Three things differ from data parallelism. A prepared data loader gives every rank the batch of all ranks, joined from
as many batches of the script's loader as there are ranks. Every rank has the results and losses of that batch. So there
is nothing to gather: `gather`, `gather_for_metrics`, `reduce` and `pad_across_processes` return their arguments; the
first two return a scalar as a tensor of shape `(1,)`.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autopar._torch import pytree, replaced
from autopar.errors import AutoparError
from autopar.integrations.batches import generator_of, with_batches_of_all
from autopar.integrations.loop_state import load_loop_state, loop_state
from autopar.integrations.prepared import PreparedModel
from autopar.runtime.checkpoint.checkpoint import read_extra
from autopar.search import RecipeLike

_REFUSED = {
    "deepspeed_plugin": "recipe='zero3' stores parameters in shards",
    "deepspeed_plugins": "recipe='zero3' stores parameters in shards",
    "fsdp_plugin": "recipe='zero3' stores parameters in shards",
    "megatron_lm_plugin": "recipe='tp' splits layers",
    "torch_tp_plugin": "recipe='tp' splits layers",
    "parallelism_config": "mesh={'dp': 2, 'tp': 2} says how many ranks share what",
    "dynamo_backend": "options={'executor': 'inductor'} compiles each rank's ops",
    "dynamo_plugin": "options={'executor': 'inductor'} compiles each rank's ops",
}


class AutoparAccelerator(Accelerator):
    """accelerate's `Accelerator`, whose `prepare` plans the model over all ranks."""

    def __init__(
        self,
        *args: Any,
        mesh: Mapping[str, int] | None = None,
        recipe: RecipeLike = "auto",
        options: Mapping[str, Any] | None = None,
        loss_outside: bool = False,
        **kwargs: Any,
    ) -> None:
        """Takes the arguments of `Accelerator`, and the options of a plan.

        Args:
            args: positional arguments of `Accelerator`.
            mesh: the axes and their sizes; by default one axis `dp` of all ranks.
            recipe: constraints on the plan, as `autopar.compile` takes them.
            options: further options of `autopar.compile`, such as `{"precision": "bf16"}`.
            loss_outside: whether the script computes its loss from other results of the model, such as logits, even
                if the model returns a loss. Then every result is differentiable, and a step is slower.
            kwargs: keyword arguments of `Accelerator`.

        Raises AutoparError for an option of `Accelerator` that parallelises in another way, with the option to use
        instead, and if accelerate's number of processes is not the number that was started.
        """
        for name, instead in _REFUSED.items():
            if kwargs.get(name) is not None:
                raise AutoparError(f"{name}=... cannot be combined with a plan: {instead}.")
        if not torch.accelerator.is_available():
            kwargs.setdefault("cpu", True)  # without it accelerate takes a machine without GPUs for one process
        super().__init__(*args, **kwargs)
        _refuse_other_processes(self.num_processes)
        if self.mixed_precision not in ("no", "bf16"):
            raise AutoparError(
                f"mixed_precision={self.mixed_precision!r} is not supported: take 'bf16', which needs no loss scale."
            )
        if mesh is not None:
            options = {**(options or {}), "mesh": mesh}
        self._plan_options = {"recipe": recipe, **(options or {})}
        self._reads_whole_batches, self._loss_outside = False, loss_outside
        self._known: weakref.WeakKeyDictionary[nn.Module, PreparedModel] = weakref.WeakKeyDictionary()

    # --- preparing

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> PreparedModel:
        """The model prepared for all ranks; later calls return the same one.

        Args:
            model: plain PyTorch model, or the result of an earlier call.
            device_placement: whether the model goes to this rank's device with the first batch, and does not stay where
                it lies; by default as the accelerator decides.
            evaluation_mode: not used; a plan serves both.
        """
        prepared = self.prepared(model)
        if prepared is None:
            _settle_configurations(model)
            autocast = self.autocast if self.mixed_precision == "bf16" else None
            placed = self.device_placement if device_placement is None else device_placement
            # The first batch moves the model there, shard by shard.
            where = self.device if placed else _device_of(model)
            prepared = self._known[model] = PreparedModel(
                model, {"device": where} | self._plan_options, autocast, loss_outside=self._loss_outside
            )
        if all(prepared is not one for one in self._models):
            self._models.append(prepared)
        return prepared

    def prepared(self, model: nn.Module) -> PreparedModel | None:
        """The prepared model of a model, or the model itself if it is a prepared one; None if there is none."""
        return model if isinstance(model, PreparedModel) else self._known.get(model)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """A loader that gives every rank the batch of all ranks.

        With `split_batches=True` the script's loader gives the batch of all ranks already; otherwise that of one rank.
        Before each pass the ranks take the first rank's state of torch's generator, and of the sampler's own, so that
        they shuffle alike.

        Raises AutoparError with `dispatch_batches=True`, and for a loader whose batch of one rank is not known.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement)
        if self.dispatch_batches or slice_fn_for_dispatch is not None:
            raise AutoparError(
                "With dispatch_batches=True the first rank reads for the others, but here every rank reads the batch "
                "of all ranks. Leave it out."
            )
        if not (self.split_batches or self._reads_whole_batches):
            data_loader = with_batches_of_all(data_loader, self.num_processes)
        placed = self.device_placement if device_placement is None else device_placement
        loader = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=placed,
            rng_types=list(dict.fromkeys([*self.rng_types, "torch"])),
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self._data_seed(),
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        loader.synchronized_generator = generator_of(loader)
        if loader.synchronized_generator is not None:
            loader.rng_types = [*loader.rng_types, "generator"]
        self._dataloaders.append(loader)
        return loader

    def _data_seed(self) -> int:
        """The seed of seedable samplers: the configured one, or the first rank's seed of torch."""
        asked = self.dataloader_config.data_seed
        (seed,) = broadcast_object_list([torch.initial_seed() if asked is None else asked])
        return int(seed)

    def whole_batches(self) -> contextlib.AbstractContextManager[None]:
        """Context in which prepared loaders already give the batch of all ranks, as with `split_batches=True`."""
        return replaced(self, _reads_whole_batches=True)

    # --- training

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips by the norm over the whole model, see `CompiledModule.clip_grad_norm_`.

        Raises AutoparError for parameters that are not all those of one prepared model.
        """
        given = {id(p) for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        for prepared in self._known.values():
            own = [p for p in prepared.parameters() if p.requires_grad]
            if {id(p) for p in own} <= given <= {id(p) for p in prepared.parameters()}:
                return prepared.module.clip_grad_norm_(max_norm, norm_type)
        raise AutoparError(
            f"clip_grad_norm_ was given {len(given)} parameters, which are not those of one prepared model. Give "
            "model.parameters(): the norm is that of the whole model."
        )

    # --- nothing to gather

    def gather(self, tensor: Any) -> Any:
        """Returns its argument, with a tensor of shape `()` as one of shape `(1,)`, as accelerate's `gather` does."""
        return _at_least_1d(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns the same as `gather`: no batch has padding rows that would have to be left out."""
        return input_data if use_gather_object else _at_least_1d(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Returns its argument, which already is a sum or mean over the batch of all ranks."""
        return tensor

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Returns its argument, which is the same on all ranks."""
        return tensor

    # --- weights and checkpoints

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model that was prepared."""
        if isinstance(model, PreparedModel):
            return model.original
        return super().unwrap_model(model, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole weights on the first rank, as `save_pretrained(state_dict=...)` takes them; empty on the others.

        Every rank calls it.
        """
        prepared = self.prepared(model)
        if prepared is None:
            return super().get_state_dict(model, unwrap)
        return prepared.whole_weights()

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> str:
        """Saves model, optimizer, schedulers, registered objects, states of data loaders and random generators.

        It saves the generators of torch (the default one), Python and numpy on the first rank. For a loader it saves
        the number of passes and the state of its shuffling, but not the position within a pass.

        Every rank calls it with the same folder, which all ranks see and which holds only this checkpoint. An existing
        checkpoint is replaced once the new one is complete, as with `autopar.checkpoint.save_checkpoint`.

        Raises AutoparError for anything but one prepared model with at most one optimizer, and for states that could
        not be loaded without running code.
        """
        if output_dir is None:
            raise AutoparError("save_state needs a folder here: save_state('checkpoints/step-100').")
        self._one_model().save(str(output_dir), self._one_optimizer(), loop=loop_state(self))
        return str(output_dir)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Loads a folder of `save_state`, under this plan or another; the model at the latest with its first batch.

        Schedulers, states of data loaders and random generators are at once as they were saved, so that the next pass
        over a loader shuffles as it would have.

        Raises AutoparError for a folder that has no such checkpoint, and where other things were prepared.
        """
        if input_dir is None:
            raise AutoparError("load_state needs a folder here: load_state('checkpoints/step-100').")
        extra = read_extra(input_dir)
        if "loop" not in extra:
            raise AutoparError(
                f"{input_dir} has no state of a loop, and was not saved by save_state. Load it with "
                "autopar.checkpoint.load_checkpoint."
            )
        load_loop_state(self, extra["loop"])
        prepared, optimizer = self._one_model(), self._one_optimizer()

        def load() -> None:
            # By the first batch its loader has drawn from torch's generator, which the checkpoint has as it was before.
            with torch.random.fork_rng(devices=[]):
                prepared.load(str(input_dir), optimizer)

        prepared.when_planned(load)

    def _one_model(self) -> PreparedModel:
        if not self._models:
            raise AutoparError("No model was prepared, so that there is no state: call prepare(model) first.")
        if len(self._models) > 1:
            raise AutoparError(
                f"save_state and load_state take one prepared model, but there are {len(self._models)}. Save and load "
                "each with save_checkpoint and load_checkpoint of autopar.checkpoint."
            )
        (prepared,) = self._models
        assert isinstance(prepared, PreparedModel)
        return prepared

    def _one_optimizer(self) -> Optimizer | None:
        if len(self._optimizers) > 1:
            raise AutoparError(
                f"save_state and load_state take one optimizer, but there are {len(self._optimizers)}. Save the model "
                "with each of them with autopar.checkpoint.save_checkpoint."
            )
        return plain_optimizer(self._optimizers[0]) if self._optimizers else None


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside accelerate's wrapper."""
    found: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _refuse_other_processes(found: int) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if found != started:
        raise AutoparError(
            f"{started} processes were started (WORLD_SIZE), and accelerate counts {found}. On a machine without GPUs "
            "say so before anything else asks: TrainingArguments(use_cpu=True), or Accelerator(cpu=True)."
        )


def _device_of(model: nn.Module) -> torch.device | None:
    """The device of a model's first parameter; None where that has no values yet."""
    first = next(model.parameters(), None)
    return None if first is None or first.is_meta else first.device


def _settle_configurations(model: nn.Module) -> None:
    """Writes into configurations of transformers what `save_pretrained` writes there, on the first rank alone.

    If a configuration changed on one rank alone, only that rank would capture the model again. The cache of keys and
    values is turned off, as in `Trainer`, because it is for generation.
    """
    written = set[int]()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        dtype = getattr(module, "dtype", None)
        if isinstance(dtype, torch.dtype) and hasattr(config, "architectures") and id(config) not in written:
            written.add(id(config))
            config.dtype = str(dtype).split(".")[1]
            config.architectures = [type(module).__name__]
            config.use_cache = False


def _at_least_1d(value: Any) -> Any:
    return pytree.tree_map(lambda x: x.reshape(1) if isinstance(x, Tensor) and x.ndim == 0 else x, value)

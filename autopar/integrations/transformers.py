"""transformers: a `Trainer` whose model runs by a plan.

    trainer = AutoparTrainer(model=model, args=args, train_dataset=data, mesh={"dp": 2}, recipe="zero3")
    trainer.train()

The plain `Trainer`, and every class that builds on it, does the same where its arguments ask for it, once this module
has been imported:

    trainer = Trainer(model=model, args=TrainingArguments(..., torch_compile_backend="autopar"))

Batches, results and gathering are those of `autopar.integrations.accelerate`. What `Trainer` has no public method for
is done by methods that it calls on itself (`OVERRIDDEN`); their names are checked when this module is imported.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader

from autopar._torch import quiet_torchao
from autopar.errors import AutoparError
from autopar.integrations.accelerate import AutoparAccelerator, plain_optimizer
from autopar.integrations.prepared import PreparedModel
from autopar.runtime.checkpoint.checkpoint import load_optimizer_state
from autopar.runtime.formats.checkpoint_folder import read_saved
from autopar.search import RecipeLike

with quiet_torchao():  # which these import
    from transformers import Trainer, TrainingArguments
    from transformers.utils import is_peft_available

# Methods of `Trainer` without a public name that are replaced here.
OVERRIDDEN = ("_save", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler")

_missing = [name for name in OVERRIDDEN if not hasattr(Trainer, name)]
if _missing:
    raise ImportError(
        f"transformers.Trainer has no {', '.join(_missing)}, which autopar.integrations needs. It is tried with "
        "transformers 5.23; install that version."
    )

# The name in `torch_compile_backend`, which torch.compile knows as well.
BACKEND = "autopar"

# The optimizer in a checkpoint: as it is saved here, and as a plain `Trainer` saves it.
_STATE, _PLAIN = "autopar", "optimizer.pt"

# What is not supported: name of the training argument -> what to do instead.
_REFUSED = {
    "fp16": "bf16=True needs no loss scale",
    "fp16_full_eval": "bf16=True evaluates under autocast",
    "bf16_full_eval": "bf16=True evaluates under autocast",
    "torch_compile": "torch_compile_backend='autopar' plans; options={'executor': 'inductor'} compiles each rank's ops",
    "torch_compile_mode": "options={'executor': 'inductor'} compiles each rank's ops",
    "fsdp": "recipe='zero3' stores parameters in shards",
    "deepspeed": "recipe='zero3' stores parameters in shards",
    "parallelism_config": "mesh={'dp': 2, 'tp': 2} says how many ranks share what",
    "activation_checkpointing": "options={'recompute': 'full'} recomputes layers in backward",
    "auto_find_batch_size": "`autopar explain` says which batch fits",
    "neftune_noise_alpha": "add the noise in the model",
    "use_liger_kernel": "options={'executor': 'inductor'} fuses ops",
}


class AutoparMixin:
    """Makes a `Trainer` run by a plan; for other trainers write `class MyTrainer(AutoparMixin, SFTTrainer)`."""

    accelerator: AutoparAccelerator
    args: TrainingArguments
    model: nn.Module
    optimizer: Any
    lr_scheduler: Any
    compute_loss: Any

    def __init__(
        self,
        *positional: Any,
        mesh: Mapping[str, int] | None = None,
        recipe: RecipeLike = "auto",
        options: Mapping[str, Any] | None = None,
        loss_outside: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes what the trainer takes, and what is asked of a plan.

        Args:
            positional: positional arguments of the trainer.
            mesh: the axes and their sizes; by default one axis `dp` of all ranks.
            recipe: constraints on the plan, as `autopar.compile` takes them.
            options: further options of `autopar.compile`, such as `{"precision": "bf16"}`.
            loss_outside: whether the trainer computes its loss from other results of the model than its loss; by
                default whether it has a `compute_loss` of its own.
            kwargs: keyword arguments of the trainer.

        Raises AutoparError for training arguments that plan in another way, naming what to ask instead.
        """
        if loss_outside is None:
            loss_outside = type(self).compute_loss is not Trainer.compute_loss
        self._asked: dict[str, Any] = {"mesh": mesh, "recipe": recipe, "options": options, "loss_outside": loss_outside}
        super().__init__(*positional, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator that plans, from the one that the trainer has configured."""
        self.args = _checked(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        made = self.accelerator
        self.accelerator = AutoparAccelerator(
            mixed_precision=self.args.mixed_precision,
            dataloader_config=made.dataloader_config,
            gradient_accumulation_plugin=GradientAccumulationPlugin(**made.gradient_state.plugin_kwargs),
            **self._asked,
        )
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    # --- evaluating

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """The loader of an evaluation, with batches of all ranks."""
        with self.accelerator.whole_batches():
            return super().get_eval_dataloader(*args, **kwargs)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """The loader of a prediction, with batches of all ranks."""
        with self.accelerator.whole_batches():
            return super().get_test_dataloader(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A step of `evaluate` and `predict`, for which the trainer takes the model out of its wrapper."""
        return super().prediction_step(self.accelerator.prepare_model(model), *args, **kwargs)  # type: ignore[misc]

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's share of the operations of the batch of all ranks; the trainer adds up those of the ranks."""
        return super().floating_point_ops(inputs) // self.args.world_size  # type: ignore[misc]

    # --- saving and loading

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves whole weights, which `from_pretrained` reads on any number of ranks; every rank calls it."""
        self._weights = self._weights_to_save()
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        del self._weights
        self.accelerator.wait_for_everyone()

    def _weights_to_save(self) -> dict[str, torch.Tensor]:
        """Whole weights on the first rank, of a model of PEFT those of its adapters alone."""
        if is_peft_available():
            from peft import PeftModel

            from autopar.integrations.peft import adapter_weights

            if isinstance(self.model, PeftModel):
                return adapter_weights(self.model)
        return self.accelerator.get_state_dict(self.model)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        weights = self._weights if state_dict is None else state_dict
        super()._save(output_dir, state_dict=weights)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves the optimizer's shards, each rank its own."""
        self._prepared().save(
            str(Path(output_dir) / _STATE),
            plain_optimizer(self.optimizer),
            only_optimizer=True,
            scheduler=self.lr_scheduler.state_dict(),
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the optimizer's state with the first batch, whose plan says where the shards lie."""
        if checkpoint is None:
            return
        folder, prepared = Path(checkpoint), self._prepared()
        if (folder / _STATE).exists() or (folder / f"{_STATE}.previous").exists():
            prepared.load(
                str(folder / _STATE),
                plain_optimizer(self.optimizer),
                lambda extra: self.lr_scheduler.load_state_dict(extra["scheduler"]),
            )
        elif (folder / _PLAIN).exists():
            prepared.when_planned(lambda: self._load_plain(folder, prepared))

    def _load_plain(self, folder: Path, prepared: PreparedModel) -> None:
        """Loads the state that a plain `Trainer` has saved."""
        state, schedule = read_saved(folder / _PLAIN), read_saved(folder / "scheduler.pt")
        load_optimizer_state(prepared.module, plain_optimizer(self.optimizer), state)
        self.lr_scheduler.load_state_dict(schedule)

    def _prepared(self) -> PreparedModel:
        return self.accelerator.prepare_model(self.model)


class AutoparTrainer(AutoparMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` over all ranks, by a plan; see `AutoparMixin` for the options of the plan."""


def _asks_for_plan(value: object) -> bool:
    """Whether a value is training arguments that name autopar as the backend of torch.compile."""
    return isinstance(value, TrainingArguments) and value.torch_compile_backend == BACKEND


@functools.cache
def _planned(kind: type[Any]) -> type[Any]:
    """A class of trainers, run by a plan; the same one each time."""
    if issubclass(kind, AutoparMixin):
        return kind
    return type(kind.__name__, (AutoparMixin, kind), {"__module__": kind.__module__})


def _new(kind: type[Any], *args: Any, **kwargs: Any) -> Trainer:
    """Makes a trainer, one that runs by a plan if its training arguments ask for it; Python then initialises it."""
    asked = any(map(_asks_for_plan, (*args, *kwargs.values())))
    chosen = _planned(kind) if asked else kind  # type: ignore[arg-type]
    make: Any = super(Trainer, chosen).__new__  # of the trainer's other bases
    made: Trainer = make(chosen) if make is object.__new__ else make(chosen, *args, **kwargs)
    return made


# accelerate has a fixed list of backends, so the name is read before accelerate sees it.
Trainer.__new__ = staticmethod(_new)  # type: ignore[method-assign,assignment]


def _checked(args: TrainingArguments) -> TrainingArguments:
    """A copy of the training arguments for ranks that read the batch of all; AutoparError for what is refused."""
    args = copy.copy(args)
    if _asks_for_plan(args):
        args.torch_compile, args.torch_compile_backend = False, None
    for name, instead in _REFUSED.items():
        if getattr(args, name, None):
            raise AutoparError(f"{name}={getattr(args, name)!r} is not supported by AutoparTrainer: {instead}.")
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        raise AutoparError(
            "train_sampling_strategy='batch_rebalance' gives each rank rows of its own, but here every rank reads the "
            "batch of all ranks, which the plan divides evenly. Take 'random' or 'group_by_length'."
        )
    # Every rank counts the tokens of the batch of all ranks.
    args.average_tokens_across_devices = False
    # The trainer weights a batch's loss by this number of rows.
    args.per_device_eval_batch_size *= args.world_size
    return args

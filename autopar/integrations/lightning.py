"""Lightning: a strategy that runs the networks of a `LightningModule` on all ranks, split by plans.

    trainer = lightning.Trainer(strategy=AutoparStrategy(mesh={"dp": 2}, recipe="zero3"))
    trainer = lightning.Trainer(strategy="autopar")             # after `import autopar.integrations.lightning`

A LightningModule's steps are Python code, which logs and may call `backward` and optimizers itself. So the steps run
unchanged on every rank, with the batch of all ranks, and the networks that they call run under autopar's backend of
torch.compile (docs/backend.md). The steps see whole results and losses. Parameters, gradients and optimizer
states are stored in shards where the recipe says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from autopar._torch import pytree
from autopar.backend import autopar as backend
from autopar.backend.sharding import shard_
from autopar.errors import AutoparError
from autopar.integrations.batches import generator_of, with_batches_of_all
from autopar.integrations.prepared import cut_plain_values
from autopar.runtime.checkpoint.checkpoint import load_optimizer_state
from autopar.runtime.ranks.seeds import draw_alike
from autopar.search import RecipeLike

_STORED_SPLIT = ("zero1", "zero2", "zero3", "fsdp")


class AutoparStrategy(DDPStrategy):
    """A strategy that splits networks over all ranks by plans, and stores parameters in shards as the recipe says.

    A data loader gives the batch of one rank, and `training_step` gets the batches of all ranks joined. With
    `split_batches=True` the loader gives the batch of all ranks itself.
    """

    strategy_name = "autopar"

    def __init__(
        self,
        *,
        mesh: Mapping[str, int] | None = None,
        recipe: RecipeLike = "auto",
        split_batches: bool = False,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Sets the options of the plans, and those of `DDPStrategy` for processes.

        Args:
            mesh: axes of the device mesh and their sizes; by default one axis `dp` of all ranks.
            recipe: constraints on the plans, for all axes or by axis.
            split_batches: whether a data loader gives the batch of all ranks; if not, it gives that of one rank.
            options: further options of the backend, such as `{"executor": "inductor"}`.
            kwargs: keyword arguments of `DDPStrategy` about devices and processes.
        """
        super().__init__(**kwargs)
        self._mesh, self._recipe, self._split_batches = mesh, recipe, split_batches
        self._options = dict(options or {})
        self._ready: LightningModule | None = None

    # --- setting up

    def setup(self, trainer: Trainer) -> None:
        """Compiles the module's networks and shards its parameters, and then makes its optimizers."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        # Lightning would replace the loaders' samplers by ones that always shuffle and give every rank different rows.
        trainer._accelerator_connector.use_distributed_sampler = False
        module = self.lightning_module
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        if self._ready is not module:
            self._make_ready(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _make_ready(self, module: LightningModule) -> None:
        mesh = dict(self._mesh or {"dp": self.world_size})
        for tensor in (*module.parameters(), *module.buffers()):
            if self.world_size > 1:
                dist.broadcast(tensor.detach(), src=0)
        stored = _storage(self._recipe, mesh)
        if self.world_size > 1:
            shard_(module, stored, mesh=mesh)
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.distributed_available_fn = _nobody_else
        module.register_load_state_dict_pre_hook(cut_plain_values)
        options = {"mesh": mesh, "recipe": self._recipe, **self._options}
        for network in networks(module):
            network.compile(backend=backend, options=options)
        self._ready = module

    def process_dataloader(self, dataloader: Any) -> Any:
        """A loader that gives every rank the batch of all ranks, which all ranks shuffle in the same order."""
        own = generator_of(dataloader) if isinstance(dataloader, DataLoader) else None
        draw_alike(self.root_device, *([] if own is None else [own]))
        if self._split_batches or not isinstance(dataloader, DataLoader):
            return dataloader
        return with_batches_of_all(dataloader, self.world_size)

    # --- collectives of Lightning: every rank already has the values of the whole batch

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The tensor as it is: each rank has computed its mean or sum over the batch of all ranks."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensor as it is: it belongs to the batch of all ranks already, as in one process."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks have a true `decision`; with `all=False` whether any rank has."""
        count = torch.tensor(int(decision), device=self.root_device)
        if self.world_size > 1:
            dist.all_reduce(count)
        return bool(count == self.world_size) if all else bool(count)

    # --- checkpoints: whole values, as one process writes and reads them

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's weights, whole on the first rank; every rank calls it."""
        assert self.lightning_module is not None
        return self._whole(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, whole on the first rank; every rank calls it."""
        return self._whole(getattr(optimizer, "_optimizer", optimizer).state_dict())

    def _whole(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values with every DTensor gathered; only the first rank keeps them, the others get None."""

        def gathered(x: Any) -> Any:
            found = x.full_tensor() if isinstance(x, DTensor) else x
            return found if self.is_global_zero else None

        found: dict[str, Any] = pytree.tree_map(gathered, values)
        return found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the whole states of the optimizers from a checkpoint; each rank takes its own shards.

        Raises AutoparError where there are other optimizers, groups or parameters than were saved.
        """
        assert self.lightning_module is not None
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise AutoparError(
                f"The checkpoint has the states of {len(states)} optimizers, but configure_optimizers returned "
                f"{len(self.optimizers)}. Return as many as were saved, in the same order."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_optimizer_state(self.lightning_module, optimizer, state)

    def teardown(self) -> None:
        """Ends the training; parameters in shards stay where they are."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the strategy with Lightning, so that `Trainer(strategy="autopar")` finds it."""
        strategy_registry.register(
            cls.strategy_name, cls, description="splits the computation of a LightningModule by plans"
        )


def networks(module: nn.Module) -> Iterator[nn.Module]:
    """The networks that a LightningModule's steps may call: the module itself if it has a forward, and its children.

    Children without parameters, such as metrics, are left out. For a ModuleList or ModuleDict its members are taken.
    """
    if type(module).forward not in (LightningModule.forward, nn.Module.forward):
        yield module
    for child in module.children():
        if not any(True for _ in child.parameters()):
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from networks(child)
        else:
            yield child


def _storage(recipe: RecipeLike, mesh: Mapping[str, int]) -> RecipeLike:
    """The recipe by which parameters are stored: in shards along the axes whose recipe does so, else whole."""
    if isinstance(recipe, str):
        return recipe if recipe in _STORED_SPLIT else "ddp"
    return {axis: row if row in _STORED_SPLIT else "ddp" for axis, row in dict(recipe).items() if axis in mesh}


def _nobody_else() -> bool:
    """Whether a metric of torchmetrics reduces over ranks: no, because each rank sees the batch of all ranks."""
    return False


AutoparStrategy.register_strategies(StrategyRegistry)

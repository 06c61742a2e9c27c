"""A compiled model as training frameworks call it: `results = model(**batch)`, then `results.loss.backward()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.api import compile
from autopar.errors import AutoparError, PlanError
from autopar.integrations.results import LossOutsideError, in_float32, loss_and_rest, readable
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from autopar.runtime.model.deferred import with_deferred_gradients
from autopar.runtime.model.module import CompiledModule
from autopar.runtime.parameters.stage_partition import as_stored
from autopar.runtime.ranks.processes import world_size

# What the frameworks decide themselves, and what a prepared model decides for them.
_DECIDED = {
    "model": "it is the model that the framework is given",
    "example_inputs": "the first batch is the example",
    "loss_fn": "the model returns its loss, or the script computes it from the model's results",
    "outputs": "results are whole when they are read",
    "batch": "every rank reads the batch of all ranks",
}


class PreparedModel(nn.Module):
    """A model that trains on all ranks behind the calls of a single-device script.

    Every rank gives the whole batch. `model(**batch)` returns the whole results, and the backward of a loss leaves
    gradients in the parameters, which lie in shards as the plan has them. If the model returns its loss among its
    results, a call with autograd on runs the planned step, and the gradients wait for `loss.backward()`; then only
    that loss is differentiable. Otherwise every result is.

    Attributes:
        module: compiled module.

    The plan is made at the first batch. Plain whole values load at any time, before and after.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Mapping[str, Any],
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
        *,
        loss_outside: bool = False,
    ) -> None:
        """Compiles a model.

        Args:
            model: plain PyTorch; it stays usable for its configuration, for saving and for loading.
            options: options of `autopar.compile`; without `mesh` all ranks are one axis `dp`.
            autocast: context that calls run in, whose results are then cast to float32; None for no context.
            loss_outside: whether the script computes its loss from the model's results, also where these have a loss.

        Raises AutoparError for an option that the frameworks decide, and for pipeline stages.
        """
        super().__init__()
        _refuse_decided(options)
        chosen = dict(options)
        if chosen.get("plan") is None and chosen.get("mesh") is None:
            chosen["mesh"] = {"dp": world_size()}
        compiled = compile(model, loss_fn=loss_and_rest, outputs="dtensor", **chosen)
        _refuse_stages(compiled)
        self.module = compiled
        self._autocast = autocast
        self._gives_loss = not loss_outside
        self._waiting: list[Callable[[], object]] = []
        model.register_load_state_dict_pre_hook(cut_plain_values)

    @property
    def original(self) -> nn.Module:
        """The model that was prepared."""
        return self.module.original

    @property
    def has_plan(self) -> bool:
        """Whether the first batch has come."""
        try:
            return self.module.plan is not None
        except PlanError:
            return False

    def when_planned(self, work: Callable[[], object]) -> None:
        """Calls a function that needs the plan: now if there is a plan, else with the first batch, before it runs."""
        if self.has_plan:
            work()
        else:
            self._waiting.append(work)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's results for the batch of all ranks, whole."""
        if self._autocast is None:
            return readable(self._results(args, kwargs))
        with self._autocast():
            return readable(in_float32(self._results(args, kwargs)))

    def _results(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.has_plan:
            self._make_plan(args, kwargs)
        if self._gives_loss and torch.is_grad_enabled():
            try:
                return self._step(args, kwargs)
            except LossOutsideError:
                self._gives_loss = False
        return self.module(*args, **kwargs)

    def _make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans for the first batch, and calls the functions that wait for a plan."""
        try:
            with torch.enable_grad():  # the plan is that of a step, also where an evaluation comes first
                self.module.prepare(*args, **kwargs)
        except LossOutsideError:
            with torch.no_grad():
                self.module(*args, **kwargs)
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The results of a planned step, whose gradients wait for the backward of the loss."""
        rest: dict[str, Any] = {}

        def run() -> list[Tensor]:
            loss, others = self.module.step(*args, **kwargs)
            rest.update(others)
            return [loss]

        trained = [p for p in self.module.parameters() if p.requires_grad]
        (loss,) = with_deferred_gradients(run, trained)
        return {"loss": loss, **rest}

    # --- weights and checkpoints

    def whole_weights(self) -> dict[str, Tensor]:
        """The model's state dict with whole values, on the CPU of the first rank; empty on the others.

        Every rank calls it. No rank holds more than one gathered tensor at a time beside what is returned.
        """
        if self._waiting:
            raise AutoparError(
                "A checkpoint is to be loaded at the first batch, so the weights asked for now would be those before "
                "it. Run the model on a batch first."
            )
        keep = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        gathered: dict[int, Tensor] = {}  # a tied parameter is one tensor under two names
        weights = {}
        for name, value in self.original.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                continue
            if id(value) not in gathered:
                found = value.detach()
                found = found.full_tensor() if isinstance(found, DTensor) else found
                gathered[id(value)] = found.cpu() if keep else torch.empty(0)
            weights[name] = gathered[id(value)]
        return weights if keep else {}

    def save(self, folder: str, optimizer: Optimizer | None, **extra: Any) -> None:
        """Saves model and optimizer as `autopar.checkpoint.save_checkpoint` does, with its further arguments."""
        save_checkpoint(folder, self.module, optimizer, **extra)

    def load(
        self, folder: str, optimizer: Optimizer | None, then: Callable[[dict[str, Any]], object] = lambda extra: None
    ) -> None:
        """Loads a folder of `save`, under this plan or another; with the first batch if there is no plan yet.

        Args:
            folder: folder of the checkpoint.
            optimizer: optimizer of the model's parameters.
            then: function that takes the extra values once they are read.
        """
        self.when_planned(lambda: then(load_checkpoint(folder, self.module, optimizer)))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def cut_plain_values(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a model whose parameters lie in shards loads whole plain values: each rank takes its part."""
    own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    state_dict.update({prefix + name: value for name, value in as_stored(own, model).items()})


def _refuse_decided(options: Mapping[str, Any]) -> None:
    for name, why in _DECIDED.items():
        if name in options:
            raise AutoparError(f"{name}=... cannot be given here: {why}. Leave it out.")


def _refuse_stages(compiled: CompiledModule) -> None:
    if compiled.has_stages:
        raise AutoparError(
            "The mesh has an axis pp, but the frameworks' loops do not run pipeline stages, whose ranks hold "
            "different parameters. Take axes of data and tensor parallelism, such as mesh={'dp': 2, 'tp': 2}, or "
            "train with autopar.compile and model.step (docs/training.md)."
        )

"""Puts parameters and buffers into their layouts between steps, and again if the user replaces them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from autopar import _torch
from autopar.errors import PlanError, StepError
from autopar.ops.trail import name_axes
from autopar.program.program import Program
from autopar.runtime.execute.inputs import digest_of
from autopar.runtime.execute.settings import Settings
from autopar.runtime.model.program_builder import Fixed, Programs
from autopar.runtime.parameters.adoption import Adoption, adopt
from autopar.runtime.parameters.initialise import initial_values, place_buffers, replaced_values
from autopar.runtime.parameters.parameters import ParameterStore
from autopar.runtime.parameters.shared import SharedParameters
from autopar.runtime.parameters.stage_partition import held_by, take_part, users_of
from autopar.runtime.ranks.all_ranks import AllRanks
from autopar.runtime.ranks.world import World


class Placement:
    """The location of a model's parameters on this rank (this is not `torch.distributed.tensor.Placement`).

    With process groups, parameters become DTensors when this is made, and `place` gives them the layouts
    of the first plan; without, they stay plain tensors.

    Args:
        model: the user's model, whose parameters are replaced in place.
        settings: the options of the compiled module.

    Attributes:
        adoption: the DTensors that replaced the parameters; None without process groups.
        store: the parameters in their layout between steps; None before there is a plan.
        first: the program that gave them these layouts; None before there is a plan.
        fixed: decisions of the first program for all later ones (layouts, stages, recomputation, and the stages that
            use each parameter); None before there is a plan.
        counted_elsewhere: parameters that an earlier rank of the pipeline holds too.
        shared: parameters that several pipeline stages use; None without pipeline stages.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self.adoption: Adoption | None = None
        if settings.device_mesh is not None:
            self.adoption = adopt(model, settings.device_mesh)
            weakref.finalize(self, self.adoption.stop)
        self.store: ParameterStore | None = None
        self.first: Program | None = None
        self.fixed: Fixed | None = None
        self.counted_elsewhere: Collection[str] = ()
        self.shared: SharedParameters | None = None

    def place(self, programs: Programs, world: World) -> None:
        """Puts parameters and buffers into the layouts between steps that the first program gives them."""
        model, settings = self._model, self._settings
        self._adopt_new(world)
        users, pipe = users_of(model, programs.stages), world.pipe
        held = frozenset(users)
        if programs.pipeline is not None and pipe is not None:
            held = held_by(pipe.rank, users, programs.pipeline)
        weights = settings.weights
        values = initial_values(
            model,
            world,
            init_fn=settings.init_fn,
            seed=settings.seed,
            read_later=() if weights is None else weights.names(model),
        )
        self._settle_gradients()
        if self.adoption is not None:
            _refuse_used(model)
        self.store, self.first = ParameterStore(world), programs.whole
        name_axes(world.axes_of_groups)
        self.store.fill(programs.whole, model, values, held)
        place_buffers(model, world)
        plan = programs.whole.plan
        self.fixed = Fixed(plan.parameters, plan.pipeline, plan.recompute, users, plan.saved)
        if pipe is not None:
            assert self.adoption is not None and programs.pipeline is not None
            self.adoption.pipe = pipe
            self.counted_elsewhere = take_part(model, users, programs.pipeline, world)
            self.store.elsewhere = {n: p for n, p in model.named_parameters() if _torch.is_elsewhere(p)}
            self.shared = SharedParameters(users, programs.pipeline, self.store)

    def _adopt_new(self, world: World) -> None:
        """Makes DTensors of parameters that were put into the model since it was compiled."""
        if self.adoption is not None:
            assert self._settings.device_mesh is not None, "DTensors lie on a mesh"
            adopt(self._model, self._settings.device_mesh, self.adoption, world.device_mesh)

    def _settle_gradients(self) -> None:
        """Looks at the gradients that parameters bring along."""
        if self.adoption is not None:
            self.adoption.drop_cleared_gradients()
            if self.store is None:
                _refuse_unlike_gradients(self._model)

    def forget_replaced(self) -> list[str]:
        """Names of the parameters that are other objects since they were placed; every program holds the old ones.

        Raises StepError for a model with pipeline stages.
        """
        if self.store is None or self.fixed is None:
            return []
        replaced = self.store.replaced(self._model)
        if not replaced:
            return []
        if self.fixed.pipeline is not None:
            raise StepError(
                f"The parameter {replaced[0]} was replaced by another, which a model with pipeline stages does not "
                "follow. Copy the values into it (with torch.no_grad(): parameter.copy_(...)), or compile again."
            )
        shapes = {name: p.shape for name, p in self._model.named_parameters()}
        same = {
            name: layouts
            for name, layouts in self.fixed.parameters.items()
            if shapes.get(name) == self.store.kept[name].spec.shape
        }
        self.fixed = replace(self.fixed, parameters=same)
        return replaced

    def place_replaced(self, programs: Programs, names: Sequence[str]) -> None:
        """Puts parameters to rest that took the place of others."""
        assert self.store is not None and self.fixed is not None
        model, world = self._model, self.store.world
        self._adopt_new(world)
        self._settle_gradients()
        values = replaced_values(model, names, world)
        self.store.fill(programs.whole, model, values, frozenset(names))
        planned = programs.whole.plan.parameters
        new = {name: planned[name] for name in names if name in planned}
        self.fixed = replace(self.fixed, parameters={**self.fixed.parameters, **new})

    def refuse_other_factors(self, program: Program) -> None:
        """Raises PlanError where a program names the factors of a split parameter's dims otherwise than the first."""
        assert self.store is not None
        for spec in program.parameters:
            kept = self.store.kept.get(spec.name)
            inner = [s for s in (*spec.layout, *(kept.storage if kept else ())) if s.factor > 0]
            if kept is not None and inner and kept.spec.dims != spec.dims:
                raise PlanError(
                    f"Parameter {spec.name} is split within dims of factors {kept.spec.dims}, but with these inputs "
                    f"the model uses it with {spec.dims}. Compile it again for these inputs."
                )


def _refuse_used(model: nn.Module) -> None:
    """Raises StepError for a parameter in a graph of autograd that is older than the plan, now or in its backward.

    The gradient would come to the parameter as it was before. Every rank has all parameters here, and refuses alike.
    """
    for name, parameter in model.named_parameters():
        if _torch.is_saved_by_autograd(parameter):
            _refuse(_used_before(name, "has a view, or is in a graph of autograd, as of a penalty of weights, made"))
        used = _used_before(name, "was used under autograd, as in a penalty of weights")
        _torch.call_before_accumulation(parameter, functools.partial(_refuse, used))


def _used_before(name: str, use: str) -> str:
    return (
        f"The parameter {name} {use} before the first call of the model, which plans how parameters are stored. "
        "Compute that after model(*inputs) or model.step(*batch), under torch.no_grad() if it needs no gradient; or "
        "plan before it: model.prepare(*inputs)."
    )


def _refuse(message: str) -> None:
    raise StepError(message)


def _refuse_unlike_gradients(model: nn.Module) -> None:
    """Raises StepError on all ranks for whole gradients, there before the first step, that differ between ranks."""
    ranks = AllRanks("Comparing the gradients before the first step")
    own = {name: digest_of([_torch.local_tensor(p.grad)]) for name, p in model.named_parameters() if p.grad is not None}
    first, *others = ranks.everyones(own)
    for rank, found in enumerate(others, 1):
        for name in first.keys() | found.keys():
            if first.get(name) != found.get(name):
                raise StepError(
                    f"Before the first step the parameter {name} has another gradient on rank {rank} than on rank 0, "
                    "and the step would add to it. All ranks must have the gradient of the whole batch: clear it "
                    "(model.zero_grad()), or average it over the ranks (torch.distributed.all_reduce)."
                )

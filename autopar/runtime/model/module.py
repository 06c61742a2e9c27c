"""The compiled module: the user's model, which runs on all ranks by a plan.

It has the model's submodules, parameters and buffers under their original names, so that optimizers,
checkpoints, `train()` and `eval()` work as they did before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import _torch
from autopar.capture.results import loss_first
from autopar.errors import MemoryBoundError, NoLossError, PlanError, StepError
from autopar.ir import Pipeline, Plan
from autopar.ir.order import Order
from autopar.runtime.execute.executor import unflatten_outputs
from autopar.runtime.execute.inputs import Arguments, shape_words
from autopar.runtime.execute.settings import Outputs, Settings
from autopar.runtime.failures.finite import Skipping
from autopar.runtime.formats.weights import PathLike, read_weights
from autopar.runtime.formats.weights_export import write_weights
from autopar.runtime.model.examples import Examples
from autopar.runtime.model.generation import generate, is_of_script
from autopar.runtime.model.module_programs import ModulePrograms
from autopar.runtime.model.module_runs import ModuleRuns
from autopar.runtime.model.program_builder import ProgramBuilder
from autopar.runtime.model.program_cache import ReadyProgram, release
from autopar.runtime.parameters.initialise import make_room, refuse_without_values
from autopar.runtime.parameters.stage_partition import as_stored, is_averaged, of_rank, refuse_shards_of_others
from autopar.runtime.parameters.weight_stashing import refuse_gradients
from autopar.runtime.pipeline.pipeline import BoundPipeline
from autopar.runtime.ranks.seeds import draw_alike
from autopar.runtime.ranks.stderr_log import heard, say
from autopar.runtime.replicas.meetings import Meetings

_CONTAINER = ("__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__", "__reversed__")


def _of_original(name: str) -> Callable[..., Any]:
    """A method of a compiled module that is the one of this name of its model."""
    return lambda compiled, *args: getattr(type(compiled.original), name)(compiled.original, *args)


class CompiledModule(nn.Module):
    """A model that runs on all ranks; `autopar.compile` returns it.

    `step(*batch)` runs forward and backward of a global batch and leaves gradients in `.grad`. `model(*inputs)` runs
    only the forward. Parameters, buffers, the keys of `state_dict` and attributes have the names that they have in the
    original model, and hooks are those of the model. It is an instance of the model's class, too.
    """

    def __new__(cls, model: nn.Module | None = None, *_: Any) -> CompiledModule:
        """Makes an object that also has the methods of a container that the model has, such as `model[0]`.

        Python looks for them in the class alone.
        """
        own = {name: _of_original(name) for name in _CONTAINER if hasattr(type(model), name)}
        return super().__new__(type(cls.__name__, (cls,), own) if own else cls)

    def __init__(self, model: nn.Module, planner: ProgramBuilder, settings: Settings) -> None:
        super().__init__()
        self._planner, self._settings = planner, settings
        self._examples = Examples()
        self._programs = ModulePrograms(model, planner, settings)
        self._runs = ModuleRuns(model, planner, self._programs, settings)
        self._placement, self._kept = self._programs.placement, self._programs.kept
        self._returns_loss = settings.returns_loss  # until a capture shows otherwise
        self._too_large: set[tuple[object, ...]] = set()  # calls whose whole forward fits no plan
        self._skipping = Skipping(model, settings.skip_nonfinite)
        self._first_weights = settings.weights  # to read with the first program; None after that
        self._unread = ""  # why parameters have no values
        # Both modules share these dicts, so that names need no prefix and a change to one changes the other. A hook on
        # the compiled module is a hook on the model, so it runs in captures, and when state is saved or loaded.
        of_a_module = vars(nn.Module()).items()
        hooks = [name for name, value in of_a_module if "hook" in name and isinstance(value, dict)]
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *hooks):
            object.__setattr__(self, table, getattr(model, table))
        object.__setattr__(self, "_original", model)
        self.training = model.training
        weakref.finalize(self, release, self._kept)

    # --- running

    def step(self, *batch: Any, **kwargs: Any) -> Any:
        """Runs forward and backward of one global batch and leaves the gradients in `.grad`.

        Under `torch.no_grad()` it computes only the loss and does not change gradients. Schedules that update
        parameters inside a step (docs/pipeline.md) call the attached optimizer, and leave no gradients.

        Args:
            batch: the model's inputs, followed by the arguments of the loss function after the model's
                result. In the first step every rank gives the whole batch, of which it computes its part; with
                batch="local" it gives only its own rows. Later each tensor may be given whole or as this
                part. For a new shape the model is captured and planned once more, and parameters keep their
                layouts (docs/shapes.md).
            kwargs: keyword arguments of the model.

        Returns:
            The loss of the whole batch, of shape `()`, the same on every rank. If the loss function or the model
            returns `(loss, extras)`, where `extras` is any tree of tensors, `step` returns such a tuple. Extra
            results belong to the whole batch and are whole on every rank; with outputs="dtensor" they are DTensors in
            the layout of the plan (docs/training.md). A loss that averages over unmasked tokens averages over
            those of the whole batch. Replicas that meet every K steps (docs/replicas.md) each
            return the results of their own rows.

        Raises StepError if the ranks give different shapes or values, or one gives none, and for a loss or an extra
        result that cannot be computed from several micro-batches; PeerError if another rank died or hangs.
        """
        given = self._examples.note(Arguments.of(batch, kwargs))
        arguments = self._programs.rows_of_step(given)
        ready = self._program(arguments, is_step=True)
        if torch.is_grad_enabled():
            self._check_updates(ready.bound.program.plan.pipeline)
        if self._meetings is not None:
            self._meetings.hold_if_due()
        self._skipping.begin(ready.bound.program)
        results = self._runs.step(ready, arguments)
        if self._meetings is not None and torch.is_grad_enabled():
            self._meetings.count_step(list(ready.bound.program.mutated.values()))
        self._skipping.end(results[-1], lambda: self._runs.gradient_norm(torch.inf))
        return loss_first(unflatten_outputs(ready.bound.program, results))

    def _check_updates(self, pipeline: Pipeline | None) -> None:
        """Raises StepError if a step that updates parameters has no optimizer, or an option that it cannot take."""
        self._programs.optimizer.check(pipeline)
        if self._settings.skip_nonfinite:
            refuse_gradients(pipeline, "skip_nonfinite=True")
        if self._settings.loss_scaling is not None:
            refuse_gradients(pipeline, "A loss scale")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`; a program calls the forward hooks itself, as a part of its graph."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result: all of it, or this rank's part with outputs="local", or DTensors with "dtensor".

        Inputs are as in `step`. With autograd on, the result is differentiable: if the model returns its loss,
        `model(x, y).backward()` leaves the gradients that `step(x, y)` leaves. With pipeline stages or several
        micro-batches the call then runs backward at once, as `step` does, and returns only the loss (and extra
        results). With autograd off, a batch that does not fit whole is evaluated in the micro-batches that nobody
        asked for.

        Raises StepError with autograd on where several pipeline stages use one parameter and the model does not return
        its loss.
        """
        arguments = Arguments.of(args, kwargs)
        if self._settings.replicas is not None and torch.is_grad_enabled():
            raise StepError(
                "model(...) was called with autograd on, but replicas that synchronise every K steps count the calls "
                "of step. Call it under torch.no_grad(), or train with model.step(*batch)."
            )
        if self._trains_in_parts():
            return self._trained_in_parts(arguments, self._settings.outputs)
        # A number that a user asks for may change results (docs/training.md), and an evaluation must not.
        is_asked = self._settings.micro_batches is not None
        if torch.is_grad_enabled() or self.has_stages or is_asked:
            return self._forward(arguments, self._settings.outputs)
        return self._evaluation(arguments)

    def _evaluation(self, arguments: Arguments) -> Any:
        """The results of a forward without autograd; in the micro-batches of a step where the batch does not fit whole.

        Raises MemoryBoundError if it does not, and the model returns no loss, or micro-batches would change results.
        """
        call = (arguments.shapes, arguments.spec, repr(arguments.literals), self._original.training)
        if call in self._too_large:
            return self._runs.evaluation(self._program(arguments, is_step=True), arguments)
        try:
            return self._forward(arguments, self._settings.outputs)
        except MemoryBoundError as error:
            if not self._returns_loss:
                raise
            try:
                ready = self._program(arguments, is_step=True)
            except (MemoryBoundError, NoLossError):
                raise error from None
        self._too_large.add(call)
        return self._runs.evaluation(ready, arguments)

    def _forward(self, arguments: Arguments, outputs: Outputs) -> Any:
        """The results of a forward."""
        ready = self._program(arguments, is_step=False)
        if isinstance(ready.bound, BoundPipeline) and torch.is_grad_enabled():
            if self._returns_loss:
                return self._trained_in_parts(arguments, outputs)
            refuse_gradients(ready.bound.program.plan.pipeline, "model(...) with autograd on")
        return self._runs.forward(ready, arguments, outputs)

    def _trained_in_parts(self, arguments: Arguments, outputs: Outputs) -> Any:
        """The results of a whole step; of a forward, if the model returns no loss."""
        try:
            return self._runs.differentiable_step(self._program(arguments, is_step=True), arguments)
        except NoLossError:
            self._returns_loss = False
        return self._forward(arguments, outputs)

    def _trains_in_parts(self) -> bool:
        """Whether `model(...)` runs a whole step: with autograd, a returned loss, and stages or micro-batches."""
        in_parts = self.has_stages or self._trains_in_micro_batches
        return in_parts and self._returns_loss and torch.is_grad_enabled()

    @property
    def _trains_in_micro_batches(self) -> bool:
        """Whether steps cut their batch."""
        return (self._programs.micro_batches or 1) > 1

    def _program(self, arguments: Arguments, *, is_step: bool) -> ReadyProgram:
        """The program for arguments of these shapes. The first one places the parameters, and then weights are read."""
        if self._unread:
            raise StepError(f"{self._unread}. Call model.load_weights, or compile the model again.")
        with _torch.saving_nothing():
            ready = self._programs.find(arguments, is_step=is_step)
        self._read_first_weights()
        return ready

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own `generate`, whose forwards run by the plan of training.

        Every rank calls it with the same whole prompts and gets the tokens that a single device gives. If tokens are
        sampled, all ranks use the first rank's state of torch's random generator. Keys and values are cached in the
        layouts of the plan (docs/checkpoints.md). A `generate` that the script itself defines is called as it is.

        Raises PlanError before there is a plan; StepError with batch="local", for a model of transformers that is not a
        causal language model, and for arguments that it does not support; PeerError if another rank died or hangs.
        """
        _ = self.plan
        if self._settings.batch == "local":
            raise StepError(
                'generate was called with batch="local", but all ranks must generate from the same prompts. Compile '
                'with batch="global", or export the weights (model.export).'
            )
        draw_alike(self._settings.device)
        own = getattr(self._original, "generate", None)
        if is_of_script(own):
            return self._with_self(own)(*args, **kwargs)

        def run(given: Mapping[str, Any]) -> Any:
            return self._forward(Arguments.of((), given), "dtensor")

        return generate(self._original, run, args, kwargs)

    def prepare(self, *batch: Any, shapes: Sequence[Any] | None = None, **kwargs: Any) -> None:
        """Captures and plans in advance for batches of some shapes; every rank calls it.

        It prepares steps; forwards if there is no loss function and the model returns no loss.

        Values do not matter, and tensors may be on the meta device. A shape that is known takes no time. What is done
        for each entry of a list is said on the first rank.

        Args:
            batch: batch as it is given to `step`; with `shapes` it may be left out once any batch was given.
            shapes: list of shapes to prepare for, instead of that of the batch. An entry such as `(8, 128)` is the
                shape of the first tensor: all tensors of the same shape take it, and the others its number of rows.
                An entry may also be a dict, `{"input_ids": (8, 128)}`, or a list with the shape of every tensor.
            kwargs: keyword arguments of the model.

        Raises StepError for an entry that is not a shape of such a batch.
        """
        given = Arguments.of(batch, kwargs)
        if shapes is None:
            self._prepare(self._examples.note(given))
            return
        batches = self._examples.at(shapes, given)
        with heard():
            for number, each in enumerate(batches, 1):
                say("Shapes %d of %d: %s.", number, len(batches), shape_words(each.shapes))
                self._prepare(each)

    def _prepare(self, arguments: Arguments) -> None:
        try:
            self._programs.prepare(arguments, is_step=True)
        except NoLossError:  # the loss is outside of the model
            self._returns_loss = False
            self._programs.prepare(arguments, is_step=False)
        self._read_first_weights()

    def meet(self) -> Order | None:
        """Holds a meeting of the replicas now, before it is due: they exchange parameters, which are then equal.

        Every rank calls this (docs/replicas.md). Without replicas it does nothing, nor where no step was run since
        the last meeting. Raises PeerError if another rank died or hangs.

        Returns:
            With an asynchronous server the order of its exchanges since the last meeting, for `autopar.replay`; else
            None.
        """
        return None if self._meetings is None else self._meetings.hold()

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the optimizer that `step` calls under schedules that update inside a step (docs/pipeline.md).

        With `schedule="pipedream"` and the like, `step` updates parameters after every micro-batch or every few, and
        leaves no gradients. Every rank calls this once, before the first step, with an optimizer of its own parameters.
        A call of `optimizer.step()` in the training loop finds no gradients and changes nothing.
        """
        self._programs.optimizer.hold(optimizer)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm over the whole model is at most `max_norm`.

        It gives what torch.nn.utils.clip_grad_norm_ gives on a single device. Every rank calls this.

        Returns:
            The norm before clipping, of shape `()`, the same on every rank.

        Raises StepError for a `norm_type` that is not supported and where steps update parameters themselves, PeerError
        if another rank died or hangs.
        """
        if self._programs.plan is not None:
            refuse_gradients(self._programs.plan.pipeline, "clip_grad_norm_")
        return self._runs.clip_grad_norm_(max_norm, norm_type)

    # --- weights in files

    def load_weights(self, path: PathLike) -> None:
        """Copies weights from a folder or file of safetensors, such as `save_pretrained` of transformers writes.

        Every rank calls this and reads only its own shards. The files use the names of `state_dict()`; values are
        cast to the model's dtypes.

        Raises PlanError before there is a plan; AutoparError on every rank for files that are missing,
        damaged or of another model, which names the differences; PeerError if another rank died or hangs.
        """
        _ = self.plan
        read_weights(self, path)
        self._unread = ""
        if self._meetings is not None:
            self._meetings.begin_again()

    def _read_first_weights(self) -> None:
        """Reads the files that `compile` was given, once there are parameters to read them into."""
        weights, self._first_weights = self._first_weights, None
        if weights is not None:
            self._unread = f"The weights at {weights.path} were not read to the end"
            self.load_weights(weights.path)

    def export(self, folder: PathLike) -> None:
        """Writes whole weights, as a single device has them, to a folder that all ranks see.

        Every rank calls this. The folder gets safetensors files of about 5 GB with an index. If the model has a
        `config` of transformers, the folder gets it too, and `from_pretrained` can read the folder. A tied parameter
        is written once. No rank holds the whole model; the first one holds one tensor at a time.

        Raises PlanError before there is a plan; AutoparError on every rank for what cannot be written;
        PeerError if another rank died or hangs.
        """
        _ = self.plan
        if self._meetings is not None:
            self._meetings.require("Exporting weights")
        self._runs.drift.compare("before weights were exported")
        write_weights(self, folder, original=self._original)

    # --- the plan

    @property
    def _meetings(self) -> Meetings | None:
        return self._programs.meetings

    @property
    def plan(self) -> Plan:
        """The plan of the first program. Raises PlanError before there is one."""
        if self._programs.plan is None:
            raise PlanError(
                "There is no plan yet: it is made at the first call. Pass example_inputs to autopar.compile to make "
                "it at once."
            )
        return self._programs.plan

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps: those that overflowed under a loss scale and, with `skip_nonfinite=True`, those
        whose loss or gradients were not finite.
        """
        return self._skipping.count + self._runs.scaler.skipped

    @property
    def loss_scale(self) -> float:
        """The factor by which the next step scales the loss for backward; 1.0 without loss scaling."""
        return self._runs.scaler.scale

    @property
    def has_stages(self) -> bool:
        """Whether the plan has pipeline stages; before there is a plan, whether the requested mesh has."""
        fixed = self._placement.fixed
        return self._settings.has_stages if fixed is None else fixed.pipeline is not None

    def explain(self) -> object:
        """The plan and the reasons for it, with the names of the model's modules; it prints as tables."""
        return self._planner.explain(self.plan)

    # --- the original model

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copies and pickles: a module may be copied that has no plan yet, and will have no stages."""
        if self.has_stages or self._placement.store is not None:
            raise StepError(
                "A compiled module was to be copied (copy.deepcopy, AveragedModel) or pickled (torch.save), but its "
                "programs belong to this process and its process groups. Save its state_dict() or a checkpoint "
                "(docs/checkpoints.md). After its plan is made, copy model.original: AveragedModel(model.original) "
                "averages this rank's parameters by update_parameters(model)."
            )
        if self._placement.adoption is not None and is_averaged():
            raise StepError(
                "AveragedModel was given a model that has no plan yet. The plan decides how parameters are stored, "
                "and averages must be stored in the same way. Give compile example_inputs=, or call step first; then "
                "AveragedModel(model.original) averages this rank's parameters by update_parameters(model)."
            )
        return super().__reduce_ex__(protocol)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the model, whose instance `isinstance` then takes this for, besides a CompiledModule."""
        return type(self.__dict__.get("_original", self))

    @property
    def original(self) -> nn.Module:
        """The model that was compiled; the compiled module has the same parameters."""
        return self._original

    def train(self, mode: bool = True) -> CompiledModule:
        """Sets the mode of the model, as `nn.Module.train` does."""
        self.training = mode
        self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state dict of the model; with process groups its parameters are DTensors.

        With pipeline stages parameters of other ranks are stand-ins: `x.full_tensor()` gives an entry to all ranks,
        and torch.distributed.checkpoint saves and loads what each rank has. `torch.save` takes the state dict where
        every rank has whole tensors, and raises StepError for shards and stages; `state_dict().shards()`, which has
        this rank's part, is what it takes all the same.

        Raises StepError where replicas have run steps since their last meeting, because their parameters then differ.
        """
        if self._meetings is not None:
            self._meetings.refuse_differences("A state dict")
        state = self._original.state_dict(*args, **kwargs)
        return of_rank(state, self._rank)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict as `nn.Module.load_state_dict` does; before planning into a meta-device model, too.

        Raises StepError for `assign=True` after planning, and for the shards of another rank.
        """
        is_placed = self._placement.store is not None
        if assign and is_placed:
            raise StepError(
                "load_state_dict(assign=True) would replace the parameters that the plan has placed; "
                "leave assign out, and values are copied."
            )
        refuse_shards_of_others(state_dict, self._rank)
        if not is_placed:
            make_room(self._original, state_dict, assign=assign)
        own = as_stored(state_dict, self._original)
        found = self._original.load_state_dict(own, strict, assign)
        if not is_placed:
            refuse_without_values(self._original, found.missing_keys)
        if self._meetings is not None:
            self._meetings.begin_again()
        return found

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self._with_self(getattr(self.__dict__["_original"], name))

    def _with_self(self, found: Any) -> Any:
        """A method of the script's model, which calls the compiled module where it calls `self`; else the value."""
        is_own = is_of_script(found) and found.__self__ is self.__dict__["_original"]
        return MethodType(found.__func__, self) if is_own else found

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("_original")
        if original is None or name in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(original, name, value)

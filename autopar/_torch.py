"""The one place that touches torch APIs without a stability promise; tests/test_torch_api.py has a test of each."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.multiprocessing.reductions import StorageWeakRef

# What a fake tensor answers to an op that has to read values.
DependsOnValues = DataDependentOutputException
# The same of an op with the size of whose result it does.
SizeDependsOnValues = DynamicOutputShapeException


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of this c10d group name."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Lets collectives of this group fail after waiting for so long."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def local_tensor(parameter: Tensor) -> Tensor:
    """The local shard of a DTensor parameter, or a plain parameter's values, without autograd."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


def dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> Tensor:
    """A DTensor of this global shape over a local shard that is on any device, also on meta."""
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def replicates_implicitly() -> bool:
    """Whether DTensors now take plain tensors for replicated ones.

    Inside `torch.distributed.tensor.experimental.implicit_replication` they do.
    """
    return DTensor._op_dispatcher._allow_implicit_replication


def differentiable_local(parameter: Tensor) -> Tensor:
    """The local shard as a function of the parameter, whose gradient is of the same placements."""
    if isinstance(parameter, DTensor):
        return parameter.to_local(grad_placements=parameter.placements)
    return parameter


def accumulate_gradient(parameter: nn.Parameter, local: Tensor) -> None:
    """Adds a local gradient to `parameter.grad`."""
    if parameter.grad is not None:
        grad = parameter.grad
        (grad._local_tensor if isinstance(grad, DTensor) else grad).add_(local)
    elif isinstance(parameter, DTensor):
        parameter.grad = DTensor(local, parameter._spec, requires_grad=False)
    else:
        parameter.grad = local


def below_autograd() -> AbstractContextManager[None]:
    """Inside it, custom ops are dispatched to their kernels instead of their autograd formulas."""
    return torch._C._AutoDispatchBelowAutograd()


def is_functional(x: Tensor) -> bool:
    """Whether AOTAutograd is tracing `x`, and wants ops that neither change nor alias what they take."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(x, FunctionalTensor)


def compile_graph(
    module: fx.GraphModule, arguments: Sequence[Tensor], backend: str
) -> Callable[..., Any]:
    """What a backend of torch.compile makes of a graph, for arguments of the kind of these.

    Autograd is on or off as it is now. What watches saved tensors outside does not see those of the trace.
    """
    from torch._dynamo import lookup_backend

    def unchanged(x: Any) -> Any:
        return x

    examples = _examples(arguments)
    for example, x in zip(examples, arguments, strict=True):
        example.requires_grad_(x.requires_grad)
    with torch.autograd.graph.saved_tensors_hooks(unchanged, unchanged):
        return lookup_backend(backend)(copy.deepcopy(module), examples)


def _examples(arguments: Sequence[Tensor]) -> list[Tensor]:
    with fake_mode():
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            for x in arguments
        ]


@torch.no_grad()
def computes_complex(module: fx.GraphModule, arguments: Sequence[Tensor]) -> bool:
    """Whether a graph has complex numbers, for arguments of the kind of these."""
    seen: list[Tensor] = []

    class Watching(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found = super().run_node(n)
            seen.extend(x for x in torch.utils._pytree.tree_leaves(found) if isinstance(x, Tensor))
            return found

    Watching(module).run(*_examples(arguments))
    return any(x.is_complex() for x in seen)


def missing_cpp_compiler() -> str:
    """What Inductor says of the C++ compiler that it does not find; "" where it finds one."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return ""


def on_second_derivative(results: Sequence[Any], call: Callable[..., None]) -> None:
    """Has `call` called where a backward of the backward of a graph that AOTAutograd made begins.

    Args:
        results: of the graph.
    """

    def in_backward(gradients: Sequence[Tensor | None], _: Any) -> None:
        if torch.is_grad_enabled():
            for x in gradients:
                if x is not None and x.grad_fn is not None:
                    x.grad_fn.register_prehook(call)

    nodes = (x.grad_fn for x in results if isinstance(x, Tensor) and x.requires_grad)
    made = (n for n in nodes if n is not None and n.name() == "CompiledFunctionBackward")
    for node in itertools.islice(made, 1):  # the results share it
        node.register_hook(in_backward)


def call_with(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls a model with other tensors in place of parameters and buffers, under every name that these have.

    It is `torch.func.functional_call`, which leaves its tensors in a module that has two names (2.13): it swaps
    them in twice, and takes the first for the module's own.
    """
    every = (model.named_parameters, model.named_buffers)
    own = {name: x for named in every for name, x in named(remove_duplicate=False)}
    given = {id(own[name]): x for name, x in tensors.items()}
    once = {
        f"{prefix}.{name}".lstrip("."): given[id(x)]
        for prefix, module in model.named_modules()
        for name, x in itertools.chain(module._parameters.items(), module._buffers.items())
        if id(x) in given
    }
    return torch.func.functional_call(model, once, args, dict(kwargs), tie_weights=False)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given, whose names have no prefix; any other as it is."""
    return model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model


def autopar_op(name: str) -> Any:
    """The default overload of `torch.ops.autopar.<name>`."""
    return getattr(torch.ops.autopar, name).default


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum of `x` over the group."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", group))


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """The `x` of all ranks of the group, concatenated along dim 0."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, size, group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """This rank's part of the sum of `x` over the group, cut along dim 0."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", size, group))


def all_to_all(x: Tensor, size: int, group: str) -> Tensor:
    """Part i of `x` along dim 0 goes to rank i; the parts received, concatenated along dim 0."""
    ops = torch.ops._c10d_functional
    parts = [x.shape[0] // size] * size
    return ops.wait_tensor(ops.all_to_all_single(x, parts, parts, group))


@contextlib.contextmanager
def custom_functions() -> Iterator[list[str]]:
    """Collects the names of the autograd.Functions applied inside, whose backward a graph would not keep."""
    seen: list[str] = []
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(("torch.", "autopar.")):
            seen.append(cls.__qualname__)
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield seen
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to sum `x` over the group, in place."""
    return group.allreduce([x])


def start_all_gather(result: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to concatenate the `x` of all ranks into `result`, both flat."""
    return group._allgather_base(result, x)


def start_reduce_scatter(result: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to sum `x` over the group and to leave this rank's part in `result`, both flat."""
    return group._reduce_scatter_base(result, x, dist.ReduceScatterOptions())


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor whose storage has no bytes, of which shapes alone may be asked."""
    x = torch.empty(tuple(shape), dtype=dtype, device=device)
    x.untyped_storage().resize_(0)
    return x


def has_storage(x: Tensor) -> bool:
    """Whether a tensor has memory of its own; one that torch.func maps over has not."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def storage_reference(x: Tensor) -> StorageWeakRef:
    """A weak reference to a tensor's storage, whose address (`cdata`) is not used again while it lives."""
    return StorageWeakRef(x.untyped_storage())


def user_line(error: BaseException) -> str | None:
    """The innermost line of a traceback (or of the trace that export attached) outside torch and autopar."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (
        os.path.dirname(torch.__file__),
        os.path.dirname(__file__),
        os.path.dirname(traceback.__file__),
    )
    outside = [
        f for f in frames if not f.filename.startswith(ours) and not f.filename.startswith("<")
    ]
    if outside:
        frame = outside[-1]
        return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return None


class _StandInStage:
    """What a pipeline schedule asks of a stage, noting in `log` what it is told to do.

    Its sends and receives are empty lists, so that no process group is needed.
    """

    submod = None

    def __init__(self, index: int, count: int, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, count
        self.group_rank, self.group_size = rank, ranks
        self.is_first, self.is_last = index == 0, index == count - 1
        self.log: list[tuple[str, int, int]] = []

    def _note(self, kind: str, micro_batch: int, there_is: bool = True) -> list[dist.P2POp]:
        if there_is:
            self.log.append((kind, self.stage_index, micro_batch))
        return []

    def get_fwd_recv_ops(self, micro_batch: int) -> list[dist.P2POp]:
        return self._note("RECV_F", micro_batch, not self.is_first)

    def get_fwd_send_ops(self, micro_batch: int) -> list[dist.P2POp]:
        return self._note("SEND_F", micro_batch, not self.is_last)

    def get_bwd_recv_ops(self, micro_batch: int) -> list[dist.P2POp]:
        return self._note("RECV_B", micro_batch, not self.is_last)

    def get_bwd_send_ops(self, micro_batch: int) -> list[dist.P2POp]:
        return self._note("SEND_B", micro_batch, not self.is_first)

    def forward_one_chunk(self, micro_batch: int, *_: object, **__: object) -> None:
        self._note("F", micro_batch)

    def backward_one_chunk(self, micro_batch: int, **_: object) -> None:
        self._note("B", micro_batch)

    def perform_reduce_grad(self, _: int) -> None:
        pass


def pipeline_actions(
    schedule: type[Any], stages_of: Sequence[Sequence[int]], micro_batches: int
) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """What a class of torch.distributed.pipelining has every rank do, in order.

    Schedules of one stage a rank are a loop, which is run on stand-ins: the order that
    `Schedule1F1B` tells of itself (`pipeline_order`) numbers the last rank's micro-batches from 1.
    The others run the list that they made at birth, sends and receives included; an overlapped
    forward and backward are run one after the other, and so they are here.

    Args:
        schedule: the class.
        stages_of: the stages of every rank.
        micro_batches: how many; a number that the class refuses raises its ValueError.

    Returns:
        (kind, stage, micro-batch) for every action of every rank, without those for FSDP.
    """
    # Half a second to import, which only pipelines need.
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    ranks, count = len(stages_of), sum(map(len, stages_of))
    stages = [
        [_StandInStage(index, count, rank, ranks) for index in found]
        for rank, found in enumerate(stages_of)
    ]
    has_list = issubclass(schedule, PipelineScheduleMulti)  # of the class's own, not of its base
    if has_list:
        lists = schedule(stages[0], micro_batches).pipeline_order_with_comms
        return tuple(_flat_actions(lists[rank]) for rank in range(ranks))
    return tuple(_looped_actions(schedule, stage, micro_batches) for (stage,) in stages)


def _looped_actions(
    schedule: type[Any], stage: _StandInStage, micro_batches: int
) -> tuple[tuple[str, int, int], ...]:
    built = schedule(stage, micro_batches)
    built._stage_forward_initialized = True  # or it would look for neighbours to receive from
    built._step_microbatches()
    return tuple(stage.log)


def _flat_actions(actions: Sequence[Any]) -> tuple[tuple[str, int, int], ...]:
    parts = (part for each in actions for part in each.sub_actions or (each,))
    return tuple(
        (part.computation_type.value, part.stage_index, part.microbatch_index)
        for part in parts
        if part.microbatch_index is not None
    )


def runs_one_stage(schedule: type) -> bool:
    """Whether a class of torch.distributed.pipelining takes one stage, and not a list of them."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    return issubclass(schedule, PipelineScheduleSingle)


def pipeline_stage(
    module: nn.Module,
    number: int,
    count: int,
    *,
    device: torch.device,
    group: dist.ProcessGroup,
    received: tuple[Tensor, ...],
    sent: tuple[Tensor, ...],
    split_backward: Callable[..., Any],
    before_backward: Callable[..., None],
    after_backward: Callable[[], None],
) -> Any:
    """A `PipelineStage` that says when a micro-batch's gradients begin and end to accumulate.

    Args:
        module: called with what is received and keyword arguments; returns what is sent, or the loss.
        number, count: of the stage, and of all.
        received, sent: examples on the meta device, which need a gradient where one comes back.
        split_backward: of results, their gradients and inputs makes what has `input_gradients` and
            `run_weights()`, the two halves of a backward.
        before_backward: called with `last`, whether the micro-batch is the step's last.
    """
    made = _watched_stage()(
        module, number, count, device, input_args=received, output_args=sent, group=group
    )
    made.before_backward, made.after_backward = before_backward, after_backward
    made.split_backward, made.halves = split_backward, {}
    made.received, made.sent = received, sent
    return made


@functools.cache
def _watched_stage() -> type:
    from torch.distributed.pipelining import PipelineStage  # half a second

    class WatchedStage(PipelineStage):
        before_backward: Callable[..., None]
        after_backward: Callable[[], None]
        split_backward: Callable[..., Any]
        halves: dict[int, Any]
        received: tuple[Tensor, ...]
        sent: tuple[Tensor, ...]

        # PipelineStage makes a buffer for whatever any micro-batch will receive, and keeps all of them.
        # Here one lives from its receive to the end of its backward.

        def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._prepare_forward_infra(*args, **kwargs)
            for infos in self.args_recv_info.values():
                _free_buffers(infos)
            return result

        def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._prepare_backward_infra(*args, **kwargs)
            for infos in self.grad_recv_info.values():
                _free_buffers(infos)
            return result

        def get_fwd_recv_ops(self, number: int) -> list[dist.P2POp]:
            if not self.is_first:
                _make_buffers(self.args_recv_info[number], self.received, self.device)
            return super().get_fwd_recv_ops(number)

        def get_bwd_recv_ops(self, number: int) -> list[dist.P2POp]:
            if self.has_backward and not self.is_last:
                _make_buffers(self.grad_recv_info[number], self.sent, self.device)
            return super().get_bwd_recv_ops(number)

        def forward_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            output = super().forward_one_chunk(number, *args, **kwargs)
            if not self.has_backward:
                _free_buffers(self.args_recv_info[number])
            return output

        def backward_one_chunk(
            self,
            number: int,
            loss: Any = None,
            full_backward: bool = True,
            last_backward: bool = False,
        ) -> None:
            if not self.has_backward:
                return
            arrived = () if self.is_first else self.args_recv_info[number]
            received = [info.buffer for info in arrived if info.buffer is not None]
            results, inputs = self.fwd_cache[number]
            if full_backward:
                self.before_backward(last=last_backward)
                super().backward_one_chunk(number, loss, full_backward, last_backward)
                self.after_backward()
            else:
                del self.fwd_cache[number]
                self.bwd_cache[number] = self.input_gradients(number, results, inputs, loss)
            for x in (*results, loss):  # torch keeps them, and they all that they were made of
                if isinstance(x, Tensor) and x.requires_grad:
                    x.detach_()
            # A send takes contiguous tensors, and before torch 2.13 a gradient of every input.
            pairs = zip(self.bwd_cache[number], received, strict=False)
            self.bwd_cache[number] = tuple(
                g.contiguous()
                if g is not None
                else torch.zeros_like(x)
                if x.requires_grad
                else None
                for g, x in pairs
            )
            _free_buffers(self.args_recv_info[number])
            if not self.is_last:
                _free_buffers(self.grad_recv_info[number])

        def input_gradients(
            self, number: int, results: Sequence[Tensor], inputs: Sequence[Any], loss: Any
        ) -> tuple[Tensor | None, ...]:
            if self.is_last:
                half = self.split_backward((loss,), (None,), inputs)
            else:
                half = self.split_backward(results, self._retrieve_recv_grads(number), inputs)
            self.halves[number] = half
            return half.input_gradients[: len(self.args_recv_info[number])]

        def backward_weight_one_chunk(self, number: int, last_backward: bool = False) -> None:
            if not self.has_backward:
                return
            self.before_backward(last=last_backward)
            self.halves.pop(number).run_weights()
            self.after_backward()

    return WatchedStage


def _free_buffers(infos: Sequence[Any]) -> None:
    """Lets go of what was received."""
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            info.buffer = torch.empty(0, dtype=info.buffer.dtype, device=info.buffer.device)


def _make_buffers(infos: Sequence[Any], like: Sequence[Tensor], device: torch.device) -> None:
    """Makes room for what is received."""
    for info, example in zip(infos, like, strict=True):
        if info.buffer is not None:
            info.buffer = torch.empty(example.shape, dtype=example.dtype, device=device)


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def handed_on(x: Tensor) -> Tensor:
    """The same values, contiguous, as a tensor that autograd saves nowhere and takes for no view.

    So it can be detached in place when its graph is no longer needed.
    """
    return _Handed.apply(x.contiguous()) if x.requires_grad else x.contiguous()


def broke_in_communication(error: BaseException) -> bool:
    """Whether an error was raised by sending, receiving or waiting for it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename.endswith("distributed_c10d.py") or frame.name == "_wait_batch_p2p"


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """The local shard of a gradient, which is there."""
    assert parameter.grad is not None
    return parameter.grad._local_tensor if isinstance(parameter.grad, DTensor) else parameter.grad


def lines_along(mesh: DeviceMesh, axis: str) -> list[list[int]]:
    """The global ranks of a mesh in lines along one axis, in the order of the other axes."""
    assert mesh.mesh_dim_names is not None
    position = mesh.mesh_dim_names.index(axis)
    return mesh.mesh.movedim(position, -1).reshape(-1, mesh.mesh.shape[position]).tolist()


@torch.no_grad()
def run_node(node: Node, gradients: Sequence[Tensor | None]) -> list[tuple[GradientEdge, Tensor]]:
    """Runs one node of an autograd graph and none behind it.

    Args:
        gradients: that arrived at it, one for each of its results.

    Returns:
        The edges that leave it with what it gives to each, as autograd hands it on: in the shape and
        dtype of what the edge leads to.
    """
    if callable(node):
        found = node(*gradients)
        found = found if isinstance(found, tuple) else (found,)
        given = list(zip(node.next_functions, found, strict=True))
    else:  # an autograd.Function: has no edge for an argument that is no tensor
        found = node.apply(*_materialized(node, gradients))  # type: ignore[attr-defined]
        found = found if isinstance(found, tuple) else (found,)
        wanted = itertools.compress(found, node.needs_input_grad)  # type: ignore[attr-defined]
        given = list(zip((f for f in node.next_functions if f[0] is not None), wanted, strict=True))
    return [
        (GradientEdge(following, number), _as_input(following, number, gradient))
        for (following, number), gradient in given
        if following is not None and gradient is not None
    ]


def _materialized(node: Node, gradients: Sequence[Tensor | None]) -> Iterator[Tensor]:
    for gradient, like in zip(gradients, node._input_metadata, strict=True):
        if gradient is None:
            gradient = torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)
        yield gradient


def _as_input(node: Node, number: int, gradient: Tensor) -> Tensor:
    like = node._input_metadata[number]
    return gradient.sum_to_size(tuple(like.shape)).to(like.dtype)


def fake_mode() -> Any:
    """A context in which calls compute shapes alone; its `from_tensor` makes a tensor without values.

    Tensors that share memory, or are views, stay so.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def dynamo_source(node: fx.Node) -> str:
    """Where an argument of a dynamo graph comes from: `L['self']._modules['up']._parameters['weight']`."""
    source = getattr(node, "_dynamo_source", None)
    return "" if source is None else source.name


def default_store() -> dist.Store:
    """The key-value store through which the default process group was made."""
    return dist.distributed_c10d._get_default_store()


def store_seconds(store: dist.Store) -> float:
    """How long a store waits for a key if it is not told."""
    return store.timeout.total_seconds()  # type: ignore[attr-defined]


def required_arguments(name: str) -> int | None:
    """How many arguments the ATen operator of this name must be given; None where there is no such operator."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or "default" not in packet.overloads():
        return None
    arguments = packet.default._schema.arguments
    return sum(not a.has_default_value() and not a.kwarg_only for a in arguments)


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` is true, as it is for code that torch.export traces."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """Inside, torch's own modules compute without looking at values, which a trace has none of.

    Distributions do not validate their arguments, unless they are told to one by one; the layers of
    `nn.Transformer` apply a mask that they are given, and do not find out whether it is the causal one.
    """
    from torch._dynamo.eval_frame import TorchPatcher
    from torch.distributions import Distribution
    from torch.nn.modules import transformer

    def is_causal(
        mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
    ) -> bool:
        return is_causal is True

    patches = TorchPatcher.patch.cache_info().currsize
    validates, detect = Distribution._validate_args, transformer._detect_is_causal_mask
    Distribution.set_default_validate_args(False)
    transformer._detect_is_causal_mask = is_causal
    try:
        yield
    finally:
        if TorchPatcher.patch.cache_info().currsize == patches:
            Distribution.set_default_validate_args(validates)
        # else Dynamo, which an op inside has started, has switched it off, once and for all
        transformer._detect_is_causal_mask = detect


def validates_distribution(error: BaseException) -> bool:
    """Whether an error was raised where a distribution checks the values of its arguments."""
    from torch.distributions import distribution

    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename == distribution.__file__ for frame in frames)


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Inside, a failing `torch.export.export` only raises: it neither prints the graph so far nor logs the failure."""
    from torch.export import _trace

    def was_asked_for(record: logging.LogRecord) -> bool:  # by TORCH_LOGS
        return record.levelno < logging.WARNING

    names = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    logs = list(map(logging.getLogger, names))
    for log in logs:
        log.addFilter(was_asked_for)
    vars(_trace)["print"] = lambda *_, **__: None  # in front of the builtin, for that module alone
    try:
        yield
    finally:
        vars(_trace).pop("print", None)
        for log in logs:
            log.removeFilter(was_asked_for)


def trace_recurrent_layers() -> None:
    """Lets Dynamo trace frames with nn.RNN, nn.LSTM and nn.GRU, which else it runs as they are, and says nothing."""
    torch._dynamo.config.allow_rnn = True

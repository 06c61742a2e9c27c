"""The steps of a plan on simulated ranks, as results to compare with those of a single device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from autopar._torch import pytree, widened_dtype
from autopar.analysis.objective import MicroBatch
from autopar.ir import Graph
from autopar.program.program import Program, TensorSpec
from autopar.program.stages import cut_stages, stages_with_smaller
from autopar.proof import lockstep
from autopar.proof.comparison import PlanResults
from autopar.proof.rehearsal import Draws, Rehearsal, actions_of
from autopar.proof.single_device import Batch, Between, Results, SingleDevice, copied, widened_tensors
from autopar.proof.streams import MicroBatchStreams
from autopar.runtime.execute.shares import rows_of


def simulated_steps(
    whole: Program,
    graphs: Sequence[Graph],
    device: SingleDevice,
    steps: Iterable[tuple[Sequence[Batch], Results]],
    between: Between | None,
) -> Iterator[PlanResults]:
    """Runs steps of a plan on simulated ranks. The weights are not updated; buffers are.

    Args:
        whole: the program of the plan.
        graphs: the captured model, and the one captured for smaller micro-batches if the last ones are.
        device: the model and its loss function, which are copied.
        steps: for every step its micro-batches, and the results of a single device.
        between: function that is called with the copy of the model between two steps, or None.

    Yields the results of every step.
    """
    model, _ = copied(device.model, device.loss_fn)
    count = whole.plan.micro_batches
    stages = _stages_of(whole, graphs)
    for step, (batches, expected) in enumerate(steps):
        if step and between is not None:
            between(model)
        inputs = [named_inputs(whole.of(i), batch) for i, batch in enumerate(batches)]
        buffers = dict(model.named_buffers(remove_duplicate=False))
        read = [each | prefixed_buffers(buffers) for each in inputs]
        programs = [whole.of(i) for i in range(count)]
        parts = [MicroBatch(x, rows_of(own), own.objective) for x, own in zip(read, programs, strict=True)]
        shares = whole.objective.shares(parts)
        inputs = [each | own for each, own in zip(inputs, whole.term_shares(parts), strict=True)]
        rehearsal = Rehearsal(
            whole,
            stages,
            micro_batches=count,
            parameters=dict(model.named_parameters()),
            buffers=buffers,
            shares=shares,
            draws=draws_of(whole, device, count),
        )
        rehearsal.run(actions_of(whole.plan), inputs.__getitem__)
        updated = _updated_buffers(rehearsal, model, expected)
        weighted = [[s * x for x in rehearsal.losses[i]] for i, s in enumerate(shares)]
        losses = [torch.stack(ranks).sum(0) for ranks in zip(*weighted, strict=True)]
        present = slice(whole.plan.mesh.ranks)
        stored = {name: ranks[present] for name, ranks in rehearsal.stored.items()}
        updated = {name: ranks[present] for name, ranks in updated.items()}
        yield PlanResults(whole, losses[present], stored, updated)
        with torch.no_grad():
            for name, ranks in rehearsal.updates.items():
                model.get_buffer(name).copy_(ranks[0])


def _stages_of(whole: Program, graphs: Sequence[Graph]) -> Sequence[Program]:
    """The programs of all stages, of micro-batches of every size."""
    stages, *smaller = [cut_stages(each, graph) for each, graph in zip(_sizes(whole), graphs, strict=True)]
    return stages_with_smaller(stages, smaller[0], whole.first_smaller) if smaller else stages


def _sizes(whole: Program) -> tuple[Program, ...]:
    return (whole,) if whole.smaller is None else (whole, whole.smaller)


def draws_of(whole: Program, device: SingleDevice, group: int) -> Draws:
    """The noise of every micro-batch, as the single device draws it.

    Args:
        whole: the program of the plan.
        device: the single device.
        group: number of micro-batches between two updates.
    """
    is_whole = whole.objective.counts
    return lambda i: MicroBatchStreams.number(device.streams, i, group, is_whole=is_whole)


def prefixed_buffers(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Buffers with the prefix `buffers.`, as the denominator of a loss names them."""
    return {f"buffers.{name}": x for name, x in buffers.items()}


def named_inputs(whole: Program, batch: Batch) -> dict[str, Tensor]:
    """The tensors of a micro-batch by the names of the program's inputs, in the dtypes that it expects."""
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    # The inputs of a program in float64 arithmetic have the dtype float64.
    pairs = zip(whole.inputs, tensors, strict=True)
    return {spec.name: x.to(torch.promote_types(spec.dtype, x.dtype)) for spec, x in pairs}


def _updated_buffers(rehearsal: Rehearsal, model: nn.Module, expected: Results) -> dict[str, lockstep.Ranks]:
    """The buffers that the program updates, and those that the model changes on a single device.

    If the model changes a buffer and the program does not, the old value is compared, and the check fails.
    """
    found = dict(rehearsal.updates)
    names = _names_of_buffers(model)
    for name in expected.changed:
        if found.keys().isdisjoint(names[name]):
            held = next((n for n in names[name] if n in rehearsal.buffers), None)
            found[name] = rehearsal.buffers[held] if held else [model.get_buffer(name).clone()]
    return found


def widened_program(program: Program) -> Program:
    """The program with inputs, parameters and accumulated gradients in float64."""
    return replace(
        program,
        parameters=tuple(map(_widened_spec, program.parameters)),
        buffers=tuple(map(_widened_spec, program.buffers)),
        inputs=tuple(map(_widened_spec, program.inputs)),
        shares=tuple(map(_widened_spec, program.shares)),
        constants=tuple(widened_tensors(x) for x in program.constants),
        smaller=None if program.smaller is None else widened_program(program.smaller),
    )


def _widened_spec(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype=widened_dtype(spec.dtype), reduced=None)


def _names_of_buffers(model: nn.Module) -> dict[str, list[str]]:
    """First name of every buffer -> all its names."""
    names: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    return {found[0]: found for found in names.values()}

"""Cuts the program of a whole model into the programs of its pipeline stages; results that stay with their stage."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from autopar._torch import FakeTensorMode, pytree
from autopar.errors import PlanError
from autopar.ir import Graph, Mesh, local_shape
from autopar.ir.conversion import OWNER_COLLECTIVES
from autopar.ops.alone import alone, owners_of
from autopar.ops.collectives import Collective
from autopar.passes import cut_stage_graphs, retarget_device, verify_graph
from autopar.passes.cut_stages import StageGraph, stage_numbers
from autopar.program.program import Program, TensorSpec, Wire


class Staying:
    """A container in a model's result whose tensors are for the stage that makes them.

    The next forward takes them back as inputs, and the same layers read them. On the ranks of other stages the tensors
    have their shapes and no values.
    """


def staying_outputs(program: Program) -> frozenset[int]:
    """Positions of the outputs of a forward that lie in a container that stays."""
    if program.is_step:
        return frozenset()
    stays = pytree.are_inside(program.out_spec, Staying)
    tensors = [each for i, each in enumerate(stays) if i not in program.out_literals]
    return frozenset(i for i, each in enumerate(tensors) if each)


def cut_stages(program: Program, graph: Graph) -> list[Program]:
    """Cuts a program into one program per pipeline stage of its plan; without stages, returns the program itself.

    Raises PlanError if a stage changes a buffer that another stage reads.
    """
    pipeline = program.plan.pipeline
    if pipeline is None:
        return [program]
    places = {op.name: i for i, op in enumerate(graph.ops)}
    begins = [places[name] for name in pipeline.cuts]
    weights = _names(program, parameters=True)
    changes = len(program.mutated)
    early = {*range(changes), *(changes + i for i in staying_outputs(program))}
    graphs = cut_stage_graphs(
        program.module,
        stage_numbers(program.module, places, begins),
        len(begins) + 1,
        kept=[*weights, *_changed(program)],
        weights=weights,
        early_outputs=early,
    )
    values = _examples(program)
    leaves = [n.name for n in program.module.graph.find_nodes(op="placeholder")]
    stages = [_stage(program, each, leaves, values, graph) for each in graphs]
    _refuse_stale_buffers(stages)
    if pipeline.update_every:
        _refuse_shared_parameters(stages, pipeline.schedule)
    return stages


def stages_with_smaller(stages: Sequence[Program], smaller: Sequence[Program], first: int) -> list[Program]:
    """The programs of stages, whose micro-batches from number `first` on run by others."""
    assert len(stages) == len(smaller), "both have the stages of one plan"
    return [replace(own, smaller=less, first_smaller=first) for own, less in zip(stages, smaller, strict=True)]


def cuts_where_parameters_lie(graph: Graph, users: Mapping[str, Sequence[int]], stages: int) -> tuple[str, ...]:
    """Cuts of another graph of the same model, so that every op finds its parameters on its stage.

    Args:
        graph: the other graph, such as the forward without its loss.
        users: parameter name -> the stages that hold it.
        stages: number of stages.

    Raises PlanError if the ops of the graph use parameters in another order than the stages.
    """
    names = {tensor: name for name, tensor in graph.parameters.items()}
    homes = []
    for op in graph.ops:
        used = [names[x] for x in op.operands if x in names]
        if len(set(op.operands)) == len(set(used)) == 1 and not op.draws:
            # It is of one parameter alone, such as a cast, and runs wherever its results are used.
            names.update(dict.fromkeys(op.results, used[0]))
            used = []
        homes.append([(name, users[name]) for name in used if name in users])
    early, stage = list[int](), 0
    for op, found in zip(graph.ops, homes, strict=True):
        stage = _nearest(stage, found, 1, op.name)
        early.append(stage)
    late, stage = list[int](), stages - 1
    for op, found in zip(reversed(graph.ops), reversed(homes), strict=True):
        stage = _nearest(stage, found, -1, op.name)
        late.insert(0, stage)
    places = [0]
    for stage in range(1, stages):
        places.append(max(bisect.bisect_left(late, stage), places[-1] + 1))
        if places[-1] > min(bisect.bisect_left(early, stage), len(early) - 1):
            raise PlanError(
                f"The parameters of stage {stage} of {stages} are not used here, so it has nothing to run: use "
                "step(*batch) only, or plan without stages (recipe='zero3'). Layers that share a parameter share it "
                "from before the first call."
            )
    return tuple(graph.ops[place].name for place in places[1:])


def refuse_strays(stages: Sequence[Program], users: Mapping[str, Sequence[int]]) -> None:
    """Raises PlanError if a stage uses a parameter that lies on others; `users` are the stages that hold each."""
    for number, stage in enumerate(stages):
        for spec in stage.parameters:
            own = users.get(spec.name, (number,))
            if number not in own:
                raise PlanError(
                    f"{spec.name} is on stage {' and '.join(map(str, own))} of the pipeline, but this graph of the "
                    f"model (not that of the first step) uses it on stage {number}. Begin with a step that uses every "
                    "parameter on the same stage as this one, or plan without stages."
                )


def _nearest(stage: int, homes: Sequence[tuple[str, Sequence[int]]], direction: int, op: str) -> int:
    """The stage next to this one, in a direction, on which all of an op's parameters lie."""
    for name, stages in homes:
        beyond = [s for s in stages if direction * s >= direction * stage]
        if not beyond:
            raise PlanError(
                f"{name} is on stage {' and '.join(map(str, stages))} of the pipeline, but {op}, which uses it, comes "
                f"{'after' if direction > 0 else 'before'} what runs on stage {stage}. This graph uses its parameters "
                "in another order than the step: use step(*batch) only."
            )
        stage = min(beyond) if direction > 0 else max(beyond)
    return stage


def _names(program: Program, *, parameters: bool) -> list[str]:
    """Placeholders of the parameters, or of the buffers."""
    names = [n.name for n in program.module.graph.find_nodes(op="placeholder")]
    count = len(program.parameters)
    return names[:count] if parameters else names[count : count + len(program.buffers)]


def _changed(program: Program) -> list[str]:
    """Placeholders of the buffers that a step changes."""
    names = _names(program, parameters=False)
    changed = set(program.mutated.values())
    return [name for name, spec in zip(names, program.buffers, strict=True) if spec.name in changed]


def _examples(program: Program) -> dict[str, Tensor]:
    """Every value of the local graph by name, as a fake tensor that knows whether it needs a gradient."""
    module = copy.deepcopy(program.module)
    retarget_device(module, torch.device("cpu"))
    values: dict[str, Tensor] = {}

    class Recording(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            result = _as_owner(n, self.env) if _is_of_owners(n) else super().run_node(n)
            if isinstance(result, Tensor):
                values[n.name] = result
            return result

    with FakeTensorMode(), torch.enable_grad():
        Recording(module).run(*_fake_arguments(program))
    return values


def _is_of_owners(node: fx.Node) -> bool:
    """Whether a node is a collective from or to a state O, which has no kernel that gives a fake tensor."""
    call = Collective.of(node)
    return call is not None and call.name in OWNER_COLLECTIVES


def _as_owner(node: fx.Node, values: Mapping[fx.Node, Tensor]) -> Tensor:
    """The result of such a collective on a rank that has some of it."""
    found, call = alone(node), Collective.of(node)
    assert found is not None and found.shape is not None and call is not None, node.format_node()
    x = values[call.x]
    return x.new_empty(found.shape).requires_grad_(x.requires_grad)


def _fake_arguments(program: Program) -> list[Tensor]:
    mesh = program.plan.mesh
    specs = (*program.parameters, *program.buffers)
    fakes = [_empty(spec, local_shape(spec.dims, spec.layout, mesh)) for spec in specs]
    for fake, spec in zip(fakes, program.parameters, strict=False):
        fake.requires_grad_(spec.name not in program.frozen)
    fakes += [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in program.constants]
    fed = [_empty(s, local_shape(s.dims, s.layout, mesh)) for s in (*program.inputs, *program.shares)]
    for fake, spec in zip(fed, program.inputs, strict=False):
        fake.requires_grad_(spec.name in program.differentiable)
    return fakes + fed


def _empty(spec: TensorSpec, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=spec.dtype)


def _stage(
    program: Program, graph: StageGraph, leaves: list[str], values: Mapping[str, Tensor], model: Graph
) -> Program:
    verify_graph(graph.module, after="cutting stages")
    own = [leaves.index(name) for name in graph.leaves]
    groups = (program.parameters, program.buffers, program.constants, program.inputs, program.shares)
    parameters, buffers, constants, inputs, shares = _select(own, groups)
    changes, mesh = len(program.mutated), program.plan.mesh
    mutated = [program.mutated[i] for i in graph.outputs if i < changes]
    places = tuple(i - changes for i in graph.outputs if i >= changes)
    return replace(
        program,
        module=graph.module,
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        inputs=inputs,
        shares=shares,
        mutated=dict(enumerate(mutated)),
        outputs=tuple(program.outputs[i] for i in places),
        places=places,
        is_step=program.is_step and bool(places),
        received=tuple(_wire(node, values, mesh, model) for node in graph.received),
        sent=tuple(_wire(node, values, mesh, model) for node in graph.sent),
        recomputed=program.recomputed & {n.meta.get("block") for n in graph.module.graph.nodes},
    )


def _select(own: Sequence[int], groups: Sequence[Sequence[object]]) -> list[tuple]:
    """The members of each group that a stage has; `own` holds positions in the concatenated groups."""
    found: list[tuple] = []
    start = 0
    for group in groups:
        found.append(tuple(group[i - start] for i in own if start <= i < start + len(group)))
        start += len(group)
    return found


def _wire(node: fx.Node, values: Mapping[str, Tensor], mesh: Mesh, model: Graph) -> Wire:
    value, (tensor, layout) = values[node.name], node.meta["holds"]
    shape = local_shape(model.tensors[tensor].dims, layout, mesh)
    return Wire(node.name, shape, value.dtype, value.requires_grad, owners_of(layout, mesh))


def _refuse_shared_parameters(stages: Sequence[Program], schedule: str) -> None:
    """Raises PlanError if two stages use one parameter: they update at different times, so that copies would differ."""
    homes: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for spec in stage.parameters:
            home = homes.setdefault(spec.name, number)
            if home != number:
                raise PlanError(
                    f"Stages {home} and {number} both use the parameter {spec.name}, and under the schedule {schedule} "
                    "every stage updates its own at another time. Untie it (a separate embedding and head), cut so "
                    "that one stage has all its uses, or take 1f1b."
                )


def _refuse_stale_buffers(stages: Sequence[Program]) -> None:
    """Raises PlanError if one stage changes a buffer that another one reads, which would have the old value."""
    for number, stage in enumerate(stages):
        for name in stage.mutated.values():
            others = [
                i for i, other in enumerate(stages) if i != number and name in {spec.name for spec in other.buffers}
            ]
            if others:
                raise PlanError(
                    f"Stage {number} of the pipeline changes the buffer {name}, and stage {others[0]} "
                    "reads it: layers that share a module with running statistics must be on one stage. "
                    "Give each layer its own such module, or use fewer stages."
                )

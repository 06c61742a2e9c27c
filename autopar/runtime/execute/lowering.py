"""The rewrites that bind a portable graph to this rank, and the lists of them in the order in which they run.

`LOWERING` makes the program of a model or of a stage fit to run, and `LOWERING_OF_LOCAL_GRAPH` a graph of
torch.compile. A rewrite reads and changes one value, a `Binding`, and does nothing where nothing asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from autopar.ir import part_shape
from autopar.ops.decomposed import gather_products, product_scatter
from autopar.ops.work import shares_of_work
from autopar.passes import (
    bind_groups,
    bind_sizes,
    decompose_products,
    defer_loss_sum,
    fold_blocks,
    hoist_input_sums,
    overlap_batches,
    retarget_device,
    start_early,
    verify_graph,
)
from autopar.program.program import Program
from autopar.program.slices import gathered_again
from autopar.runtime.collectives.alone import leave_to_owners
from autopar.runtime.collectives.async_collectives import StartCollective, finish
from autopar.runtime.collectives.transfer import finish_sum, start_sum
from autopar.runtime.execute.compiled import Executor
from autopar.runtime.execute.recompute import Recomputed
from autopar.runtime.execute.saved import SlicedSaves, install_notes
from autopar.runtime.parameters.entries import Entries
from autopar.runtime.parameters.gather import Gathers
from autopar.runtime.ranks.world import World


@dataclass
class Binding:
    """A graph on its way to this rank, with what its rewrites read, and what they find out.

    Attributes:
        graph: the graph, whose collectives name mesh axes until `bind_collectives`.
        world: the process groups and the device.
        executor: runs the ops, eagerly or compiled.
        gathers: parameters that are collected at their uses.
        bucket_bytes: approximate bytes of one collective.
        entries: parameters of a graph of torch.compile of which only gradients travel; None for a program.
        state: function that returns the buffers and constants of the program, in the order of its inputs.
        saves: tensors that the program saves in slices; None for a graph of torch.compile.
        at_a_time: number of micro-batches of one run, whose ops take turns.
        program: the program that the graph is of; None for a graph of torch.compile.
        loss_axes: axes over which the loss still has to be summed; found by `leave_sum_of_loss`.
        order: parameters in the order in which backward completes their gradients; found by `note_order`.
        has_lone_calls: whether some ranks alone run a call; found by `leave_calls_to_owners`.
    """

    graph: fx.GraphModule
    world: World
    executor: Executor
    gathers: Gathers
    bucket_bytes: int
    entries: Entries | None = None
    state: Callable[[], Sequence[Tensor]] = list
    saves: SlicedSaves | None = None
    at_a_time: int = 1
    program: Program | None = None
    loss_axes: tuple[str, ...] = ()
    order: list[int] = field(default_factory=list)
    has_lone_calls: bool = False

    @property
    def bound_program(self) -> Program:
        """The program of a rewrite that only programs have."""
        assert self.program is not None, "no graph of torch.compile"
        return self.program


def give_own_sizes(binding: Binding) -> None:
    """Sizes that differ between ranks, such as of a batch that their number does not divide, become this rank's."""
    bind_sizes(binding.graph, binding.world.rank)


def move_to_device(binding: Binding) -> None:
    """Tensors that the graph makes are made on this rank's device."""
    retarget_device(binding.graph, binding.world.device)


def leave_sum_of_loss(binding: Binding) -> None:
    """The graph gives a rank's part of the loss; see `autopar.passes.overlap_sums`."""
    if binding.bound_program.is_step:
        binding.loss_axes = defer_loss_sum(binding.graph)


def interleave_micro_batches(binding: Binding) -> None:
    """Makes the graph of a micro-batch that of several, whose ops take turns; see `autopar.passes.overlap_batches`."""
    if binding.at_a_time == 1:
        return
    program, world, residents = binding.bound_program, binding.world, binding.gathers.residents
    leaves = [(residents.shape(i), s.dtype) for i, s in enumerate(program.parameters)]
    fed = (*program.inputs, *program.shares)
    inputs = [(part_shape(s.dims, s.layout, world.mesh, world.rank), s.dtype) for s in fed]
    examples = [*leaves, *((x.shape, x.dtype) for x in binding.state()), *inputs]
    shares = shares_of_work(binding.graph, examples, world.device)
    overlap_batches(binding.graph, copies=binding.at_a_time, inputs=len(inputs), seconds=shares.__getitem__)


def note_order(binding: Binding) -> None:
    """Finds the order in which gradients will be complete."""
    binding.order = completion_order(binding.graph, len(binding.bound_program.parameters))


def leave_calls_to_owners(binding: Binding) -> None:
    """Removes the calls that other ranks run alone."""
    binding.has_lone_calls = leave_to_owners(binding.graph, binding.world, compiles=binding.executor.compiles)


def gather_parameters(binding: Binding) -> None:
    """Parameters are gathered in groups, ahead of their first use."""
    binding.gathers.install(binding.graph, binding.world.mesh, binding.bucket_bytes)


def enter_parameters(binding: Binding) -> None:
    """Gradients of parameters that need no gather are summed in groups."""
    if binding.entries is not None:
        local = [kept.local for kept in binding.gathers.residents.kept]
        binding.entries.install(binding.graph, local, binding.bucket_bytes)


def bind_collectives(binding: Binding) -> None:
    """Collectives name process groups in place of mesh axes."""
    bind_groups(binding.graph, binding.world.group_names)


def decompose(binding: Binding) -> None:
    """Products are computed in pieces while the collective beside them sends those; along the axes of the plan."""
    program, groups = binding.bound_program, binding.world.group_names
    if axes := program.plan.decomposed:
        restored = gathered_again(program.slices, program.plan, groups)
        along = [groups[axis] for axis in axes]
        decompose_products(binding.graph, gather_products, product_scatter, groups=along, restored=restored)


def note_saved_slices(binding: Binding) -> None:
    """Autograd is told of the tensors that it saves in slices."""
    assert binding.saves is not None, "a program has them, if only none"
    install_notes(binding.graph, binding.saves)


def fold_recomputed_blocks(binding: Binding) -> None:
    """One call of every recomputed block."""
    program, ready = binding.bound_program, binding.executor.ready
    binding.graph = fold_blocks(
        binding.graph,
        program.recomputed,
        lambda block: Recomputed(ready(block)),
        parameters=len(program.parameters),
        received=len(program.received),
    )


def hoist_sums(binding: Binding) -> None:
    """Sums of gradients that leave the graph start as soon as these are complete."""
    program = binding.bound_program
    if not binding.has_lone_calls:
        counts = {"parameters": len(program.parameters), "received": len(program.received)}
        hoist_input_sums(binding.graph, start_sum, finish_sum, **counts)


def start_collectives_early(binding: Binding) -> None:
    """Collectives start where their operand is ready, and end where their result is used.

    Which of them do depends on the calls around them, which differ between owners and other ranks, and nothing goes
    between the ops of a compiled graph.
    """
    if binding.bound_program.plan.pipeline is not None or binding.executor.compiles or binding.has_lone_calls:
        return
    world = binding.world
    axes = {group: axis for axis, group in world.group_names.items()}
    start_early(binding.graph, lambda call: StartCollective(call._replace(group=axes[call.group]), world), finish)


Rewrite = Callable[[Binding], None]

LOWERING: tuple[Rewrite, ...] = (
    give_own_sizes,  # all that follows sees the sizes of this rank's tensors
    move_to_device,  # the graph was captured on no device, or on another one
    leave_sum_of_loss,  # ranks need not wait for it in every micro-batch; before the loss has copies
    interleave_micro_batches,  # all that follows sees the ops of all of them
    note_order,  # while every parameter still stands at its uses
    leave_calls_to_owners,  # what other ranks run needs no parameters here
    gather_parameters,  # its routes are layouts of axes; before these become groups
    bind_collectives,  # from here on a collective names its process group
    decompose,  # it knows the collectives beside a product by their group
    note_saved_slices,  # inside blocks, too, so before these become calls
    fold_recomputed_blocks,
    hoist_sums,  # sums inside a recomputed block stay there
    start_collectives_early,  # last: no later rewrite may come between a start and its end
)
LOWERING_OF_LOCAL_GRAPH: tuple[Rewrite, ...] = (give_own_sizes, gather_parameters, enter_parameters, bind_collectives)


def lower(binding: Binding, rewrites: Sequence[Rewrite] = LOWERING) -> None:
    """Runs the rewrites in place, and verifies the graph that they leave."""
    for rewrite in rewrites:
        rewrite(binding)
    verify_graph(binding.graph, after="binding to process groups")


def completion_order(module: fx.GraphModule, parameters: int) -> list[int]:
    """Parameters in the order in which backward completes their gradients: that of first use, reversed."""
    position = {node: i for i, node in enumerate(module.graph.nodes)}
    leaves = module.graph.find_nodes(op="placeholder")[:parameters]

    def first_use(node: fx.Node) -> int:
        return min((position[user] for user in node.users), default=0)

    return sorted(range(parameters), key=lambda i: (-first_use(leaves[i]), i))

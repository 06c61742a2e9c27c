"""Rewrites of fx graphs, one file per rewrite, and the list `CLEANUP` of rewrites in the order in which they run.

`CLEANUP` makes a captured graph fit for analysis; `partition` turns it into the program of one rank.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar._torch import code_when_called
from autopar.ops.verifier import verify_graph
from autopar.passes.cleanup.call_bindings import call_bindings
from autopar.passes.cleanup.densify_gradients import densify_gradients
from autopar.passes.cleanup.drop_empty_operands import drop_empty_operands
from autopar.passes.cleanup.expand_copies import expand_copies
from autopar.passes.cleanup.name_nodes import name_nodes
from autopar.passes.cleanup.open_random_attention import open_random_attention
from autopar.passes.cleanup.plain_slices import plain_slices
from autopar.passes.cleanup.read_types import read_types
from autopar.passes.cleanup.real_scatters import real_scatters
from autopar.passes.cleanup.refresh_examples import refresh_examples
from autopar.passes.cleanup.remove_assertions import remove_assertions
from autopar.passes.cleanup.remove_clones import remove_clones
from autopar.passes.cleanup.reshape_views import reshape_views
from autopar.passes.cleanup.single_batch_norm import single_batch_norm
from autopar.passes.cleanup.unreduce_losses import unreduce_losses
from autopar.passes.close_sizes import close_sizes
from autopar.passes.cut_regions import cut_regions
from autopar.passes.cut_stages import cut_stage_graphs
from autopar.passes.decompose_products import decompose_products
from autopar.passes.fold_blocks import fold_blocks
from autopar.passes.group_gathers import find_gathers, group_gathers
from autopar.passes.join_experts import join_experts
from autopar.passes.join_losses import join_losses
from autopar.passes.open_unruled import open_unruled
from autopar.passes.overlap_batches import overlap_batches
from autopar.passes.overlap_sums import defer_loss_sum, hoist_input_sums
from autopar.passes.partition import partition
from autopar.passes.retarget import arguments_on, bind_groups, bind_sizes, retarget_device
from autopar.passes.start_early import start_early

Pass = Callable[[fx.GraphModule], None]

CLEANUP: tuple[Pass, ...] = (
    remove_assertions,  # they speak of global shapes and devices, and compute nothing
    expand_copies,  # a slice that is assigned to keeps its gradient
    real_scatters,  # a slice of complex numbers that is assigned to has a gradient
    open_random_attention,  # its masks must differ between parts of the batch
    open_unruled,  # an op that nobody gave a rule may have parts that can be split
    unreduce_losses,  # a sum of element-wise terms can be split along anything
    single_batch_norm,  # in evaluation it can be split along the batch, and has one result to say so of
    densify_gradients,  # no collective takes a sparse one
    read_types,  # of a tensor that gives only its type, no part is needed
    reshape_views,  # a view's strides need not be those of the local tensor; sizes of -1 differ between devices
    plain_slices,  # they differ between sizes that are numbers and open ones
    drop_empty_operands,  # they have no dims along which the others could be split
    remove_clones,  # they differ between devices, and compute nothing
    join_experts,  # tokens are sorted by every rank alone, and experts can be split
    refresh_examples,  # their strides tell what must be copied, and so what backward keeps
    name_nodes,  # last: what is left is named
)


def clean_up(module: fx.GraphModule) -> None:
    """Runs `CLEANUP` in place, with the verifier after every pass."""
    with code_when_called():
        for rewrite in CLEANUP:
            rewrite(module)
            verify_graph(module, after=rewrite.__name__)
    module.recompile()

"""The data types that all rooms share: mesh, layout, conversion, graph, plan. They need no torch."""

from autopar.ir.call import CollectiveCall, calls, calls_between
from autopar.ir.choice import (
    EXCHANGED,
    OWNED,
    PARTIAL,
    UNSPLIT,
    VARIED,
    Choice,
    Labels,
    go_together,
    is_least_deep,
    nested_labels,
    nesting_of,
    owner_of,
    plain,
    runs_alone,
    split_factors,
)
from autopar.ir.conversion import BY_ROWS, LayoutStep, can_go_by_rows, steps, steps_of
from autopar.ir.graph import Factor, Graph, Stack, Tensor, find_stacks, is_legal
from autopar.ir.layout import (
    ANY,
    WHOLE,
    Dims,
    Layout,
    O,
    P,
    R,
    S,
    State,
    V,
    divides,
    format_layout,
    has_owner,
    in_nesting_order,
    lies_in_chunks,
    local_elements,
    local_factors,
    local_shape,
    nested,
    parse_layout,
    parts_of,
    stretch_of,
)
from autopar.ir.meeting import Meeting, mesh_of_all, mesh_of_replica
from autopar.ir.mesh import PIPELINE_AXIS, Mesh
from autopar.ir.op import (
    Leaf,
    Moved,
    Op,
    OwnCollective,
    Work,
    operand_layouts,
    parts_fit,
    result_layouts,
    split_counts,
    why_not_alone,
)
from autopar.ir.parameter_plan import ParameterPlan
from autopar.ir.pipeline import (
    PLACEMENTS,
    SCHEDULES,
    VERSIONED,
    Pipeline,
    pipeline_position,
    with_pipeline,
    without_pipeline,
)
from autopar.ir.plan import Plan
from autopar.ir.precision import MixedPrecision
from autopar.ir.tier import TIERS, Tier, TieredLayout, format_place, parse_place
from autopar.ir.uneven import cuts_chunks, is_storable, part_shape, reaches_all, uneven_axes
from autopar.ir.vacancy import has_all, partly_vacant

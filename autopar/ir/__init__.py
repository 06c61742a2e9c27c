"""The words everyone shares: mesh, layout, conversion, graph, plan. Plain data, no torch."""

from autopar.ir.conversion import CollectiveCall, LayoutStep, calls, steps, walk
from autopar.ir.graph import (
    PARTIAL,
    UNSPLIT,
    VARIED,
    Choice,
    Factor,
    Graph,
    Labels,
    Leaf,
    Op,
    OwnCollective,
    Stack,
    Tensor,
    Work,
    find_stacks,
    is_legal,
    operand_layouts,
    result_layouts,
)
from autopar.ir.layout import (
    WHOLE,
    Dims,
    Layout,
    P,
    R,
    S,
    State,
    V,
    divides,
    format_layout,
    local_elements,
    local_factors,
    local_shape,
    parse_layout,
    shape_of,
)
from autopar.ir.mesh import PIPELINE_AXIS, Mesh
from autopar.ir.pipeline import SCHEDULES, Pipeline, with_pipeline, without_pipeline
from autopar.ir.plan import ParameterPlan, Plan
from autopar.ir.precision import MixedPrecision
from autopar.ir.tier import TIERS, Tier, format_place, parse_place

__all__ = [
    "PARTIAL", "PIPELINE_AXIS", "SCHEDULES", "TIERS", "UNSPLIT", "VARIED", "WHOLE",
    "Choice", "OwnCollective", "CollectiveCall", "Dims", "Factor", "Graph", "Labels", "Layout", "Leaf", "Mesh",
    "MixedPrecision", "Op", "P", "ParameterPlan", "Pipeline", "Plan", "R", "S", "Stack", "State", "LayoutStep",
    "Tensor", "Tier", "V", "Work",
    "calls", "divides", "find_stacks", "format_layout", "format_place", "is_legal", "local_elements", "local_factors",
    "local_shape", "operand_layouts", "parse_layout", "parse_place", "result_layouts", "shape_of", "steps",
    "walk", "with_pipeline", "without_pipeline",
]  # fmt: skip

"""Everything a step does and everything a rank holds, as two flat lists of priced items.

Every statement about a plan's cost (a sum, a breakdown, a timeline, a coefficient of the search) is a
grouping of these lists. `autopar.cost_model.pricer` makes them. With `Sizes` and a `Hardware` of
numbers the prices are numbers; with symbols they are expressions.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from autopar.cost_model.arith import Quantity

Region = Literal["before", "layers", "after"]
Phase = Literal["forward", "backward", "gather", "reduce"]
COMPUTE = "compute"


@dataclass(frozen=True)
class Item:
    """Work of one kind on one resource of a rank.

    Attributes:
        name: kind of the op, or the collective and the tensor that it moves, without layer numbers.
        kind: kind of the op, or name of the collective.
        resource: "compute", or the mesh axis along which a collective runs.
        phase: part of the step. Forward and backward run once a micro-batch; gather runs once a
            step; reduce runs once a step, or once a micro-batch where `every_micro_batch` is set.
        region: position relative to the repeated layers: before, in or after them.
        count: number of such executions in one phase.
        seconds: duration of one execution.
        traffic_bytes: bytes that one execution moves in the device's memory, or sends over the link.
        flops: floating-point operations of one execution.
        kernels: kernels that the host issues for one execution.
        carries: "activation", "parameter" or "gradient" for a collective, "" for compute.
        every_micro_batch: whether the item runs once a micro-batch.
        ranks: number of participating ranks.
        of: op that the item is, or the first op that needs it; the parameter's name for the sums,
            gathers and reductions of a parameter.
        recomputed: change of the number of executions where the item's block is recomputed: 1 for work
            of forward that recomputation repeats; 0 for work that it does not; -1 for a gather that
            backward no longer needs, because the recomputed forward has made it.
        moves: tensor that a conversion inside the graph moves; "" for all other work.
    """

    name: str
    kind: str
    resource: str
    phase: Phase
    region: Region
    count: Quantity
    seconds: Quantity
    traffic_bytes: Quantity
    flops: Quantity = 0
    kernels: int = 1
    carries: str = ""
    every_micro_batch: bool = True
    ranks: Quantity = 1
    of: str = ""
    recomputed: int = 0
    moves: str = ""


@dataclass(frozen=True)
class Holding:
    """Memory of one kind on a rank.

    Kinds that last: "parameters", "gradients", "optimizer", "buffers", "saved activations".

    Kinds that exist only while one block (a layer) runs, of which the peak counts the largest block alone: "gathered"
    (all-gathered copies of sharded parameters), "working" (operands of a loss), "made again" (activations that a block
    saves while it is recomputed in backward).

    "returned" is a credit: the activations of the blocks behind the last recomputed one, whose backward has freed them
    before the first block is recomputed. It is subtracted from "made again".

    Attributes:
        name: words for reports: path of the parameter or buffer with `*` for numbers of layers, or module and kind of
            the op that keeps the memory; the kind itself for "gathered", "made again" and "returned".
        kind: one of the kinds above.
        region: position relative to the repeated layers: before, in or after them.
        bytes: size of everything the item stands for; of a single block for the kinds that exist while it runs.
        of: name of the parameter, of a buffer's tensor, or of an op: the first that keeps the memory, or that uses the
            gathered copy.
        block: block during which the memory exists; "" for the kinds that last and for "returned".
    """

    name: str
    kind: str
    region: Region
    bytes: Quantity
    of: str = ""
    block: Hashable = ""


@dataclass(frozen=True)
class TrainingState:
    """Bytes per element that training keeps in addition to a parameter of the captured graph.

    Where a graph was captured under a mixed-precision policy, its tensors say it themselves
    (`Tensor.at_rest`, `Tensor.gradient`), and `FULL` is right. The others are for graphs whose
    parameters have the format of their use from the start, such as models described in bfloat16.

    Attributes:
        gradient_bytes: bytes of a gradient; None for the parameter's own format.
        master_bytes: bytes of a second copy of the parameter that the optimizer updates; 0 for none.
        moment_bytes: bytes of both moments of Adam together; None for two in the parameter's format.
        fresh_gradient_bytes: bytes of the gradient of one micro-batch that stays next to the sum.
    """

    gradient_bytes: int | None = None
    master_bytes: int = 0
    moment_bytes: int | None = None
    fresh_gradient_bytes: int = 0


FULL = TrainingState()
# Micikevicius et al. 2018, section 3.1, as Megatron-LM and ZeRO (section 3.1) count it: 2 + 2 + 12.
MIXED = TrainingState(gradient_bytes=2, master_bytes=4, moment_bytes=8)
# The same with gradients accumulated in float32 (nanotron, Megatron-Core): 2 + 4 + 12.
MIXED_FLOAT32_GRADIENTS = TrainingState(gradient_bytes=4, master_bytes=4, moment_bytes=8)
# nanotron adds the gradient of a micro-batch, in bfloat16, to the sum, and keeps both.
MIXED_BOTH_GRADIENTS = TrainingState(4, 4, 8, fresh_gradient_bytes=2)

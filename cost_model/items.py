"""Everything a step does and everything a rank holds, as two flat lists of priced items.

Every statement about a plan's cost (a sum, a breakdown, a timeline, a coefficient of the search) is a
grouping of these lists. `autopar.cost_model.pricer` makes them. With `Sizes` and a `Hardware` of
numbers the prices are numbers; with symbols they are expressions.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from autopar.cost_model.arith import Quantity
from autopar.cost_model.optimizers import ADAMW, OptimizerFormat, optimizer_format
from autopar.cost_model.sizes import Sizes
from autopar.errors import AutoparError
from autopar.ir import Layout, Tensor, Tier

Region = Literal["before", "layers", "after"]
Phase = Literal["forward", "backward", "gather", "reduce", "meet"]
COMPUTE = "compute"


@dataclass(frozen=True)
class Item:
    """Work of one kind on one resource of a rank.

    Attributes:
        name: kind of the op, or the collective and the tensor that it moves, without layer numbers.
        kind: kind of the op, or name of the collective.
        resource: "compute", the mesh axis along which a collective runs, or the tier whose link a move takes.
        phase: part of the step. Forward and backward run once a micro-batch; gather runs once a
            step; reduce runs once a step, or once a micro-batch where `every_micro_batch` is set; meet runs every K
            steps, and its `count` is the mean of a step.
        region: position relative to the repeated layers: before, in or after them.
        count: number of such executions in one phase.
        seconds: duration of one execution.
        traffic_bytes: bytes that one execution moves in the device's memory, or sends over the link.
        flops: floating-point operations of one execution.
        kernels: kernels that the host issues for one execution.
        carries: "activation", "parameter" or "gradient" for a collective or a move between memories, "" for compute.
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
        tier: memory that it lies in.
        is_stored: whether the optimizer reads or updates this memory. It is False of what the device holds for a step
            only (the copy of a parameter that the host stores, and the sum of its gradients), and of what replicas keep
            from one meeting to the next.
    """

    name: str
    kind: str
    region: Region
    bytes: Quantity
    of: str = ""
    block: Hashable = ""
    tier: Tier = "device"
    is_stored: bool = True


# How often an optimizer's update touches a byte: it reads and writes its states and the parameters; the gradient
# is read for its norm, read, and set to zero.
TOUCHED: Mapping[str, int] = MappingProxyType({"optimizer": 2, "gradients": 3, "parameters": 2})


@dataclass(frozen=True)
class TrainingState:
    """What training keeps in addition to a parameter of the captured graph.

    Where a graph was captured under a mixed-precision policy, its tensors say their formats themselves
    (`Tensor.at_rest`, `Tensor.gradient`), and `FULL` is right. The others are for graphs whose
    parameters have the format of their use from the start, such as models described in bfloat16.

    >>> TrainingState.parse("adamw8bit gradients=4 masters=4")
    TrainingState(adamw8bit gradients=4 masters=4)

    Attributes:
        gradient_bytes: bytes of one element of a gradient; None for the parameter's own format.
        master_bytes: bytes of one element of a second copy of the parameter, which the optimizer updates;
            0 for none.
        optimizer: tensors that the optimizer keeps for a parameter.
        fresh_gradient_bytes: bytes of one element of a micro-batch's gradient that stays next to the sum.
        meeting_copies: number of tensors of a parameter's size and format that a replica keeps from one meeting to
            the next (`autopar.ir.meeting`).
    """

    gradient_bytes: int | None = None
    master_bytes: int = 0
    optimizer: OptimizerFormat = ADAMW
    fresh_gradient_bytes: int = 0
    meeting_copies: int = 0

    def __str__(self) -> str:
        """`adamw8bit gradients=4 masters=4`, as `parse` reads it."""
        words = [self.optimizer.name]
        words += [] if self.gradient_bytes is None else [f"gradients={self.gradient_bytes}"]
        return " ".join([*words, *([f"masters={self.master_bytes}"] * bool(self.master_bytes))])

    def __repr__(self) -> str:
        return f"TrainingState({self})"

    @classmethod
    def parse(cls, text: str, usual: TrainingState | None = None) -> TrainingState:
        """Reads the name of an optimizer, and bytes of gradients and masters; each may be left out.

        Args:
            text: words such as `adamw8bit`, or `gradients=2 masters=0`.
            usual: state that gives what the text leaves out; by default `FULL`.

        Raises AutoparError for a word that is none of these.
        """
        state = cls() if usual is None else usual
        for word in text.split():
            name, _, size = word.partition("=")
            if name in _WORDS and size in _SIZES:
                found = {_WORDS[name]: int(size)}
                state = cls(**{**vars(state), **found})
            elif "=" in word:
                raise AutoparError(
                    f"Cannot read {word!r} in the training state {text!r}; write gradients= or masters= and "
                    f"bytes of an element ({', '.join(_SIZES)}), such as adamw8bit gradients=2 masters=0."
                )
            else:
                state = replace(state, optimizer=optimizer_format(name))
        return state

    @classmethod
    def of(cls, given: object) -> TrainingState:
        """A state as `compile` takes it: a value, its text, or None for `FULL`. Raises AutoparError."""
        return given if isinstance(given, cls) else cls.parse(str(given or ""))

    def optimizer_bytes(
        self, tensor: Tensor, storage: Layout, sizes: Sizes, count: Quantity = 1
    ) -> Quantity:
        """Bytes on a rank of masters and optimizer states of `count` parameters alike.

        Args:
            tensor: the parameter as it lies between steps.
            storage: its layout then.
            sizes: local sizes of tensors on a rank.
            count: number of such parameters.
        """
        size = tensor.itemsize_bytes
        own = self.master_bytes or size
        element_bytes = self.master_bytes + self.optimizer.element_bytes(tensor, own)
        found = element_bytes / size * (count * sizes.bytes(tensor, storage))
        for held in self.optimizer.other_bytes(tensor, storage, sizes, own):
            found = found + count * held
        return found


_WORDS = {"gradients": "gradient_bytes", "masters": "master_bytes"}
_SIZES = ("0", "2", "4", "8")
FULL = TrainingState()
# Micikevicius et al. 2018, section 3.1, as Megatron-LM and ZeRO (section 3.1) count it: 2 + 2 + 12.
MIXED = TrainingState(gradient_bytes=2, master_bytes=4)
# The same with gradients accumulated in float32 (nanotron, Megatron-Core): 2 + 4 + 12.
MIXED_FLOAT32_GRADIENTS = TrainingState(gradient_bytes=4, master_bytes=4)
# nanotron adds the gradient of a micro-batch, in bfloat16, to the sum, and keeps both.
MIXED_BOTH_GRADIENTS = replace(MIXED_FLOAT32_GRADIENTS, fresh_gradient_bytes=2)

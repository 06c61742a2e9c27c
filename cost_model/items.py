"""Everything that a step does and everything that a rank holds, as two flat lists: items and holdings.

An *item* is work with its seconds, such as a matrix product or an all-gather. A *holding* is memory with its bytes,
such as a parameter. Every figure of a report and every coefficient of the search is a sum over some of them.
`autopar.cost_model.pricer` makes the lists. The figures are numbers if sizes and hardware are numbers, and sympy
expressions if they are symbols.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from autopar.cost_model.arith import Quantity
from autopar.cost_model.optimizers import ADAMW, OptimizerFormat, optimizer_format
from autopar.cost_model.sizes import Sizes
from autopar.errors import AutoparError
from autopar.ir import TIERS, Layout, Tensor, Tier

Region = Literal["before", "layers", "after"]
Phase = Literal["forward", "backward", "gather", "reduce", "meet", "update"]
COMPUTE = "compute"
Places = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class WorkItem:
    """Work of one kind on one resource of a rank.

    Attributes:
        name: kind of the op, or the collective and the tensor that it moves, without layer numbers.
        kind: kind of the op, or name of the collective.
        resource: "compute", the mesh axis along which a collective runs, or the tier whose link a move takes.
        phase: part of the step. "forward" and "backward" run once per micro-batch; "gather" runs once per
            step; "reduce" runs once per step, or once per micro-batch where `every_micro_batch` is set; "meet" runs
            every K steps, and its `count` is the mean per step; "update" is the optimizer's, once per step.
        region: position relative to the repeated layers: before, in or after them.
        count: number of executions in one phase.
        seconds: duration of one execution.
        traffic_bytes: bytes that one execution moves in the device's memory, or sends over the link; a mean over all
            ranks where ranks send different amounts.
        flops: floating-point operations of one execution.
        kernels: kernels that the host issues for one execution.
        carries: "activation", "parameter" or "gradient" for a collective or a move between memories, "" for compute.
        every_micro_batch: whether the item runs once a micro-batch.
        ranks: number of participating ranks.
        of: name of the op that does this work, or of the first op that needs its result; for work on a parameter
            between steps, the parameter's name.
        recomputed: number of executions that recomputation of the item's block adds: 1 for work of forward that is
            repeated; 0 for work that is not; -1 for a gather in backward that is dropped, because the recomputed
            forward has gathered the tensor already.
        moves: name of the tensor that a conversion inside the graph converts; "" for all other work.
        hidden_seconds: part of `seconds` that overlaps with the products with which a collective is decomposed.
        places: mesh axis, by its index, and the positions along it of the ranks that do the work; along axes that are
            not named, all do. Empty for work of all ranks.
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
    hidden_seconds: Quantity = 0
    places: Places = ()

    def runs_at(self, position: Sequence[int]) -> bool:
        """Whether the rank at these mesh coordinates does this work."""
        return all(position[axis] in positions for axis, positions in self.places)


def kind_of_work(item: WorkItem) -> str:
    """Kind of an item's work, which decides how much of it can overlap with compute.

    "compute"; communication of "stored" parameters and gradients, or of "activation"s; or a "move" between memories,
    for which the runtime waits, so that nothing hides it.
    """
    if item.resource == COMPUTE:
        return "compute"
    if item.resource in TIERS:
        return "move"
    return "activation" if item.carries == "activation" else "stored"


def runs_every_time(item: WorkItem) -> bool:
    """Whether an item runs once per micro-batch, not once per step."""
    return item.phase in ("forward", "backward") or (item.phase == "reduce" and item.every_micro_batch)


@dataclass(frozen=True)
class MemoryItem:
    """Memory of one kind on a rank.

    Lasting kinds: "parameters", "gradients", "optimizer", "buffers", "saved activations".

    Kinds that exist only while one block (a layer) runs: "gathered" (all-gathered copies of sharded parameters),
    "working" (operands of a loss), "recomputed" (activations that a block saves while it is recomputed in backward).
    The peak counts them for the largest block only.

    "returned" is subtracted from "recomputed": the activations of the blocks after the last recomputed one. Backward
    has freed them before it recomputes a block.

    Attributes:
        name: words for reports: path of the parameter or buffer with `*` for numbers of layers, or module and kind of
            the op that keeps the memory; the kind itself for "gathered", "recomputed" and "returned".
        kind: one of the kinds above.
        region: position relative to the repeated layers: before, in or after them.
        bytes: size of the memory in all layers that the op or parameter stands for; in a single block for the kinds
            that exist only while a block runs.
        of: name of the parameter, of a buffer's tensor, or of the first op that keeps the memory or uses the gathered
            copy.
        block: block during which the memory exists; "" for the lasting kinds and for "returned".
        tier: tier in which the memory lies.
        is_stored: whether the optimizer reads or updates this memory. It is False for copies that the device holds
            during a step (of parameters and gradients stored on the host), and for what replicas keep from one meeting
            to the next.
    """

    name: str
    kind: str
    region: Region
    bytes: Quantity
    of: str = ""
    block: Hashable = ""
    tier: Tier = "device"
    is_stored: bool = True


# Number of times that an optimizer's step reads or writes a byte: it reads and writes its states and the parameters,
# reads a gradient twice (once for the norm), and sets it to zero.
TOUCHED: Mapping[str, int] = MappingProxyType({"optimizer": 2, "gradients": 3, "parameters": 2})


@dataclass(frozen=True)
class TrainingState:
    """The gradients, master copies and optimizer states that training keeps for every parameter.

    For a graph that was captured under a mixed-precision policy, `FULL` is right: its tensors have the dtypes of
    storage and gradients (`Tensor.at_rest`, `Tensor.gradient`). The other values of this module are for graphs whose
    parameters are in bfloat16 from the start.

    >>> TrainingState.parse("adamw8bit gradients=4 masters=4")
    TrainingState(adamw8bit gradients=4 masters=4)

    Attributes:
        gradient_bytes: bytes of one element of a gradient; None for the dtype of the parameter.
        master_bytes: bytes of one element of a master copy of the parameter, which the optimizer updates;
            0 for no copy.
        optimizer: tensors that the optimizer keeps for a parameter.
        fresh_gradient_bytes: bytes of one element of a micro-batch's gradient, where it is kept in addition to the
            accumulated gradient; 0 where it is not.
        meeting_copies: number of tensors of a parameter's size and dtype that a replica keeps from one meeting to
            the next (`autopar.ir.meeting`).
    """

    gradient_bytes: int | None = None
    master_bytes: int = 0
    optimizer: OptimizerFormat = ADAMW
    fresh_gradient_bytes: int = 0
    meeting_copies: int = 0

    def __str__(self) -> str:
        """Text such as `adamw8bit gradients=4 masters=4`; the inverse of `parse`."""
        words = [self.optimizer.name]
        words += [] if self.gradient_bytes is None else [f"gradients={self.gradient_bytes}"]
        return " ".join([*words, *([f"masters={self.master_bytes}"] * bool(self.master_bytes))])

    def __repr__(self) -> str:
        return f"TrainingState({self})"

    @classmethod
    def parse(cls, text: str, usual: TrainingState | None = None) -> TrainingState:
        """Reads the name of an optimizer and the bytes per element of gradients and masters; each may be left out.

        Args:
            text: words such as `adamw8bit`, or `gradients=2 masters=0`.
            usual: state whose values hold for what the text leaves out; by default `FULL`.

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
        """Makes a state from any form that users may give: a `TrainingState`, its text, or None for `FULL`.

        Raises AutoparError for anything else.
        """
        return given if isinstance(given, cls) else cls.parse(str(given or ""))

    def optimizer_bytes(self, tensor: Tensor, storage: Layout, sizes: Sizes, count: Quantity = 1) -> Quantity:
        """Bytes that a rank needs for master copies and optimizer states of `count` equal parameters.

        Args:
            tensor: the parameter as it is stored between steps.
            storage: layout of the parameter between steps.
            sizes: local sizes of tensors on a rank.
            count: number of equal parameters.
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

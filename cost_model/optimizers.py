"""The states that optimizers keep for a parameter with n elements: which tensors, and their exact bytes.

    adamw         two tensors of n elements, in the dtype of the weights that the optimizer updates
                  (Loshchilov and Hutter 2019)
    adamwbf16     two tensors of n elements in bfloat16
    adamw8bit     two tensors of n bytes, a float32 scale for 256 elements, a table of 256 float32
                  (Dettmers et al. 2022, torchao)
    adamw4bit     two tensors of n/2 bytes, a float32 scale for 128 elements, a table of 16 float32
                  (Li et al. 2023, torchao)
    adamwfp8      two tensors of n bytes, a float32 scale for 256 elements (torchao)
    adafactor     a row and a column of the last two dims; n elements for a vector
                  (Shazeer and Stern 2018, as torch.optim)
    muon          one tensor of n elements for a matrix; two, as AdamW, for every other parameter
                  (Jordan et al. 2024, as torch.optim)
    sgd-momentum  one tensor of n elements
    sgd           nothing

torchao keeps a state in the parameter's own dtype if a rank has fewer than 4,096 elements of the state, or a number of
elements that is not a multiple of the block (torchao 0.18, `_AdamBase._new_buffer`); so do these prices. They leave out
the counter of steps, one number for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.cost_model.arith import Quantity, where
from autopar.cost_model.sizes import Sizes
from autopar.errors import AutoparError, did_you_mean
from autopar.ir import Layout, R, Tensor

_LEAST_ELEMENTS = 4096  # torchao 0.18, after bitsandbytes


@dataclass(frozen=True)
class StateFormat:
    """Number format of one tensor that an optimizer keeps for a parameter.

    Attributes:
        element_bytes: bytes of one element; None for the dtype of the weights that the optimizer updates.
        block_elements: number of elements that share a scale; None for a tensor without scales.
        scale_bytes: bytes of the scale of one block.
        table_bytes: bytes of the lookup table that each tensor has.
    """

    element_bytes: float | None = None
    block_elements: int | None = None
    scale_bytes: int = 0
    table_bytes: int = 0

    def is_taken(self, elements: Quantity) -> Quantity:
        """Whether a rank's part with this number of elements is kept in this format, and not in the weights' dtype."""
        if self.block_elements is None:
            return True
        return (elements >= _LEAST_ELEMENTS) & (elements % self.block_elements == 0)

    def bytes(self, elements: Quantity, taken: Quantity, own_bytes: float) -> Quantity:
        """Bytes of a rank's part with this number of elements.

        `taken` is the result of `is_taken`, and `own_bytes` the bytes of one element of the weights.
        """
        if self.block_elements is None:
            return elements * (own_bytes if self.element_bytes is None else self.element_bytes)
        assert self.element_bytes is not None, "blocks have a format of their own"
        coded = self.element_bytes + self.scale_bytes / self.block_elements
        return where(taken, elements * coded + self.table_bytes, elements * own_bytes)


@dataclass(frozen=True)
class OptimizerFormat:
    """The tensors that an optimizer keeps for a parameter.

    Attributes:
        name: name by which users select the optimizer.
        states: formats of the tensors that have the parameter's shape.
        factored: whether a parameter with several dims has a row and a column in place of these tensors.
        of_matrices: number of these tensors that a parameter with two dims has; None for all.
        ops: number of ops by which torch.optim updates one parameter on a processor, where it takes one after the
            other (counted in torch 2.13).
    """

    name: str
    states: tuple[StateFormat, ...] = ()
    factored: bool = False
    of_matrices: int | None = None
    ops: int = 1

    def element_bytes(self, tensor: Tensor, own_bytes: float) -> float:
        """Bytes of optimizer states per element of the parameter, over the states of which this is a constant."""
        states = self.states[: self.of_matrices] if len(tensor.dims) == 2 else self.states
        plain = (s for s in states if s.block_elements is None and not self._factors(tensor))
        return sum(own_bytes if s.element_bytes is None else s.element_bytes for s in plain)

    def other_bytes(self, tensor: Tensor, storage: Layout, sizes: Sizes, own_bytes: float) -> Iterator[Quantity]:
        """Bytes on a rank of each state that `element_bytes` does not count.

        Args:
            tensor: the parameter as it is stored between steps.
            storage: layout of the parameter between steps.
            sizes: local sizes of tensors on a rank.
            own_bytes: bytes of an element of the weights that the optimizer updates.
        """
        if self._factors(tensor):
            whole = (R,) * len(storage)
            for dropped in (-1, -2):
                vector = _without(tensor, dropped)
                yield sizes.bytes(vector, whole) / vector.itemsize_bytes * own_bytes
            return
        elements = sizes.bytes(tensor, storage) / tensor.itemsize_bytes
        count = sizes.count(tensor, storage)
        for state in self.states:
            if state.block_elements is not None:
                yield state.bytes(elements, state.is_taken(count), own_bytes)

    def _factors(self, tensor: Tensor) -> bool:
        return self.factored and len(tensor.dims) > 1


def _without(tensor: Tensor, dim: int) -> Tensor:
    """The tensor without one of its dims."""
    at = len(tensor.dims) + dim
    return replace(
        tensor, dims=tensor.dims[:at] + tensor.dims[at + 1 :], factors=tensor.factors[:at] + tensor.factors[at + 1 :]
    )


_OWN = StateFormat()
_ADAM_OPS = 10
ADAMW = OptimizerFormat("adamw", (_OWN, _OWN), ops=_ADAM_OPS)
OPTIMIZERS = {
    each.name: each
    for each in (
        ADAMW,
        # At least as many as without a format of their own.
        OptimizerFormat("adamwbf16", 2 * (StateFormat(2, 1),), ops=_ADAM_OPS),
        OptimizerFormat("adamw8bit", 2 * (StateFormat(1, 256, 4, 256 * 4),), ops=_ADAM_OPS),
        OptimizerFormat("adamw4bit", 2 * (StateFormat(0.5, 128, 4, 16 * 4),), ops=_ADAM_OPS),
        OptimizerFormat("adamwfp8", 2 * (StateFormat(1, 256, 4),), ops=_ADAM_OPS),
        OptimizerFormat("adafactor", (_OWN,), factored=True, ops=22),
        OptimizerFormat("muon", 2 * (_OWN,), of_matrices=1, ops=23),
        OptimizerFormat("sgd-momentum", (_OWN,), ops=3),
        OptimizerFormat("sgd"),
    )
}


def optimizer_format(name: str) -> OptimizerFormat:
    """The states of the optimizer called `name`. Raises AutoparError for a name that is not in `OPTIMIZERS`."""
    if name not in OPTIMIZERS:
        raise AutoparError(
            f"There is no optimizer {name!r} among the training states{did_you_mean(name, OPTIMIZERS)}; "
            f"choose among {', '.join(OPTIMIZERS)}."
        )
    return OPTIMIZERS[name]

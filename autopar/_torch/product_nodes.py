"""Nodes of autograd that multiply matrices or convolve, and the gradient of one of their operands alone.

Such a node computes the gradient of each operand by a product of its own, so that one can be computed without the
other. The functions here do what the formulas of torch's `tools/autograd/derivatives.yaml` do for the operand: they
read the operands that the node has saved (`node._saved_mat1`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from autopar._torch.autograd import as_input

_Gradient = Callable[[Any, Tensor, int], Tensor]


@torch.no_grad()
def operand_gradients(
    node: Node, gradient: Tensor, edges: Mapping[int, GradientEdge]
) -> list[tuple[GradientEdge, Tensor]]:
    """The gradients of some operands of a product; none if the node is not a product.

    Args:
        node: a node of autograd's graph, whose saved tensors are still there.
        gradient: gradient of the node's result.
        edges: position of an operand among the node's edges (`node.next_functions`) -> the edge.

    Example:
        >>> x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 1, requires_grad=True)
        >>> edge = torch.autograd.graph.get_gradient_edge(w)
        >>> [(_, found)] = operand_gradients((x @ w).grad_fn, torch.ones(2, 1), {1: edge})
        >>> found.tolist()
        [[2.0], [2.0], [2.0]]
    """
    formula = _FORMULAS.get(node.name())
    if formula is None:
        return []
    return [(edge, as_input(edge.node, edge.output_nr, formula(node, gradient, i))) for i, edge in edges.items()]


def _of_mm(node: Any, gradient: Tensor, position: int) -> Tensor:
    return _of_first(gradient, node._saved_mat2) if position == 0 else _of_second(node._saved_self, gradient, node)


def _of_addmm(node: Any, gradient: Tensor, position: int) -> Tensor:
    if position == 0:
        return _times(gradient, node._saved_beta)
    if position == 1:
        return _times(_of_first(gradient, node._saved_mat2), node._saved_alpha)
    return _times(_of_second(node._saved_mat1, gradient, node), node._saved_alpha)


def _of_bmm(node: Any, gradient: Tensor, position: int) -> Tensor:
    return gradient @ node._saved_mat2.mH if position == 0 else node._saved_self.mH @ gradient


def _of_baddbmm(node: Any, gradient: Tensor, position: int) -> Tensor:
    if position == 0:
        return _times(gradient, node._saved_beta)
    if position == 1:
        return _times(gradient @ node._saved_batch2.mH, node._saved_alpha)
    return _times(node._saved_batch1.mH @ gradient, node._saved_alpha)


def _of_convolution(node: Any, gradient: Tensor, position: int) -> Tensor:
    found = torch.ops.aten.convolution_backward(
        gradient,
        node._saved_input,
        node._saved_weight,
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
        [i == position for i in range(3)],
    )
    return found[position]


def _of_first(gradient: Tensor, second: Tensor) -> Tensor:
    return gradient @ second.mH


def _of_second(first: Tensor, gradient: Tensor, node: Any) -> Tensor:
    """The gradient of the second factor, in the order of dims in which that factor lies in memory, as in torch."""
    sizes, strides = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    if strides[0] == 1 and strides[1] == sizes[0]:
        return (gradient.mT @ first.conj()).mT
    return first.mH @ gradient


def _times(gradient: Tensor, factor: complex) -> Tensor:
    return gradient if factor == 1 else gradient * factor.conjugate()


_FORMULAS: Mapping[str, _Gradient] = {
    "MmBackward0": _of_mm,
    "AddmmBackward0": _of_addmm,
    "BmmBackward0": _of_bmm,
    "BaddbmmBackward0": _of_baddbmm,
    "ConvolutionBackward0": _of_convolution,
}

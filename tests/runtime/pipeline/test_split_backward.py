"""First the gradients of inputs, then those of weights: together a whole backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as torchs

from autopar.runtime.pipeline import split_backward
from autopar.runtime.pipeline.split_backward import SplitBackward, trunk

Function = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


def straight(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    return [torch.tanh(x[0] @ w[0]) @ w[1]]


def met_in_two_places(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """One node makes both weights' use, as a gather of several does, and the trunk meets it twice."""
    a, b = torch.stack(tuple(w[:2])).unbind()
    return [torch.tanh(x[0] @ a) @ b]


def used_twice(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    return [torch.tanh(x[0] @ w[0]) @ w[0]]


def made_of_another(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """Weights go through ops of their own before they meet an input."""
    return [x[0] @ (w[0] @ w[1]).sigmoid() @ w[1]]


def weights_alone(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """A result that no input enters, and one that every input enters."""
    return [x[0] @ w[0], (w[0] * w[1]).sum()]


def two_results(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    y = torch.tanh(x[0] @ w[0])
    return [y @ w[1], y, x[1] * y]


def one_tensor_twice(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    y = x[0] @ w[0]
    return [y, y]


def an_input_passes_through(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    return [x[1], x[0] @ w[0]]


def broadcast_and_shared(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """Autograd sums a gradient over broadcast dims, and rounds it, as it hands it on."""
    row, low = w[0][0], w[1].float()
    return [((x[0] + row) * x[1] + row).float() @ low @ low]


def several_results_of_one_node(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    a, b = (x[0] @ w[0]).split(2, 1)
    return [torch.cat([b * 2, a], 1) @ w[1], b]


class Scaled(torch.autograd.Function):
    """x * w, of which the other result is not used, and an argument that is not a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, text: str, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, other: Tensor) -> tuple[Tensor, None, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w + other, None, gradient * x + other


def functions_of_the_user(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    y, _ = Scaled.apply(x[0], "text", w[0])
    z, _ = Scaled.apply(y, "text", w[0])
    return [z]


FUNCTIONS: list[Function] = [
    straight,
    met_in_two_places,
    used_twice,
    made_of_another,
    weights_alone,
    two_results,
    one_tensor_twice,
    an_input_passes_through,
    several_results_of_one_node,
    broadcast_and_shared,
    functions_of_the_user,
]


def leaves() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def leaf() -> Tensor:
        return torch.randn(4, 4, generator=generator, dtype=torch.float64).requires_grad_()

    return [leaf(), leaf()], [leaf(), leaf()]


def gradients_of(results: Sequence[Tensor]) -> list[Tensor]:
    return [torch.full_like(y, 0.5) + y.detach() for y in results]


def whole(function: Function) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of weights and inputs by an ordinary backward."""
    w, x = leaves()
    results = function(w, x)
    torch.autograd.backward(results, gradients_of(results))
    return [p.grad for p in w], [p.grad for p in x]


def close(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.allclose(a, b))
        for a, b in zip(found, expected, strict=True)
    )


def added_product(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    return [torch.addmm(w[1][0], x[0], w[0], alpha=2.5, beta=-0.5), torch.addmm(x[1], w[1], x[0])]


def batches_of_products(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    a, b, row = x[0].view(2, 2, 4), w[0].view(2, 4, 2), w[1][:1, :2].unsqueeze(0)
    return [torch.baddbmm(row, a, b, alpha=2.0, beta=0.5) @ torch.bmm(w[1].view(2, 2, 4), x[1].view(2, 4, 2))]


def convolution(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    return [torch.conv1d(x[0].view(1, 4, 4), w[0].view(4, 4, 1), w[1][0]).tanh() * x[1]]


FUNCTIONS += [added_product, batches_of_products, convolution]


@pytest.mark.parametrize("passed_on_bytes", [0, 2**25])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_both_halves_are_a_whole_backward(
    function: Function, passed_on_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_backward, "_PASSED_ON_BYTES", passed_on_bytes)
    expected_weights, expected_inputs = whole(function)
    w, x = leaves()
    results = function(w, x)
    half = SplitBackward(results, gradients_of(results), x)
    assert [p.grad for p in w] == [None, None]
    assert close(half.input_gradients, expected_inputs)
    half.run_weights()
    assert close([p.grad for p in w], expected_weights)
    assert [p.grad for p in x] == [None, None]


def test_complex_factors_of_a_product_are_conjugated() -> None:
    def step(halves: bool) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        x, w, b = (torch.randn(2, 2, generator=generator, dtype=torch.complex128).requires_grad_() for _ in range(3))
        y = torch.addmm(b, x, w, alpha=2.5 + 1j, beta=0.3 - 2j)
        gradient = torch.full_like(y, 1 + 2j)
        if halves:
            SplitBackward([y], [gradient], [x]).run_weights()
        else:
            y.backward(gradient)
        return [w.grad, b.grad]

    assert close(step(halves=True), step(halves=False))


def test_a_sparse_gradient_of_a_weight() -> None:
    w, shares = (torch.randn(4, 3).double().requires_grad_(), torch.rand(1, 2).double().requires_grad_())
    rows = torch.tensor([[0, 2]])
    y = nn.functional.embedding_bag(rows, w, per_sample_weights=shares, mode="sum", sparse=True)
    SplitBackward([y], [None], [shares]).run_weights()
    assert w.grad is not None
    assert torch.allclose(w.grad.to_dense()[2], shares[0, 1].detach().expand(3))


def test_weights_add_to_gradients_that_are_there() -> None:
    w, x = leaves()
    for _ in range(2):
        results = used_twice(w, x)
        SplitBackward(results, gradients_of(results), x).run_weights()
    (expected, _), _ = whole(used_twice)
    assert expected is not None and w[0].grad is not None
    assert torch.allclose(w[0].grad, 2 * expected)


def test_no_inputs_at_all() -> None:
    """A first stage, whose tokens require no gradient: all is the second half."""
    w, _ = leaves()
    tokens = torch.tensor([0, 2])
    results = [torch.tanh(w[0][tokens]) @ w[1]]
    half = SplitBackward(results, gradients_of(results), [tokens])
    assert half.input_gradients == (None,)
    half.run_weights()
    found = [p.grad for p in w]
    w, _ = leaves()
    torch.autograd.backward([torch.tanh(w[0][tokens]) @ w[1]], gradients_of(results))
    assert close(found, [p.grad for p in w])


def test_a_result_without_a_gradient_is_passed_over() -> None:
    w, x = leaves()
    results = [x[0] @ w[0], x[0].argmax(1), x[1].detach()]
    half = SplitBackward(results, [torch.ones(4, 4).double(), None, None], [x[0], "text", x[1]])
    assert half.input_gradients[1:] == (None, None)
    assert half.input_gradients[0] is not None
    assert torch.allclose(half.input_gradients[0], w[0].detach().sum(1).expand(4, 4))


def test_no_gradient_means_ones() -> None:
    w, x = leaves()
    SplitBackward([(x[0] @ w[0]).sum()], [None], x).run_weights()
    assert w[0].grad is not None
    assert torch.allclose(w[0].grad, x[0].detach().sum(0).unsqueeze(1).expand(4, 4))


def test_hooks_of_weights_fire_once_in_the_second_half() -> None:
    """Data parallelism sends gradients from there."""
    w, x = leaves()
    fired: list[Tensor] = []
    w[0].register_post_accumulate_grad_hook(fired.append)
    results = used_twice(w, x)
    half = SplitBackward(results, gradients_of(results), x)
    assert fired == []
    half.run_weights()
    assert len(fired) == 1 and fired[0] is w[0]


class Counted(torch.autograd.Function):
    """Multiplies, and counts backward passes, as a collective would have to be matched."""

    runs = 0

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        Counted.runs += 1
        return gradient * 2


def test_weights_get_gradients_though_results_were_detached_in_between() -> None:
    """As a stage does, for torch keeps the results of all micro-batches."""
    w, x = leaves()
    expected, _ = whole(functions_of_the_user)
    results = functions_of_the_user(w, x)
    half = SplitBackward(results, gradients_of(results), x)
    for y in results:
        y.detach_()
    half.run_weights()
    assert close([p.grad for p in w], expected)


def test_nodes_without_weights_run_once() -> None:
    """A collective between weights runs in the first half alone, one of a weight in the second."""
    w, x = leaves()
    trunk_side: Tensor = Counted.apply(x[0] @ w[0])
    results = [trunk_side @ w[1]]
    Counted.runs = 0
    half = SplitBackward(results, gradients_of(results), x)
    assert Counted.runs == 1
    half.run_weights()
    assert Counted.runs == 1
    weight_side: Tensor = Counted.apply(w[0])
    results = [x[0] @ weight_side]
    Counted.runs = 0
    half = SplitBackward(results, gradients_of(results), x)
    assert Counted.runs == 0
    half.run_weights()
    assert Counted.runs == 1


def test_the_trunk_is_what_leads_to_an_input() -> None:
    w, x = leaves()
    y = torch.relu(x[0] @ w[0])
    end = torch.autograd.graph.get_gradient_edge(x[0]).node
    root = y.grad_fn
    assert root is not None
    found = trunk([root], {end})
    assert {node.name() for node in found} == {"ReluBackward0", "MmBackward0", "torch::autograd::AccumulateGrad"}
    assert len(found) == 3  # of the weight's own node, none
    leaving = [(node.name(), *edges) for node, edges in found.items() if edges]
    assert leaving == [("MmBackward0", 1)]


# --- torch's own halves


class Plain(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in leaves()[0])


def by_torch(function: Function) -> list[Tensor | None]:
    module, (_, x) = copy.deepcopy(Plain(function)), leaves()
    weights = list(module.weights)
    results = function(weights, x)
    _, groups = torchs.stage_backward_input(list(results), gradients_of(results), x[:1], iter(module.parameters()))
    torchs.stage_backward_weight(iter(module.parameters()), groups)
    return [p.grad for p in weights]


def test_torchs_halves_are_right_where_a_weight_meets_the_trunk_once() -> None:
    assert close(by_torch(straight), whole(straight)[0])


def test_torchs_halves_lose_what_weights_alone_give() -> None:
    """Why there is a split of ours; once this fails, torch's may do."""
    assert not close(by_torch(weights_alone), whole(weights_alone)[0])


def counted_between(w: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    y: Tensor = Counted.apply(x[0] @ w[0])
    return [y @ w[0]]


def test_torchs_halves_run_twice_what_lies_between_two_uses_of_a_weight() -> None:
    Counted.runs = 0
    by_torch(counted_between)
    assert Counted.runs == 2
    w, x = leaves()
    results = counted_between(w, x)
    Counted.runs = 0
    SplitBackward(results, gradients_of(results), x).run_weights()
    assert Counted.runs == 1

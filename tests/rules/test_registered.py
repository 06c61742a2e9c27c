"""Rules that users give to ops of their own: proved on the captured call, and refused where they do not hold."""

import pytest
import torch
from proof import labels_of, prove

import autopar
from autopar.errors import RecipeError
from autopar.rules import registered
from autopar.rules.functions import function_name


def define(name, function, mutated=()):
    """A custom op of `torch.library`, differentiable through the ops it is made of."""
    op = torch.library.custom_op(f"rules_test::{name}", function, mutates_args=mutated)
    op.register_fake(function)
    return op


def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


def scale_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    return grad * weight, (grad * x).sum((0, 1))


scaled = define("scale", scale)
scaled.register_autograd(
    scale_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def center(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


centered = define("center", center)
centered.register_autograd(lambda ctx, grad: grad - grad.mean(-1, keepdim=True))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ weight + bias


multiplied = define("product", product)
multiplied.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ grad, grad.sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled = define("doubled", double)
doubled.register_autograd(lambda ctx, grad: grad * 2)


def rand(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


def test_an_op_without_a_rule_runs_whole():
    assert labels_of(doubled, rand(4, 6), kind="rules_test.doubled") == {"-"}


def test_one_line_lets_an_op_be_split():
    autopar.register_rule("rules_test::scale", "b s h, h -> b s h")
    tensors = rand(2, 4, 6), rand(6)
    assert labels_of(scaled, *tensors, kind="rules_test.scale") == {"-", "b", "s", "h"}
    assert prove(scaled, *tensors, kind="rules_test.scale") >= 4


def test_sums_and_biases_are_proved_too():
    autopar.register_rule("rules_test::product", "i k, k j, +j -> i j | sum k")
    tensors = rand(4, 6), rand(6, 8), rand(8)
    assert prove(multiplied, *tensors, kind="rules_test.product") >= 4


def test_a_wrong_letter_is_named_with_the_difference():
    autopar.register_rule("rules_test::center", "b h -> b h")
    with pytest.raises(RecipeError, match=r"rules_test\.center.*letter 'h' into 2 parts.*by \d"):
        labels_of(centered, rand(4, 6), kind="rules_test.center")
    autopar.register_rule("rules_test::center", "b h! -> b h!")
    assert labels_of(centered, rand(4, 6), kind="rules_test.center") == {"-", "b"}


def test_a_bias_that_is_not_marked_is_found():
    autopar.register_rule("rules_test::product", "i k, k j, j -> i j | sum k")
    with pytest.raises(RecipeError, match="letter 'k'"):
        labels_of(multiplied, rand(4, 6), rand(6, 8), rand(8), kind="rules_test.product")


def test_a_partial_sum_that_does_not_pass_is_found():
    autopar.register_rule("rules_test::scale", "b s h, h -> b s h | linear 0")
    assert "+0" in labels_of(scaled, rand(2, 4, 6), rand(6), kind="rules_test.scale")
    autopar.register_rule("rules_test::product", "i k, k j, j -> i j | linear 0")
    with pytest.raises(RecipeError, match=r"rules_test\.product"):
        labels_of(multiplied, rand(4, 6), rand(6, 8), rand(8), kind="rules_test.product")


def test_a_rule_that_does_not_fit_names_the_shapes():
    autopar.register_rule("rules_test::scale", "b s h -> b s h")
    with pytest.raises(RecipeError, match=r"1 operands.*\[2, 4, 6\], \[6\]"):
        labels_of(scaled, rand(2, 4, 6), rand(6), kind="rules_test.scale")
    autopar.register_rule("rules_test::scale", "b s h, s -> b s h")
    with pytest.raises(RecipeError, match="letter 's' is 6 in one tensor and 4 in another"):
        labels_of(scaled, rand(2, 4, 6), rand(6), kind="rules_test.scale")


def test_what_cannot_be_registered():
    with pytest.raises(RecipeError, match="no op 'rules_test::absent'"):
        autopar.register_rule("rules_test::absent", "b -> b")
    with pytest.raises(RecipeError, match="no op 'scale'"):
        autopar.register_rule("scale", "b -> b")
    with pytest.raises(RecipeError, match="'->'"):
        autopar.register_rule("rules_test::scale", "b s h, h")
    with pytest.raises(RecipeError, match="changes its arguments"):
        autopar.register_rule("aten::add_", "b, b -> b")


@pytest.fixture(autouse=True)
def forget():
    """Rules of one test are not those of the next."""
    before = dict(registered.RULES)
    yield
    registered.RULES.clear()
    registered.RULES.update(before)


class Scaled(torch.autograd.Function):
    """x * weight, with twice the gradient of x."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return 2 * gradient * weight, (gradient * x).sum((0, 1))


def test_a_function_with_a_backward_of_its_own_is_split_by_a_row():
    tensors, kind = (rand(2, 4, 6), rand(6)), function_name(Scaled)
    assert labels_of(Scaled.apply, *tensors, kind=kind) == {"-"}
    autopar.register_rule(Scaled, "b s h, h -> b s h")
    assert labels_of(Scaled.apply, *tensors, kind=kind) == {"-", "b", "s", "h"}
    assert prove(Scaled.apply, *tensors, kind=kind) >= 4


class Normed(torch.autograd.Function):
    """x, with its gradient divided by the norm of every row."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm(dim=-1, keepdim=True)


def test_the_backward_of_a_function_is_proved():
    autopar.register_rule(Normed, "b h -> b h")
    with pytest.raises(
        RecipeError, match=r"Normed does not hold: splitting the letter 'h' into 2 parts"
    ):
        labels_of(Normed.apply, rand(4, 6), kind=function_name(Normed))
    autopar.register_rule(Normed, "b h! -> b h!")
    assert labels_of(Normed.apply, rand(4, 6), kind=function_name(Normed)) == {"-", "b"}

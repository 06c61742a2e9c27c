"""Rules that users give to ops of their own: proved on the captured call, and refused where they do not hold."""

import re

import pytest
import torch
from proof import _captured, labels_of, prove

import autopar
from autopar._torch import FakeTensor
from autopar.analysis.factors import analyze
from autopar.errors import RecipeError
from autopar.ir import VARIED
from autopar.rules import registered
from autopar.rules.functions import function_name


def op_of(function, *tensors, kind):
    """The op of this kind in the graph of a model that calls a function."""
    graph = analyze(_captured(function, tensors)[1]).graph
    return next(op for op in graph.ops if op.kind == kind)


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
scaled.register_autograd(scale_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


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


def by_groups(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight.repeat_interleave(x.shape[1] // weight.shape[1], 1)


grouped = define("groups", by_groups)
grouped.register_autograd(
    lambda ctx, grad: torch.autograd.functional.vjp(by_groups, ctx.saved_tensors, grad)[1],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def soften(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x * weight).softmax(-1)


softened = define("soften", soften)
softened.register_autograd(
    lambda ctx, grad: torch.autograd.functional.vjp(soften, ctx.saved_tensors, grad)[1],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


clipped = define("clip", copy)
clipped.register_autograd(lambda ctx, grad: grad / grad.norm().clamp(min=1))


def add_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


noisy = define("noisy", add_noise)
noisy.register_autograd(lambda ctx, grad: grad)

library = torch.library.Library("rules_test", "FRAGMENT")
library.define("composite(Tensor x, Tensor weight) -> Tensor")
library.impl("composite", lambda x, weight: torch.relu(x) * weight, "CompositeImplicitAutograd")


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


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
    with pytest.raises(RecipeError, match=r"Normed does not hold: splitting the letter 'h' into 2 parts"):
        labels_of(Normed.apply, rand(4, 6), kind=function_name(Normed))
    autopar.register_rule(Normed, "b h! -> b h!")
    assert labels_of(Normed.apply, rand(4, 6), kind=function_name(Normed)) == {"-", "b"}


# --- what a row says of cost and memory


def test_a_row_says_its_flops():
    autopar.register_rule("rules_test::scale", "b s h, h -> b s h | flops 3 b s h | flops 1 h")
    op = op_of(scaled, rand(2, 4, 6), rand(6), kind="rules_test.scale")
    assert op.flops == 3 * 2 * 4 * 6 + 6
    assert not any(work.is_product for work in op.work)


def test_a_product_is_one_that_says_what_it_sums():
    row = "i k, k j, +j -> i j | sum k | flops 2 i j k over k"
    autopar.register_rule("rules_test::product", row)
    op = op_of(multiplied, rand(4, 6), rand(6, 8), rand(8), kind="rules_test.product")
    (work,) = op.work
    sizes = [[leaf.size for leaf in leaves] for leaves in (work.rows, work.columns, work.inner)]
    assert sizes == [[4], [8], [6]] and op.flops == 2 * 4 * 8 * 6


def test_a_row_says_what_backward_keeps():
    autopar.register_rule("rules_test::center", "b h! -> b h! | saves")
    assert op_of(centered, rand(4, 6), kind="rules_test.center").saved == ()
    autopar.register_rule("rules_test::center", "b h! -> b h! | saves y0; 2 [b] float32")
    op = op_of(centered, rand(4, 6), kind="rules_test.center")
    assert op.saved == (op.results[0], *op.hidden) and len(op.hidden) == 1


def test_a_row_that_keeps_less_than_the_op_is_refused_with_both_numbers():
    autopar.register_rule("rules_test::scale", "b s h, h -> b s h | saves x1")
    # x is 2 x 4 x 6 numbers of 8 bytes, and the weight 6.
    with pytest.raises(RecipeError, match=r"keeps 48 bytes, but it keeps 432\. Add"):
        labels_of(scaled, rand(2, 4, 6), rand(6), kind="rules_test.scale")


def test_heads_of_groups_are_one_dim():
    autopar.register_rule("rules_test::groups", "b (g r), b g -> b (g r)")
    assert labels_of(grouped, rand(4, 6), rand(4, 2), kind="rules_test.groups") == {"-", "b", "g"}
    assert prove(grouped, rand(4, 6), rand(4, 2), kind="rules_test.groups") >= 3
    autopar.register_rule("rules_test::groups", "b (g r), g b -> b (g r)")
    with pytest.raises(RecipeError, match="does not fit"):
        labels_of(grouped, rand(4, 6), rand(4, 2), kind="rules_test.groups")


@pytest.mark.parametrize("clause", sorted(["flops", "flops b", "flops 2 b over h", "saves z0", "saves [b] single"]))
def test_a_clause_that_cannot_be_read_is_shown(clause):
    with pytest.raises(RecipeError, match=f"Cannot read.*{re.escape(clause.split()[-1])}"):
        autopar.register_rule("rules_test::center", f"b h! -> b h! | {clause}")


# --- ops that nobody gave a rule


def test_an_op_whose_rows_are_independent_is_split_by_a_guess():
    tensors = rand(4, 6), rand(6)
    op = op_of(softened, *tensors, kind="rules_test.soften")
    assert op.guess and {c.label for c in op.choices} - {VARIED} == {"-", "rows"}
    assert prove(softened, *tensors, kind="rules_test.soften") >= 2


def test_an_op_whose_gradient_mixes_rows_stays_whole():
    op = op_of(clipped, rand(4, 6), kind="rules_test.clip")
    assert not op.has_rule and labels_of(clipped, rand(4, 6), kind="rules_test.clip") == {"-"}


def test_a_probe_leaves_random_numbers_as_they_are():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    labels_of(noisy, rand(4, 6), kind="rules_test.noisy")
    assert torch.equal(torch.get_rng_state(), before)


def test_an_op_made_of_others_is_split_by_its_parts():
    composite, kind = torch.ops.rules_test.composite, "rules_test.composite"
    x, weight = rand(4, 6), rand(6)
    assert labels_of(composite, x, weight, kind="aten.relu") >= {"d0", "d1"}
    assert not labels_of(composite, x, weight, kind=kind)
    autopar.register_rule("rules_test::composite", "b h, h -> b h")
    assert labels_of(composite, rand(4, 6), rand(6), kind=kind) == {"-", "b", "h"}


@pytest.mark.parametrize("least", [0, 96])
def test_a_row_is_proved_on_small_tensors(monkeypatch, least):
    """Of 96 x 4096 numbers an op is tried on few rows; on all of them where it refuses fewer."""
    monkeypatch.setattr(registered, "MOST_ELEMENTS", 1 << 15)
    tried = []

    def double(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, FakeTensor) and not x.is_meta:
            tried.append(len(x))
            assert len(x) >= least / 2  # and its halves
        return 2 * x

    define(f"double_{least}", double)
    autopar.register_rule(f"rules_test::double_{least}", "b h! -> b h!")
    assert op_of(getattr(torch.ops.rules_test, f"double_{least}"), rand(96, 4096), kind=f"rules_test.double_{least}")
    assert max(tried) == (96 if least else 6)

"""Cross-entropy in every form, its batch and its classes split: loss and gradients of the unsplit op."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from proof import labels_of, prove

from tests.support.tables import often

IGNORED = -100
SHAPES = {"tokens": (8, 6), "pixels": (2, 6, 2, 4)}  # classes are dim 1
REDUCED = list(itertools.product(("mean", "sum", "none"), SHAPES))


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def classes(shape, ignored=IGNORED):
    """Class indices, every fifth ignored, unevenly over the batch."""
    where = torch.arange(torch.Size(shape).numel() // shape[1])
    ids = torch.where(where % 5 == 3, ignored, where * 7 % shape[1])
    return ids.reshape(shape[0], *shape[2:])


@pytest.mark.parametrize(
    ("reduction", "name"), often(REDUCED, [("mean", "tokens"), ("sum", "pixels"), ("none", "tokens")])
)
def test_class_indices(reduction, name):
    shape = SHAPES[name]
    forms = itertools.product((True, False), (0.1, 0.0))
    for weighted, smoothing in itertools.islice(forms, 4 if len(shape) == 2 else 1):

        def loss(x, target, weight, weighted=weighted, smoothing=smoothing):
            return F.cross_entropy(
                x, target, weight.detach().exp() if weighted else None, reduction=reduction, label_smoothing=smoothing
            )

        tensors = rand(*shape), classes(shape), rand(6)
        assert splits(loss, tensors, shape)


@pytest.mark.parametrize(
    ("reduction", "name"), often(REDUCED, [("mean", "pixels"), ("sum", "tokens"), ("none", "pixels")])
)
def test_class_probabilities(reduction, name):
    shape = SHAPES[name]
    # the targets and the weights take gradients here too
    for weighted, smoothing in ((True, 0.1), (False, 0.0))[: 2 if len(shape) == 2 else 1]:

        def loss(x, target, weight, weighted=weighted, smoothing=smoothing):
            return F.cross_entropy(
                x, target.softmax(1), weight.exp() if weighted else None, reduction=reduction, label_smoothing=smoothing
            )

        assert splits(loss, (rand(*shape), rand(*shape) * 2, rand(6)), shape)


def splits(loss, tensors, shape):
    """Whether every choice holds: nothing, the same everywhere, the classes, and each dim of tokens."""
    return prove(loss, *tensors, kind="aten.cross_entropy_loss") == 2 + len(shape)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_negative_likelihoods(reduction):
    for weighted in (False, True):

        def loss(x, target, weight, weighted=weighted):
            logs = x.log_softmax(1)
            return F.nll_loss(logs, target, weight.detach().exp() if weighted else None, reduction=reduction)

        tensors = rand(2, 6, 4), classes((2, 6, 4)), rand(6)
        assert labels_of(loss, *tensors, kind="aten.nll_loss_nd") == {"-", "n0", "n1", "n2"}
        assert prove(loss, *tensors, kind="aten.nll_loss_nd") >= 3


def test_another_index_is_ignored():
    def loss(x, target):
        return F.cross_entropy(x, target, ignore_index=2, label_smoothing=0.3)

    assert prove(loss, rand(8, 6), classes((8, 6), ignored=2), kind="aten.cross_entropy_loss") >= 3


def test_a_rank_without_a_token_that_counts():
    # the second half of the batch is ignored: its share of the mean is 0, not 0 / 0
    target = torch.tensor([1, 5, 0, 3, *[IGNORED] * 4])
    assert prove(F.cross_entropy, rand(8, 6), target, kind="aten.cross_entropy_loss") >= 3


def test_infinite_logits_of_other_classes_stay_out_of_the_loss():
    def masked(x, target, hidden):
        return F.cross_entropy(x.masked_fill(hidden, float("-inf")), target)

    hidden = torch.arange(6) == 0
    target = torch.arange(8) % 5 + 1
    assert prove(masked, rand(8, 6), target, hidden, kind="aten.cross_entropy_loss") >= 3

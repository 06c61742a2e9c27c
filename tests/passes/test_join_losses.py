"""A linear layer and the cross-entropy of its results become one call: text in, text out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.export import capture_step
from autopar.passes import clean_up, join_losses
from tests.passes.test_running import text

WIDTH, CLASSES = 4, 10


class Head(nn.Module):
    """A head whose loss `ways` names.

    Args:
        ways: function of logits of shape (rows, length, classes) and targets of shape (rows, length).
    """

    def __init__(self, ways):
        super().__init__()
        self.head, self.ways = nn.Linear(WIDTH, CLASSES, bias=False), ways

    def forward(self, x, target):
        return self.ways(self.head(x), target)


def joined(ways):
    """The number of losses that were joined, and the text of the graph after it."""
    model, batch = Head(ways), (torch.randn(2, 3, WIDTH), torch.zeros(2, 3, dtype=torch.int64))
    module = capture_step(model, batch, {}, None).module
    clean_up(module)
    count = join_losses(module, 80)
    return count, text(module.graph)


def flat(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_the_rows_of_logits_become_those_of_what_the_layer_reads():
    count, lines = joined(flat)
    assert count == 1
    assert lines[-4:] == [
        "reshape = aten.reshape(batch_1, [6])",
        "reshape_1 = aten.reshape(batch_0, [6, 4])",
        "linear_cross_entropy = autopar.linear_cross_entropy("
        "reshape_1, p_model_head_weight, None, reshape, None, 1, -100, 0.0, torch.float32, 80)",
        "return (linear_cross_entropy,)",
    ]


def test_rows_may_be_left_out_and_logits_cast():
    def shifted(logits, target):
        return flat(logits.double()[:, :-1], target[:, 1:])

    count, lines = joined(shifted)
    assert count == 1 and not any("linear(" in line for line in lines), lines
    assert "torch.float64, 80" in lines[-2]


@pytest.mark.parametrize(
    "ways",
    [
        lambda logits, target: flat(logits, target) + logits.logsumexp(-1).pow(2).mean(),
        lambda logits, target: flat(30 * torch.tanh(logits / 30), target),
        lambda logits, target: F.cross_entropy(logits.transpose(1, 2), target),
        lambda logits, target: F.cross_entropy(logits.flatten(0, 1), logits.detach().softmax(-1).flatten(0, 1)),
    ],
    ids=["logits of two terms", "capped logits", "classes in another dim", "targets that are probabilities"],
)
def test_other_losses_stay_as_they_are(ways):
    count, lines = joined(ways)
    assert count == 0 and any("cross_entropy_loss(" in line for line in lines)

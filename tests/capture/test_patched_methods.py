"""Methods and properties of a model that are replaced after the capture are noticed, whoever has the new ones."""

import pytest
import torch
from torch import nn

import autopar

X = torch.ones(2, 8)


class Scaled(nn.Module):
    """Every number that its forward takes is two."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @property
    def rate(self):
        return 2.0

    @classmethod
    def of_class(cls):
        return 2.0

    @staticmethod
    def of_nobody():
        return 2.0

    def doubled(self, x):
        return x * 2.0

    def forward(self, x):
        return self.doubled(self.linear(x)).mean() * self.of_class() * self.of_nobody() * self.rate


NEW = {
    "method of the object": lambda model: setattr(model, "doubled", lambda x: x * 7.0),
    "method of the class": lambda model: setattr(type(model), "doubled", lambda self, x: x * 7.0),
    "class method of the object": lambda model: setattr(model, "of_class", lambda: 7.0),
    "class method of the class": lambda model: setattr(type(model), "of_class", classmethod(lambda cls: 7.0)),
    "static method of the object": lambda model: setattr(model, "of_nobody", lambda: 7.0),
    "static method of the class": lambda model: setattr(type(model), "of_nobody", staticmethod(lambda: 7.0)),
    "property of the class": lambda model: setattr(type(model), "rate", property(lambda self: 7.0)),
    "forward of the object": lambda model: setattr(model, "forward", lambda x: model.linear(x).mean()),
}


@pytest.mark.parametrize("what", NEW)
@pytest.mark.filterwarnings("ignore:.*captured again")
def test_a_step_follows_what_was_replaced(what):
    class Inherited(Scaled):
        """A class of its own for each test, which has none of the methods itself."""

    torch.manual_seed(0)
    model = Inherited()
    made = autopar.compile(model, recipe="ddp")
    before = made.step(X).item()
    NEW[what](model)
    expected = model.forward(X).item()
    assert expected != pytest.approx(before)
    assert made.step(X).item() == pytest.approx(expected)


def test_a_model_that_nobody_patches_is_captured_once():
    model = Scaled()
    made = autopar.compile(model, recipe="ddp")
    made.step(X)
    (ready,) = made._kept.ready[True]
    assert ready.holds()
    made.step(X)
    assert made._kept.ready[True] == [ready]

"""Of functions that one function has made, which have equal code, every one that runs is guarded."""

import functools
import gc
import types
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.export import capture_forward
from autopar.capture.guards.closures import Closures
from autopar.errors import CaptureError


def scaled_by(rate):
    def scaled(x):
        return x * rate

    def put(value):
        nonlocal rate
        rate = value

    return scaled, put


def scaled_by_first(rates):
    return lambda x: x * rates[0]


def repeated(rate):
    def repeat(count):
        for _ in range(count):
            yield rate

    def put(value):
        nonlocal rate
        rate = value

    return repeat, put


class Both(nn.Module):
    """Two functions of one factory, in a list."""

    def __init__(self):
        super().__init__()
        (first, _), (second, self.put) = scaled_by(1.0), scaled_by(2.0)
        self.functions = [first, second]

    def forward(self, x):
        return self.functions[1](self.functions[0](x))


class Alike(Both):
    """Two functions whose cells hold the same value."""

    def __init__(self):
        super().__init__()
        rate = 2.0
        (first, _), (second, self.put) = scaled_by(rate), scaled_by(rate)
        self.functions = [first, second]


class OneInside(Both):
    """One of the functions is made by the forward itself."""

    def forward(self, x):
        return self.functions[1](scaled_by(1.0)[0](x))


class OfLists(Both):
    def __init__(self):
        super().__init__()
        rates = [2.0]
        self.put = functools.partial(rates.__setitem__, 0)
        self.functions = [scaled_by_first([1.0]), scaled_by_first(rates)]


class Generators(Both):
    def __init__(self):
        super().__init__()
        (first, _), (second, self.put) = repeated(1.0), repeated(2.0)
        self.functions = [first, second]

    def forward(self, x):
        for function in self.functions:
            for rate in function(1):
                x = x * rate
        return x


@pytest.mark.parametrize("kind", [Both, Alike, OneInside, OfLists, Generators])
def test_every_closure_of_one_code_is_guarded(kind):
    model = kind()
    guards = capture_forward(model, (torch.ones(2),), {}).guards
    assert guards.hold()
    model.put(5.0)
    assert " of " in str(guards.broken())


def test_a_step_follows_the_second_closure():
    model, x = nn.Sequential(nn.Linear(2, 2), Both()), torch.ones(2, 2)
    made = autopar.compile(model, loss_fn=nn.functional.mse_loss)
    first = float(made.step(x, 0 * x))
    model[1].put(6.0)  # three times as much, and squared
    assert float(made.step(x, 0 * x)) == pytest.approx(9 * first)


def test_a_closure_that_does_not_run_is_no_reason_to_capture_again():
    model = Both()
    other, put = scaled_by(3.0)
    guards = capture_forward(model, (torch.ones(2),), {}).guards
    put(5.0)
    assert guards.hold() and float(other(1.0)) == 5.0


class Counting(nn.Module):
    """Two counters of one code, whose cells are brought back when a capture is refused."""

    def __init__(self):
        super().__init__()
        self.counters = [self._counter(0), self._counter(10)]

    @staticmethod
    def _counter(start):
        count = start

        def counted():
            nonlocal count
            count += 1
            return count

        return counted

    def forward(self, x):
        return x * self.counters[1]() * self.counters[0]() * self.counters[0]()


def test_a_refused_capture_brings_every_cell_back():
    model = Counting()
    with pytest.raises(CaptureError, match="changes count"):
        capture_forward(model, (torch.ones(2),), {})
    assert [counter() for counter in model.counters] == [1, 11]


class Collecting(nn.Module):
    def forward(self, x):
        found = []

        def note(each):
            found.append(2 * each)

        note(x)
        return found[0]


def test_what_the_forward_makes_for_itself_may_change():
    graph = capture_forward(Collecting(), (torch.ones(2),), {}).module
    assert any("mul" in node.name for node in graph.graph.nodes)


def test_a_method_that_calls_super_asks_for_no_search():
    closures = Closures()
    with mock.patch.object(gc, "get_referrers", return_value=[]) as search:
        closures.look(Both.__init__.__code__)  # its one free variable is __class__
        assert search.call_count == 0
        closures.look(scaled_by.__code__)
        closures.look(scaled_by.__code__)
    assert search.call_count == 1


def test_each_code_is_looked_for_before_it_runs_and_then_all_at_once():
    makers = (scaled_by, repeated, scaled_by_first, Counting._counter)
    made = [maker(1.0) for maker in makers]
    functions = [x if isinstance(x, types.FunctionType) else x[0] for x in made]
    closures = Closures()
    for maker in makers:
        closures.look(maker.__code__)
    late = [maker(1.0) for maker in makers]
    for function in functions:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        values = {name: cell.cell_contents for name, cell in cells.items()}
        found = closures.running(function.__code__, values)
        assert any(x is function for x in found) and not any(x in found for x in late)

"""An error of a step without memory says what was asked, where, what was planned and what to change."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import autopar
from autopar.errors import PeerError
from autopar.runtime.failures.failing_op import naming_line, naming_plan, naming_tensors


def test_a_backward_without_memory_names_the_priced_peak_and_what_to_change() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = autopar.compile(model, loss_fn=nn.functional.mse_loss, mesh={"dp": 1})
    x = torch.randn(2, 4)
    made.step(x, x)
    (ready,) = made._kept.ready[True]
    leaf = ready.bound._runner.leaves[0]  # type: ignore[union-attr]
    leaf.register_hook(lambda grad: torch.empty(2**60, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="tried to allocate 1152921504606846976 bytes") as raised:
        made.step(x, x)
    planned, remedy = raised.value.__notes__
    assert planned.startswith("planned: a peak of ") and planned.endswith(" per rank, including optimizer states")
    assert remedy.startswith("remedy: ask for a plan that needs less memory")


def test_a_forward_without_memory_says_what_to_change_once() -> None:
    with pytest.raises(MemoryError) as raised, naming_plan(lambda: (1.0, 2e9)), naming_line():
        raise MemoryError
    remedies = [note for note in raised.value.__notes__ if note.startswith("remedy:")]
    assert len(remedies) == 1


def broken(x: torch.Tensor) -> torch.Tensor:
    raise PeerError("lost", collective="all_reduce", group="1")


def test_a_lost_peer_is_told_with_the_op_that_waited_for_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.relu, (x,))
    product.meta["nn_module_stack"] = {"": ("", nn.Module), "2": ("2", nn.ReLU)}
    graph.output(graph.call_function(broken, (product,)))
    module = fx.GraphModule(nn.Module(), graph)
    with pytest.raises(PeerError) as raised, naming_line():
        module(torch.ones(2))
    assert raised.value.op == "broken of module 2"


def test_tensors_of_a_lost_collective_are_named_up_to_three() -> None:
    with pytest.raises(PeerError) as raised, naming_tensors("gradients", ["a", "b", "c", "d"]):
        broken(torch.ones(2))
    assert raised.value.op == "the gradients of a, b, c and 1 more"


def test_other_errors_ask_for_no_price() -> None:
    def predicted() -> tuple[float, float]:
        raise AssertionError("nobody asked")

    with pytest.raises(ZeroDivisionError), naming_plan(predicted):
        raise ZeroDivisionError

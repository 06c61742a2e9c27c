"""Blocks that are alike are made functional once, and the graph is that which torch makes of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autopar.capture import functional as made_functional
from autopar.capture.alike_blocks import AlikeBlocks, find_alike_blocks
from autopar.capture.export import capture_step
from autopar.passes.cleanup.name_nodes import named

LAYERS = 8


class Model(nn.Module):
    """Linear layers that a function calls one after the other."""

    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Tensor], frozen: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        for layer in self.layers:
            layer.register_buffer("scale", torch.ones(8))
        if frozen is not None:
            self.layers[frozen].weight.requires_grad_(False)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers, x)


def chain(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = x + torch.relu(layer(x))
    return x.sum()


def shared(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """One layer, called often; all calls read the same mask."""
    mask = (x > 0).float()
    for _ in layers:
        x = torch.relu(layers[0](x)) * mask
    return x.sum()


def two_states(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """The first block reads one value as both states."""
    state = carry = x
    for layer in layers:
        state = layer(state)
        carry = torch.tanh(state + carry)
    return (state + carry).sum()


def views(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Calls of which some make several nodes of the functional graph and others none."""
    left, right = x.chunk(2, -1)
    for layer in layers:
        joined = layer(torch.cat([left, right], -1).contiguous())
        left, right = torch.broadcast_tensors(*joined.reshape(-1, 8).chunk(2, -1))
    return (left * right).sum()


def writes_afterwards(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = torch.relu(layer(x))
    x.view(-1).mul_(2.0)
    return x.sum()


def delayed(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Every block hands on what it has read of the one before."""
    state = before = x
    for layer in layers:
        new = layer(state) + torch.relu(before)
        state, before = new, state.to(state.dtype).contiguous()
    return state.sum()


def collected(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """The results of all blocks are read at the end."""
    found = []
    for layer in layers:
        x = torch.relu(layer(x))
        found.append(x)
    return torch.stack(found).sum()


def numbered(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        x = layer(x) * (i / 2)
    return x.sum()


def in_place(layers: nn.ModuleList, x: Tensor) -> Tensor:
    x = x.clone()
    for layer in layers:
        x += torch.relu(layer(x))
    return x.sum()


def writes_one_buffer(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """The forward writes to a part of what a block in the middle reads."""
    layers[3].scale[:4] = 3.0
    for layer in layers:
        x = torch.relu(layer(x)) * layer.scale
    return x.sum()


def alternating(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Blocks of two layers: Python's 1 and 1.0 are equal, and not alike."""
    for i, layer in enumerate([*layers, *layers]):
        x = layer(x) * (1 if i % 2 else 1.0)
    return x.sum()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of calls that torch has made functional, one a run."""
    counts: list[int] = []
    run = torch.export.ExportedProgram.run_decompositions

    def counted(exported: Any, table: Any) -> Any:
        counts.append(len(exported.graph.nodes))
        return run(exported, table)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
    return counts


def capture(model: nn.Module) -> list[str]:
    """The nodes of a capture, with what passes read of their metadata."""
    module = capture_step(model, (torch.ones(4, 8),), {}, None).module
    return [_written(node) for node in named(module.graph).nodes]


def _written(node: fx.Node) -> str:
    value = node.meta.get("val")
    kinds = [
        (x.shape, x.stride(), x.dtype)
        for x in (value if isinstance(value, tuple | list) else [value])
        if isinstance(x, Tensor)
    ]
    where = node.meta.get("nn_module_stack"), node.meta.get("stack_trace")
    return f"{node.format_node()} {kinds} {where}"


@pytest.mark.parametrize("run", [chain, shared, two_states, views, writes_afterwards, alternating])
def test_alike_blocks_are_made_once(
    run: Callable[..., Tensor], made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(run)
    found = capture(model)
    monkeypatch.setattr(made_functional, "find_alike_blocks", lambda graph: None)
    assert capture(model) == found
    short, whole = made
    assert short < whole


@pytest.mark.parametrize("run", [delayed, collected, numbered, in_place, writes_one_buffer])
def test_other_blocks_are_made_each(
    run: Callable[..., Tensor], made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(run)
    found = capture(model)
    monkeypatch.setattr(made_functional, "find_alike_blocks", lambda graph: None)
    assert capture(model) == found
    assert made[-2] == made[-1], "the graph that was taken is the whole one"


def test_a_frozen_layer_is_like_no_other(made: list[int]) -> None:
    capture(Model(chain, frozen=4))
    frozen = made[-1]
    capture(Model(chain))
    assert made[-1] < frozen


def blocks_of(calls: Callable[[Tensor, list[Tensor]], Tensor], count: int = 6) -> AlikeBlocks | None:
    module = torch.export.export(_Called(calls, count), (torch.ones(3, 3),)).graph_module
    return find_alike_blocks(module.graph)


class _Called(nn.Module):
    def __init__(self, run: Callable[[Tensor, list[Tensor]], Tensor], count: int) -> None:
        super().__init__()
        self.run, self.weights = run, nn.ParameterList(torch.ones(3, 3) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, list(self.weights))


def test_finds_blocks() -> None:
    def run(x: Tensor, weights: list[Tensor]) -> Tensor:
        x = x.cos()
        for weight in weights:
            x = functional.linear(x, weight).sin()
        return x

    found = blocks_of(run)
    assert found is not None
    assert [[node.name for node in block] for block in found.blocks][1] == ["linear_1", "sin_1"]
    assert len(found.blocks) == 6
    assert [str(other) for given in found.given for other in given.values()] == [f"p_weights_{i}" for i in range(6)]


def test_one_parameter_for_two_is_not_alike() -> None:
    """The third block reads two parameters where the others read one twice."""

    def run(x: Tensor, weights: list[Tensor]) -> Tensor:
        x = x.cos()
        for i, weight in enumerate(weights):
            x = functional.linear(x, weight) + (weights[0] if i == 2 else weight)
        return x

    assert blocks_of(run, 7) is None

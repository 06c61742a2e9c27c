"""The programs of a pipeline's stages: what they take, send and refuse."""

import bisect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.ir import Pipeline
from autopar.planning.planning import prepare_forward, prepare_step
from autopar.program.program import build_program
from autopar.program.stages import cut_stages, cuts_where_parameters_lie, refuse_strays
from tests.support.staged import with_stages


class Net(nn.Module):
    """Embedding and head share a matrix; two maps between them, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) * (tokens > 3).unsqueeze(-1)
        return self.down(torch.relu(self.up(x))) @ self.table.weight.T


def nothing(y: Tensor) -> Tensor:
    return y.square().mean()


TOKENS = torch.arange(12).reshape(4, 3)


def stages_of(model, inputs, cuts, *, mesh=None, recipe="auto", loss_fn=nothing):
    prepared = prepare_step(model, inputs, loss_fn=loss_fn)
    plan = with_stages(prepared, Pipeline(len(cuts) + 1, "gpipe", cuts), 1, mesh, recipe)
    program = build_program(prepared.captured, prepared.analysis, plan)
    return cut_stages(program, prepared.analysis.graph)


def names(specs):
    return [spec.name for spec in specs]


def test_parameters_inputs_and_wires_of_every_stage():
    first, second, last = stages_of(Net(), (TOKENS,), ("linear", "linear_1"))
    assert [names(s.parameters) for s in (first, second, last)] == [
        ["table.weight"],
        ["up.weight", "up.bias"],
        ["table.weight", "down.weight", "down.bias"],
    ]
    assert [names(s.inputs) for s in (first, second, last)] == [["tokens"], [], []]
    assert [w.shape for w in first.sent] == [(4, 3, 8)]
    assert [w.shape for w in second.sent] == [(4, 3, 12)]
    assert (first.sent, second.sent) == (second.received, last.received)
    assert all(w.needs_grad and w.dtype == torch.float32 for w in (*first.sent, *second.sent))
    assert [s.is_step for s in (first, second, last)] == [False, False, True]
    assert (first.received, last.sent, first.outputs, len(last.outputs)) == ((), (), (), 1)


def test_wires_are_local_shapes_on_the_mesh_of_a_stage():
    first, _ = stages_of(Net(), (TOKENS,), ("linear",), mesh={"dp": 2}, recipe="ddp")
    assert [w.shape for w in first.sent] == [(2, 3, 8)]  # 4 rows on 2 ranks
    _, last = stages_of(Net(), (TOKENS,), ("linear_1",), mesh={"tp": 2}, recipe="tp")
    assert [w.shape for w in last.received] == [(4, 3, 6)]  # 12 columns on 2 ranks


class Frozen(nn.Module):
    """What comes before the head requires no gradient, and counts its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        where = x.argmax(-1, keepdim=True)
        return self.head(x * self.scale).gather(-1, where)


def test_a_wire_needs_a_gradient_only_if_a_parameter_behind_it_does():
    first, second = stages_of(Frozen(), (TOKENS,), ("linear",))
    wires = {w.name: (w.needs_grad, w.dtype) for w in first.sent}
    assert list(wires.values()) == [(False, torch.int64), (True, torch.float32)]
    assert first.sent == second.received
    first, second = stages_of(Frozen(), (TOKENS,), ("argmax",))
    assert [w.needs_grad for w in first.sent] == [False]  # an embedding that is frozen
    assert first.is_step is False and second.frozen == {"table.weight"}


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_wire_of_frozen_layers_takes_a_gradient_to_an_input_that_asks_for_one(is_asked):
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    prepared = prepare_forward(layers, (torch.randn(4, 8),))
    plan = with_stages(prepared, Pipeline(2, "gpipe", ("linear_1",)), 1)
    program = build_program(prepared.captured, prepared.analysis, plan)
    inputs = frozenset(spec.name for spec in program.inputs) if is_asked else frozenset()
    first, _ = cut_stages(replace(program, differentiable=inputs), prepared.analysis.graph)
    assert [w.needs_grad for w in first.sent] == [is_asked]


class Counting(nn.Module):
    """A running mean, which it also uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        return self.second(y - self.mean) + self.mean


def test_a_changed_buffer_is_returned_by_its_stage_alone():
    first, second = stages_of(Counting(), (torch.randn(4, 8),), ("linear_1",))
    assert (dict(first.mutated), dict(second.mutated)) == ({0: "mean"}, {})
    assert (names(first.buffers), names(second.buffers)) == (["mean"], [])
    assert len(first.sent) == 2  # what the second map takes, and the new mean


class Late(nn.Module):
    """Reads a buffer, and changes it far behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x - self.mean))
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        return y


def test_a_buffer_that_another_stage_would_read_old_is_refused():
    with pytest.raises(PlanError, match="Stage 1 of the pipeline changes the buffer mean, and stage 0 reads it"):
        stages_of(Late(), (torch.randn(4, 8),), ("linear_1",))


# --- other graphs of the same model


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if self.training else reversed(self.layers):
            x = torch.relu(layer(x))
        return x


HOMES = {f"layers.{i}.weight": (i,) for i in range(3)}


def graph_of(model, *inputs):
    return prepare_forward(model, inputs).analysis.graph


def strays(graph, homes, stages):
    """The ops that are cut off from a parameter of theirs, with their stages; every stage has an op."""
    cuts = cuts_where_parameters_lie(graph, homes, stages)
    places = [next(i for i, op in enumerate(graph.ops) if op.name == cut) for cut in cuts]
    assert places == sorted(set(places)) and len(places) == stages - 1 and 0 not in places
    return [
        (op.name, stage)
        for i, op in enumerate(graph.ops)
        for stage in [bisect.bisect_right(places, i)]
        for name, tensor in graph.parameters.items()
        if tensor in op.operands and stage not in homes[name]
    ]


def test_a_forward_is_cut_where_its_parameters_lie():
    assert not strays(graph_of(Line(), torch.randn(4, 8)), HOMES, 3)


def test_a_stage_may_have_no_parameter_of_its_own():
    graph = graph_of(Line(), torch.randn(4, 8))
    assert not strays(graph, {name: (2 * i,) for i, name in enumerate(HOMES)}, 6)


def test_a_matrix_on_several_stages_is_met_on_any_of_them():
    ends, middle = {"table.weight": (0, 2)}, {"up.weight": (1,), "up.bias": (1,)}
    assert not strays(graph_of(Net(), TOKENS), ends | middle | {"down.weight": (2,), "down.bias": (2,)}, 3)
    everywhere = {name: (0, 1, 2) for name in HOMES}  # as layers that share their parameters
    assert not strays(graph_of(Line(), torch.randn(4, 8)), everywhere, 3)


def test_casts_of_parameters_run_where_their_results_are_used():
    with torch.autocast("cpu", torch.bfloat16):
        prepared = prepare_step(Line(), (torch.randn(4, 8),), loss_fn=nothing)
    cuts = cuts_where_parameters_lie(prepared.analysis.graph, HOMES, 3)
    plan = with_stages(prepared, Pipeline(3, "gpipe", cuts), 1)
    program = build_program(prepared.captured, prepared.analysis, plan)
    stages = cut_stages(program, prepared.analysis.graph)
    refuse_strays(stages, HOMES)
    assert [spec.name for stage in stages for spec in stage.parameters] == list(HOMES)
    with pytest.raises(PlanError, match=r"is on stage 1 of the pipeline, .* uses it on stage 0"):
        refuse_strays(stages, dict.fromkeys(HOMES, (1,)))


def test_another_order_of_parameters_is_refused():
    graph = graph_of(Line().eval(), torch.randn(4, 8))
    with pytest.raises(PlanError, match=r"layers.\d.weight is on stage \d of .* in another order"):
        cuts_where_parameters_lie(graph, HOMES, 3)


def test_more_stages_than_there_is_to_run_are_refused():
    graph = graph_of(Line(), torch.randn(4, 8))  # three maps and three relus
    with pytest.raises(PlanError, match=r"stage \d of 7 are not used here, .*use step\(\*batch\) only"):
        cuts_where_parameters_lie(graph, HOMES, 7)


# --- docs/pipeline.md


def test_the_worked_example_of_the_document(capsys):
    document = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    code, _, rest = document.partition("```python\n")[2].partition("```\n")
    exec(code, {"__name__": "example"})
    printed = "".join(f"    {line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    assert rest.startswith("\n" + printed + "\n")

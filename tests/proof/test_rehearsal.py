"""A step with all ranks in one process finds what is wrong with stages and their schedule."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.ir import SCHEDULES, Mesh, Pipeline
from autopar.pipeline.schedules import Action
from autopar.planning.planning import prepare_step
from autopar.program.program import build_program
from autopar.program.stages import cut_stages
from autopar.proof.random_plan import random_plan
from autopar.proof.rehearsal import Rehearsal, actions_of
from tests.support.staged import with_stages


class Net(nn.Module):
    """A matrix used at both ends, and a residual sum over the middle."""

    def __init__(self):
        super().__init__()
        self.ends, self.middle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.ends(x)
        return self.ends(torch.tanh(self.middle(y)) + y).square().mean()


def mean(y):
    return y.mean()


def rehearsal(*, weaken=lambda stage: stage, micro_batches=2):
    """Two stages on two ranks each, the schedule's order, and the inputs of every micro-batch."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(4, 4).double()
    prepared = prepare_step(model, (x,))
    plan = with_stages(prepared, Pipeline(2, "1f1b", ("linear_1",)), micro_batches, {"dp": 2}, "ddp")
    whole = build_program(prepared.captured, prepared.analysis, plan)
    stages = [weaken(s) for s in cut_stages(whole, prepared.analysis.graph)]
    parameters = dict(model.named_parameters())
    made = Rehearsal(whole, stages, parameters=parameters, buffers={}, micro_batches=micro_batches)
    return made, actions_of(plan), lambda i: {"x": x.roll(i, 0)}, (model, x)


def gradient_errors(made, model, x):
    loss = model(x)
    loss.backward()
    losses = torch.stack([torch.stack(ranks) for ranks in made.losses.values()])
    assert torch.allclose(losses, loss.detach().expand_as(losses))
    return {
        name: max((shard.grad - parameter.grad).abs().max().item() for shard in made.stored[name])
        for name, parameter in model.named_parameters()
    }


def test_stages_give_the_gradients_of_the_model():
    made, order, inputs, (model, x) = rehearsal()
    made.run(order, inputs)
    assert max(gradient_errors(made, model, x).values()) < 1e-12


def test_a_gradient_that_is_not_sent_is_missing():
    def mute(stage):
        return replace(stage, received=tuple(replace(w, needs_grad=False) for w in stage.received))

    made, order, inputs, (model, x) = rehearsal(weaken=mute)
    made.run(order, inputs)
    errors = gradient_errors(made, model, x)
    assert errors["ends.weight"] > 1e-3  # the share of the first stage's use
    assert errors["middle.weight"] < 1e-12


def test_a_micro_batch_without_a_backward_is_an_error():
    made, order, inputs, _ = rehearsal()
    with pytest.raises(AssertionError, match=r"without a backward: \[\(0, 1\)\]"):
        made.run([a for a in order if a != Action("B", 0, 1)], inputs)


def test_without_stages_micro_batches_go_one_after_the_other():
    model = Net()
    prepared = prepare_step(model, (torch.randn(4, 4),))
    plan = random_plan(prepared.analysis.graph, Mesh.of({"a": 2}), seed=0, fingerprint="")
    order = actions_of(replace(plan, micro_batches=2))
    assert [str(a) for a in order] == ["0F0", "0B0", "0F1", "0B1"]


def test_seeds_draw_every_schedule_and_cuts_in_order():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    graph = prepare_step(model, (torch.randn(4, 4),), loss_fn=mean).analysis.graph
    places = {op.name: i for i, op in enumerate(graph.ops)}
    drawn = set()
    for seed in range(40):
        plan = random_plan(graph, Mesh.of({"pp": 2, "a": 2}), seed=seed, fingerprint="")
        cuts = [places[name] for name in plan.pipeline.cuts]
        assert cuts == sorted(set(cuts)) and 0 not in cuts
        drawn.add(plan.pipeline.schedule)
    assert drawn == set(SCHEDULES)


def test_stages_are_drawn_apart_from_layouts():
    """A plan for the whole batch and one for its micro-batches have the same schedule and cuts."""
    graph = prepare_step(Net(), (torch.randn(8, 4),)).analysis.graph
    small = prepare_step(Net(), (torch.randn(2, 4),)).analysis.graph
    mesh = Mesh.of({"pp": 2, "a": 2})
    first, second = (random_plan(g, mesh, seed=3, fingerprint="") for g in (graph, small))
    assert first.pipeline == second.pipeline

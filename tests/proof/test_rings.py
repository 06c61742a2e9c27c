"""Plans whose attention sends keys and values round equal one device, whatever else they do."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig, loss_fn
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.cost_model import H100
from autopar.ir import UNSPLIT, Graph, Mesh, Plan, is_legal
from autopar.planning.planning import make_plan
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from autopar.search.request.request import Request
from tests.support.llama import Llama
from tests.support.tables import often

ATTENTION = "aten.scaled_dot_product_attention"
RING = "q>k"


class Rotary(nn.Module):
    """A Llama of transformers, which turns its positions into a table of rotations and a mask."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens, targets):
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens():
    return torch.randint(32, (2, 16)), torch.randint(32, (2, 16))


def llama():
    torch.manual_seed(0)
    sizes = {"vocab": 32, "width": 32, "inner": 48, "heads": 4, "kv_heads": 2}
    return Llama(layers=2, **sizes).double(), tokens()


def rotary():
    torch.manual_seed(0)
    return Rotary().double(), tokens()


class Learned(nn.Module):
    """A GPT with a learned position for every place, and its loss."""

    def __init__(self):
        super().__init__()
        self.model = GPT(GPTConfig(seq_len=16, layers=1, heads=4, width=32))

    def forward(self, tokens, targets):
        return loss_fn(self.model(tokens), targets)


def gpt():
    torch.manual_seed(0)
    return Learned().double(), tokens()


SUBJECTS = {"llama": llama, "rotary": rotary, "gpt": gpt}
CASES = [("llama", "a=2"), ("llama", "a=2,b=2"), ("rotary", "a=4"), ("gpt", "a=2,b=2")]


@functools.cache
def subject_of(name: str) -> Subject:
    return Subject.of(*SUBJECTS[name]())


def in_rings(graph: Graph, plan: Plan) -> Plan:
    """The plan with keys and values going round along every axis that may split an attention's queries."""
    ops = dict(plan.ops)
    for op in graph.ops:
        if op.kind == ATTENTION:
            labels = [UNSPLIT] * len(plan.mesh.axes)
            for axis in range(len(labels)):
                with_ring = (*labels[:axis], RING, *labels[axis + 1 :])
                labels = list(with_ring if is_legal(graph, op, with_ring, plan.mesh) else labels)
            assert RING in labels, (op, plan.mesh)
            ops[op.name] = tuple(labels)
    return replace(plan, ops=ops, saved={})  # slices were drawn for the layouts of other choices


@pytest.mark.parametrize(("name", "mesh"), often(CASES, CASES[1:]))
def test_random_plans_with_rings_equal_one_device(name, mesh):
    """All other ops, and parameters, as a seed draws them."""
    subject = subject_of(name)
    captured, graph = subject.prepared.captured, subject.prepared.analysis.graph
    plan = random_plan(graph, Mesh.parse(mesh), seed=0, fingerprint=captured.fingerprint)
    report = subject.compare(in_rings(graph, plan))
    assert report.passed, f"{report}\n{plan}"


@pytest.mark.parametrize("labels", [(RING, "q"), ("q", RING), (RING, "group"), ("b0", RING)], ids=" ".join)
def test_a_ring_beside_every_other_choice(labels):
    """Of grouped queries on two axes: keys go round along one, and are whole or split by heads along the other."""
    subject = subject_of("llama")
    graph, mesh = subject.prepared.analysis.graph, Mesh.of({"a": 2, "b": 2})
    plan = make_plan(subject.prepared, Request(H100, mesh=mesh))
    ops = {op.name: labels for op in graph.ops if op.kind == ATTENTION}
    report = subject.compare(replace(plan, ops={**plan.ops, **ops}))
    assert report.passed, report


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_recipe_equals_one_device(name):
    """Positions are those of the whole sequence: learned, of a table, or none."""
    subject = subject_of(name)
    plan = make_plan(subject.prepared, Request(H100, mesh=Mesh.of({"cp": 4}), recipe="cp"))
    graph = subject.prepared.analysis.graph
    rings = [plan.ops[op.name] for op in graph.ops if op.kind == ATTENTION]
    assert rings and set(rings) == {(RING,)}
    assert subject.compare(plan).passed


@pytest.mark.parametrize("labels", [("q^1", RING, "q"), ("q^1", "q", RING)], ids=" ".join)
def test_a_ring_among_axes_of_another_order(labels):
    """The first query of a rank follows from the order of all axes that split queries, in the ring or not."""
    subject = subject_of("llama")
    graph, mesh = subject.prepared.analysis.graph, Mesh.parse("a=2,b=2,c=2")
    plan = make_plan(subject.prepared, Request(H100, mesh=mesh))
    ops = {op.name: labels for op in graph.ops if op.kind == ATTENTION}
    report = subject.compare(replace(plan, ops={**plan.ops, **ops}))
    assert report.passed, report

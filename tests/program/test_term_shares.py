"""Terms of a loss are multiplied by their shares, whatever the calls of a rank's graph are called."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cost_model import find_hardware
from autopar.planning.planning import make_plan
from autopar.proof.subject import Subject
from autopar.search.request.request import Request


def two_terms(logits, target):
    return F.cross_entropy(logits, target) + 0.1 * logits.logsumexp(-1).pow(2).mean()


def test_a_call_that_a_rule_adds_is_not_taken_for_the_sum_of_the_terms():
    # Over split classes the loss has more additions, one of which is called as that of the terms is in the capture.
    torch.manual_seed(0)
    blocks = [nn.Linear(8, 8) for _ in range(2)]
    batch = torch.randn(8, 8), torch.randint(0, 6, (8,))
    subject = Subject.of(nn.Sequential(*blocks, nn.Linear(8, 6)), batch, loss_fn=two_terms)
    pins = {"cross_entropy*": "n1@tp"}
    plan = make_plan(subject.prepared, Request(find_hardware("h100"), mesh=autopar.Mesh.of({"tp": 2}), pins=pins))
    assert subject.compare(replace(plan, micro_batches=2)).passed

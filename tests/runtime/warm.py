"""What every rank would do first: the server that ranks are forked from imports this module, once for all ranks.

A first capture and a first program import parts of torch and sympy and fill their tables, which takes ten times as
long as those after them. Nothing here starts a thread: a fork would leave it behind, so no gradient is computed.
"""

import contextlib
import logging

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._inductor.compile_fx
import torch.distributed.checkpoint
from torch import nn
from tqdm import tqdm

import autopar.api
import autopar.backend
import autopar.proof.verify
from autopar.cost_model import find_hardware
from autopar.planning.planning import make_plan
from autopar.search.request.request import Request
from tests.support.shared_captures import share_captures
from tests.support.staged import prepared_once

with contextlib.suppress(ImportError):  # an extra, in seconds that six ranks would spend each
    from transformers import LlamaForCausalLM  # noqa: F401

# No thread that watches the progress bars of `torch.fx`.
tqdm.monitor_interval = 0
torch.set_num_threads(1)

_MODEL = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
_PREPARED = prepared_once(_MODEL, (torch.ones(2, 2),), torch.mean)
make_plan(_PREPARED, Request(find_hardware("cpu-gloo"), mesh={"dp": 2}, recipe="ddp"))
logging.getLogger("autopar").setLevel(logging.WARNING)  # else this plan is announced
autopar.compile(_MODEL, loss_fn=torch.mean, mesh={"dp": 1}).prepare(torch.ones(2, 2))
share_captures()

"""Collectives of one step, counted where they are issued, against products written by hand.

A model of two blocks on four ranks; a process group that moves nothing answers for the other three.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autopar

RANKS, BATCH, SEQ, WIDTH, INNER = 4, 8, 16, 32, 64
FLOAT = 4  # bytes

MATRIX = WIDTH * INNER * FLOAT  # one projection
NORM = WIDTH * FLOAT  # the weight of one norm
PARAMETERS = 2 * (2 * MATRIX + NORM)  # two blocks of up, down and norm
STREAM = BATCH * SEQ * WIDTH * FLOAT  # the residual stream of the global batch
SCALAR = FLOAT


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = (
            nn.Linear(WIDTH, INNER, bias=False),
            nn.Linear(INNER, WIDTH, bias=False),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(Block(), Block())


def loss_fn(y):
    return y.pow(2).mean()


class Counted(TorchDispatchMode):
    """(collective -> number, bytes); bytes are those of the larger side on one rank."""

    NAMES = {  # noqa: RUF012
        "allreduce": "all_reduce", "all_reduce": "all_reduce",
        "_allgather_base": "all_gather", "all_gather": "all_gather",
        "_reduce_scatter_base": "reduce_scatter", "reduce_scatter": "reduce_scatter",
        "all_to_all": "all_to_all", "alltoall_base": "all_to_all",
    }  # fmt: skip

    def __init__(self):
        super().__init__()
        self.number, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "autopar"):  # those of the runtime, and those of the graph
            name = self.NAMES.get(func._schema.name.split("::")[1].rstrip("_"))
            if name:
                tensors = [
                    x for x in pytree.tree_leaves((args, result)) if isinstance(x, torch.Tensor)
                ]
                self.number[name] += 1
                self.bytes[name] += max(x.nbytes for x in tensors)
        return result


@pytest.fixture(scope="module", autouse=True)
def four_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def counted(recipe, micro_batches=1):
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ, WIDTH)
    model = autopar.compile(
        Model(), example_inputs=(x,), loss_fn=loss_fn, mesh={"x": RANKS}, recipe=recipe,
        micro_batches=micro_batches,
    )  # fmt: skip
    model.step(x)
    model.zero_grad()
    with Counted() as counted:
        model.step(x)
    return counted


def test_ddp_reduces_every_gradient_once():
    for micro_batches in (1, 2):
        found = counted("ddp", micro_batches)
        # all gradients in one bucket, and the loss of all micro-batches
        assert found.bytes == {"all_reduce": PARAMETERS + SCALAR}
        assert found.number == {"all_reduce": 2}


def test_zero1_scatters_gradients_once_and_gathers_parameters_once():
    for micro_batches in (1, 2):
        found = counted("zero1", micro_batches)
        assert found.bytes == {
            "all_gather": PARAMETERS, "reduce_scatter": PARAMETERS, "all_reduce": SCALAR,
        }  # fmt: skip


def test_zero2_scatters_gradients_for_every_micro_batch():
    for micro_batches in (1, 2):
        found = counted("zero2", micro_batches)
        assert found.bytes == {
            "all_gather": PARAMETERS,
            "reduce_scatter": micro_batches * PARAMETERS,
            "all_reduce": SCALAR,
        }


def test_zero3_gathers_around_each_use():
    for micro_batches in (1, 2):
        found = counted("zero3", micro_batches)
        # forward and backward need every parameter
        assert found.bytes["reduce_scatter"] == micro_batches * PARAMETERS
        assert found.bytes["all_reduce"] == SCALAR
        assert found.bytes["all_gather"] == micro_batches * 2 * PARAMETERS


def test_tensor_parallel_reduces_the_stream_twice_a_block():
    found = counted("tp")
    # behind each down in forward (g), before each up in backward (f); the loss is whole on every rank
    assert found.bytes == {"all_reduce": 4 * STREAM}
    assert found.number == {"all_reduce": 4}


def test_sequence_parallel_scatters_and_gathers_instead():
    found = counted("tp+sp")
    # in forward a gather before each up and a scatter behind each down, in backward the transposes;
    # the norms' gradients are sums over all positions, in one bucket
    assert found.bytes == {
        "all_gather": 4 * STREAM, "reduce_scatter": 4 * STREAM, "all_reduce": 2 * NORM + SCALAR,
    }  # fmt: skip
    assert found.number == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 2}

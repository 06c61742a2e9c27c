"""Collectives of one step, counted where they are issued, against products written by hand.

A model of two blocks on four ranks; a process group that moves nothing answers for the other three.
"""

import itertools
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
from autopar.cost_model.items import COMPUTE
from tests.support.staged import captured_once
from tests.support.tables import often

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
        self.up, self.down = (nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False))

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
        "allreduce": "all_reduce",
        "all_reduce": "all_reduce",
        "_allgather_base": "all_gather",
        "all_gather": "all_gather",
        "_reduce_scatter_base": "reduce_scatter",
        "reduce_scatter": "reduce_scatter",
        "all_to_all": "all_to_all",
        "alltoall_base": "all_to_all",
        "broadcast": "broadcast",
        "reduce": "reduce",
        "send": "send",
        "recv": "receive",
    }

    def __init__(self):
        super().__init__()
        self.number, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "autopar"):  # those of the runtime, and those of the graph
            name = self.NAMES.get(func._schema.name.split("::")[1].rstrip("_"))
            if name:
                tensors = [x for x in pytree.tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
                self.number[name] += 1
                self.bytes[name] += max(x.nbytes for x in tensors)
        return result


@pytest.fixture(scope="module", autouse=True)
def four_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@captured_once()
def counted(recipe, micro_batches=1):
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ, WIDTH)
    model = autopar.compile(
        Model(), example_inputs=(x,), loss_fn=loss_fn, mesh={"x": RANKS}, recipe=recipe, micro_batches=micro_batches
    )
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
        assert found.bytes == {"all_gather": PARAMETERS, "reduce_scatter": PARAMETERS, "all_reduce": SCALAR}


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
        # forward needs every parameter, and backward all but the first norm, whose input has no gradient
        assert found.bytes["reduce_scatter"] == micro_batches * PARAMETERS
        assert found.bytes["all_reduce"] == SCALAR
        assert found.bytes["all_gather"] == micro_batches * (2 * PARAMETERS - NORM)


def test_data_parallel_sends_parameters_out_and_gradients_back():
    for micro_batches in (1, 2):
        found = counted("data-parallel", micro_batches)
        assert found.bytes == {"broadcast": PARAMETERS, "reduce": PARAMETERS, "all_reduce": SCALAR}
        assert found.number == {"broadcast": 1, "reduce": 1, "all_reduce": 1}


@pytest.mark.filterwarnings("ignore:The loss of step 1")  # what others would send is not there
def test_a_parameter_server_sends_as_much_from_and_to_several_ranks():
    found = counted("parameter-server")
    assert found.bytes == {"broadcast": PARAMETERS, "reduce": PARAMETERS, "all_reduce": SCALAR}
    assert found.number == {"broadcast": RANKS, "reduce": RANKS, "all_reduce": 1}


@pytest.mark.filterwarnings("ignore:The loss of step 1")  # what others would send is not there
def test_servers_send_a_worker_its_parameters_and_take_its_gradients():
    found = counted("serve")
    # three servers; the worker's loss goes to all
    assert found.bytes == {"receive": PARAMETERS, "send": PARAMETERS, "broadcast": SCALAR}
    assert found.number == {"receive": RANKS - 1, "send": RANKS - 1, "broadcast": 1}


def test_tensor_parallel_reduces_the_stream_twice_a_block():
    found = counted("tp")
    # behind each down in forward (g), before each up in backward (f); the loss is whole on every rank
    assert found.bytes == {"all_reduce": 4 * STREAM}
    assert found.number == {"all_reduce": 4}


def test_sequence_parallel_scatters_and_gathers_instead():
    found = counted("tp+sp")
    # in forward a gather before each up and a scatter behind each down, in backward the transposes;
    # the norms' gradients are sums over all positions, in one bucket
    assert found.bytes == {"all_gather": 4 * STREAM, "reduce_scatter": 4 * STREAM, "all_reduce": 2 * NORM + SCALAR}
    assert found.number == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 2}


# --- collectives inside an op, against what the explanation says that they send

VOCABULARY, CHANNELS = 64, 24
TOKENS = BATCH * SEQ * FLOAT  # one number for every token
MOMENTS = 2 * CHANNELS * FLOAT  # mean and variance of every channel


class Head(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, VOCABULARY, bias=False)


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv1d(SEQ, CHANNELS, 3, padding=1), nn.BatchNorm1d(CHANNELS))


def likelihood(y, target, weight=None):
    return F.cross_entropy(y.flatten(0, 1), target.flatten(), weight)


def weighted(y, target):
    return likelihood(y, target, torch.arange(1.0, VOCABULARY + 1))


def of_a_step(model, batch, loss, mesh, pins):
    """What a step sends, counted and priced, and by axis and title what ops send inside themselves."""
    compiled = autopar.compile(model, example_inputs=batch, loss_fn=loss, mesh=mesh, pins=pins)
    compiled.step(*batch)
    compiled.zero_grad()
    with Counted() as counted:
        compiled.step(*batch)
    explained, priced, inside = compiled.explain(), Counter(), {}
    for item in explained.step.items:
        if item.resource != COMPUTE:
            larger = item.traffic_bytes * item.ranks / (item.ranks - 1)
            priced[item.kind] += item.count * larger / (2 if item.kind == "all_reduce" else 1)
    for axis in explained.traffic.parts:
        inside |= {(axis.name[-1], p.name): p.value for p in axis.parts if " inside " in p.name}
    return counted.bytes, priced, inside


LOSSES = {
    # every rank's largest logit of every token, and the sum of exponentials
    "four": ({"x": 4}, "n1@x", likelihood, {("x", "all_gather"): 3 * TOKENS, ("x", "all_reduce"): 1.5 * TOKENS}),
    # half of the tokens on a rank, and along their axis the number of those that count, of 8 bytes
    "two": (
        {"a": 2, "x": 2},
        "n0.0@a n1@x",
        likelihood,
        {("x", "all_gather"): TOKENS / 2, ("x", "all_reduce"): TOKENS / 2, ("a", "all_reduce"): 8},
    ),
    # with class weights the sum runs again in backward, and the sum of the weights is one over classes too
    "weights": (
        {"x": 4},
        "n1@x",
        weighted,
        {("x", "all_gather"): 3 * TOKENS, ("x", "all_reduce"): 2 * 1.5 * TOKENS + 1.5 * SCALAR},
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_over_split_classes_sends_what_it_is_priced_for(case):
    mesh, labels, loss, expected = LOSSES[case]
    batch = torch.randn(BATCH, SEQ, WIDTH), torch.randint(VOCABULARY, (BATCH, SEQ))
    counted, priced, inside = of_a_step(Head(), batch, loss, mesh, {"cross_entropy*": labels})
    assert priced == counted
    assert inside == {(a, f"{kind} inside cross_entropy_loss"): n for (a, kind), n in expected.items()}


@pytest.mark.parametrize("axes", [{"x": 4}, {"a": 2, "x": 2}])
def test_batch_statistics_send_what_they_are_priced_for(axes):
    labels = " ".join(f"d0@{axis}" for axis in axes)
    counted, priced, inside = of_a_step(
        Normed(), (torch.randn(BATCH, SEQ, WIDTH),), loss_fn, axes, {"*batch_norm*": labels}
    )
    assert priced == counted
    # in forward all have the moments of all, in backward all add up the gradients of theirs
    titles = (f"{kind} inside _native_batch_norm_legit_functional" for kind in ("all_gather", "reduce_scatter"))
    assert inside == {(a, title): (n - 1) * MOMENTS for title in titles for a, n in axes.items()}


# --- recomputation, against what is priced


class Layered(nn.Module):
    """Four blocks as repeated layers of a model, between two linear maps."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@pytest.mark.parametrize(
    ("recipe", "recompute"),
    often(
        itertools.product(("ddp", "zero2", "zero3", "tp", "tp+sp"), ("none", 2, "full")),
        [("ddp", "full"), ("zero2", 2), ("zero3", "none"), ("zero3", "full"), ("tp", 2), ("tp+sp", "full")],
    ),
)
def test_recomputed_layers_send_what_they_are_priced_for(recipe, recompute):
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ, WIDTH)
    compiled = autopar.compile(
        Layered(),
        example_inputs=(x,),
        loss_fn=loss_fn,
        mesh={"x": RANKS},
        recipe=recipe,
        recompute=recompute,
        bucket_bytes=1,  # so that no parameter is gathered again for its neighbour
    )
    compiled.step(x)
    compiled.zero_grad()
    with Counted() as counted:
        compiled.step(x)
    assert priced_bytes(compiled.explain().step) == dict(counted.bytes)


@pytest.mark.parametrize(("recipe", "gathers"), [("zero1", 1), ("zero2", 1), ("zero3", 2)])
def test_parts_of_different_sizes_send_what_they_are_padded_to(recipe, gathers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9, bias=False), nn.GELU(), nn.Linear(9, 6, bias=False))
    x = torch.randn(BATCH, 6)
    compiled = autopar.compile(
        model, example_inputs=(x,), loss_fn=loss_fn, mesh={"x": RANKS}, recipe=recipe, bucket_bytes=1
    )
    compiled.step(x)
    compiled.zero_grad()
    with Counted() as counted:
        compiled.step(x)
    # 9 rows of 6 over 4 ranks are 3, 3, 3, 0, and 6 columns of 9 are 2, 2, 2, 0: padded 12 x 6 and 9 x 8
    matrix = 72 * FLOAT
    assert counted.bytes == {
        # backward needs the second matrix again, and the first not: the input requires no gradient
        "all_gather": (2 + (gathers - 1)) * matrix,
        "reduce_scatter": 2 * matrix,
        "all_reduce": SCALAR,
    }
    assert priced_bytes(compiled.explain().step) == dict(counted.bytes)


def priced_bytes(step):
    """Kind of collective -> bytes in a step, counted as `Counted` does: those of the larger side."""
    found = Counter()
    for item in step.items:
        if item.resource != COMPUTE:
            once = item.phase in ("gather", "reduce") and not item.every_micro_batch
            times = item.count * step.times(item) * (1 if once else step.run.micro_batches)
            larger = item.traffic_bytes * item.ranks / (item.ranks - 1)
            found[item.kind] += times * larger / (2 if item.kind == "all_reduce" else 1)
    return found

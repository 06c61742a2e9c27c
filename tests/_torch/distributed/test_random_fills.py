"""Random numbers in DTensors: those of the whole tensor, and those of torch where it tells shards apart."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from autopar import _torch
from autopar._torch.distributed.dtensors import handlers
from tests.runtime.gloo_ranks import Ranks, kept_ranks


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    yield from kept_ranks(2)


def test_a_dtensor_draws_what_a_plain_tensor_draws(group) -> None:
    _torch.draw_whole_on_processors()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    plain = torch.zeros(4, 6)
    cut = distribute_tensor(plain.clone(), mesh, [Shard(1)])
    for fill in (nn.init.normal_, nn.init.kaiming_uniform_, nn.init.trunc_normal_, torch.Tensor.random_):
        for x in (plain, cut):
            torch.manual_seed(0)
            fill(x)
        assert cut.full_tensor().equal(plain), fill
    generator = torch.Generator()
    found = [x.normal_(generator=generator.manual_seed(1)) for x in (plain, cut)]
    assert found[1] is cut and cut.full_tensor().equal(plain)


@pytest.mark.parametrize(
    "draw",
    [
        torch.randn_like,
        functools.partial(torch.randint_like, high=5),
        functools.partial(torch.randint_like, low=-1, high=5),
        torch.bernoulli,
        torch.nn.functional.dropout,
    ],
)
def test_what_is_drawn_beside_a_dtensor_is_what_is_drawn_beside_a_plain_tensor(group, draw) -> None:
    _torch.draw_whole_on_processors()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    plain = torch.linspace(0, 1, 24).view(4, 6)
    cut, noise = distribute_tensor(plain.clone(), mesh, [Shard(1)]), []
    for x in (plain, cut):
        torch.manual_seed(2)
        noise.append(draw(x))
    assert isinstance(noise[1], DTensor) and noise[1].placements == cut.placements
    assert noise[1].full_tensor().equal(noise[0])


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli of its own memory": lambda x: x.detach().bernoulli_(x.detach()),
    "transposed": lambda x: x.t().uniform_().t(),
    "bernoulli of a transposed": lambda x: torch.bernoulli(x.t()),
    "normal_ of rows that are spread": lambda x: x.t().contiguous().t().normal_(),
    "bernoulli of an out": lambda x: torch.bernoulli(x, out=torch.empty_like(x)),
    "bernoulli of a tensor": lambda x: x.clone().bernoulli_(torch.full((4, 6), 0.3)),
    "binomial": lambda x: torch.binomial(torch.full((4, 6), 9.0), x),
    "Categorical": lambda x: torch.distributions.Categorical(probs=x).sample(),
    "dropout": F.dropout,
    "fill": lambda x: x.fill_(2.0) + torch.rand_like(x),
    "functional normal": torch.ops.aten.normal_functional,
    "gamma": lambda x: torch._standard_gamma(x),
    "Gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial with replacement": lambda x: torch.multinomial(x, 9, replacement=True),
    "normal": lambda x: torch.normal(x, x),
    "orthogonal": lambda x: nn.init.orthogonal_(x.clone()),
    "poisson": lambda x: torch.poisson(9 * x),
    "rand with an out": lambda x: torch.rand(4, 6, out=torch.empty_like(x)),
    "randn": torch.randn_like,
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu in place": lambda x: F.rrelu_(x, training=True),
    "sparse": lambda x: nn.init.sparse_(x.clone(), 0.3),
    "truncated normal": lambda x: nn.init.trunc_normal_(x.clone(), a=-0.5, b=0.5),
}


def apart() -> list[tuple[str, str]]:
    """The draws on two ranks that are others than those of one process, or after which generators are apart."""
    _torch.treat_as_plain()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    plain, found = torch.linspace(0.05, 0.95, 24).view(4, 6), []
    layouts = {str(each): distribute_tensor(plain, mesh, [each]) for each in (Shard(0), Shard(1))}
    layouts["sum"] = DTensor.from_local(plain / 2, mesh, [Partial()], run_check=False)
    for name, draw in DRAWS.items():
        for layout, x in layouts.items():
            torch.manual_seed(0)
            expected = draw(plain.clone()), torch.rand(1)
            torch.manual_seed(0)
            drawn, later = draw(cast(DTensor, x.clone())), torch.rand(1)
            whole = drawn.full_tensor() if isinstance(drawn, DTensor) else drawn
            if not (whole.equal(expected[0]) and later.equal(expected[1])):
                found.append((name, layout))
    return found


@pytest.mark.multiprocess
def test_shards_and_sums_draw_what_one_process_draws(two_ranks: Ranks) -> None:
    assert two_ranks.run(apart) == [[], []]


# The dropout of attention is that of `bernoulli_` on processors, and the others are of accelerators.
LEFT_OUT = re.compile("scaled_dot_product|_sdp_|flash_attention|_triton_|_nested_tensor|cudnn|miopen|_mps")


def test_all_random_operators_of_torch_on_processors_are_known() -> None:
    _torch.draw_whole_on_processors()
    found = []
    for name in map(str.strip, torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or LEFT_OUT.search(name):
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        takes_tensors = any("Tensor" in str(each.type) for each in op._schema.arguments)
        runs_here = [has_kernel(name, key) for key in ("CPU", "CompositeExplicitAutograd")]
        if torch.Tag.nondeterministic_seeded in op.tags and takes_tensors and any(runs_here):
            found.append(op)
    kept = handlers()
    assert len(found) > 60 and [op for op in found if op not in kept] == []

"""Process groups of c10d: found by name, their collectives, their store and their timeouts."""

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import _torch
from autopar.ops.collectives import group_name

X = torch.arange(6.0).reshape(2, 3)


def test_a_group_is_found_by_its_name(group):
    assert _torch.resolve_group(group_name(group)).rank() == 0


def test_the_timeout_of_a_group_is_set(group):
    _torch.set_group_timeout(group, 7.0)
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7.0
    assert _torch.group_seconds(group) == 7.0


def test_functional_collectives_of_one_rank_return_their_input(group):
    name = group_name(group)
    assert torch.equal(_torch.all_reduce(X, name), X)
    assert torch.equal(_torch.all_gather(X, 1, name), X)
    assert torch.equal(_torch.reduce_scatter(X, 1, name), X)
    assert torch.equal(_torch.all_to_all(X, 1, name), X)
    assert torch.equal(_torch.exchange_rows(X, [2], [2], name), X)
    assert _torch.exchange_rows(X[:0], [0], [0], name).shape == (0, 3)
    assert torch.equal(_torch.start_exchange_rows(X, [2], [2], name)(), X)


class _Watching(TorchDispatchMode):
    """A mode that sees ops, and changes none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen = func.namespace
        return func(*args, **(kwargs or {}))


def test_who_watches_or_traces_ops_sees_functional_collectives(group):
    assert _torch.runs_at_once(X)
    with _Watching() as mode:
        assert not _torch.runs_at_once(X)
        result = _torch.all_reduce(X, group_name(group))
    assert torch.equal(result, X)
    assert mode.seen == "_c10d_functional"
    with FakeTensorMode() as fakes:
        assert not _torch.runs_at_once(fakes.from_tensor(X))
    asked = []
    torch.func.vmap(lambda x: asked.append(_torch.runs_at_once(x)) or x)(X)
    assert asked == [False]


def test_complex_numbers_are_gathered_and_summed_as_pairs(group):
    x, result = torch.tensor([1 + 2j, 3 - 4j]), torch.zeros(2, dtype=torch.complex64)
    _torch.start_all_gather(result, x, group).wait()
    assert torch.equal(result, x)
    result.zero_()
    _torch.start_reduce_scatter(result, x, group).wait()
    assert torch.equal(result, x)
    assert torch.equal(_torch.reduce_scatter(x, 1, group_name(group)), x)


def test_started_collectives_leave_their_result(group):
    x, result = X.flatten().clone(), torch.zeros(6)
    _torch.start_all_reduce(x, group).wait()
    assert torch.equal(x, X.flatten())
    _torch.start_all_gather(result, x, group).wait()
    assert torch.equal(result, x)
    result.zero_()
    _torch.start_reduce_scatter(result, x, group).wait()
    assert torch.equal(result, x)
    result.zero_()
    _torch.start_all_to_all(result, x, group).wait()
    assert torch.equal(result, x)


def test_the_store_of_the_default_group_is_found(group):
    _torch.default_store().set("key", "value")
    assert _torch.default_store().get("key") == b"value"
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=7))
    assert _torch.store_seconds(store) == 7
    assert _torch.store_host(store) == ""


def test_the_flight_recorder_is_read_where_it_is_on():
    """In a process of its own: the recorder reads its switch once."""
    program = (
        "import torch, torch.distributed as dist; from autopar import _torch\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(3)); print(_torch.flight_record().decode())"
    )
    for size, expected in ("10", ["gloo:all_reduce"]), ("0", []):
        said = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"TORCH_FR_BUFFER_SIZE": size},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.strip()
        entries = json.loads(said)["entries"] if said else []
        assert [each["profiling_name"] for each in entries] == expected


def test_the_machine_of_a_store_is_found_below_prefixes():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert _torch.store_host(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "localhost"


def test_waiting_longer_leaves_the_timeout_as_it_was(group):
    options = group._get_backend(torch.device("cpu")).options
    _torch.set_group_timeout(group, 5)
    with _torch.waiting_longer(group, 60):
        assert options._timeout.total_seconds() == 60
        with _torch.waiting_longer(group, 7):
            assert options._timeout.total_seconds() == 60
    assert options._timeout.total_seconds() == 5


class _Lost:
    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def test_what_is_raised_while_a_rank_waits_broke_in_communication() -> None:
    with pytest.raises(RuntimeError) as waiting:
        _torch.wait_for_all([_Lost()])  # type: ignore[list-item]
    assert _torch.broke_in_communication(waiting.value)
    with pytest.raises(RuntimeError) as alone:
        _Lost().wait()
    assert not _torch.broke_in_communication(alone.value)

"""What depends on the kind of a device, as far as a machine without an accelerator can tell."""

from __future__ import annotations

import ast
import platform
import re
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from autopar import _torch
from tests.support.accelerators import seeming_accelerators

CUDA, CPU, META = torch.device("cuda", 1), torch.device("cpu"), torch.device("meta")


def test_the_processor_and_the_meta_device_are_no_accelerators() -> None:
    assert [_torch.is_accelerator(x) for x in (CUDA, CPU, META)] == [True, False, False]


def test_each_kind_of_device_has_the_backend_that_torch_names() -> None:
    kinds = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
    assert {kind: _torch.backend_of(torch.device(kind)) for kind in kinds} == kinds
    assert _torch.backends_of(torch.device("xpu", 1)) == "cpu:gloo,xpu:xccl"


def test_the_kind_of_this_machines_accelerator_is_torchs() -> None:
    found = torch.accelerator.current_accelerator(check_available=True)
    assert _torch.accelerator_kind() == (None if found is None else found.type)
    assert _torch.autocast_kinds() == ("cpu",) + (() if found is None else (found.type,))


def test_autocast_has_a_format_where_it_is_on() -> None:
    assert [_torch.autocast_dtype(x) for x in (CPU, META)] == [None, None]
    with torch.autocast("cpu", torch.bfloat16):
        assert [_torch.autocast_dtype(x) for x in (CPU, META)] == [torch.bfloat16, None]


def test_random_numbers_that_are_drawn_inside_are_not_missed_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with _torch.forked_random_state([CPU, CPU, META]):
        inside = torch.rand(4)
    assert torch.equal(inside, expected)
    assert torch.equal(torch.rand(4), expected)
    with _torch.forked_random_state([CPU], seed=3), monkeypatch.context() as patched:
        patched.setattr(traceback, "format_stack", lambda *_: pytest.fail("the stack is kept for an accelerator"))
        with _torch.forked_random_state([CPU], seed=3):
            assert torch.equal(torch.rand(4), expected)
        assert torch.equal(torch.rand(4), expected)
    before = _torch.random_states(CPU)
    torch.rand(1)
    (state,) = _torch.random_states(CPU)
    assert len(before) == 1 and not torch.equal(state, before[0])


def test_a_copy_of_a_processors_tensor_is_there_at_once_and_stays() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    copy, arrived = _torch.copy_to_host(x)
    with torch.no_grad():
        x.fill_(3.0)
    assert (copy.item(), copy.requires_grad, arrived) == (2.0, False, None)


def test_a_processor_counts_no_allocated_bytes_and_needs_no_waiting() -> None:
    _torch.synchronize(CPU)
    assert _torch.peak_allocated_bytes(CPU) is None
    assert _torch.current_device("cpu") == CPU


def test_the_accelerator_of_a_rank_is_that_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with seeming_accelerators(2) as taken:
        assert _torch.accelerator_of_rank() is None  # nobody has launched this process
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert _torch.accelerator_of_rank() == torch.device("cuda:1")
        assert [_torch.accelerator_count(kind) for kind in ("cuda", "xpu")] == [2, 0]
        _torch.use_device(CUDA)
        _torch.use_device(CPU)
    assert taken == ["cuda:1"]


def test_a_device_is_known_by_its_uuid_or_else_by_its_machine_and_number() -> None:
    module = mock.Mock()
    with mock.patch.object(torch, "get_device_module", lambda device: module):
        module.get_device_properties.return_value = SimpleNamespace(uuid="GPU-1")
        assert _torch.identity_of(CUDA) == "GPU-1"
        module.get_device_properties.return_value = SimpleNamespace()
        assert _torch.identity_of(CUDA) == f"{platform.node()} 1"
    assert _torch.identity_of(CPU) == ""


def test_the_backend_of_a_group_is_that_of_the_kind_of_a_device() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert _torch.backend_in_use(CPU) == "gloo" and _torch.uses_own_backend(CPU)
        assert not _torch.uses_own_backend(CUDA)
    finally:
        dist.destroy_process_group()


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "accelerators.md"
WORDS = {"cpu", "cuda", "nccl", "gloo", "xpu"}  # as values in code
CALLS = {"fork_rng", "get_device_module", "get_device_states"} | {
    "autocast",
    "get_autocast_dtype",
    "is_autocast_enabled",
}
KEYWORDS = {"non_blocking", "pin_memory"}


def device_uses(path: Path) -> set[str]:
    """What a module says of devices: kinds, calls that take one, and what only an accelerator has."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and node.value in WORDS:
            found.add(repr(node.value))
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
            found.add(str(node.arg))
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if node.attr in CALLS or re.match(r"torch\.(accelerator|cuda|xpu|Event|Stream)\b", name):
                found.add(name)
    return found


def users() -> dict[str, set[str]]:
    """Path of every module of the package -> what it says of devices, where it says anything."""
    files = [p for room in ("autopar", "passes", "cost_model") for p in (ROOT / room).rglob("*.py")]
    files = [p for p in files if not any(part.is_symlink() for part in p.parents)]
    found = {str(path.relative_to(ROOT)): device_uses(path) for path in files}
    return {name: uses for name, uses in found.items() if uses}


def test_the_page_lists_every_module_that_names_a_device_and_its_test() -> None:
    rows = re.findall(r"^\| `(\S+\.py)` \|.*\| `(tests/\S+\.py)`", PAGE.read_text(), re.M)
    assert sorted(users()) == sorted(name for name, _ in rows)
    assert not [test for _, test in rows if not (ROOT / test).exists()]


def test_two_modules_alone_ask_for_cuda() -> None:
    asking = {name for name, uses in users().items() if any(use.startswith("torch.cuda") for use in uses)}
    # calibrate measures NVIDIA's devices, by a class of its own; a kernel is there on one generation of GPUs alone.
    assert asking == {"autopar/calibrate/devices.py", "autopar/_torch/operators.py"}

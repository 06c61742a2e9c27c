"""What depends on the kind of a device, as far as a machine without an accelerator can tell."""

from __future__ import annotations

import torch

from autopar import _torch

CUDA, CPU, META = torch.device("cuda", 1), torch.device("cpu"), torch.device("meta")


def test_the_processor_and_the_meta_device_are_no_accelerators() -> None:
    assert [_torch.is_accelerator(x) for x in (CUDA, CPU, META)] == [True, False, False]


def test_each_kind_of_device_has_the_backend_that_torch_names() -> None:
    kinds = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
    assert {kind: _torch.backend_of(torch.device(kind)) for kind in kinds} == kinds


def test_the_kind_of_this_machines_accelerator_is_torchs() -> None:
    found = torch.accelerator.current_accelerator(check_available=True)
    assert _torch.accelerator_kind() == (None if found is None else found.type)
    assert _torch.autocast_kinds() == ("cpu",) + (() if found is None else (found.type,))


def test_random_numbers_that_are_drawn_inside_are_not_missed_outside() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with _torch.forked_random_state([CPU, CPU, META]):
        inside = torch.rand(4)
    assert torch.equal(inside, expected)
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

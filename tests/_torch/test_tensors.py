"""Storages of tensors."""

import torch

from autopar import _torch


def test_a_tensor_without_memory_has_a_shape():
    x = _torch.without_memory((3, 4), torch.float64, torch.device("cpu"))
    assert x.shape == (3, 4) and x.stride() == (4, 1) and x.untyped_storage().nbytes() == 0
    with _torch.fake_mode() as mode:
        assert (mode.from_tensor(x) @ torch.ones(4, 2, dtype=torch.float64)).shape == (3, 2)


def test_what_is_mapped_over_has_no_storage():
    found = []
    torch.func.vmap(lambda x: found.append(_torch.has_storage(x)) or x)(torch.ones(2))
    assert found == [False] and _torch.has_storage(torch.ones(2))


def test_a_storage_reference_knows_views_of_one_storage():
    x = torch.zeros(4)
    assert _torch.storage_reference(x).cdata == _torch.storage_reference(x[1:]).cdata


def test_a_storage_key_is_that_of_its_views():
    x = torch.zeros(4)
    assert _torch.storage_key(x) == _torch.storage_key(x[1:]) != _torch.storage_key(x.clone())


def test_a_leaf_gets_its_own_gradient_while_another_tensor_has_the_memory():
    x = torch.ones(4, requires_grad=True)
    x.grad = torch.ones(4)
    mine = x.grad
    _torch.own_gradient(x)
    assert x.grad is mine
    other = mine.view(2, 2)
    del mine
    _torch.own_gradient(x)
    x.grad += 1
    assert torch.equal(other, torch.ones(2, 2))
    x.grad = torch.ones(4).to_sparse()
    _torch.own_gradient(x)

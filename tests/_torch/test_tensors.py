"""Example tensors made from descriptions; storages of tensors."""

import pytest
import torch
from torch import nn

from autopar import _torch


@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_example_is_as_it_is_described(requires_grad, is_parameter):
    mode = _torch.FakeTensorMode()
    made = _torch.example_tensor(
        mode, (2, 3), (1, 2), torch.float16, torch.device("cpu"), requires_grad=requires_grad, is_parameter=is_parameter
    )
    assert isinstance(made, _torch.FakeTensor) and made.fake_mode is mode
    assert isinstance(made, nn.Parameter) == is_parameter and made.requires_grad == requires_grad
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.float16)
    assert made.device == torch.device("cpu")
    with mode:
        assert (made + made).shape == (2, 3)


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
    _torch.own_gradients([x])
    assert x.grad is mine
    other = mine.view(2, 2)
    del mine
    _torch.own_gradients([x])
    x.grad += 1
    assert torch.equal(other, torch.ones(2, 2))
    x.grad = torch.ones(4).to_sparse()
    _torch.own_gradients([x])


def with_gradients(*gradients):
    """Leaves that have these gradients."""
    leaves = [torch.zeros(x.shape, requires_grad=True) for x in gradients]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient
    return leaves


def test_gradients_that_are_parts_of_one_buffer_stay_in_it():
    buffer = torch.arange(6.0)
    address = buffer.data_ptr()
    leaves = with_gradients(buffer[4:6], buffer[0:4].view(2, 2))  # a view keeps its base alive
    del buffer
    _torch.own_gradients(leaves)
    second, first = (x.grad for x in leaves)
    assert first.data_ptr() == address and second.data_ptr() == address + 4 * 4
    first += 1
    assert second.tolist() == [4, 5]


def test_gradients_in_a_buffer_that_anything_else_has_are_copied():
    buffer = torch.arange(4.0)
    leaves = with_gradients(buffer[:2], buffer[2:])
    _torch.own_gradients(leaves)
    for x in leaves:
        x.grad += 1
    assert buffer.tolist() == [0, 1, 2, 3]


def test_of_gradients_that_overlap_all_but_one_are_copied():
    buffer = torch.arange(6.0)
    address = buffer.data_ptr()
    leaves = with_gradients(buffer[:4], buffer[:4].view(2, 2), buffer[3:5], buffer[4:])
    del buffer
    _torch.own_gradients(leaves)
    for x in leaves:
        x.grad += 10
    assert [x.grad.flatten().tolist() for x in leaves] == [[10, 11, 12, 13], [10, 11, 12, 13], [13, 14], [14, 15]]
    assert sum(x.grad.untyped_storage().data_ptr() == address for x in leaves) == 2

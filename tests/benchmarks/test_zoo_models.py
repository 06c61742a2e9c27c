"""The zoo builds models that train, and the same model from the same seed."""

import pytest
import torch
from torch import nn

from benchmarks.zoo.models import ARCHITECTURES, NAMES, build


def test_there_are_twenty_six_names() -> None:
    assert len(set(NAMES)) == len(ARCHITECTURES) == 26


@pytest.mark.parametrize("name", ["llama", "bert", "resnet"])
def test_loss_is_a_scalar_with_gradients(name: str) -> None:
    module, inputs = build(name)
    loss = module(*inputs)
    assert loss.shape == ()
    loss.backward()
    for key, parameter in module.named_parameters():
        assert key.startswith("model.")
        assert parameter.grad is not None and parameter.grad.any(), key


def test_same_seed_gives_the_same_loss_and_leaves_the_generator() -> None:
    state = torch.random.get_rng_state()
    (first, inputs), (second, others) = build("llama", seed=3), build("llama", seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first(*inputs), second(*others))
    other, _ = build("llama", seed=4)
    assert not torch.equal(first(*inputs), other(*inputs))


def test_no_dropout_is_active() -> None:
    module, inputs = build("bert")
    assert [m.p for m in module.modules() if isinstance(m, nn.Dropout) and m.p > 0] == []
    assert torch.equal(module(*inputs), module(*inputs))


def test_ids_and_labels_are_apart() -> None:
    _, (ids, labels) = build("llama")
    assert ids.data_ptr() != labels.data_ptr() and not torch.equal(ids, labels)


def test_dtype_is_taken_for_weights_and_pixels() -> None:
    module, (pixels, _) = build("resnet", dtype=torch.float32)
    assert pixels.dtype == torch.float32
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no architecture 'llma' in the zoo; there are llama, mistral"):
        build("llma")

"""torch.export: traces without values, checks to make before a trace, and the source lines of errors."""

import contextlib
import logging.handlers
from collections import OrderedDict

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.modules import module

from autopar import _torch


def test_the_line_of_an_error_is_the_users():
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        assert "torch.ones(2) @ torch.ones(3)" in _torch.user_line(error)


def test_calls_on_fake_tensors_compute_shapes_alone_and_keep_aliases():
    x = torch.ones(2, 3)
    with _torch.fake_mode() as mode:
        fake, view = mode.from_tensor(x), mode.from_tensor(x[1:])
        before = fake._version
        result = (fake @ fake.T).add_(1)
        fake.mul_(2)
    assert result.shape == (2, 2) and fake._version == before + 1
    assert torch.equal(x, torch.ones(2, 3))
    assert _torch.storage_reference(fake).cdata == _torch.storage_reference(view).cdata


def test_an_op_that_has_to_read_values_says_so_of_a_fake_tensor():
    with FakeTensorMode(), pytest.raises(_torch.DependsOnValues):
        torch.equal(torch.zeros(2), torch.zeros(2))


def test_code_runs_as_if_it_were_compiled():
    with _torch.as_if_compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_call_with_swaps_what_has_two_names_and_swaps_it_back():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = torch.nn.Linear(2, 2)
            self.third = torch.nn.Linear(2, 2)
            self.third.weight = self.first.weight

        def forward(self, x):
            return self.third(self.second(self.first(x)))

    model, x = Twice(), torch.ones(1, 2)
    own = [id(p) for p in model.parameters()]
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert not _torch.call_with(model, zeros, (x,), {}).any()
    assert [id(p) for p in model.parameters()] == own
    assert model.third.weight is model.first.weight


def test_an_op_whose_size_depends_on_values_says_so_of_a_fake_tensor():
    with FakeTensorMode(), pytest.raises(_torch.SizeDependsOnValues):
        torch.zeros(2).nonzero()


def test_torchs_own_checks_of_values_are_off_inside_and_on_again():
    normal, mask = torch.distributions.Normal, torch.nn.Transformer.generate_square_subsequent_mask
    normal.set_default_validate_args(True)  # torch.compile has it off for the rest of a process
    with _torch.without_value_checks():
        assert torch.isnan(normal(0.0, -1.0).log_prob(torch.zeros(())))
        assert not torch.nn.modules.transformer._detect_is_causal_mask(mask(3))
        assert torch.nn.modules.transformer._detect_is_causal_mask(mask(3), is_causal=True)
        with pytest.raises(ValueError, match="invalid values") as explicit:
            normal(0.0, -1.0, validate_args=True)
    with pytest.raises(ValueError, match="invalid values"):
        normal(0.0, -1.0)
    assert torch.nn.modules.transformer._detect_is_causal_mask(mask(3))
    assert _torch.validates_distribution(explicit.value)
    assert not _torch.validates_distribution(ValueError())


def test_a_failing_export_prints_nothing_and_leaves_no_hook(capfd, monkeypatch):
    class Branching(torch.nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    class Unlike(torch.nn.Module):
        def forward(self, x):
            return torch.cat([x, x[None]])

    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "filters", [])  # the backend, once imported, lets no failure through
    log.addHandler(handler := logging.handlers.BufferingHandler(100))
    monkeypatch.setattr(module, "_global_buffer_registration_hooks", OrderedDict())
    for model, said in ((Branching(), "data-dependent"), (Unlike(), "of tensors must match")):
        for quiet in (True, False):
            telling = _torch.quiet_export() if quiet else contextlib.nullcontext()
            with telling, pytest.raises(RuntimeError, match=said):
                torch.export.export(model, (torch.ones(2),), strict=False)
            assert bool(capfd.readouterr().err or handler.buffer) != quiet, model
            assert not quiet or not module._global_buffer_registration_hooks
            module._global_buffer_registration_hooks.clear()
            handler.buffer.clear()
    log.removeHandler(handler)


def test_without_values_a_model_computes_shapes_and_keeps_its_tensors() -> None:
    model = torch.nn.Linear(2, 3)
    weight, given = model.weight, torch.ones(4, 2)
    with _torch.without_values(model, (given,), {}) as (args, kwargs):
        made = model(*args, **kwargs)
        assert isinstance(made, _torch.FakeTensor) and made.shape == (4, 3)
    assert model.weight is weight
    mode = _torch.FakeTensorMode()
    with _torch.without_values(model, (mode.from_tensor(given),), {}) as ((fake,), _):
        assert fake.fake_mode is mode and mode.allow_non_fake_inputs
    assert not mode.allow_non_fake_inputs

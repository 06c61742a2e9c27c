"""Checkpoints of another model, optimizer or version are refused, and what differs is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, load_optimizer_state, save_checkpoint
from tests.runtime.checkpoint.saves import adamw, loads, make, refusal, train
from tests.runtime.models import Normed


def test_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(autopar.AutoparError, match=r"There is no checkpoint at .*/c\.$"):
        loads(tmp_path / "c")
    (tmp_path / "c.partial").mkdir()
    with pytest.raises(autopar.AutoparError, match="the first save to it did not finish"):
        loads(tmp_path / "c")


def test_another_model_is_named(saved: Path) -> None:
    with pytest.raises(autopar.AutoparError) as raised:
        load_checkpoint(saved, make(width=12))
    message = str(raised.value)
    assert "0.weight has shape [16, 8] in it and [12, 8] in the model" in message
    with pytest.raises(autopar.AutoparError, match=r"it has 0.bias, which the model lacks"):
        load_checkpoint(saved, make(bias=False))
    with pytest.raises(autopar.AutoparError, match=r"first.weight is not in it, .* and 6 more"):
        load_checkpoint(saved, Normed())


def test_an_older_version_is_named(saved: Path) -> None:
    torch.save({"version": 0}, saved / "state.pt")
    with pytest.raises(autopar.AutoparError, match="of version 0, but this autopar reads version 1"):
        loads(saved)


def test_whole_numbers_are_no_weights(saved: Path, tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(4, dtype=torch.int64))
    save_checkpoint(tmp_path / "whole", model)
    model.register_buffer("table", torch.zeros(4))
    with pytest.raises(autopar.AutoparError, match=r"another dtype, torch\.int64 in it"):
        load_checkpoint(tmp_path / "whole", model)


def test_optimizers_that_do_not_fit(saved: Path, tmp_path: Path) -> None:
    model = make()
    with pytest.raises(autopar.AutoparError, match="is not a parameter of the model"):
        load_checkpoint(saved, model, adamw(make()))
    save_checkpoint(tmp_path / "d", model)
    with pytest.raises(autopar.AutoparError, match="was saved without an optimizer"):
        load_checkpoint(tmp_path / "d", model, adamw(model))


def test_a_checkpoint_without_weights_is_no_models(tmp_path: Path) -> None:
    model = make()
    optimizer = adamw(model)
    train(model, optimizer)
    with pytest.raises(autopar.AutoparError, match="only_optimizer=True but no optimizer"):
        save_checkpoint(tmp_path / "c", model, only_optimizer=True)
    save_checkpoint(tmp_path / "c", model, optimizer, only_optimizer=True)
    with pytest.raises(autopar.AutoparError, match="has no weights"):
        load_checkpoint(tmp_path / "c", model)
    other = make(width=12)
    with pytest.raises(autopar.AutoparError, match=r"0\.weight has shape \[16, 8\] in it and \[12, 8\] in the model"):
        load_checkpoint(tmp_path / "c", other, adamw(other))


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"state": {}},
        {"state": {}, "param_groups": [{"lr": 1.0}]},
        {"state": {9: {}}, "param_groups": [{"params": [0, 1]}]},
        {"state": {0: 5}, "param_groups": [{"params": [0, 1]}]},
        {"state": {}, "param_groups": [{"params": [0, 0]}]},
        {"state": {}, "param_groups": [{"params": [0, 1], "param_names": ["weight"]}]},
        {"state": {}, "param_groups": [], "statee": {}},
    ],
)
def test_what_is_no_state_of_an_optimizer_is_refused(state: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(autopar.AutoparError, match=r"not the state_dict\(\) of an optimizer"):
        load_optimizer_state(model, torch.optim.SGD(model.parameters()), state)


def test_lists_in_the_state_of_a_parameter_are_refused() -> None:
    model = nn.Linear(2, 2)
    state = torch.optim.AdamW(model.parameters()).state_dict()
    state["state"] = {0: {"exp_avg": [[1.0, 2.0], [3.0, 4.0]]}}
    with pytest.raises(autopar.AutoparError, match="exp_avg of weight is a list in the optimizer's state"):
        load_optimizer_state(model, torch.optim.AdamW(model.parameters()), state)


def test_lists_that_an_optimizer_keeps_are_loaded() -> None:
    def trained() -> tuple[nn.Linear, torch.optim.LBFGS]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    model, optimizer = trained()
    x = torch.randn(4, 2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    other, fresh = trained()
    load_optimizer_state(other, fresh, optimizer.state_dict())
    assert len(fresh.state[other.weight]["old_dirs"]) == len(optimizer.state[model.weight]["old_dirs"]) > 0


def test_options_that_differ_within_a_group_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model = make()
    each = torch.optim.AdamW([{"params": [p], "lr": 1 / p.numel()} for p in model.parameters()])
    train(model, each)
    save_checkpoint(tmp_path / "c", model, each)
    assert "are in one group of the optimizer, but were saved with lr=" in refusal(tmp_path / "c", adamw)


def test_groups_that_were_apart_stay_apart(tmp_path: Path) -> None:
    model = make()
    groups = [{"params": [p], "lr": 10.0**-i} for i, p in enumerate(model.parameters())]
    save_checkpoint(tmp_path / "c", model, torch.optim.SGD(groups))
    with pytest.raises(autopar.AutoparError, match=r"saved with lr=1.0 and lr=0.1"):
        load_checkpoint(tmp_path / "c", model, adamw(model))

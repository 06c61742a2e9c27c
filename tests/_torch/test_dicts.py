"""Dicts that count the writes into them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar import _torch


def layer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.beta = 0.5
    return model


# Every way in which an entry of a module's `__dict__` comes, goes or becomes another.
WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "an attribute is set": lambda m: setattr(m, "beta", 0.25),
    "an attribute is new": lambda m: setattr(m, "gamma", 0.25),
    "an attribute is deleted": lambda m: delattr(m, "beta"),
    "the class's way to set is gone around": lambda m: object.__setattr__(m, "beta", 1.0),
    "an entry is set": lambda m: vars(m).__setitem__("beta", 0.25),
    "an entry is popped": lambda m: vars(m).pop("beta"),
    "the last entry is popped": lambda m: vars(m).popitem(),
    "an entry has a default": lambda m: vars(m).setdefault("gamma", 1),
    "entries are updated": lambda m: vars(m).update(beta=0.25),
    "entries are joined": lambda m: vars(m).__ior__({"beta": 0.25}),
    "a mode is changed": lambda m: m.eval(),
    "all entries are dropped": lambda m: vars(m).clear(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_into_a_dict_gives_it_another_version(
    write: Callable[[nn.Module], Any],
) -> None:
    models = [layer() for _ in range(3)]
    before = _torch.DictVersions([vars(m) for m in models])
    assert before.hold()
    write(models[1])
    assert not before.hold()
    now = _torch.DictVersions([vars(m) for m in models])
    assert now.hold() and now.written(before) == [1]


def test_a_write_by_code_that_python_has_specialized_gives_another_version() -> None:
    model = layer()
    for i in range(1000):
        versions = _torch.DictVersions([vars(model)])
        model.beta = 0.5 + i
        assert not versions.hold()


def test_a_table_of_parameters_has_another_version_where_one_is_replaced() -> None:
    model = nn.Linear(2, 2)
    versions = _torch.DictVersions([model._parameters, vars(model)])
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert _torch.DictVersions([model._parameters, vars(model)]).written(versions) == [0]


def test_reading_and_writing_the_same_object_are_no_writes() -> None:
    model = layer()
    versions = _torch.DictVersions([vars(model)])
    beta = model.beta
    model.beta = beta
    model.train()
    assert versions.hold()

"""Dicts that count the writes into them."""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
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
def test_every_write_into_a_dict_gives_it_another_version(write: Callable[[nn.Module], Any]) -> None:
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


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_seen_after_versions_were_noted(write: Callable[[nn.Module], Any]) -> None:
    models = [layer() for _ in range(3)]
    before = _torch.DictVersions([vars(m) for m in models])
    assert before.hold() and before.hold() and before.hold()
    write(models[2])
    assert not before.hold() and not before.hold()


def test_a_write_into_any_of_many_dicts_is_seen_before_and_after_versions_were_noted() -> None:
    few: list[dict[int, Any]] = [{0: 0}, OrderedDict({0: 0}), {}, {}]
    dicts = few + [{0: i} for i in range(100)]
    for each in dicts:
        for checks in range(3):
            versions = _torch.DictVersions(dicts)
            assert all(versions.hold() for _ in range(checks))
            each[0] = object()
            assert not versions.hold()


def test_dicts_are_kept_alive_and_are_free_once_their_versions_are_gone() -> None:
    class Attributes(dict[Any, Any]):
        pass

    held = Attributes()
    versions, seen = _torch.DictVersions([held]), weakref.ref(held)
    del held
    gc.collect()
    assert versions.hold() and versions.hold() and seen() is not None
    del versions
    gc.collect()
    assert seen() is None


def test_no_dicts_are_never_written() -> None:
    versions = _torch.DictVersions([])
    assert versions.hold() and versions.hold() and versions.written(versions) == []


def test_writes_are_seen_where_dynamo_may_note_no_dicts() -> None:
    model = layer()
    with torch._dynamo.config.patch(max_saved_pointers_for_recursive_dict_tags_check=0):
        versions = _torch.DictVersions([vars(model)])
        assert versions.hold() and versions.hold()
    model.beta = 0.25
    assert not versions.hold()

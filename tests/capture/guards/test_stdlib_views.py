"""Functions with a cache are found without a change to what the garbage collector looks at."""

from __future__ import annotations

import functools
import gc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import autopar
from autopar.capture.guards.stdlib_views import all_cached, kept_by, tensors_cached_by


@functools.cache
def of_a_module(x: int) -> int:
    return x


class Owner:
    @staticmethod
    @functools.cache
    def of_a_class(x: int) -> int:
        return x


def test_frozen_objects_stay_frozen_and_their_caches_are_found() -> None:
    gc.freeze()
    local = functools.cache(lambda x: x)
    # A count of frozen objects would not do: some may be freed meanwhile without being thawed.
    with mock.patch.object(gc, "unfreeze") as thaw:
        found = set(map(id, all_cached()))
    thaw.assert_not_called()
    assert gc.get_freeze_count() > 0
    assert {id(of_a_module), id(Owner.of_a_class), id(local)} <= found


@pytest.mark.parametrize("wrap", [functools.cache, functools.lru_cache(maxsize=2)])
def test_what_a_cache_keeps_is_found_without_a_run(wrap: Callable[..., Any]) -> None:
    ran: list[tuple[int, ...]] = []
    function = wrap(lambda *x: ran.append(x) or sum(x))
    assert kept_by(function, (1,)) == kept_by(function, ()) == () and not ran
    assert [function(1), function(1, 2)] == [1, 3]
    assert kept_by(function, (1, 2)) == (3,) and kept_by(function, (1,)) == (1,) and len(ran) == 2


def test_a_cache_that_tells_types_apart_is_not_asked() -> None:
    function = functools.lru_cache(typed=True)(abs)
    assert function(-1) == 1 and kept_by(function, (-1,)) == ()


def test_modules_are_asked_once_for_every_freeze() -> None:
    gc.freeze()
    one_more = functools.cache(lambda x: x)
    assert id(one_more) in set(map(id, all_cached()))
    later = functools.cache(lambda x: x)
    with mock.patch.object(gc, "get_freeze_count") as counted:
        assert {id(of_a_module), id(later)} <= set(map(id, all_cached()))
    counted.assert_not_called()
    globals()["_later"] = later
    gc.freeze()
    try:
        assert id(later) in set(map(id, all_cached()))
    finally:
        del globals()["_later"]


def test_objects_are_looked_through_only_where_a_function_was_made() -> None:
    made = [functools.cache(lambda x: x)]
    before = set(map(id, all_cached()))
    with mock.patch.object(gc, "get_referrers") as look:
        assert set(map(id, all_cached())) == before >= set(map(id, made))
    look.assert_not_called()
    made.append(functools.lru_cache(abs))
    assert set(map(id, all_cached())) == before | set(map(id, made))


def test_a_capture_makes_no_function_with_a_cache() -> None:
    """It did, so that every compilation looked through all objects: a third of its time beside a million of them."""

    def compiled() -> None:
        autopar.compile(torch.nn.Linear(2, 2), loss_fn=torch.nn.functional.mse_loss).step(*torch.ones(2, 4, 2))

    compiled()
    with mock.patch.object(gc, "get_referrers") as look:
        compiled()
    assert not look.called


def test_one_function_made_for_one_that_went_is_found() -> None:
    gone = functools.cache(lambda x: x)
    all_cached()
    del gone
    made = functools.cache(lambda x: x)
    assert any(x is made for x in all_cached())


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = torch.nn.Linear(4, 2), functools.cache(lambda n: torch.arange(float(n)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale(2)


def scaled() -> Scaled:
    model = Scaled()
    autopar.compile(model, loss_fn=lambda y: y.square().mean()).step(torch.ones(3, 4))
    return model


def test_a_function_that_was_made_when_a_reference_to_its_class_went_is_found() -> None:
    names = [type(functools.cache(len))]
    all_cached()
    names.clear()
    made = functools.cache(len)
    assert any(x is made for x in all_cached())


def test_a_function_that_the_forward_read_is_found_whatever_the_references() -> None:
    """Its cache kept a tensor without values from the capture."""
    kept = scaled()
    names = [type(kept.scale), kept.scale.cache_info()]
    all_cached()
    names.clear()
    model = scaled()
    assert type(model.scale(2)) is torch.Tensor and model.scale(2).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("wrap", [functools.cache, functools.lru_cache(maxsize=2)])
def test_tensors_are_found_in_what_containers_a_cache_holds(wrap: Callable[..., Any]) -> None:
    x = torch.ones(1)
    around: list[Any] = [[x], {"a": "b"}, {"set"}]
    around.append(around)
    held = {1: x, 2: (2, [x]), 3: {"a": OrderedDict(b=x)}, 4: around, 5: "text", 6: {7: 8}}
    function = wrap(held.__getitem__)
    for key in held:
        function(key)
        is_there = bool(tensors_cached_by(function))
        assert is_there or key > 4
    assert all(each is x for each in tensors_cached_by(function))

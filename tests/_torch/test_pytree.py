"""Nested containers, flattened and put together again."""

import collections
import copy
import enum
import logging

import numpy as np
import pytest
import torch

from autopar._torch import pytree
from autopar.errors import CaptureError

TREE = {"a": [1, (2, None)], "b": 3}


def test_leaves_come_back_to_their_places():
    leaves, spec = pytree.tree_flatten(TREE)
    assert [x for x in leaves if x is not None] == [1, 2, 3]
    assert pytree.tree_leaves([1, (2,)]) == [1, 2]
    assert isinstance(spec, pytree.TreeSpec)
    assert pytree.tree_unflatten(leaves, spec) == TREE


def test_every_leaf_or_those_of_a_type_are_mapped():
    assert pytree.tree_map(lambda x: 0, [1, (2,)]) == [0, (0,)]
    assert pytree.tree_map_only(int, lambda x: x + 1, [1, ("a",)]) == [2, ("a",)]


def test_a_path_is_written_as_python():
    pairs, _ = pytree.tree_flatten_with_path({"a": [1]})
    assert [(pytree.keystr(path), x) for path, x in pairs] == [("['a'][0]", 1)]


def test_leaves_inside_of_a_kind_of_container_are_known():
    _, spec = pytree.tree_flatten(TREE)
    assert pytree.are_inside(spec, tuple) == [False, True, True, False]
    assert pytree.are_inside(spec, dict) == [True] * 4


def test_a_tree_is_json_and_back():
    for tree in (1, TREE, (), [{}], collections.OrderedDict(b=[1], a=(2,)), collections.deque([1])):
        _, spec = pytree.tree_flatten(tree)
        assert pytree.read_tree(pytree.write_tree(spec)) == spec


def test_a_tree_is_read_without_imports_and_functions():
    for document in (
        ["collections.defaultdict", ["os", "system"], []],
        ["collections.defaultdict", {"default_factory_module": "antigravity"}, []],
        ["os.system", None, []],
        ["builtins.dict", [["a"]], [None]],
    ):
        with pytest.raises(ValueError, match="there is no container"):
            pytree.read_tree(document)
    with pytest.raises(ValueError, match="defaultdict has no text"):
        pytree.write_tree(pytree.tree_flatten(collections.defaultdict(int, a=1))[1])


class Named:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def test_objects_that_hold_tensors_are_opened_and_others_are_not():
    x, inner, device = torch.ones(2), Named(x=torch.zeros(1)), torch.device("cpu")
    pytree.register_objects([Named(x=x), object()])
    leaves, spec = pytree.tree_flatten([Named(x=x, device=device, inner=inner, size=3)])
    assert leaves == [inner.x, 3, x]
    assert pytree.tree_leaves(Named(both=[x, device])) == [x, device]  # no tensor hides in the tree
    foreign = pytree.tree_map(lambda _: object(), Named(x=x, device=device, size=3))
    assert len(pytree.tree_leaves(foreign)) == 2 and foreign.device == device
    (again,) = pytree.tree_unflatten([inner.x, 4, x], spec)
    assert (again.x, again.device, again.inner.x, again.size) == (x, device, inner.x, 4)
    assert pytree.changeable_in((again,)) == [again, again.inner]
    assert [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(again)[0]] == [".inner.x", ".size", ".x"]


def test_an_attribute_that_may_change_unseen_is_refused():
    inner = Named(scale=1.0, kind=dict, role=Role.ROWS, run=torch.relu, dtype=torch.float16, shape=torch.Size([2]))
    pytree.register_objects(Named(x=torch.ones(1), **vars(inner)))

    class Meta(Named):
        pass

    for name, value, found in (
        ("meta", Meta(scale=1.0), "Named.meta is a Meta, which may change unseen: give numbers or tensors"),
        ("ids", np.ones(2), "Named.ids is a ndarray, which may change unseen: give torch.from_numpy"),
        ("log", {"a": [logging.getLogger()]}, r"Named.log\[...\]\[...\] is a RootLogger"),
        ("layer", torch.nn.Linear(1, 1), "Named.layer is a Linear"),
    ):
        with pytest.raises(CaptureError, match=found):
            pytree.register_objects([Named(x=torch.ones(1), **{name: value})])


class Role(enum.Enum):
    ROWS = 1


def test_an_object_or_container_that_is_held_twice_is_refused():
    x, inner, names = torch.ones(1), Named(y=torch.ones(1)), ["a"]
    around = Named(x=x)
    around.own = around
    for tree, found in (
        (around, "One Named is met twice among the arguments or results, the second time as Named.own"),
        (Named(a=inner, c=[inner]), r"One Named is met twice .* as Named.c\[...\]"),
        ({"a": inner, "b": inner}, "One Named is met twice .* as an argument or result"),
        (Named(x=x, a=names, b=names), "One list is met twice .* as Named.b"),
    ):
        with pytest.raises(CaptureError, match=found):
            pytree.register_objects(tree)
    pytree.register_objects([inner, copy.copy(inner), Named(x=x, y=x, a=names, b=copy.copy(names), c=(), d=())])


def test_a_cycle_without_tensors_is_left_alone():
    class Loop:
        pass

    loop = Loop()
    loop.own, loop.entries = loop, [loop]
    loop.entries.append(loop.entries)
    given = [loop, logging.getLogger("a.b")]
    pytree.register_objects(given)
    assert pytree.tree_leaves(given) == given


class Slots:
    __slots__ = ("y",)


@pytest.mark.parametrize("base", [dict, list, Slots])
def test_an_object_that_its_attributes_do_not_make_is_refused(base: type):
    class Batch(base):
        pass

    batch = Batch()
    batch.x = torch.ones(1)
    with pytest.raises(CaptureError, match="A Batch among the arguments or results cannot be made again"):
        pytree.register_objects(batch)

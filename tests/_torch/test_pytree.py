"""Nested containers, flattened and put together again."""

import collections

import pytest

from autopar._torch import pytree

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

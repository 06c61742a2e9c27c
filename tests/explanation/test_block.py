"""Small ops of a module are drawn as one, and never in a circle."""

from autopar.explanation.block import merged
from autopar.views import BlockCollective, BlockNode

DP = (("dp", "batch"),)


def node(name, *operands, module="m", kind="mul", layouts=DP, **more):
    return BlockNode(name, kind, module, layouts, 1.0, operands, **more)


def names(nodes):
    return [each.name for each in nodes]


def test_a_chain_is_one_node_with_the_sum_of_its_time():
    chain = (node("a", "x", kind="pow"), node("b", "a", kind="mean"), node("c", "a", "b"))
    (only,) = merged(chain, set())
    assert (only.name, only.kind, only.seconds, only.operands) == ("a", "pow, mean, mul", 3.0, ("x",))


def test_two_branches_that_meet_are_one():
    ops = (node("a", "q"), node("b", "q"), node("c", "a", "b", kind="cat"))
    assert names(merged(ops, set())) == ["a"]


def test_products_modules_layouts_and_collectives_keep_apart():
    assert len(merged((node("a"), node("b", "a")), {"a"})) == 2
    assert len(merged((node("a"), node("b", "a", module="n")), set())) == 2
    assert len(merged((node("a"), node("b", "a", layouts=())), set())) == 2
    moved = (BlockCollective("dp", "all_gather", 1.0, 1.0, "a"),)
    assert len(merged((node("a"), node("b", "a", collectives=moved)), set())) == 2


def test_later_users_point_to_the_group():
    ops = (node("a", "x"), node("b", "a"), node("w", "b", kind="linear"))
    found = merged(ops, {"w"})
    assert names(found) == ["a", "w"] and found[1].operands == ("a",)


def test_what_would_be_a_circle_stays_apart():
    # a -> linear -> b, and c of both a and b: one node of a, b and c would feed itself
    ops = (node("a", "x"), node("w", "a", kind="linear"), node("b", "w", module="m"), node("c", "a", "b"))
    assert names(merged(ops, {"w"})) == ["a", "w", "b", "c"]

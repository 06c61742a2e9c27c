"""Checks that are made where a dict was written."""

import random
from dataclasses import dataclass, field
from typing import Any

from autopar.capture.guards.dict_versions import Unwritten


@dataclass
class Same:
    """A check that an entry is what it was, which counts how often it is made."""

    holder: dict[str, Any]
    key: str
    made: int = 0
    before: Any = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.holder.get(self.key)

    def holds(self) -> bool:
        self.made += 1
        return bool(self.holder.get(self.key) == self.before)


def two_checks() -> tuple[Same, Same, Unwritten[Same]]:
    one, two = Same({"x": 1}, "x"), Same({"x": 2}, "x")
    return one, two, Unwritten([(one.holder, one), (two.holder, two)])


def test_a_dict_that_nobody_writes_is_checked_once() -> None:
    one, two, checks = two_checks()
    assert [checks.hold() for _ in range(10)] == [True] * 10
    assert (one.made, two.made) == (1, 1)


def test_the_first_check_sees_what_was_written_before_it() -> None:
    one, _, checks = two_checks()
    one.holder["x"] = 5
    assert not checks.hold()


def test_only_the_dict_that_was_written_is_checked_again() -> None:
    one, two, checks = two_checks()
    assert checks.hold()
    two.holder["y"] = 1
    assert checks.hold() and checks.hold()
    assert (one.made, two.made) == (1, 2)


def test_another_value_is_seen_until_the_value_comes_back() -> None:
    one, _, checks = two_checks()
    found = []
    for value in (1, 5, 5, 6, 1, 1, 7):
        one.holder["x"] = value
        found.append(checks.hold())
    assert found == [True, False, False, False, True, True, False]


def test_a_change_is_seen_while_another_dict_does_not_hold() -> None:
    one, two, checks = two_checks()
    assert checks.hold()
    one.holder["x"] = 5
    assert not checks.hold()
    two.holder["x"] = 5
    assert not checks.hold()
    one.holder["x"] = 1
    assert not checks.hold()
    two.holder["x"] = 2
    assert checks.hold()


def test_a_dict_that_is_written_all_the_time_is_checked_every_time() -> None:
    one, two, checks = two_checks()
    for i in range(20):
        two.holder["count"] = i
        assert checks.hold()
    two.holder["x"] = 5
    assert not checks.hold()
    two.holder["x"] = 2
    assert checks.hold()
    assert one.made <= 3 and two.made >= 20


def test_what_is_found_is_what_all_checks_together_would_find() -> None:
    """Random writes into four dicts, against the checks themselves."""
    draw = random.Random(0)
    holders = [{"x": i} for i in range(4)]
    asked = [Same(holder, "x") for holder in holders]
    unwritten = Unwritten([(check.holder, check) for check in asked])
    found, expected = [], []
    for _ in range(2000):
        for _ in range(draw.choice((0, 0, 1, 1, 2))):
            i = draw.randrange(4)
            holders[i][draw.choice("xy")] = draw.choice((i, i, i, 9))
        found.append(unwritten.hold())
        expected.append(all(check.holds() for check in asked))
    assert found == expected and 100 < sum(found) < 1900

"""The order in which replicas exchanged with an asynchronous server, as data.

The arithmetic of such a run depends on the order in which the server did things, and on nothing else that is left to
chance. So a run that is repeated in its recorded order gives the same parameters, also on a single device
(`autopar.replay`). An event is a word of the text:

    1+4    replica 1 pushed the difference of 4 steps
    1=     replica 1 pulled the common parameters
    1!     replica 1 came to its end or was lost, and takes no more steps
    meet   all replicas that are left pulled at once

>>> order = Order.parse(2, "0+1 0= 0+1 1+1 1= 0= meet")
>>> order.staleness
1
>>> order.events[0]
ServerEvent(kind='push', replica=0, steps=1)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from autopar.errors import PlanError
from autopar.ir.files import COUNT

Kind = Literal["push", "pull", "end", "meet"]
_SIGNS: dict[str, Kind] = {"+": "push", "=": "pull", "!": "end"}
_SIGN_OF = {kind: sign for sign, kind in _SIGNS.items()}
_WORD = re.compile(rf"({COUNT})(?:(\+)((?!0){COUNT})|([=!]))")


class ServerEvent(NamedTuple):
    """One thing that the server did.

    Attributes:
        kind: what it was.
        replica: number of the replica; 0 for a meeting.
        steps: number of steps whose difference was pushed; 0 for other kinds.
    """

    kind: Kind
    replica: int = 0
    steps: int = 0

    def __str__(self) -> str:
        if self.kind == "meet":
            return "meet"
        return f"{self.replica}{_SIGN_OF[self.kind]}{self.steps or ''}"


MEET = ServerEvent("meet")


@dataclass(frozen=True)
class Order:
    """The events of a run from one meeting of all replicas to the next.

    Attributes:
        replicas: number of replicas.
        events: events in their order.

    Raises PlanError for events that no run has: of an unknown or lost replica, a second push without a pull between,
    and a pull without a push.
    """

    replicas: int
    events: tuple[ServerEvent, ...]

    def __post_init__(self) -> None:
        waiting, ended = set[int](), set[int]()
        for number, event in enumerate(self.events, 1):
            replica, what = event.replica, f"Word {number} of the order, {str(event)!r},"
            if replica not in range(self.replicas):
                raise PlanError(f"{what} does not belong to any of the {self.replicas} replicas.")
            if event.kind == "meet":
                waiting.clear()
                continue
            if replica in ended:
                raise PlanError(f"{what} belongs to a replica that had ended before.")
            if event.kind == "end":
                ended.add(replica)
            elif (event.kind == "push") == (replica in waiting):
                raise PlanError(f"{what} is out of order: a replica must push and pull alternately.")
            elif event.kind == "push":
                waiting.add(replica)
            else:
                waiting.remove(replica)

    def __str__(self) -> str:
        return " ".join(map(str, self.events))

    @classmethod
    def parse(cls, replicas: int, text: str) -> Order:
        """Reads the text of an order, the inverse of `str`. Raises PlanError naming the word."""
        return cls(replicas, tuple(map(_event, text.split())))

    @cached_property
    def staleness(self) -> int:
        """Largest number of pushes by which a replica was ahead of another, which pushed again, when it pulled."""
        pushes, coming = [0] * self.replicas, [0] * self.replicas
        for event in self.events:
            coming[event.replica] += event.kind == "push"
        found = 0
        for event in self.events:
            if event.kind == "push":
                pushes[event.replica] += 1
                coming[event.replica] -= 1
            elif event.kind == "pull":
                behind = [n for n, later in zip(pushes, coming, strict=True) if later]
                found = max(found, pushes[event.replica] - min(behind, default=sum(pushes)))
        return found


def _event(word: str) -> ServerEvent:
    if word == "meet":
        return MEET
    found = _WORD.fullmatch(word)
    if found is None:
        raise PlanError(
            f"Cannot read {word!r} in an order; write 1+4 for a push of 4 steps by replica 1, 1= for its pull, 1! for "
            "its end, or meet."
        )
    replica, push, steps, other = found.groups()
    return ServerEvent(_SIGNS[push or other], int(replica), int(steps or 0))

"""Replicas that exchange parameters only every K steps (local SGD, DiLoCo, an asynchronous server), as data.

The *replicas* lie along one axis of the mesh of all ranks. Each replica has all parameters, trains on its own rows of
the batch, and takes its optimizer's steps without communicating with the others. Every K steps the replicas *meet*:
they compute common parameters, with which all of them continue. All replicas run on meshes of the same axes, and the
layouts of a plan are layouts on the mesh of one replica. Let x_1 ... x_n be the parameters of the n replicas, and x
the common parameters after the last meeting. The rules of a meeting are:

    local     x := mean(x_i)                        local SGD (Stich 2019)
    geo       x := x + mean(x_i - x)                GEO-SGD of PaddlePaddle, where all replicas wait for each other
    diloco    d := x - mean(x_i)                    the outer gradient (Douillard et al. 2023, algorithm 1)
              v := momentum v + d                   SGD with Nesterov's momentum, as torch.optim.SGD has it
              x := x - rate (d + momentum v)

Between meetings `geo` keeps x (as many bytes as the parameters), and `diloco` keeps x and v (twice as many).
The text of a meeting is `every 10 steps diloco momentum=0.9 rate=0.7`; only diloco has the two numbers.

Under the rule `async-server` replicas do not meet, and one rank, the *owner*, keeps x for all of them. After every K
steps replica i *pushes* its difference to the x that it pulled last, and then *pulls* x:

    push      x := x + (x_i - base_i) / n           in the order in which pushes arrive
    pull      base_i := x,  x_i := x                once no other replica is more than S exchanges behind

S is the *staleness*, the bound of Ho et al. 2013 (More effective distributed ML via a stale synchronous parallel
parameter server): a pull after the c-th push of a replica waits until every other replica has pushed c - S times. The
text is `every 1 step async-server owner=O(0) staleness=2`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from autopar.errors import MeshError, PlanError
from autopar.ir.files import COUNT
from autopar.ir.mesh import Mesh

Rule = Literal["local", "geo", "diloco", "async-server"]
RULES: tuple[Rule, ...] = get_args(Rule)
MOMENTUM, RATE = 0.9, 0.7  # Douillard et al. 2023, section 3.1
ALONE = ("own", 1)  # the only axis of the mesh of a replica, where a replica is a single rank
SERVER: Rule = "async-server"
_COPIES: dict[Rule, int] = {"local": 0, "geo": 1, "diloco": 2}
_TEXT = re.compile(
    rf"every ({COUNT}) steps? ([\w-]+)"
    r"(?: momentum=(?P<momentum>\S+) rate=(?P<rate>\S+)"
    rf"| owner=O\((?P<owner>{COUNT})\) staleness=(?P<staleness>{COUNT}))?"
)


@dataclass(frozen=True)
class Meeting:
    """The replicas of a plan and when they meet.

    Attributes:
        axis: name of the axis along which the replicas lie, the first of the mesh of all ranks.
        replicas: number of replicas.
        steps: number of steps from one meeting or exchange to the next, K.
        rule: rule by which the replicas get their common parameters.
        momentum: momentum of the outer optimizer; only the rule `diloco` uses it.
        rate: learning rate of the outer optimizer; only the rule `diloco` uses it.
        staleness: number of exchanges that a replica may be ahead of the slowest; only `async-server` uses it.
        owner: number of the replica whose rank keeps the common parameters; only `async-server` uses it.

    >>> Meeting.parse("far", 2, "every 10 steps diloco momentum=0.9 rate=0.7").steps
    10
    >>> str(Meeting("far", 2, 4))
    'every 4 steps local'
    >>> str(Meeting("dp", 4, 1, "async-server", staleness=2))
    'every 1 step async-server owner=O(0) staleness=2'
    """

    axis: str
    replicas: int
    steps: int
    rule: Rule = "local"
    momentum: float = MOMENTUM
    rate: float = RATE
    staleness: int = 0
    owner: int = 0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise PlanError(
                f"There is no rule {self.rule!r} for replicas to synchronise; choose among {', '.join(RULES)}."
            )
        if type(self.steps) is not int or self.steps < 1:
            raise PlanError(
                f"Replicas along {self.axis} synchronise every {self.steps!r} steps; give a whole number of at least "
                f"1, such as {self.rule}:4."
            )
        if not 0 <= self.momentum < 1 or not self.rate > 0:
            raise PlanError(
                f"The outer optimizer has momentum={self.momentum} and rate={self.rate}; a momentum must be at "
                "least 0 and less than 1, and a rate above 0."
            )
        if type(self.staleness) is not int or self.staleness < 0:
            raise PlanError(
                f"The server of the replicas along {self.axis} has staleness={self.staleness!r}; give the number of "
                "exchanges that a replica may be ahead of the slowest, a whole number of at least 0."
            )
        if self.rule != SERVER and (self.staleness or self.owner):
            raise PlanError(
                f"Replicas along {self.axis} synchronise by the rule {self.rule}, which has no "
                f"staleness={self.staleness} or owner=O({self.owner}); leave them out, or choose {SERVER}."
            )
        if self.owner not in range(self.replicas):
            raise PlanError(
                f"The parameters of {self.replicas} replicas along {self.axis} have the owner O({self.owner}); it must "
                f"be one of O(0) to O({self.replicas - 1})."
            )

    def __str__(self) -> str:
        text = f"every {self.steps} step{'s' * (self.steps > 1)} {self.rule}"
        if self.rule == "diloco":
            return f"{text} momentum={self.momentum!r} rate={self.rate!r}"
        if self.rule == SERVER:
            return f"{text} owner=O({self.owner}) staleness={self.staleness}"
        return text

    @classmethod
    def parse(cls, axis: str, replicas: int, text: str) -> Meeting:
        """Reads the text of a meeting, the inverse of `str`. Raises PlanError."""
        found = _TEXT.fullmatch(text)
        if found is None or not _has_its_numbers(found):
            raise PlanError(
                f"Cannot read {text!r} of the replicas along {axis}; write 'every 4 steps local', 'every 4 steps geo', "
                f"'every 4 steps diloco momentum={MOMENTUM} rate={RATE}' or "
                "'every 1 step async-server owner=O(0) staleness=2'."
            )
        rule: Rule = found[2]  # type: ignore[assignment]  # checked at birth
        numbers: dict[str, Any] = {}
        if found["staleness"] is not None:
            numbers = {"owner": int(found["owner"]), "staleness": int(found["staleness"])}
        elif found["momentum"] is not None:
            numbers = _outer_numbers(found["momentum"], found["rate"])
        return cls(axis, replicas, int(found[1]), rule, **numbers)

    @property
    def recipe(self) -> str:
        """The recipe that asks for these replicas, such as `diloco:10`.

        It does not say all: the outer optimizer's numbers, an owner, and the steps between exchanges with a server
        stand in the plan alone.
        """
        return f"{self.rule}:{self.staleness if self.rule == SERVER else self.steps}"

    @property
    def copies(self) -> int:
        """Number of tensors of a parameter's size that the fullest rank keeps from one meeting to the next.

        The owner of `async-server` keeps x, its own base, and a message of each replica.
        """
        return self.replicas + 2 if self.rule == SERVER else _COPIES[self.rule]

    @property
    def moves(self) -> int:
        """Number of times that the busiest rank reads or writes a tensor of a parameter's size in a meeting.

        A replica makes a message of its parameters and takes one. The owner of `async-server` adds each of n messages
        to x (three moves), and copies x into each (two); its own replica moves six.
        """
        return 6 + 5 * self.replicas if self.rule == SERVER else 4 + 2 * self.copies

    @property
    def oldest_steps(self) -> int:
        """Largest number of steps that a replica has done and does not know of another, when it begins a step.

        It has done c K + r steps, with r < K, and knows the others' first (c - S) K. This is relative to its own
        count. When its next push is added, others may have pushed (2 S + 1) K steps that its gradients do not know:
        they knew (c - S) K, and another may wait after its push number c + S + 1.
        """
        return (self.staleness + 1) * self.steps - 1


def _has_its_numbers(found: re.Match[str]) -> bool:
    """Whether a text gives the numbers that belong to its rule, and no others."""
    given = {"diloco": found["momentum"] is not None, SERVER: found["staleness"] is not None}
    return {rule for rule, is_given in given.items() if is_given} == {found[2]} & given.keys()


def _outer_numbers(momentum: str, rate: str) -> dict[str, Any]:
    """Momentum and learning rate of the outer optimizer, read from their texts."""
    try:
        return {"momentum": float(momentum), "rate": float(rate)}
    except ValueError:
        raise PlanError(
            f"momentum={momentum} rate={rate} are not two numbers, such as momentum=0.9 rate=0.7."
        ) from None


def mesh_of_replica(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of one replica: the mesh of all ranks without the axis along which replicas lie.

    Where no other axis is left, the result has one axis of size 1, because every mesh needs an axis. Raises MeshError
    for a mesh with vacant places.
    """
    if mesh.occupied is not None:
        raise MeshError(
            f"The mesh {mesh} has vacant places and replicas along {axis}, but so far each replica needs all of its "
            f"ranks; leave out ' of {mesh.occupied}', or take a recipe without replicas."
        )
    return mesh.without_axis(axis) or Mesh((ALONE,))


def mesh_of_all(mesh: Mesh, meeting: Meeting) -> Mesh:
    """The mesh of all ranks, given the mesh of one replica."""
    if mesh.axes == (ALONE,):
        return Mesh(((meeting.axis, meeting.replicas),))
    return mesh.with_axis(meeting.axis, meeting.replicas, 0)

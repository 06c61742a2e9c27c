"""Replicas that average their parameters only every K steps (local SGD, DiLoCo), as data.

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
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.errors import PlanError
from autopar.ir.mesh import Mesh

Rule = Literal["local", "geo", "diloco"]
RULES: tuple[Rule, ...] = get_args(Rule)
MOMENTUM, RATE = 0.9, 0.7  # Douillard et al. 2023, section 3.1
ALONE = ("own", 1)  # the only axis of the mesh of a replica, where a replica is a single rank
_COPIES = {"local": 0, "geo": 1, "diloco": 2}
_TEXT = re.compile(r"every (\d+) steps? (\w+)(?: momentum=(\S+) rate=(\S+))?")


@dataclass(frozen=True)
class Meeting:
    """The replicas of a plan and when they meet.

    Attributes:
        axis: name of the axis along which the replicas lie, the first of the mesh of all ranks.
        replicas: number of replicas.
        steps: number of steps from one meeting to the next, K.
        rule: rule by which the replicas get their common parameters.
        momentum: momentum of the outer optimizer; only the rule `diloco` uses it.
        rate: learning rate of the outer optimizer; only the rule `diloco` uses it.

    >>> Meeting.parse("far", 2, "every 10 steps diloco momentum=0.9 rate=0.7").steps
    10
    >>> str(Meeting("far", 2, 4))
    'every 4 steps local'
    """

    axis: str
    replicas: int
    steps: int
    rule: Rule = "local"
    momentum: float = MOMENTUM
    rate: float = RATE

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise PlanError(
                f"Replicas along {self.axis} meet every {self.steps!r} steps; give a whole number of at least 1, "
                f"such as {self.rule}:4."
            )
        if self.rule not in RULES:
            raise PlanError(
                f"There is no rule {self.rule!r} by which replicas meet; choose among {', '.join(RULES)}."
            )
        if not 0 <= self.momentum < 1 or not self.rate > 0:
            raise PlanError(
                f"The outer optimizer has momentum={self.momentum} and rate={self.rate}; a momentum lies from 0 up "
                "to, not including, 1, and a rate above 0."
            )

    def __str__(self) -> str:
        text = f"every {self.steps} step{'s' * (self.steps > 1)} {self.rule}"
        if self.rule != "diloco":
            return text
        return f"{text} momentum={self.momentum!r} rate={self.rate!r}"

    @classmethod
    def parse(cls, axis: str, replicas: int, text: str) -> Meeting:
        """Reads the text of a meeting, the inverse of `str`. Raises PlanError."""
        found = _TEXT.fullmatch(text)
        if found is None or (found[2] == "diloco") != (found[3] is not None):
            raise PlanError(
                f"Cannot read {text!r} of the replicas along {axis}; write 'every 4 steps local', 'every 4 steps geo' "
                f"or 'every 4 steps diloco momentum={MOMENTUM} rate={RATE}'."
            )
        rule: Rule = found[2]  # type: ignore[assignment]  # checked at birth
        if found[3] is None:
            return cls(axis, replicas, int(found[1]), rule)
        try:
            numbers = float(found[3]), float(found[4])
        except ValueError:
            raise PlanError(
                f"momentum={found[3]} rate={found[4]} are no two numbers, such as momentum=0.9 rate=0.7."
            ) from None
        return cls(axis, replicas, int(found[1]), rule, *numbers)

    @property
    def copies(self) -> int:
        """Number of tensors of a parameter's size that a rank keeps from one meeting to the next."""
        return _COPIES[self.rule]


def mesh_of_replica(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of one replica: the mesh of all ranks without the axis along which replicas lie.

    Where no other axis is left, the result has one axis of size 1, because every mesh needs an axis.
    """
    return Mesh(tuple(each for each in mesh.axes if each[0] != axis) or (ALONE,))


def mesh_of_all(mesh: Mesh, meeting: Meeting) -> Mesh:
    """The mesh of all ranks, given the mesh of one replica."""
    rest = () if mesh.axes == (ALONE,) else mesh.axes
    return Mesh(((meeting.axis, meeting.replicas), *rest))

"""Rows of the table of recipes: what each of them lets ops split and how it lets parameters be stored.

A row selects factors by their roles; `autopar.search.request.recipes` explains the roles, and reads recipes from text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from autopar.ir import ANY, PLACEMENTS, Tier

Roles = frozenset[str]
Which = Callable[[Roles], bool]


def is_batch(roles: Roles) -> bool:
    return "batch" in roles


def is_model(roles: Roles) -> bool:
    return "parameter" in roles and not roles & {"batch", "input", "normalized", "expert"}


def is_seq(roles: Roles) -> bool:
    return "input" in roles and not roles & {"batch", "parameter"}


def is_expert(roles: Roles) -> bool:
    return "expert" in roles


def is_width(roles: Roles) -> bool:
    return {"parameter", "normalized"} <= roles and not roles & {"batch", "expert"}


def is_feature(roles: Roles) -> bool:
    return "parameter" in roles and not roles & {"batch", "expert"}


class Tiering(NamedTuple):
    """Memory of a parameter: the tier where it is stored between steps, and the tier where it is during a step."""

    stored: Tier
    resident: Tier


ON_DEVICE = Tiering("device", "device")
STORED_ON_HOST = Tiering("host", "device")
USED_FROM_HOST = Tiering("host", "host")


@dataclass(frozen=True)
class Recipe:
    """One row: constraints on one mesh axis.

    Attributes:
        name: name of the recipe, as users write it.
        meaning: description of the recipe for users.
        may: kinds of factors that ops may split; None for any.
        must: kinds of factors of which an op has to split one, if it can split any.
        products_must: the same for products with a parameter only; it comes before `must`.
        stacks_must: the same for ops that stack parameters along a new dim, which is of a kind of `products_must`.
        stages: ZeRO stages that a parameter may have; 3 includes parameters that ops use in their stored layout.
        gathers: whether a parameter that is stored split may be gathered for use.
        tier: memory in which parameters, their gradients and optimizer states are stored.
        resident_tier: memory in which parameters are during a step, if their resident layout is the stored one.
        exchanges: whether an op that splits what it must splits it by an exchange (`t>e`), if it has such a choice.
        only_columns: whether products with a parameter may split only factors that are in both the parameter and the
            result, if they can split one: the columns of the matrix, and never the rows that they sum over.
        saves_slices: whether blocks save a slice of the activations that an axis replicates, and gather it in backward.
        owner: rank of the axis on which all parameters are stored, `ANY` to spread them over the ranks; None where
            parameters have no owner.
        worker: the rank of the axis that runs all ops, while the other ranks store and update the parameters; None
            where all ranks run ops.
    """

    name: str
    meaning: str
    may: tuple[Which, ...] | None = None
    must: tuple[Which, ...] = ()
    products_must: tuple[Which, ...] = ()
    stacks_must: tuple[Which, ...] = ()
    stages: tuple[int, ...] = (0, 1, 2, 3)
    gathers: bool = True
    tier: Tier = "device"
    resident_tier: Tier = "device"
    exchanges: bool = False
    only_columns: bool = False
    saves_slices: bool = False
    owner: int | None = None
    worker: int | None = None

    @property
    def storage(self) -> tuple[tuple[int, ...], Tier, Tier, int | None]:
        """The fields that decide how parameters may be stored; recipes with equal values allow the same ways."""
        return self.stages, self.tier, self.resident_tier, self.owner

    def but(self, name: str, meaning: str, **changes: Any) -> Recipe:
        """Another row, which differs in these fields."""
        return replace(self, name=name, meaning=meaning, **changes)


_DDP = Recipe("ddp", "batch split, parameters replicated", (), (is_batch,), stages=(0,))
_TP = Recipe(
    "tp",
    "Megatron-LM's tensor parallelism: columns, then rows, of the matrices",
    (is_model,),
    (),
    (is_model,),
    stages=(0, 3),
    gathers=False,
)
_EP = Recipe(
    "ep",
    "experts of a mixture split; the batch split everywhere else",
    (is_expert, is_batch),
    (is_batch,),
    (is_expert,),
    (is_model,),
    stages=(0, 3),
    gathers=False,
)

ROWS = (
    Recipe("auto", "anything, whatever is fastest"),
    _DDP,
    _DDP.but("zero1", "ddp with optimizer states sharded", stages=(1,)),
    _DDP.but("zero2", "zero1 with gradients sharded", stages=(2,)),
    _DDP.but("zero3", "zero2 with parameters sharded", stages=(3,)),
    _DDP.but("zero-offload", "zero2 with parameters stored and updated in the host's memory", stages=(2,), tier="host"),
    _DDP.but(
        "zero3-offload", "zero3 with parameters stored and updated in the host's memory", stages=(3,), tier="host"
    ),
    _DDP.but(
        "zero-infinity",
        "zero3-offload with parameters on the device only while they are used",
        stages=(3,),
        tier="host",
        resident_tier="host",
    ),
    _DDP.but(
        "zero-infinity-nvme",
        "zero-infinity with parameters stored and updated in files on a disk",
        stages=(3,),
        tier="nvme",
        resident_tier="host",
    ),
    _DDP.but(
        "data-parallel",
        "batch split, parameters stored and updated on the first rank (torch.nn.DataParallel)",
        stages=(1,),
        owner=0,
    ),
    _DDP.but(
        "parameter-server",
        "batch split; each parameter stored and updated on one rank, and every rank stores some",
        stages=(1,),
        owner=ANY,
    ),
    _DDP.but(
        "serve",
        "all ops on the first rank, parameters stored and updated on the other ranks",
        must=(),
        stages=(1, 2),
        owner=ANY,
        worker=0,
    ),
    _TP,
    _TP.but("tp+sp", "tp with the rest split along the sequence", may=(is_model, is_seq), must=(is_seq,)),
    _TP.but(
        "tp+ep",
        "tp+sp with whole experts of a mixture on each rank, and not parts of all (Megatron-Core's folding)",
        may=(is_model, is_seq, is_expert),
        must=(is_seq,),
        products_must=(is_model, is_expert),
    ),
    Recipe(
        "cp",
        "the sequence split everywhere; keys and values of attention travel in a ring (ring attention)",
        (is_seq,),
        (is_seq,),
        exchanges=True,
    ),
    _TP.but(
        "columns",
        "columns of every matrix split, operands gathered before the product: one axis of 2d and 2.5d",
        may=(is_feature, is_seq),
        must=(is_feature, is_seq),
        products_must=(is_feature,),
        only_columns=True,
        saves_slices=True,
    ),
    _TP.but(
        "width",
        "the width of the residual stream split, and the sequence where the width stays whole: one axis of 3d",
        may=(is_width, is_model, is_seq),
        must=(is_width, is_seq),
        products_must=(is_width,),
        saves_slices=True,
    ),
    _EP,
    _EP.but("ep+zero1", "ep with optimizer states of all other parameters sharded", stages=(1, 3)),
    _EP.but("ep+zero3", "ep with all other parameters sharded", stages=(3,), gathers=True, exchanges=True),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({row.name: row for row in ROWS})

ALIASES: Mapping[str, str] = MappingProxyType({"fsdp": "zero3"})

NAIVE = "naive-pp"  # one micro-batch goes from stage to stage: layer placement without a schedule

PIPELINE_RECIPES: Mapping[str, str] = MappingProxyType(
    {**{name: f"the schedule {name}" for name in PLACEMENTS}, NAIVE: "gpipe with one micro-batch"}
)

MEETING_RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "local:K": "replicas replace their parameters by the mean every K steps (local SGD)",
        "geo:K": "replicas add the mean of their differences to a kept base every K steps",
        "diloco:K": "an outer optimizer with momentum takes that mean every K steps (DiLoCo)",
        "async-server:S": "replicas exchange differences with a server, each at most S exchanges ahead of the slowest",
    }
)

RecipeLike = str | Mapping[str, str]

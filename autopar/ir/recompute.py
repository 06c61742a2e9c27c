"""Recomputation: what a plan computes again in backward (activation checkpointing), as data.

    none                             nothing: autograd keeps every tensor that it saves
    3 blocks                         the first three blocks of every pipeline stage
    full                             all blocks
    {"layers.*": ["mlp.act/gelu"]}   single ops of every block, by name: a `Selection`

A number of blocks is Megatron-LM's `--recompute-method block --recompute-num-layers k`: the first k blocks of each
stage, because their activations would be kept longest. When backward reaches them, the later blocks have freed their
activations. Recomputing a block therefore raises the peak of memory only where all blocks are recomputed.

A selection names the ops that are recomputed, as in the selective recomputation of Korthikanti et al. 2022. Autograd
then keeps a tensor if backward, or a recomputed op, needs it, and no recomputed op computes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from autopar.errors import PlanError
from autopar.ir.files import is_count, parse_json
from autopar.ir.tier import Tier

if TYPE_CHECKING:
    from typing_extensions import TypeIs


@dataclass(frozen=True)
class Selection:
    """The ops that are recomputed in backward, by block.

    Attributes:
        blocks: pairs of the path of a block, in which `*` stands for any number, and the names of its recomputed ops.
            An exact path overrides a pattern. `autopar.pipeline.recomputable` gives ops these names.

    >>> chosen = Selection.of({"layers.*": ["mlp.act/gelu"]})
    >>> chosen.names("layers.7")
    frozenset({'mlp.act/gelu'})
    >>> chosen.names("head")
    frozenset()
    """

    blocks: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, blocks: Any) -> Selection:
        """Reads the value that `to_json` writes. Raises PlanError."""
        if not isinstance(blocks, Mapping) or not all(map(_is_list_of_names, blocks.values())):
            raise PlanError(
                "Ops to recompute are lists of names by block, such as "
                f'{{"layers.*": ["mlp.act/gelu"]}}, not {blocks!r}.'
            )
        return cls(tuple((str(path), tuple(names)) for path, names in blocks.items()))

    def to_json(self) -> dict[str, list[str]]:
        """The selection as JSON values."""
        return {path: list(names) for path, names in self.blocks}

    def names(self, path: str) -> frozenset[str]:
        """Names of the recomputed ops of the block at this path."""
        by_path = dict(self.blocks)
        return frozenset(by_path.get(path, by_path.get(path_pattern(path), ())))

    def __str__(self) -> str:
        return json.dumps(self.to_json())


def _is_list_of_names(names: object) -> bool:
    return isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)


def path_pattern(path: str) -> str:
    """The path of a module with `*` in place of every number.

    >>> path_pattern("encoder.layers.3")
    'encoder.layers.*'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


Recompute = Literal["none", "full"] | int | Selection
# Words for all blocks whose inputs are saved in another way, and the tier where they are saved.
SavedWish = Literal["partitioned", "offloaded"]
SAVED_TIERS: Mapping[str, Tier] = MappingProxyType({"partitioned": "device", "offloaded": "host"})
# What a user can ask of a search: also these words and a float, see `check_wish`.
RecomputeOption = Recompute | SavedWish | float


def check_recompute(recompute: object) -> None:
    """Raises PlanError unless the value is the recomputation of a plan: "none", "full", a number or a `Selection`."""
    if recompute in ("none", "full") or isinstance(recompute, Selection):
        return
    if type(recompute) is not int or recompute < 1:  # a bool is an int to isinstance
        raise PlanError(f"A plan recomputes none, full, or a whole number of blocks such as 3, not {recompute!r}.")


def check_wish(wish: object) -> None:
    """Raises PlanError unless `wish` is a recomputation that a user can ask of a search.

    A user can ask for None (the search decides), "none", "full", "partitioned" (all blocks, whose inputs are saved in
    slices along the axes that replicate them), "offloaded" (the same slices, in the host's memory), a whole number of
    blocks from 1 on, a `Selection`, or a float between 0 and 1, both excluded.

    A float bounds the memory for saved activations, as `torch._functorch.config.activation_memory_budget` does. 1.0
    would be the memory that "none" keeps, 0.0 the memory that "full" keeps, and the bound is linear between them. The
    search takes the fastest recomputation within this bound on every pipeline stage.
    """
    if wish in (None, "none", "full", *SAVED_TIERS) or isinstance(wish, Selection):
        return
    if isinstance(wish, float):
        _check_part(wish)
    elif type(wish) is not int or wish < 1:  # a bool is an int to isinstance
        words = ", ".join(map(repr, ("none", "full", *SAVED_TIERS)))
        raise PlanError(
            f"There is no recompute={wish!r}: it is {words}, a whole number of blocks such as 3, a part of the memory "
            "for activations such as 0.5, or names of ops, as Selection.of("
            '{"layers.*": ["mlp.act/gelu"]}) or, on a command line, this JSON.'
        )


def _check_part(part: float) -> None:
    if not 0 < part < 1:
        raise PlanError(
            f"recompute={part!r} as a part of the memory for activations must be between 0 and 1, such as 0.5; "
            "take 'none' to keep all, 'full' to keep least, and a whole number to recompute that number of blocks."
        )


def is_saved_option(wish: object) -> TypeIs[SavedWish]:
    """Whether a wish is one of the words `partitioned` and `offloaded`."""
    return isinstance(wish, str) and wish in SAVED_TIERS


def recompute_json(recompute: Recompute) -> Any:
    """The recomputation of a plan as JSON values."""
    return recompute.to_json() if isinstance(recompute, Selection) else recompute


def format_recompute(recompute: Recompute) -> str:
    """Recomputation as text; a selection is JSON.

    >>> format_recompute(3), format_recompute("full")
    ('3 blocks', 'full')
    """
    if isinstance(recompute, int):
        return f"{recompute} block{'s' * (recompute > 1)}"
    return str(recompute)


def parse_recompute(text: str) -> Recompute:
    """The inverse of `format_recompute`; also reads `3` as 3 blocks. Raises PlanError."""
    recompute = _read(text)
    check_recompute(recompute)
    return cast(Recompute, recompute)


def _read(text: str) -> Selection | int | str:
    """A selection or a number of blocks, where the text is one; else the text."""
    if text.startswith("{"):
        return Selection.of(_json(text))
    number = text.removesuffix(" blocks").removesuffix(" block")
    return int(number) if is_count(number) else text


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise PlanError(f"Cannot read the ops to recompute, {text!r}, as JSON: {error}.") from None


def parse_wish(text: str) -> RecomputeOption:
    """Reads a user's choice of recomputation: a word such as `full`, blocks such as `3`, a part such as `0.5`, or JSON.

    Raises PlanError for a text that is not a wish, see `check_wish`.
    """
    whole, point, part = text.partition(".")
    wish = float(text) if point and is_count(whole + part) else _read(text)
    check_wish(wish)
    return cast(RecomputeOption, wish)


def recomputed_blocks(recompute: Recompute, blocks: int) -> int:
    """Number of a stage's blocks that recompute something, given the number of its `blocks`."""
    if isinstance(recompute, int):
        return min(recompute, blocks)
    return 0 if recompute == "none" else blocks


def words_of_recompute(recompute: Recompute, stages: int = 1) -> str:
    """A clause for reports about the blocks or ops that are recomputed in backward; "" for none.

    Args:
        recompute: the recomputation of a plan.
        stages: number of its pipeline stages; with several, a number of blocks is that of each stage.

    >>> words_of_recompute(3), words_of_recompute(3, stages=2)
    ('the first 3 blocks recomputed in backward', 'the first 3 blocks of every stage recomputed in backward')
    """
    if isinstance(recompute, Selection):
        return _words_of_selection(recompute)
    if isinstance(recompute, str):
        return "all layers recomputed in backward" if recompute == "full" else ""
    count = "block" if recompute == 1 else f"{recompute} blocks"
    return f"the first {count}{' of every stage' if stages > 1 else ''} recomputed in backward"


def _words_of_selection(selection: Selection) -> str:
    parts = [
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)} of {path or 'the model'}"
        for path, names in selection.blocks
        if names
    ]
    more = f", and ops of {len(parts) - 2} other kinds of blocks" if len(parts) > 2 else ""
    return f"ops recomputed in backward: {'; '.join(parts[:2])}{more}" if parts else ""

"""What a plan computes again in backward instead of keeping it from forward.

    none                             nothing: autograd keeps all that it saves
    3 blocks                         the first three blocks of every pipeline stage, whole
    full                             all blocks, whole
    {"layers.*": ["mlp.act/gelu"]}   some ops of every block, by name: a `Selection`

A number is Megatron-LM's `--recompute-method block --recompute-num-layers k`: the first k layers of each
stage. Their activations live longest: when they are recomputed, the later blocks have already freed
theirs, so recomputation needs no memory of its own until all blocks are recomputed.

A selection names the ops that are recomputed, as the selective recomputation of Korthikanti et al. 2022
does with the core of attention. Everything else follows: autograd keeps a tensor if it needs it, directly
or to recompute an op, and no recomputed op makes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autopar.errors import PlanError


@dataclass(frozen=True)
class Selection:
    """The ops that are recomputed in backward, by block.

    Attributes:
        blocks: path of a block, in which `*` stands for any number, and the names of its recomputed ops; an
            exact path goes before a pattern. Names are those of `autopar.pipeline.recomputable`.

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
PARTITIONED: Literal["partitioned"] = "partitioned"
# What can be asked of a search: also all blocks with their inputs in slices (`autopar.ir.saved`), and a part.
RecomputeWish = Recompute | Literal["partitioned"] | float


def check_recompute(recompute: object) -> None:
    """Raises PlanError unless a plan can recompute this."""
    if recompute in ("none", "full") or isinstance(recompute, Selection):
        return
    if type(recompute) is not int or recompute < 1:  # a bool is an int to isinstance
        raise PlanError(
            f"A plan recomputes none, full, or a whole number of blocks such as 3, not {recompute!r}."
        )


def check_wish(wish: object) -> None:
    """Raises PlanError unless a search takes `wish` as its recomputation.

    It takes None (the search decides), "none", "full", "partitioned" (all blocks, and what enters them in slices along
    the axes that replicate it), a whole number of blocks from 1 on, a `Selection`, and a
    float between 0 and 1, both excluded.

    A float bounds the memory for activations, as `torch._functorch.config.activation_memory_budget` does. 1.0
    would be what "none" keeps, 0.0 what "full" keeps, and the numbers between are linear. The search takes the
    fastest recomputation within this bound on every pipeline stage.
    """
    if wish is None or wish == PARTITIONED or (isinstance(wish, float) and 0 < wish < 1):
        return
    if isinstance(wish, float):
        raise PlanError(
            f"recompute={wish!r} as a part of the memory for activations is between 0 and 1, such as 0.5; "
            "take 'none' to keep all, 'full' to keep least, and a whole number for so many blocks."
        )
    check_recompute(wish)


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
    """The inverse of `format_recompute`; a bare number is one of blocks. Raises PlanError."""
    if text.startswith("{"):
        return Selection.of(_json(text))
    number = text.removesuffix(" blocks").removesuffix(" block")
    if not (number.isascii() and number.isdigit()):
        check_recompute(text)
        return "full" if text == "full" else "none"
    check_recompute(int(number))
    return int(number)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"Cannot read the ops to recompute, {text!r}, as JSON: {error}.") from None


def parse_wish(text: str) -> RecomputeWish:
    """`none`, `full`, `partitioned`, a number of blocks such as `3`, or a part such as `0.5`. Raises PlanError."""
    if text == PARTITIONED:
        return PARTITIONED
    whole, point, part = text.partition(".")
    if point and (whole + part).isdigit():
        check_wish(float(text))
        return float(text)
    return parse_recompute(text)


def blocks_again(recompute: Recompute, blocks: int) -> int:
    """How many of a stage's blocks recompute something."""
    if isinstance(recompute, int):
        return min(recompute, blocks)
    return 0 if recompute == "none" else blocks


def words_of_recompute(recompute: Recompute) -> str:
    """For people, after a comma: what is recomputed in backward; "" for nothing."""
    if isinstance(recompute, Selection):
        return _words_of_selection(recompute)
    if isinstance(recompute, str):
        return "layers run again in backward" if recompute == "full" else ""
    if recompute == 1:
        return "the first block of every stage runs again in backward"
    return f"the first {recompute} blocks of every stage run again in backward"


def _words_of_selection(selection: Selection) -> str:
    parts = [
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)} of {path or 'the model'}"
        for path, names in selection.blocks
        if names
    ]
    more = f", and ops of {len(parts) - 2} other kinds of blocks" if len(parts) > 2 else ""
    return f"ops recomputed in backward: {'; '.join(parts[:2])}{more}" if parts else ""

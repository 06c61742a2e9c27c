"""How many blocks run again in backward, so that only what enters them is kept.

    none        0 blocks: everything is kept for backward
    3 blocks    the first three of every pipeline stage (of the model, where there is one stage)
    full        all of them

As Megatron-LM's `--recompute-method block --recompute-num-layers k`: of each stage the first k layers.
The first, because what they keep lives longest: when they run again, the blocks behind them have given
back what they kept, so that running again takes no room of its own until all blocks do.
"""

from __future__ import annotations

from typing import Literal

from autopar.errors import PlanError

Recompute = Literal["none", "full"] | int
RecomputeWish = Recompute | float  # what can be asked of a search


def check_recompute(recompute: object) -> None:
    """Raises PlanError unless this says how many blocks of a plan run again."""
    if recompute in ("none", "full"):
        return
    if type(recompute) is not int or recompute < 1:  # a bool is an int to isinstance
        raise PlanError(
            f"A plan recomputes none, full, or a whole number of blocks such as 3, not {recompute!r}."
        )


def check_wish(wish: object) -> None:
    """Raises PlanError unless a search can be asked for this.

    A part such as 0.5 asks for the fewest blocks with which every stage keeps at most that part of what
    recomputation can save, as `torch._functorch.config.activation_memory_budget` does: 1.0 would be all
    that is kept with "none", and 0.0 what remains with "full".
    """
    if wish is None or (isinstance(wish, float) and 0 < wish < 1):
        return
    if isinstance(wish, float):
        raise PlanError(
            f"recompute={wish!r} as a part of the memory for activations is between 0 and 1, such as 0.5; "
            "take 'none' to keep all, 'full' to keep least, and a whole number for so many blocks."
        )
    check_recompute(wish)


def format_recompute(recompute: Recompute) -> str:
    """Recomputation as text.

    >>> format_recompute(3), format_recompute("full")
    ('3 blocks', 'full')
    """
    if isinstance(recompute, str):
        return recompute
    return f"{recompute} block{'s' * (recompute > 1)}"


def parse_recompute(text: str) -> Recompute:
    """The inverse of `format_recompute`; a bare number is one of blocks. Raises PlanError."""
    number = text.removesuffix(" blocks").removesuffix(" block")
    if not (number.isascii() and number.isdigit()):
        check_recompute(text)
        return "full" if text == "full" else "none"
    check_recompute(int(number))
    return int(number)


def parse_wish(text: str) -> RecomputeWish:
    """`none`, `full`, a number of blocks such as `3`, or a part such as `0.5`. Raises PlanError."""
    whole, point, part = text.partition(".")
    if point and (whole + part).isdigit():
        check_wish(float(text))
        return float(text)
    return parse_recompute(text)


def blocks_again(recompute: Recompute, blocks: int) -> int:
    """How many of a stage's blocks run again."""
    if isinstance(recompute, str):
        return blocks if recompute == "full" else 0
    return min(recompute, blocks)


def words_of_recompute(recompute: Recompute) -> str:
    """For people, after a comma: what runs again in backward; "" for nothing."""
    if isinstance(recompute, str):
        return "layers run again in backward" if recompute == "full" else ""
    if recompute == 1:
        return "the first block of every stage runs again in backward"
    return f"the first {recompute} blocks of every stage run again in backward"

"""Results that stay on the pipeline stage that makes them, such as the keys and values of its layers."""

from __future__ import annotations

from autopar._torch import pytree
from autopar.program.program import Program


class Staying:
    """A container in a model's result whose tensors are for the stage that makes them.

    The next forward takes them back as inputs, and the same layers read them. On the ranks of other stages the tensors
    have their shapes and no values.
    """


def staying_outputs(program: Program) -> frozenset[int]:
    """Positions of the outputs of a forward that lie in a container that stays."""
    if program.is_step:
        return frozenset()
    stays = pytree.are_inside(program.out_spec, Staying)
    tensors = [each for i, each in enumerate(stays) if i not in program.out_literals]
    return frozenset(i for i, each in enumerate(tensors) if each)

"""The dims of a model after unification, from which factors get their names and roles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.analysis.atoms import Atom
from autopar.capture.captured import Captured
from autopar.rules.spec import Spec


@dataclass(frozen=True)
class Unified:
    """A captured model whose letters were unified along every edge.

    Attributes:
        captured: the model.
        atoms: name of a tensor -> factors of each of its dims, most significant first.
        specs: name of an fx node -> the rule of its op.
        letters: name of an fx node -> letter of its spec -> factor.
        operands: name of an fx node -> names of the tensors that it takes.
        of_inputs: names of the tensors that depend on an input.
    """

    captured: Captured
    atoms: Mapping[str, Sequence[Sequence[Atom]]]
    specs: Mapping[str, Spec]
    letters: Mapping[str, Mapping[str, Atom]]
    operands: Mapping[str, Sequence[str]]
    of_inputs: Collection[str]

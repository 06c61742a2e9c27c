"""Names and roles of factors: `batch` and `seq` for dims of inputs, `weight[0]` for dims of parameters.

A factor takes its name from the first place where it occurs: in an input, in a parameter, in any other tensor. Its role
says what it is to the search: the batch, a dim of a parameter, experts, and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.analysis.atoms import Atom, leaves
from autopar.capture.captured import Captured
from autopar.ir import Factor
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


class _Names:
    """The names and roles that factors have so far.

    Attributes:
        names: identity of a factor -> its name.
        roles: identity of a factor -> its roles.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.roles: dict[int, set[str]] = {}
        self._sizes: dict[str, int] = {}

    def meet(self, atom: Atom, name: str, role: str | None) -> None:
        """Adds a role to a factor and, where the factor has no name yet, names it; a name in use gets a number."""
        self.roles.setdefault(id(atom), set()).update({role} if role else ())
        if id(atom) in self.names:
            return
        unique, count = name, 2
        while unique in self._sizes:
            unique, count = f"{name}~{count}", count + 1
        self.names[id(atom)] = unique
        self._sizes[unique] = atom.size

    def factors(self) -> dict[str, Factor]:
        """Name -> factor, in the order in which names were given."""
        roles = {self.names[key]: frozenset(found) for key, found in self.roles.items()}
        return {name: Factor(name, size, roles[name]) for name, size in self._sizes.items()}


def name_factors(model: Unified) -> tuple[dict[int, str], dict[str, Factor]]:
    """Names all factors of a model and finds their roles.

    Inputs come first (batch, seq), then parameters, then all other tensors. A factor that is both a dim of an input and
    the heads of attention, as in a cache of keys and values, does not take its name or role from the input.

    Returns:
        Identity of an atom -> name of its factor, and name -> factor.
    """
    names = _Names()
    _name_inputs(names, model)
    _name_joined_batches(names, model)
    _name_parameters(names, model)
    _name_letters_of_ops(names, model)
    for name, dims in model.atoms.items():
        for atom in leaves(a for dim in dims for a in dim):
            names.meet(atom, name, None)
    for node, own in model.letters.items():
        for letter in own:
            _name_letter(names, model, node, letter, None)
    return names.names, names.factors()


def _name_inputs(names: _Names, model: Unified) -> None:
    apart = {_batch_of_op(model, node) for node in model.specs}
    batch, heads = _batch_of_inputs(model, apart), _heads(model, apart)
    for placeholder, name in model.captured.inputs.items():
        for dim, atoms in enumerate(model.atoms[placeholder]):
            for atom in (x for x in leaves(atoms) if id(x) not in heads):
                is_batch = batch.get(id(atom), dim == 0)
                names.meet(atom, _input_name(name, dim, is_batch), "batch" if is_batch else "input")


def _name_joined_batches(names: _Names, model: Unified) -> None:
    """Gives the role of the batch to a dim that an op joins from rows that are all of the batch."""
    for node, spec in model.specs.items():
        for joined, rows in spec.joins.items():
            if all("batch" in names.roles.get(id(x), ()) for x in _atoms(model, node, rows)):
                _name_letter(names, model, node, joined, "batch")


def _name_parameters(names: _Names, model: Unified) -> None:
    for placeholder, name in model.captured.parameters.items():
        for dim, atoms in enumerate(model.atoms[placeholder]):
            parts = leaves(atoms)
            for i, atom in enumerate(parts):
                part = f".{i}" if len(parts) > 1 else ""
                names.meet(atom, f"{name}[{dim}]{part}", "parameter")


def _name_letters_of_ops(names: _Names, model: Unified) -> None:
    """Gives the roles that rules give to letters: of a normalized dim, and of experts."""
    for node, spec in model.specs.items():
        for letter in sorted(spec.normalized):
            _name_letter(names, model, node, letter, "normalized")
        for letter in sorted(spec.experts | _counts_matrices(model, node, spec)):
            _name_letter(names, model, node, letter, "expert")


def _name_letter(names: _Names, model: Unified, node: str, letter: str, role: str | None) -> None:
    for leaf in model.letters[node][letter].leaves():
        names.meet(leaf, f"{node}.{letter}", role)


def _batch_of_inputs(model: Unified, apart: Collection[frozenset[int]]) -> dict[int, bool]:
    """Factors of inputs -> whether they are the batch, for inputs whose batch is not their leading dim.

    That is so for torch.nn.LSTM and torch.nn.MultiheadAttention without `batch_first`. Some ops compute every sample
    separately, and their rules tell over which dims. The batch is the leading dim if all these ops agree that it is
    such a dim, else the first dim of which they do.

    Args:
        apart: for each op that computes samples separately, the factors over which it does.
    """
    matrices = {id(x) for name in model.captured.parameters for x in _of(model, name)}
    found: dict[int, bool] = {}
    for placeholder in model.captured.inputs:
        dims = [{id(x) for x in leaves(atoms)} for atoms in model.atoms[placeholder]]
        free = [dim for dim in dims if dim and not dim & matrices]
        ops = [each for each in apart if any(each & dim for dim in free)]
        kept = [dim for dim in free if ops and all(dim <= each for each in ops)]
        first = dims[0] & frozenset.intersection(*ops) if ops else set()  # batch x something
        if kept and dims[0] and not first and not any(dims[0] & dim for dim in kept):
            found |= dict.fromkeys(dims[0], False) | dict.fromkeys(kept[0], True)
    return found


def _heads(model: Unified, apart: Collection[frozenset[int]]) -> set[int]:
    """The heads of attention: factors of weights' columns over which products of two activations are batched."""
    columns = {
        id(x)
        for node, spec in model.specs.items()
        if spec.sums and _varies(model, node, spec) == {True, False}
        for x in _atoms(model, node, _columns(model, node, spec))
    }
    return {x for each in apart for x in each & columns}


def _batch_of_op(model: Unified, node: str) -> frozenset[int]:
    """Factors over which an op computes samples separately: those of its rule, or the batch of a product."""
    spec = model.specs[node]
    letters = set(spec.batch)
    if spec.sums and _varies(model, node, spec) == {True}:
        letters |= _common(spec)
    return frozenset(id(x) for x in _atoms(model, node, letters))


def _columns(model: Unified, node: str, spec: Spec) -> set[str]:
    """Letters of a product's result that come only from operands computed from parameters."""
    of_model, of_inputs = (
        {
            x
            for name, letters in zip(model.operands[node], spec.operands, strict=True)
            if (name in model.of_inputs) is varies
            for dim in letters
            for x in dim
        }
        for varies in (False, True)
    )
    return {x for letters in spec.results for dim in letters for x in dim} & of_model - of_inputs


def _atoms(model: Unified, node: str, letters: Iterable[str]) -> list[Atom]:
    return leaves(model.letters[node][letter] for letter in sorted(letters))


def _of(model: Unified, tensor: str) -> list[Atom]:
    return leaves(atom for dim in model.atoms[tensor] for atom in dim)


def _counts_matrices(model: Unified, node: str, spec: Spec) -> set[str]:
    """Batch letters of a batched product of an activation and a weight, such as `e` in `e c d, e d f -> e c f`."""
    varies = {name in model.of_inputs for name in model.operands[node]}
    return _common(spec) if spec.sums and varies == {True, False} else set()


def _varies(model: Unified, node: str, spec: Spec) -> set[bool]:
    """For the factors of a product, whether they depend on inputs, as a set; an added bias does not count."""
    factors = [x for i, x in enumerate(model.operands[node]) if i not in spec.additive]
    return {name in model.of_inputs for name in factors} if len(factors) > 1 else set()


def _common(spec: Spec) -> set[str]:
    """Letters that every tensor of an op has."""
    tensors = [{x for dim in letters for x in dim} for letters in (*spec.operands, *spec.results)]
    return set.intersection(*tensors)


def _input_name(name: str, dim: int, is_batch: bool) -> str:
    """Name of a dim of an input: `batch`, `seq` for the other of the first two dims, or such as `mask[2]`."""
    return "batch" if is_batch else "seq" if dim < 2 else f"{name}[{dim}]"

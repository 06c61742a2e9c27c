"""Factors: names for the model's dimensions, and from them every op's choices.

A rule names the dims of an op by letters, such as `b k, k j -> b j`. At first each letter of each op is a factor
of its own. Where one op takes the result of another, the two lists of factors of each dim are unified. Where the lists
are cut differently (4096 against 32, 128) the coarser factor is split, and with it every tensor that has the
factor, weights included. Where neither size divides the other (2, 3 against 3, 2) the op that takes the tensor cannot
split this dim.

Two dims have the same factor because a tensor flows from one to the other, never because their sizes agree. Factors
give names and roles to dims. The choices of an op depend only on its own letters: queries and keys of an
attention op both have the factor `seq`, and each can be split without the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor as TorchTensor
from torch import fx

from autopar import rules
from autopar.analysis.work import works
from autopar.capture.captured import Captured
from autopar.ir import (
    EXCHANGED,
    PARTIAL,
    UNSPLIT,
    VARIED,
    Choice,
    Factor,
    Graph,
    Leaf,
    Op,
    OwnCollective,
    P,
    R,
    S,
    State,
    Tensor,
    V,
    find_stacks,
    split_factors,
)
from autopar.ops.nodes import draws, tensor_operands, tensor_results
from autopar.rules.spec import Hidden, Letters, Spec


class Atom:
    """A factor during unification.

    It has a size. Once it is split, `parts` has its parts; once it is unified, `same` has the factor that it equals.
    """

    __slots__ = ("parts", "same", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.same: Atom | None = None
        self.parts: list[Atom] | None = None

    def root(self) -> Atom:
        atom = self
        while atom.same is not None:
            atom = atom.same
        return atom

    def leaves(self) -> list[Atom]:
        atom = self.root()
        if atom.parts is None:
            return [atom]
        return [leaf for part in atom.parts for leaf in part.leaves()]


def leaves(atoms: Iterable[Atom]) -> list[Atom]:
    """The factors of a list, each that was split replaced by its parts, in order."""
    return [leaf for atom in atoms for leaf in atom.leaves()]


def unify(left: Sequence[Atom], right: Sequence[Atom]) -> bool:
    """Cuts the factors of two lists, in place, until both lists are the same; False where that is impossible.

    Both lists factor a dim of the same size, most significant first. `[4096]` and `[32, 128]` both become
    `[32, 128]`. `[2, 3]` and `[3, 2]` give False, because neither 2 nor 3 divides the other. Factors that were
    matched before such a pair stay matched.
    """
    a, b = leaves(left)[::-1], leaves(right)[::-1]
    while a and b:
        # An earlier pass through this loop may have split an atom that is still in a list.
        x, y = _front(a), _front(b)
        if x is y:
            continue
        if x.size == y.size:
            y.same = x
        elif min(x.size, y.size) and max(x.size, y.size) % min(x.size, y.size) == 0:
            large, small = (x, y) if x.size > y.size else (y, x)
            rest = Atom(large.size // small.size)
            large.parts = [small, rest]
            (a if large is x else b).append(rest)
        else:
            return False
    if any(
        atom.size == 0 for atom in (*a, *b)
    ):  # a dim of size 0, which some rule counts as size 1
        return False
    assert not a and not b, "unify needs lists of the same total size"
    return True


def _front(stack: list[Atom]) -> Atom:
    parts = stack.pop().leaves()
    stack.extend(reversed(parts[1:]))
    return parts[0]


@dataclass(frozen=True)
class Analysis:
    """What `analyze` finds in a captured model: how each op can be split, and which dims belong together.

    A factor is a dim, or the part of a dim that a view separates: a dim of 4096 that the model views as
    (32, 128) has the factors 32 and 128. A spec names the factors of one op by letters.

    Attributes:
        graph: tensors, ops and factors as the search sees them.
        specs: name of an fx node -> the rule of its op, see `autopar.rules.spec.Spec`.
        letters: name of an fx node -> letter of its spec -> labels of its factors in choices, most significant
            first: `("j",)`, or `("j.0", "j.1")` where the letter was split into two factors.
        names: name of an fx node -> names of the tensors that the node returns.
    """

    graph: Graph
    specs: Mapping[str, Spec]
    letters: Mapping[str, Mapping[str, tuple[str, ...]]]
    names: Mapping[str, tuple[str, ...]]


def analyze(captured: Captured) -> Analysis:
    """Finds factors, choices, costs and saved tensors of every node."""
    return _Analyzer(captured).run()


def hidden_name(node: str, hidden: Hidden) -> str:
    """The name of a tensor that a node saves for its own backward and does not return."""
    return f"{node}:{hidden.name}"


def is_getitem(node: fx.Node) -> bool:
    """Whether a node takes one result out of a tuple."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


class _Analyzer:
    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.nodes = list(captured.module.graph.nodes)
        self.values: dict[str, TorchTensor] = {}  # tensor name -> example
        self.atoms: dict[str, list[list[Atom]]] = {}  # tensor name -> factors of each dim
        self.names: dict[str, tuple[str, ...]] = {}
        self.specs: dict[str, Spec] = {}
        self.with_rule: dict[str, bool] = {}
        self.letters: dict[str, dict[str, Atom]] = {}
        self.conflicts: dict[str, set[str]] = {}
        self.needs_grad: set[str] = set()
        self.of_inputs: set[str] = set()  # tensors that depend on an input
        self.taken: dict[str, tuple[str, ...]] = {}  # node name -> its operands

    def run(self) -> Analysis:
        for node in self.nodes:
            self._add(node)
        self._forget_unreached()
        self.factor_names, factors = _name_factors(self)
        tensors = {name: self._tensor(name) for name in self.values}
        ops = tuple(self._op(node) for node in self.nodes if node.name in self.specs)
        graph = Graph(
            tensors=tensors,
            ops=ops,
            parameters={v: k for k, v in self.captured.parameters.items()},
            buffers={v: k for k, v in self.captured.buffers.items()}
            | {name: name for name in self.captured.constants},
            inputs={v: k for k, v in self.captured.inputs.items()},
            outputs=tuple(self.names[n.name][0] for n in output_nodes(self.captured.module)),
            factors=factors,
            stacks=find_stacks(ops),
            precision=self.captured.precision,
            whole_outputs=self.captured.whole_outputs,
        )
        letters = {
            name: {letter: self._labels(letter, atom) for letter, atom in own.items()}
            for name, own in self.letters.items()
        }
        return Analysis(graph, self.specs, letters, self.names)

    # --- one node

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._add_leaf(node)
        elif is_getitem(node):
            source, position = node.args
            self.names[node.name] = (self.names[source.name][position],)  # type: ignore[union-attr, index]
        elif node.op == "call_function":
            self._add_call(node)

    def _add_leaf(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, TorchTensor):
            return
        self._add_tensor(node.name, value, [[Atom(s)] if s != 1 else [] for s in value.shape])
        self.names[node.name] = (node.name,)
        if node.name in self.captured.inputs:
            self.of_inputs.add(node.name)
        name = self.captured.parameters.get(node.name)
        is_trained = name is not None and name not in self.captured.frozen
        if is_trained or node.name in self.captured.differentiable:
            self.needs_grad.add(node.name)

    def _add_tensor(self, name: str, value: TorchTensor, atoms: list[list[Atom]]) -> None:
        self.values[name] = value
        self.atoms[name] = atoms

    def _add_call(self, node: fx.Node) -> None:
        spec, has_rule = rules.spec(node, self._wanted(node))
        results = tensor_results(node)
        single = isinstance(node.meta.get("val"), TorchTensor)
        names = (node.name,) if single else tuple(f"{node.name}:{i}" for i in range(len(results)))
        self.specs[node.name], self.with_rule[node.name] = spec, has_rule
        self.taken[node.name] = self._operands(node)
        self.names[node.name] = names
        own = {letter: Atom(size) for letter, size in spec.sizes.items()}
        self.letters[node.name] = own
        self.conflicts[node.name] = set()
        for operand, letters in zip(self._operands(node), spec.operands, strict=True):
            self._flow(node.name, self.atoms[operand], letters, own)
        for name, value, letters in zip(names, results, spec.results, strict=True):
            self._add_tensor(name, value, [[own[x] for x in dim] for dim in letters])
        for hidden in spec.kept.hidden:
            self._add_hidden(node.name, hidden, own)
        if self.of_inputs.intersection(self._operands(node)):
            self.of_inputs.update(names)
        if self._passes_gradient(node):
            self.needs_grad |= {
                n
                for n, v in zip(names, results, strict=True)
                if (v.is_floating_point() or v.is_complex())
            }

    def _forget_unreached(self) -> None:
        """Removes from `needs_grad` the tensors that no differentiable path connects to a result, such as an index."""
        reached = {self.names[node.name][0] for node in output_nodes(self.captured.module)}
        made: set[str] = set()
        for node in reversed(self.nodes):
            if node.name not in self.specs:
                continue
            results = self.names[node.name]
            made.update(results)
            if self._passes_gradient(node) and reached & self.needs_grad & {*results}:
                reached.update(self._operands(node))
        self.needs_grad -= made - reached

    def _add_hidden(self, node: str, hidden: Hidden, own: Mapping[str, Atom]) -> None:
        """Adds a tensor that only backward uses; its last dim has size `hidden.times` if that is more than 1."""
        atoms = [[own[x] for x in dim] for dim in hidden.letters]
        if hidden.times > 1:
            atoms.append([Atom(hidden.times)])
        value = torch.empty((), dtype=hidden.dtype, device="meta")
        self._add_tensor(hidden_name(node, hidden), value, atoms)

    def _wanted(self, node: fx.Node) -> tuple[int, ...]:
        """Positions of the operands that a gradient flows back to."""
        if not self._passes_gradient(node):
            return ()
        return tuple(i for i, x in enumerate(self._operands(node)) if x in self.needs_grad)

    def _operands(self, node: fx.Node) -> tuple[str, ...]:
        return tuple(self.names[n.name][0] for n in tensor_operands(node))

    def _passes_gradient(self, node: fx.Node) -> bool:
        stops = rules.operator_name(node) in rules.NOT_DIFFERENTIABLE
        return not stops and any(name in self.needs_grad for name in self._operands(node))

    def _flow(
        self, node: str, atoms: list[list[Atom]], letters: Letters, own: Mapping[str, Atom]
    ) -> None:
        """Unifies the dims of a tensor with those of an operand; a dim where that fails is not split in this op."""
        for factors, dim in zip(atoms, letters, strict=True):
            if dim and not unify(factors, [own[letter] for letter in dim]):
                self.conflicts[node].update(dim)

    # --- the result

    def _tensor(self, name: str) -> Tensor:
        value = self.values[name]
        dims = [leaves(dim) for dim in self.atoms[name]]
        return Tensor(
            name=name,
            dims=tuple(tuple(atom.size for atom in dim) for dim in dims),
            factors=tuple(tuple(self.factor_names[id(atom)] for atom in dim) for dim in dims),
            itemsize_bytes=value.element_size(),
            needs_grad=name in self.needs_grad,
            **self._formats(name, value),
        )

    def _formats(self, name: str, value: TorchTensor) -> dict[str, int]:
        """Element sizes of a stored parameter and of its gradient, where they differ from the size in use."""
        parameter, used = self.captured.parameters.get(name), value.dtype.itemsize
        if parameter is None:
            return {}
        found = {
            "stored_itemsize_bytes": self.captured.stored.get(parameter, value.dtype).itemsize,
            "gradient_itemsize_bytes": self.captured.gradient_dtype(
                parameter, value.dtype
            ).itemsize,
        }
        return {key: size for key, size in found.items() if size != used}

    def _labels(self, letter: str, atom: Atom) -> tuple[str, ...]:
        count = len(atom.leaves())
        return (letter,) if count == 1 else tuple(f"{letter}.{i}" for i in range(count))

    def _op(self, node: fx.Node) -> Op:
        spec, operands = self.specs[node.name], self._operands(node)
        kept, names = spec.kept, self.names[node.name]
        hidden = tuple(hidden_name(node.name, each) for each in kept.hidden)
        return Op(
            name=node.name,
            kind=rules.operator_name(node),
            operands=operands,
            results=(*names, *hidden),
            choices=tuple(self._choices(node.name, spec)),
            flops=spec.flops,
            saved=(
                *(operands[i] for i in kept.operands),
                *(names[i] for i in kept.results),
                *hidden,
            ),
            is_view=spec.is_view,
            module=module_path(node),
            has_rule=self.with_rule[node.name],
            work=works(spec, lambda letter: self._leaves(node.name, letter)),
            hidden=hidden,
            collectives=tuple(self._collectives(node.name, spec)),
            product_itemsize_bytes=spec.product_itemsize_bytes,
            draws=draws(node),
        )

    def _collectives(self, node: str, spec: Spec) -> Iterable[OwnCollective]:
        for each in spec.collectives:
            yield OwnCollective(
                frozenset(label for over in each.over for label in self._labels_over(node, over)),
                each.forward, each.backward, each.itemsize_bytes,
                tuple(leaf for letter in each.letters for leaf in self._leaves(node, letter)),
            )  # fmt: skip

    def _labels_over(self, node: str, over: str) -> Iterable[str]:
        """Labels of the choices that split a letter or, for `t>e`, exchange rows between these letters."""
        letter, *groups = split_factors(over)
        ends = [EXCHANGED + self._leaves(node, each)[0].label for each in groups] or [""]
        return (leaf.label + end for leaf in self._leaves(node, letter) for end in ends)

    def _leaves(self, node: str, letter: str) -> tuple[Leaf, ...]:
        atom = self.letters[node][letter]
        return tuple(
            Leaf(label, self.factor_names[id(leaf)], leaf.size)
            for label, leaf in zip(self._labels(letter, atom), atom.leaves(), strict=True)
        )

    def _choices(self, name: str, spec: Spec) -> Iterable[Choice]:
        made = len(spec.results) + len(spec.kept.hidden)
        yield Choice(UNSPLIT, (R,) * len(spec.operands), (R,) * made)
        if spec.linear_backward and self._is_function_of_parameters(name):
            yield Choice(VARIED, (V,) * len(spec.operands), (V,) * made)
        for letter, atom in self.letters[name].items():
            if not spec.splittable(letter) or letter in self.conflicts[name]:
                continue
            parts = list(zip(self._labels(letter, atom), atom.leaves(), strict=True))
            for i, (label, leaf) in enumerate(parts[: 1 if letter in spec.contiguous else None]):
                yield self._split(name, spec, [(letter, i)], label, leaf)
        yield from self._exchanged(name, spec)
        for positions in spec.linear:
            label = PARTIAL + "+".join(str(i) for i in sorted(positions))
            states = tuple(P if i in positions else V for i in range(len(spec.operands)))
            yield Choice(label, states, (P,) * made)

    def _is_function_of_parameters(self, name: str) -> bool:
        """Whether an op's results depend on parameters and not on inputs, as casts of weights do.

        All ranks of a data-parallel axis can then run the op in V. Its backward is linear in the gradient, so that
        partial gradients pass through it to the parameter, where they are summed with all others.
        """
        results = self.names[name]
        return not self.of_inputs.intersection(results) and bool(
            self.needs_grad.intersection(results)
        )

    def _exchanged(self, name: str, spec: Spec) -> Iterable[Choice]:
        """Choices `t>e` of an op: tensors with rows are split by rows, and the other tensors by experts or the like."""
        for rows, groups in spec.exchanges:
            if self.conflicts[name].intersection((rows, groups)):
                continue
            group, atom = self._leaves(name, groups)[0], self.letters[name][groups].leaves()[0]
            leaves_of_rows = self._leaves(name, rows)[: 1 if rows in spec.contiguous else None]
            for i, leaf in enumerate(leaves_of_rows):
                label = leaf.label + EXCHANGED + group.label
                yield self._split(name, spec, [(rows, i), (groups, 0)], label, atom)

    def _split(
        self, name: str, spec: Spec, parts: list[tuple[str, int]], label: str, leaf: Atom
    ) -> Choice:
        """The choice that splits each tensor of an op by the first of these parts of letters that the tensor has."""
        own, letter = self.letters[name], parts[0][0]
        summed, over = letter in spec.sums, EXCHANGED.join(each for each, _ in parts)

        def place(letters: Letters) -> tuple[int, int] | None:
            found = (_position(letters, letter, part, own) for letter, part in parts)
            return next((position for position in found if position), None)

        def operand(i: int, letters: Letters) -> State:
            if position := place(letters):
                return S(*position)
            return P if summed and i in spec.additive else V

        def result(letters: Letters) -> State:
            position = place(letters)
            assert position or summed or letter in spec.agreed, (name, letter)
            return S(*position) if position else P if summed else V

        def kept(letters: Letters) -> State:
            position = place(letters)
            return S(*position) if position else V

        return Choice(
            label,
            tuple(operand(i, letters) for i, letters in enumerate(spec.operands)),
            (
                *(result(letters) for letters in spec.results),
                *(kept(hidden.letters) for hidden in spec.kept.hidden),
            ),
            leaf.size,
            self.factor_names[id(leaf)],
            spec.stretch.get(over, 1.0),
        )


def _position(
    letters: Letters, letter: str, part: int, own: Mapping[str, Atom]
) -> tuple[int, int] | None:
    """Position of part `part` of a letter in a tensor: its dim, and its number among the dim's factors."""
    for dim, names in enumerate(letters):
        if letter in names:
            before = names[: names.index(letter)]
            return dim, len(leaves(own[x] for x in before)) + part
    return None


def output_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """The tensor-valued nodes among a graph's outputs, in order."""
    output = next(iter(module.graph.find_nodes(op="output")))
    return tensor_operands(output)


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that called a node, without the prefix of the wrapper that capture adds."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("model").removeprefix(".")


def _name_factors(analyzer: _Analyzer) -> tuple[dict[int, str], dict[str, Factor]]:
    """Names and roles of all factors. A factor takes its name from the first place where it occurs.

    Inputs come first (batch, seq), then parameters, then all other tensors. A factor that is both a dim of an input and
    the heads of attention, as in a cache of keys and values, does not take its name or role from the input.
    """
    names: dict[int, str] = {}
    taken: dict[str, Factor] = {}
    roles: dict[int, set[str]] = {}

    def meet(atom: Atom, name: str, role: str | None) -> None:
        roles.setdefault(id(atom), set()).update({role} if role else ())
        if id(atom) in names:
            return
        unique, count = name, 2
        while unique in taken:
            unique, count = f"{name}~{count}", count + 1
        names[id(atom)] = unique
        taken[unique] = Factor(unique, atom.size)

    captured = analyzer.captured
    apart = {_batch_of_op(analyzer, node) for node in analyzer.specs}
    batch, heads = _batch_of_inputs(analyzer, apart), _heads(analyzer, apart)
    for placeholder, name in captured.inputs.items():
        for dim, atoms in enumerate(analyzer.atoms[placeholder]):
            for atom in (x for x in leaves(atoms) if id(x) not in heads):
                is_batch = batch.get(id(atom), dim == 0)
                meet(atom, _input_name(name, dim, is_batch), "batch" if is_batch else "input")
    for node, spec in analyzer.specs.items():
        for joined, rows in spec.joins.items():
            if all("batch" in roles.get(id(x), ()) for x in _atoms(analyzer, node, rows)):
                for x in _atoms(analyzer, node, [joined]):
                    meet(x, f"{node}.{joined}", "batch")
    for placeholder, name in captured.parameters.items():
        for dim, atoms in enumerate(analyzer.atoms[placeholder]):
            parts = leaves(atoms)
            for i, atom in enumerate(parts):
                meet(atom, f"{name}[{dim}]" + (f".{i}" if len(parts) > 1 else ""), "parameter")
    for node, spec in analyzer.specs.items():
        for letter in sorted(spec.normalized):
            for atom in analyzer.letters[node][letter].leaves():
                meet(atom, f"{node}.{letter}", "normalized")
        for letter in sorted(spec.experts | _counts_matrices(analyzer, node, spec)):
            for atom in analyzer.letters[node][letter].leaves():
                meet(atom, f"{node}.{letter}", "expert")
    for name, dims in analyzer.atoms.items():
        for atom in leaves(a for dim in dims for a in dim):
            meet(atom, name, None)
    for node, own in analyzer.letters.items():
        for letter, atom in own.items():
            for leaf in atom.leaves():
                meet(leaf, f"{node}.{letter}", None)
    by_name = {names[key]: frozenset(found) for key, found in roles.items()}
    return names, {n: Factor(n, f.size, by_name[n]) for n, f in taken.items()}


def _batch_of_inputs(analyzer: _Analyzer, apart: Collection[frozenset[int]]) -> dict[int, bool]:
    """Factors of inputs -> whether they are the batch, for inputs whose batch is not their leading dim.

    That is so for torch.nn.LSTM and torch.nn.MultiheadAttention without `batch_first`. Some ops compute every sample
    separately, and their rules tell over which dims. The batch is the leading dim if all these ops agree that it is
    such a dim, else the first dim of which they do.

    Args:
        apart: for each op that computes samples separately, the factors over which it does.
    """
    matrices = {id(x) for name in analyzer.captured.parameters for x in _of(analyzer, name)}
    found: dict[int, bool] = {}
    for placeholder in analyzer.captured.inputs:
        dims = [{id(x) for x in leaves(atoms)} for atoms in analyzer.atoms[placeholder]]
        free = [dim for dim in dims if dim and not dim & matrices]
        told = [each for each in apart if any(each & dim for dim in free)]
        kept = [dim for dim in free if told and all(dim <= each for each in told)]
        first = dims[0] & frozenset.intersection(*told) if told else set()  # batch x something
        if kept and dims[0] and not first and not any(dims[0] & dim for dim in kept):
            found |= dict.fromkeys(dims[0], False) | dict.fromkeys(kept[0], True)
    return found


def _heads(analyzer: _Analyzer, apart: Collection[frozenset[int]]) -> set[int]:
    """The heads of attention: factors of weights' columns over which products of two activations are batched."""
    columns = {
        id(x)
        for node, spec in analyzer.specs.items()
        if spec.sums and _varies(analyzer, node, spec) == {True, False}
        for x in _atoms(analyzer, node, _columns(analyzer, node, spec))
    }
    return {x for each in apart for x in each & columns}


def _batch_of_op(analyzer: _Analyzer, node: str) -> frozenset[int]:
    """Factors over which an op computes samples separately: those of its rule, or the batch of a product."""
    spec = analyzer.specs[node]
    letters = set(spec.batch)
    if spec.sums and _varies(analyzer, node, spec) == {True}:
        letters |= _common(spec)
    return frozenset(id(x) for x in _atoms(analyzer, node, letters))


def _columns(analyzer: _Analyzer, node: str, spec: Spec) -> set[str]:
    """Letters of a product's result that come only from operands computed from parameters."""
    of_model, of_inputs = (
        {x for name, letters in zip(analyzer.taken[node], spec.operands, strict=True)
         if (name in analyzer.of_inputs) is varies for dim in letters for x in dim}
        for varies in (False, True)
    )  # fmt: skip
    return {x for letters in spec.results for dim in letters for x in dim} & of_model - of_inputs


def _atoms(analyzer: _Analyzer, node: str, letters: Iterable[str]) -> list[Atom]:
    return leaves(analyzer.letters[node][letter] for letter in sorted(letters))


def _of(analyzer: _Analyzer, tensor: str) -> list[Atom]:
    return leaves(atom for dim in analyzer.atoms[tensor] for atom in dim)


def _counts_matrices(analyzer: _Analyzer, node: str, spec: Spec) -> set[str]:
    """Batch letters of a batched product of an activation and a weight, such as `e` in `e c d, e d f -> e c f`."""
    varies = {name in analyzer.of_inputs for name in analyzer.taken[node]}
    return _common(spec) if spec.sums and varies == {True, False} else set()


def _varies(analyzer: _Analyzer, node: str, spec: Spec) -> set[bool]:
    """For the factors of a product, whether they depend on inputs, as a set; an added bias does not count."""
    factors = [x for i, x in enumerate(analyzer.taken[node]) if i not in spec.additive]
    return {name in analyzer.of_inputs for name in factors} if len(factors) > 1 else set()


def _common(spec: Spec) -> set[str]:
    """Letters that every tensor of an op has."""
    tensors = [{x for dim in letters for x in dim} for letters in (*spec.operands, *spec.results)]
    return set.intersection(*tensors)


def _input_name(name: str, dim: int, is_batch: bool) -> str:
    """Name of a dim of an input: `batch`, `seq` for the other of the first two dims, or such as `mask[2]`."""
    return "batch" if is_batch else "seq" if dim < 2 else f"{name}[{dim}]"

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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor as TorchTensor
from torch import fx

from autopar import rules
from autopar.analysis.atoms import Atom, leaves, unify
from autopar.analysis.roles import Unified, name_factors
from autopar.analysis.work import works
from autopar.capture.captured import Captured
from autopar.ir import (
    EXCHANGED,
    PARTIAL,
    UNSPLIT,
    VARIED,
    Choice,
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
from autopar.ops.nodes import draws, is_getitem, module_path, output_nodes, tensor_operands, tensor_results
from autopar.rules.spec import Hidden, Letters, Spec


@dataclass(frozen=True)
class Analysis:
    """The result of `analyze`: how each op of a captured model can be split, and which dims belong together.

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
        found = Unified(self.captured, self.atoms, self.specs, self.letters, self.taken, self.of_inputs)
        self.factor_names, factors = name_factors(found)
        tensors = {name: self._tensor(name) for name in self.values}
        ops = tuple(self._op(node) for node in self.nodes if node.name in self.specs)
        graph = Graph(
            tensors=tensors,
            ops=ops,
            parameters={v: k for k, v in self.captured.parameters.items()},
            buffers={v: k for k, v in self.captured.buffers.items()} | {name: name for name in self.captured.constants},
            inputs={v: k for k, v in self.captured.inputs.items()},
            outputs=tuple(self.names[n.name][0] for n in output_nodes(self.captured.module)),
            factors=factors,
            stacks=find_stacks(ops),
            precision=self.captured.precision,
            loss_tile_bytes=self.captured.loss_tile_bytes,
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
                n for n, v in zip(names, results, strict=True) if (v.is_floating_point() or v.is_complex())
            }

    def _forget_unreached(self) -> None:
        """Removes from `needs_grad` the tensors that no differentiable path connects to a result, such as an index.

        A new value of a buffer is not a result: it is written without gradient.
        """
        reached = {
            self.names[node.name][0]
            for i, node in enumerate(output_nodes(self.captured.module))
            if i not in self.captured.mutated
        }
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
        """Positions of the operands to which a gradient flows back."""
        if not self._passes_gradient(node):
            return ()
        return tuple(i for i, x in enumerate(self._operands(node)) if x in self.needs_grad)

    def _operands(self, node: fx.Node) -> tuple[str, ...]:
        return tuple(self.names[n.name][0] for n in tensor_operands(node))

    def _passes_gradient(self, node: fx.Node) -> bool:
        stops = rules.operator_name(node) in rules.NOT_DIFFERENTIABLE
        return not stops and any(name in self.needs_grad for name in self._operands(node))

    def _flow(self, node: str, atoms: list[list[Atom]], letters: Letters, own: Mapping[str, Atom]) -> None:
        """Unifies the dims of a tensor with those of an operand; a dim for which that fails is not split in this op."""
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
        reduced = self.captured.gradient_dtype(parameter, value.dtype)
        found = {
            "stored_itemsize_bytes": self.captured.stored.get(parameter, value.dtype).itemsize,
            "gradient_itemsize_bytes": reduced.itemsize,
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
            saved=(*(operands[i] for i in kept.operands), *(names[i] for i in kept.results), *hidden),
            is_view=spec.is_view,
            module=module_path(node),
            has_rule=self.with_rule[node.name],
            guess=spec.guess,
            work=works(spec, lambda letter: self._leaves(node.name, letter)),
            hidden=hidden,
            collectives=tuple(self._collectives(node.name, spec)),
            product_itemsize_bytes=spec.product_itemsize_bytes,
            draws=draws(node),
            looks_up=None if spec.looks_up is None else self._all_leaves(node.name, spec.looks_up),
            transient=spec.transient,
        )

    def _collectives(self, node: str, spec: Spec) -> Iterable[OwnCollective]:
        for each in spec.collectives:
            yield OwnCollective(
                frozenset(label for over in each.over for label in self._labels_over(node, over)),
                each.forward,
                each.backward,
                each.itemsize_bytes,
                self._all_leaves(node, each.letters),
            )

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

    def _all_leaves(self, node: str, letters: Iterable[str]) -> tuple[Leaf, ...]:
        return tuple(leaf for letter in letters for leaf in self._leaves(node, letter))

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
        results = {*self.names[name]}
        return not self.of_inputs & results and bool(self.needs_grad & results)

    def _exchanged(self, name: str, spec: Spec) -> Iterable[Choice]:
        """Choices `t>e` of an op: tensors with rows are split by rows, and the others by experts or the like."""
        for rows, groups in spec.exchanges:
            if self.conflicts[name].intersection((rows, groups)):
                continue
            group, atom = self._leaves(name, groups)[0], self.letters[name][groups].leaves()[0]
            leaves_of_rows = self._leaves(name, rows)[: 1 if rows in spec.contiguous else None]
            for i, leaf in enumerate(leaves_of_rows):
                label = leaf.label + EXCHANGED + group.label
                yield self._split(name, spec, [(rows, i), (groups, 0)], label, atom)

    def _split(self, name: str, spec: Spec, parts: list[tuple[str, int]], label: str, leaf: Atom) -> Choice:
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
            (*(result(letters) for letters in spec.results), *(kept(hidden.letters) for hidden in spec.kept.hidden)),
            leaf.size,
            self.factor_names[id(leaf)],
            spec.stretch.get(over, 1.0),
            needs_equal=letter in spec.equal or len(parts) > 1,
        )


def _position(letters: Letters, letter: str, part: int, own: Mapping[str, Atom]) -> tuple[int, int] | None:
    """Position of part `part` of a letter in a tensor: its dim, and its number among the dim's factors."""
    for dim, names in enumerate(letters):
        if letter in names:
            before = names[: names.index(letter)]
            return dim, len(leaves(own[x] for x in before)) + part
    return None

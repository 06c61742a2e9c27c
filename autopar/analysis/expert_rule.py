"""The rule of a mixture-of-experts layer, which follows from the rules of the ops in its body.

The letters of all ops are unified along the body's edges, as `autopar.analysis.factors` does over a whole graph. A
letter can be split if every op can follow without a conversion. On a rank, each op of the body is written by its own
rule.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar import rules
from autopar.analysis.atoms import Atom, leaves, unify
from autopar.analysis.exchange import Emit, Exchange, can_be_exchanged, marked, stated
from autopar.analysis.expert_run import ExpertBody, LayerRun
from autopar.analysis.skew import ORDERS
from autopar.analysis.work import nests_of
from autopar.ops.nodes import is_getitem, tensor_operands, tensor_results
from autopar.rules.grouped import PRODUCTS, product_of_rows
from autopar.rules.index import shifted
from autopar.rules.spec import Call, Hidden, Kept, Letters, Local, Nest, Spec, StatedCollective, parts

aten = torch.ops.aten
Dims = list[list[Atom]]
_NEST_GROUPS = ("rows", "columns", "inner", "batch", "groups")


def call_target(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assert callable(node.target), node.target
    return node.target(*args, **kwargs)


class BodyRule:
    """The ops of a body with their letters unified, as `autopar.analysis.factors` does over a whole graph."""

    def __init__(self, experts: ExpertBody, call: Call) -> None:
        self.experts, self.call = experts, call
        self.dims: dict[fx.Node, list[Dims]] = {}  # of every result
        self.specs: dict[fx.Node, Spec] = {}
        self.letters: dict[fx.Node, dict[str, Atom]] = {}
        self.stuck: list[Atom] = []  # letters that could not be unified
        # Node -> split letter -> positions of the operands that one rank alone adds.
        self.counted_once: dict[fx.Node, dict[str, frozenset[int]]] = {}
        self.operands = self._inputs()
        for node in experts.calls:
            self._add(node)
        self.names = self._names()

    # --- letters

    def _inputs(self) -> list[Dims]:
        """Dims of the layer's operands. The first letters of sorted rows are those of the ids."""
        experts, values = self.experts, self.call.operands
        rows = len(experts.slots)
        entries = [Atom(values[rows].numel())]
        operands = [[_atoms(s) for s in value.shape] for value in values]
        operands[rows] = [entries]
        for position, slots in enumerate(experts.slots):
            own = operands[position]
            inner = [Atom(slots)] if slots > 1 else []
            unify(entries, [*own[0], *inner])
            self.dims[experts.inputs[position]] = [[entries, *own[1:]]]
        self.dims[experts.sorted_ids] = [[entries]]
        self.dims[experts.ends] = [[_atoms(experts.count)]]
        for node, own in zip(experts.inputs[rows + 2 :], operands[rows + 1 :], strict=True):
            self.dims[node] = [own]
        return operands

    def _add(self, node: fx.Node) -> None:
        if is_getitem(node):
            source, position = node.args
            self.dims[node] = [self.dims[source][position]]  # type: ignore[index]
            return
        call = Call(node)
        is_product = rules.operator_name(node) in PRODUCTS
        spec = product_of_rows(call) if is_product else rules.spec(node)[0]
        own = {letter: Atom(size) for letter, size in spec.sizes.items()}
        self.specs[node], self.letters[node] = spec, own
        for operand, letters in zip(tensor_operands(node), spec.operands, strict=True):
            for found, dim in zip(self.dims[operand][0], letters, strict=True):
                if dim and not unify(found, [own[x] for x in dim]):
                    self.stuck += [own[x] for x in dim]
        self.dims[node] = [[[own[x] for x in dim] for dim in letters] for letters in spec.results]
        if self._is_lookup(node):  # biases of the experts
            unify(self.dims[node.args[0]][0][0], self.dims[self.experts.ends][0][0])  # type: ignore[index]

    def _is_lookup(self, node: fx.Node) -> bool:
        return node.target is aten.index.Tensor and list(node.args[1]) == [self.experts.sorted_ids]  # type: ignore[arg-type]

    def _leaves(self) -> list[Atom]:
        tensors = [*self.operands, *(dims for found in self.dims.values() for dims in found)]
        return leaves(atom for dims in tensors for dim in dims for atom in dim)

    def _names(self) -> dict[int, str]:
        """Letters of atoms: t and k of the rows, e of the experts, d0, d1 ... of the others, in order."""
        rows = leaves(self.operands[len(self.experts.slots)][0])
        names = {id(x): f"k{i - 1}" if i > 1 else "tk"[i] for i, x in enumerate(rows)}
        self.rows = frozenset(names.values())
        names |= {id(x): "e" for x in leaves(self.dims[self.experts.ends][0][0])}
        fixed = len(names)
        for leaf in self._leaves():
            names.setdefault(id(leaf), f"d{len(names) - fixed}")
        return names

    def _sizes(self) -> dict[str, int]:
        return {self.names[id(leaf)]: leaf.size for leaf in self._leaves()}

    def _named(self, dims: Dims) -> Letters:
        return tuple(tuple(self.names[id(x)] for x in leaves(dim)) for dim in dims)

    # --- the spec

    def spec(self) -> Spec:
        operands = tuple(self._named(dims) for dims in self.operands)
        result = self._named(self.dims[self.experts.result][0])
        kept = self._kept()
        seen = [*operands, result, *(hidden.letters for hidden in kept.hidden)]
        found = dict.fromkeys(x for letters in seen for dim in letters for x in dim)
        sizes = self._sizes()
        states = {name: self._ends_in(name) for name in found}
        nests, pairs = self._nests(found), self._exchanges(states)
        return Spec(
            operands,
            (result,),
            {name: sizes[name] for name in found},
            sums=frozenset(n for n, state in states.items() if state == "P"),
            whole=frozenset(n for n, state in states.items() if not state),
            flops=round(sum(nest.flops(sizes) for nest in nests)),
            nests=nests,
            kept=kept,
            experts=frozenset({"e"} & found.keys()),
            exchanges=pairs,
            equal=frozenset(found),
            collectives=self._stated(pairs),
            localize=self._localize,
        )

    def _exchanges(self, states: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        """Pairs `(t, "e")` where rows can be exchanged along `t`; every tensor with rows has that letter."""
        rows = len(self.experts.slots)
        tensors = [self._named(dims) for found in self.dims.values() for dims in found]
        if states.get("e") != "P" or not can_be_exchanged(self.experts.calls, tensors, set(self.rows)):
            return ()
        heads = [set(self._named(dims[:1])[0]) for dims in self.operands[: rows + 1]]
        shared = set.intersection(*heads)
        return tuple((x, "e") for x in states if x in shared and states[x] == "S")

    def _stated(self, pairs: tuple[tuple[str, str], ...]) -> tuple[StatedCollective, ...]:
        """The collectives that exchange rows; an operand with rows is sent as one sorted row for every id."""
        inputs, wanted = self.experts.inputs[: len(self.experts.slots)], self.call.wanted
        moved = [self._message(node, i in wanted) for i, node in enumerate(inputs)]
        result = self._message(self.experts.result, bool(wanted))
        return stated(pairs, moved, result, self.experts.count)

    def _message(self, node: fx.Node, takes_gradient: bool) -> tuple[Letters, int, bool]:
        itemsize: int = node.meta["val"].element_size()
        return self._named(self.dims[node][0]), itemsize, takes_gradient

    # --- what it costs

    def _nests(self, known: Container[str]) -> tuple[Nest, ...]:
        """A nest for each kernel: those of the permutations, and those of the body; only products count FLOPs.

        Args:
            known: letters of the whole op.
        """
        rows = len(self.experts.slots)
        ids = self._moved(self.experts.sorted_ids, torch.empty((), dtype=torch.int64), known)
        orders = [Nest(0.0, moved=(ids, ids, ids))] * 2  # sorts ids; sorts their order
        permuted = [
            Nest(0.0, gradients=int(node in self.flows), moved=(self._moved(node, node.meta["val"], known),) * 2)
            for node in (*self.experts.inputs[:rows], self.experts.result)
        ]
        calls = (node for node in self.specs if not self.specs[node].is_view)
        return (*orders, *permuted, *(nest for node in calls for nest in self._nests_of_call(node, known)))

    def _nests_of_call(self, node: fx.Node, known: Container[str]) -> Iterator[Nest]:
        operands = tensor_operands(node)
        moved = [self._moved(n, n.meta["val"], known) for n in operands]
        moved += [self._moved(node, value, known, i) for i, value in enumerate(tensor_results(node))]
        multiplied = [nest for nest in nests_of(self.specs[node]) if nest.inner]
        if not multiplied:
            yield Nest(0.0, gradients=int(node in self.flows), moved=tuple(moved))
        for nest in multiplied:
            groups = {name: self._own(node, getattr(nest, name)) for name in _NEST_GROUPS}
            wanted, itemsize_bytes = sum(n in self.flows for n in operands[:2]), tensor_results(node)[0].element_size()
            yield Nest(nest.times, **groups, itemsize_bytes=itemsize_bytes, gradients=wanted, moved=tuple(moved))

    def _own(self, node: fx.Node, letters: Iterable[str]) -> tuple[str, ...]:
        """Letters of the whole op for those of a call in it."""
        return self._named([[self.letters[node][x] for x in letters]])[0]

    def _moved(
        self, node: fx.Node, value: torch.Tensor, known: Container[str], result: int = 0
    ) -> tuple[tuple[str, ...], int]:
        """Letters of a tensor, and the bytes for one element, of which dims without a letter of the op are a part."""
        letters = [x for dim in self._named(self.dims[node][result]) for x in dim]
        sizes = self._sizes()
        within = math.prod(sizes[x] for x in letters if x not in known)
        return tuple(x for x in letters if x in known), within * value.element_size()

    def _ends_in(self, name: str) -> str:
        """The state of the result where a letter is split: "S" or "P"; "" if the letter cannot be split."""
        if name == "e":
            return "P" if self._can_follow_apart() else ""
        stuck = {x for atom in self.stuck for x in self._named([[atom]])[0]}
        if name in stuck or (name in self.rows and self._meets_rows()):
            return ""
        states = {
            n: "S" if any(name in dim for dim in self._named(self.dims[n][0])) else "V" for n in self.experts.inputs
        }
        for node in self.experts.calls:
            if is_getitem(node):
                states[node] = states[node.all_input_nodes[0]]
            else:
                states[node] = self._follow(node, name, [states[n] for n in tensor_operands(node)])
            if not states[node]:
                return ""
        return states[self.experts.result].replace("V", "")

    def _follow(self, node: fx.Node, name: str, states: Sequence[str]) -> str:
        """The state of an op's results along a letter, given those of its operands; "" if the op cannot follow."""
        spec = self.specs[node]
        own = [x for x, atom in self.letters[node].items() if name in self._named([[atom]])[0]]
        if not own:
            return self._follow_partial(node, name, states)
        (letter,) = own
        minor = self.names[id(self.letters[node][letter].leaves()[0])] != name
        if not spec.splittable(letter) or (letter in spec.contiguous and minor):
            return ""
        for i, (state, letters) in enumerate(zip(states, spec.operands, strict=True)):
            has = any(letter in dim for dim in letters)
            if state != ("S" if has else "V") or (letter in spec.sums and i in spec.additive):
                return ""
        return "S" if all(any(letter in d for d in y) for y in spec.results) else "P"

    def _follow_partial(self, node: fx.Node, name: str, states: Sequence[str]) -> str:
        """The state of a linear op's results where operands are partial. One rank alone then adds a bias."""
        partial = frozenset(i for i, state in enumerate(states) if state == "P")
        if not partial:
            return "V"
        together = next((p for p in self.specs[node].linear if p >= partial), None)
        if together is None or any(states[i] != "V" for i in together - partial):
            return ""
        self.counted_once.setdefault(node, {})[name] = together - partial
        return "P"

    def _can_follow_apart(self) -> bool:
        """Whether experts meet rows only in products and lookups, and no weight has a dim of the rows."""
        for node in self.specs:
            is_product = rules.operator_name(node) in PRODUCTS
            for i, operand in enumerate(tensor_operands(node)):
                first = (i > 0 and is_product) or (i == 0 and self._is_lookup(node))
                dims = self._named(self.dims[operand][0])
                if any("e" in dim for dim in dims[1 if first else 0 :]):
                    return False
        return not self._meets_rows()

    def _meets_rows(self) -> bool:
        """Whether a weight has a letter of the rows; such a weight would have to be sorted with them."""
        weights = self.operands[len(self.experts.slots) + 1 :]
        return any(self.rows.intersection(dim) for dims in weights for dim in self._named(dims))

    # --- what backward keeps

    @cached_property
    def flows(self) -> frozenset[fx.Node]:
        """Inputs and calls of the body to which gradients flow."""
        found = {n for n in self.experts.inputs if self.experts.outer(n) in self.call.wanted}
        for node in self.experts.calls:
            found.update([node] if found.intersection(node.all_input_nodes) else [])
        return frozenset(found)

    def _kept(self) -> Kept:
        """Tensors that the body's ops keep: weights, which are operands of the layer, and tensors made inside it."""
        experts, flows = self.experts, self.flows
        if not flows:
            return Kept()
        found: dict[fx.Node, None] = {}
        hidden: list[Hidden] = []
        for node in experts.calls:
            wanted = [i for i, n in enumerate(tensor_operands(node)) if n in flows]
            if wanted and not is_getitem(node):
                kept = rules.kept(rules.operator_name(node), Call(node, wanted), self.specs[node])
                found |= dict.fromkeys(self._base(tensor_operands(node)[i]) for i in kept.operands)
                found |= dict.fromkeys([self._base(node)] if kept.results else [])
                hidden += [self._renamed(node, h) for h in kept.hidden]
        rows = len(experts.slots) + 2
        weights = [n for n in experts.inputs[rows:] if n in found]
        hidden += [
            Hidden(n.name, self._named(self.dims[n][0]), n.meta["val"].dtype)
            for n in found
            if n not in weights and len(self.dims[n]) == 1 and n is not experts.ends
        ]
        outer = (experts.outer(n) for n in weights)
        return Kept(tuple(i for i in outer if i is not None), (), (*hidden, *self._orders(flows)))

    def _orders(self, flows: Container[fx.Node]) -> list[Hidden]:
        """The permutations that backward needs: one per operand with a gradient, and that of the result."""
        letters = self._named(self.dims[self.experts.sorted_ids][0])
        order, back = ORDERS
        ways = {
            order if slots == 1 else f"{i}_{order}": None
            for i, (slots, node) in enumerate(zip(self.experts.slots, self.experts.inputs, strict=False))
            if node in flows
        }
        return [Hidden(name, letters, torch.int64) for name in (*ways, back)]

    def _base(self, node: fx.Node) -> fx.Node:
        """The tensor whose memory a view shares."""
        while is_getitem(node) or (node in self.specs and self.specs[node].is_view):
            node = node.all_input_nodes[0]
        return node

    def _renamed(self, node: fx.Node, hidden: Hidden) -> Hidden:
        own = self.letters[node]
        letters = self._named([[own[x] for x in dim] for dim in hidden.letters])
        return hidden._replace(name=f"{node.name}_{hidden.name}", letters=letters)

    # --- on local shards

    def _localize(self, local: Local) -> fx.Node:
        experts, args = self.experts, list(local.args)
        exchanged = local.exchanges("e")
        if exchanged:
            return self._localize_exchanged(local, exchanged)
        axes, rows = local.axes("e"), len(experts.slots)
        count = experts.count // parts(local, ["e"])
        if axes:  # ids are counted from this rank's first expert, and `count` stands for all other experts
            here = shifted(local, args[rows], "e")
            mine = local.emit(
                aten.logical_and.default, local.emit(aten.ge.Scalar, here, 0), local.emit(aten.lt.Scalar, here, count)
            )
            other = local.emit(aten.logical_not.default, mine)
            args[rows] = local.emit(aten.masked_fill.Scalar, here, other, count)

        layer = LayerRun(experts, args, local.emit, count, self._slots(local), bool(axes))
        return self._written(layer, local)

    def _localize_exchanged(self, local: Local, axes: tuple[tuple[str, int], ...]) -> fx.Node:
        """The layer with exchanged rows. Ids keep their numbers, which tell an expert's rank and its place there."""
        assert axes == local.axes("e"), local.node  # see `autopar.ir.go_together`
        emit, experts = marked(local), self.experts
        layer = LayerRun(experts, local.args, emit, experts.count, self._slots(local), exchange=Exchange(emit, axes))
        return self._written(layer, local)

    def _written(self, layer: LayerRun, local: Local) -> fx.Node:
        """The layer on this rank, with every op of its body as the op's own rule writes it."""
        emit, is_exchanged = layer.emit, layer.exchange is not None

        def run(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_getitem(node):
                return args[0][args[1]] if isinstance(args[0], tuple) else emit(node.target, *args)
            args = self._count_once(local, node, args)
            body = _BodyLocal(self, local, emit, node, args, kwargs, is_exchanged)
            return self.specs[node].localize(body)

        found: fx.Node = layer.result(run)
        return found

    def _count_once(self, local: Local, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        found = list(args)
        for name, positions in self.counted_once.get(node, {}).items():
            for axis, size in local.axes(name):
                for i in positions:
                    call: tuple[Any, ...] = (found[i], [], size, axis, "partial")
                    found[i] = local.emit(torch.ops.autopar.partial.default, *call)
        return tuple(found)

    def _slots(self, local: Local) -> list[int]:
        """Number of ids for every row of an operand, on this rank."""
        lacking = (self.rows.difference(self._named([dims[0]])[0]) for dims in self.operands)
        return [
            slots // parts(local, sorted(letters)) for slots, letters in zip(self.experts.slots, lacking, strict=False)
        ]


class _BodyLocal:
    """An op of the body as its localizer sees it: axes of its letters are those of the whole op.

    Where rows are exchanged, their number is not known, and shapes have -1 in its place.
    """

    def __init__(
        self,
        rule: BodyRule,
        local: Local,
        emit: Emit,
        node: fx.Node,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_exchanged: bool,
    ) -> None:
        self._rule, self._local, self._is_exchanged = rule, local, is_exchanged
        self.node, self.args, self.kwargs, self.emit = node, args, kwargs, emit
        self.tile: int | None = None
        self.result_shapes = tuple(tuple(self._size(dim) for dim in dims) for dims in rule.dims[node])

    def axes(self, letter: str) -> tuple[tuple[str, int], ...]:
        names = self._rule._named([[self._rule.letters[self.node][letter]]])[0]
        return tuple(axis for name in names for axis in self._local.axes(name))

    def is_even(self, letters: Iterable[str]) -> bool:
        return True  # no other parts go to experts

    def part(self, letter: str) -> int:
        return self._size([self._rule.letters[self.node][letter]]) if letter in self._rule.letters[self.node] else 1

    def first(self, letter: str) -> int:
        name, *inner = self._rule._named([[self._rule.letters[self.node][letter]]])[0]
        return self._local.first(name) * math.prod(self._rule._sizes()[each] for each in inner)

    def exchanges(self, letter: str) -> tuple[tuple[str, int], ...]:
        return ()  # of a letter of its own: what is exchanged are the rows of the whole

    def _size(self, dim: list[Atom]) -> int:
        (names,) = self._rule._named([dim])
        if self._is_exchanged and not self._rule.rows.isdisjoint(names):
            return -1
        return math.prod(x.size for x in leaves(dim)) // parts(self._local, names)


def _atoms(size: int) -> list[Atom]:
    return [Atom(size)] if size != 1 else []

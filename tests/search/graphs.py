"""Small graphs for tests, written as rows such as `x: b s k, w: j k -> y: b s j`.

A word of a row is a dim; `(h d)` is a dim of two factors. Equal words in one row are one factor,
and their sizes come from `sizes` (`d'` is another factor of the size of `d`). A factor may be
split unless it ends in `!`; one that stands in no result is summed away.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir import Choice, Factor, Graph, Leaf, Op, P, R, S, State, Tensor, V, Work

Names = tuple[tuple[str, ...], ...]  # factor names of every dim


@dataclass
class Builder:
    """Collects ops and tensors; `graph()` makes the graph."""

    sizes: Mapping[str, int]
    roles: Mapping[str, str] = field(default_factory=dict)
    itemsize_bytes: int = 2
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def input(self, name: str, dims: str) -> str:
        self.inputs[name] = self._tensor(name, _dims(dims), needs_grad=False)
        return name

    def buffer(self, name: str, dims: str) -> str:
        self.buffers[name] = self._tensor(name, _dims(dims), needs_grad=False)
        return name

    def parameter(self, name: str, dims: str, needs_grad: bool = True) -> str:
        tensor = "p_" + name.replace(".", "_")
        self.parameters[name] = self._tensor(tensor, _dims(dims), needs_grad=needs_grad)
        return tensor

    def op(
        self,
        kind: str,
        row: str,
        operands: Sequence[str],
        *,
        saves: Sequence[int] | None = None,
        saves_result: bool = False,
        linear: Sequence[Sequence[int]] = (),
        flops: int | None = None,
        view: bool = False,
        itemsize_bytes: int | None = None,
    ) -> str:
        """Adds an op and returns the name of its result; a row has one result."""
        left, _, right = row.partition("->")
        operand_dims = [_dims(text) for text in left.split(",")]
        result_dims = _dims(right)
        name = f"{kind}_{len(self.ops)}"
        grad = any(self.tensors[each].needs_grad for each in operands)
        self._tensor(name, result_dims, needs_grad=grad, itemsize_bytes=itemsize_bytes)
        letters = dict.fromkeys(_letters([*operand_dims, result_dims]))
        points = math.prod(self.sizes[_plain(letter)] for letter in letters)
        summed = set(letters) - set(_letters([result_dims]))
        saved = [operands[i] for i in (range(len(operands)) if saves is None else saves)]
        self.ops.append(
            Op(
                name=name,
                kind=kind,
                operands=tuple(operands),
                results=(name,),
                choices=tuple(self._choices(letters, operand_dims, result_dims, linear)),
                flops=flops if flops is not None else points * (2 if summed else 1),
                saved=tuple([] if view else [*saved, *([name] if saves_result else [])]),
                is_view=view,
                work=(self._work(letters, operand_dims, result_dims),) if flops is None else (),
            )
        )
        return name

    def _work(self, letters: Mapping[str, None], operands: list[Names], result: Names) -> Work:
        """The loop nest of a row: two FLOPs a point where something is summed, else one."""
        left, right = (set(_letters([dims])) for dims in (operands * 2)[:2])
        groups: dict[str, list[Leaf]] = {"rows": [], "columns": [], "inner": [], "batch": []}
        for letter in letters:
            leaf = Leaf(letter.rstrip("!"), _plain(letter), self.sizes[_plain(letter)])
            if letter not in _letters([result]):
                groups["inner"].append(leaf)
            elif letter in left and letter in right and len(operands) > 1:
                groups["batch"].append(leaf)
            else:
                groups["rows" if letter in left else "columns"].append(leaf)
        return Work(2 if groups["inner"] else 1, **{name: tuple(found) for name, found in groups.items()})

    def output(self, name: str) -> None:
        self.outputs.append(name)

    def graph(self) -> Graph:
        factors = {
            name: Factor(name, size, frozenset(self.roles.get(name, "").split())) for name, size in self.sizes.items()
        }
        return Graph(
            dict(self.tensors),
            tuple(self.ops),
            dict(self.parameters),
            dict(self.buffers),
            dict(self.inputs),
            tuple(self.outputs),
            factors,
        )

    def _tensor(self, name: str, dims: Names, *, needs_grad: bool, itemsize_bytes: int | None = None) -> str:
        plain = tuple(tuple(_plain(letter) for letter in dim) for dim in dims)
        sizes = tuple(tuple(self.sizes[letter] for letter in dim) for dim in plain)
        size = itemsize_bytes or self.itemsize_bytes
        self.tensors[name] = Tensor(name, sizes, plain, size, needs_grad)
        return name

    def _choices(
        self, letters: Mapping[str, None], operands: list[Names], result: Names, linear: Sequence[Sequence[int]]
    ) -> list[Choice]:
        choices = [Choice("-", (R,) * len(operands), (R,))]
        for letter in letters:
            if letter.endswith("!") or f"{letter}!" in letters:
                continue
            states = tuple(_at(dims, letter) or V for dims in operands)
            made = _at(result, letter) or P
            size = self.sizes[_plain(letter)]
            choices.append(Choice(letter, states, (made,), size, _plain(letter)))
        for positions in linear:
            label = "+" + "+".join(map(str, positions))
            states = tuple(P if i in positions else V for i in range(len(operands)))
            choices.append(Choice(label, states, (P,)))
        return choices


def _dims(text: str) -> Names:
    words = re.findall(r"\([^)]*\)|\S+", text.strip())
    return tuple(tuple(word.strip("()").split()) for word in words)


def _letters(tensors: Sequence[Names]) -> list[str]:
    return [letter for dims in tensors for dim in dims for letter in dim]


def _plain(letter: str) -> str:
    return letter.rstrip("!'")


def _at(dims: Names, letter: str) -> State | None:
    for dim, factors in enumerate(dims):
        if letter in factors:
            return S(dim, factors.index(letter))
    return None


def mlp(*, layers: int = 1, batch: int = 8, width: int = 16, hidden: int = 32) -> Graph:
    """x -> relu(x A) B, again and again, and a sum for a loss; float32, no normalization."""
    b = Builder(
        {"b": batch, "d": width, "f": hidden},
        {"b": "batch", "d": "parameter normalized", "f": "parameter"},
        itemsize_bytes=4,
    )
    x = b.input("x", "b d")
    for i in range(layers):
        up = b.parameter(f"layers.{i}.up", "f d")
        down = b.parameter(f"layers.{i}.down", "d f")
        h = b.op("linear", "b d, f d -> b f", [x, up], linear=[[0]])
        h = b.op("relu", "b f -> b f", [h], saves=[], saves_result=True)
        x = b.op("linear", "b f, d f -> b d", [h, down], linear=[[0]])
    b.output(b.op("sum", "b d ->", [x], saves=[], linear=[[0]]))
    return b.graph()


@dataclass(frozen=True)
class LlamaSizes:
    """Llama-3 8B by default, at one sequence of 4096 tokens."""

    batch: int = 1
    seq: int = 4096
    layers: int = 1
    dim: int = 4096
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    ffn: int = 14336
    vocab: int = 128256


def llama(sizes: LlamaSizes = LlamaSizes()) -> Graph:
    """A bfloat16 Llama: embedding, RMSNorm, rotary, grouped attention, gated MLP, head, loss."""
    b = Builder(
        {
            "b": sizes.batch,
            "s": sizes.seq,
            "t": sizes.seq,
            "d": sizes.dim,
            "h": sizes.kv_heads,
            "g": sizes.group,
            "e": sizes.head_dim,
            "f": sizes.ffn,
            "v": sizes.vocab,
        },
        {
            "b": "batch",
            "s": "input",
            "t": "input",
            "d": "parameter normalized",
            "h": "parameter",
            "g": "parameter",
            "e": "parameter",
            "f": "parameter",
            "v": "parameter",
        },
    )
    tokens, targets = b.input("tokens", "b s"), b.input("targets", "b s")
    frequencies = b.buffer("frequencies", "s e")
    cos = b.op("cos", "s e -> s e", [frequencies], saves=[])
    table = b.parameter("embed.weight", "v d")
    x = b.op("embedding", "b s, v d -> b s d", [tokens, table], saves=[0], flops=sizes.batch * sizes.seq * sizes.dim)
    for i in range(sizes.layers):
        x = _attention(b, x, cos, f"layers.{i}.attention")
        x = _gated_mlp(b, x, f"layers.{i}.mlp")
    x = _norm(b, x, "norm.weight")
    logits = _linear(b, "b s d, v d -> b s v", x, b.parameter("head.weight", "v d"))
    logits = b.op("cast", "b s v -> b s v", [logits], saves=[], linear=[[0]], itemsize_bytes=4)
    b.output(b.op("cross_entropy", "b s v, b s ->", [logits, targets], itemsize_bytes=4))
    return b.graph()


def _linear(b: Builder, row: str, x: str, weight: str) -> str:
    return b.op("linear", row, [x, weight], linear=[[0]])


def _norm(b: Builder, x: str, name: str) -> str:
    weight = b.parameter(name, "d")
    wide = b.op("cast", "b s d -> b s d", [x], saves=[], linear=[[0]], itemsize_bytes=4)
    square = b.op("pow", "b s d -> b s d", [wide], itemsize_bytes=4)
    mean = b.op("mean", "b s d! -> b s", [square], saves=[], linear=[[0]], itemsize_bytes=4)
    scale = b.op("rsqrt", "b s -> b s", [mean], saves=[], saves_result=True, itemsize_bytes=4)
    wide = b.op("mul", "b s d, b s -> b s d", [wide, scale], linear=[[0]], itemsize_bytes=4)
    narrow = b.op("cast", "b s d -> b s d", [wide], saves=[], linear=[[0]])
    return b.op("mul", "b s d, d -> b s d", [narrow, weight], linear=[[0]])


def _attention(b: Builder, x: str, cos: str, path: str) -> str:
    y = _norm(b, x, f"{path}.norm.weight")
    q = _linear(b, "b s d, (h g e) d -> b s (h g e)", y, b.parameter(f"{path}.q.weight", "(h g e) d"))
    k = _linear(b, "b s d, (h e) d -> b s (h e)", y, b.parameter(f"{path}.k.weight", "(h e) d"))
    v = _linear(b, "b s d, (h e) d -> b s (h e)", y, b.parameter(f"{path}.v.weight", "(h e) d"))
    q = _view(b, "b s (h g e) -> b s (h g) e", q)
    q = _view(b, "b s (h g) e -> b (h g) s e", q)
    k = _view(b, "b s (h e) -> b s h e", k)
    k = _view(b, "b s h e -> b h s e", k)
    v = _view(b, "b s (h e) -> b s h e", v)
    v = _view(b, "b s h e -> b h s e", v)
    q = b.op("mul", "b (h g) s e, s e -> b (h g) s e", [q, cos], saves=[1], linear=[[0]])
    k = b.op("mul", "b h s e, s e -> b h s e", [k, cos], saves=[1], linear=[[0]])
    y = b.op("attention", "b (h g) s e!, b h t! e!, b h t! e! -> b (h g) s e!", [q, k, v], saves_result=True)
    y = _view(b, "b (h g) s e -> b s (h g) e", y)
    y = _view(b, "b s (h g) e -> b s (h g e)", y)
    weight = b.parameter(f"{path}.o.weight", "d (h g e)")
    y = _linear(b, "b s (h g e), d (h g e) -> b s d", y, weight)
    return b.op("add", "b s d, b s d -> b s d", [x, y], saves=[], linear=[[0, 1]])


def _view(b: Builder, row: str, x: str) -> str:
    return b.op("view", row, [x], saves=[], linear=[[0]], view=True)


def _gated_mlp(b: Builder, x: str, path: str) -> str:
    y = _norm(b, x, f"{path}.norm.weight")
    gate = _linear(b, "b s d, f d -> b s f", y, b.parameter(f"{path}.gate.weight", "f d"))
    gate = b.op("silu", "b s f -> b s f", [gate])
    up = _linear(b, "b s d, f d -> b s f", y, b.parameter(f"{path}.up.weight", "f d"))
    y = b.op("mul", "b s f, b s f -> b s f", [gate, up], linear=[[0], [1]])
    y = _linear(b, "b s f, d f -> b s d", y, b.parameter(f"{path}.down.weight", "d f"))
    return b.op("add", "b s d, b s d -> b s d", [x, y], saves=[], linear=[[0, 1]])

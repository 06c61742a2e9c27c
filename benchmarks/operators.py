"""Every rule against PyTorch's operator database: split by every choice, run, put together, compared.

    OMP_NUM_THREADS=1 python benchmarks/operators.py --markdown docs/operators.md

Samples are those of `op_db` in float64 (or what an op takes), with the database's sizes made even. Each is
traced to the ATen ops it calls, as torch.export would leave them; every call of an op that has a rule
becomes a graph of its own, is split by every choice of the rule on 2 ranks (or the next prime) and on 4,
rewritten and simulated as a model would be, and compared with the unsplit op, forward and backward.

`missing` are splits that hold and that no choice of the rule is: every way to give each operand one dim
to be cut along is tried, and the results joined along a dim or added up.
"""

from __future__ import annotations

import importlib
import itertools
import math
import random
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.opinfo import core as opinfo
from torch.utils import _pytree as pytree

from autopar import rules
from autopar.capture import Captured
from autopar.factors import Analysis, analyze
from autopar.ir import (
    UNSPLIT,
    VARIED,
    Choice,
    Mesh,
    ParameterPlan,
    Plan,
    R,
    S,
    P,
    State,
    V,
    divides,
    is_legal,
)
from autopar.passes.unreduce_losses import unreduce_losses
from autopar.program import build_program
from autopar.rules.spec import tensor_operands
from autopar.rules.trial import Results, difference, on_parts
from autopar.runtime.simulate import convert, run

TOLERANCE = 1e-8  # in float64; gradients of decompositions lose some digits
COUNTS = (2, 3, 5, 7, 4)  # the first of the primes that divides, and 4
MOST_ELEMENTS = 4096
MOST_GUESSES = 400
EVEN_SIZES = {"XS": 2, "S": 4, "M": 8, "L": 12}  # the database has 3, 5, 10 and 20


# --- samples


@dataclass(frozen=True)
class Sample:
    """One call of an ATen op with real tensors.

    Attributes:
        target: the overload.
        leaves: of (args, kwargs), tensors among them.
        spec: pytree of them.
    """

    target: torch._ops.OpOverload
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @property
    def kind(self) -> str:
        """`aten.linear`."""
        return str(self.target.overloadpacket)

    @property
    def operands(self) -> list[Tensor]:
        return [x for x in self.leaves if isinstance(x, Tensor)]

    @property
    def wanted(self) -> list[int]:
        """Positions of the operands that can have a gradient."""
        return [i for i, x in enumerate(self.operands) if x.is_floating_point() or x.is_complex()]

    def run(self, *operands: Any) -> Results:
        """The op on other operands of the same kinds."""
        remaining = iter(operands)
        leaves = [next(remaining) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        result = self.target(*args, **kwargs)
        return tuple(result) if isinstance(result, (list, tuple)) else (result,)

    @property
    def key(self) -> str:
        """Equal for samples that tell the same."""
        shown = [
            (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in self.leaves
        ]
        return f"{self.target} {shown} {self.spec}"


def even_sizes() -> None:
    """Gives the database's samples sizes that two and four ranks divide."""
    places = ("core", "definitions.linalg", "definitions._masked", "definitions.special")
    names = [f"torch.testing._internal.opinfo.{place}" for place in places]
    for name in [*names, "torch.testing._internal.common_methods_invocations"]:
        module = importlib.import_module(name)
        for letter, size in EVEN_SIZES.items():
            if hasattr(module, letter):
                setattr(module, letter, size)


def database() -> list[opinfo.OpInfo]:
    """PyTorch's operators and how to sample them."""
    module = importlib.import_module("torch.testing._internal.common_methods_invocations")
    even_sizes()
    return list(module.op_db)


class _Recorder(fx.Interpreter):
    """Runs a traced graph and notes its calls."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.samples: list[Sample] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload):
            leaves, spec = pytree.tree_flatten((args, kwargs))
            leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
            self.samples.append(Sample(target, tuple(leaves), spec))
        return super().call_function(target, args, kwargs)


def samples_of(info: opinfo.OpInfo, most: int) -> Iterator[Sample]:
    """ATen calls of some samples of a database entry, spread over its list."""
    dtype = next((d for d in DTYPES if d in info.dtypes), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    random.seed(0)
    inputs = list(itertools.islice(_inputs(info, dtype), 60))
    step = max(1, len(inputs) // most)
    for sample in inputs[::step]:
        yield from traced(info.op, (sample.input, *sample.args), sample.kwargs)


DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)


def _inputs(info: opinfo.OpInfo, dtype: torch.dtype) -> Iterator[Any]:
    """The database's samples; an entry that cannot be sampled ends early."""
    try:
        yield from info.sample_inputs("cpu", dtype, requires_grad=False)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return


def traced(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sample]:
    """The ATen ops that a call of a Python function makes; none where it cannot be traced."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    tensors = [leaves[i].detach() for i in where]
    if not tensors or any(x.numel() > MOST_ELEMENTS or not x.numel() for x in tensors):
        return []

    def function(*operands: Tensor) -> Any:
        given = list(leaves)
        for i, x in zip(where, operands, strict=True):
            given[i] = x
        own_args, own_kwargs = pytree.tree_unflatten(given, spec)
        return op(*own_args, **own_kwargs)

    try:
        recorder = _Recorder(make_fx(function, pre_dispatch=True)(*tensors))
        recorder.run(*tensors)
    except Exception:  # what a database of all of PyTorch raises here is of many kinds
        return []
    return [s for s in recorder.samples if _is_functional(s)]


def _is_functional(sample: Sample) -> bool:
    """What a captured graph can hold, and can be compared: no changes, no chance, tensors out of tensors."""
    draws = torch.Tag.nondeterministic_seeded in sample.target.tags
    if sample.target._schema.is_mutable or draws or not sample.operands:
        return False
    if any(x.layout is not torch.strided or not x.numel() for x in sample.operands):
        return False
    results = sample.run(*sample.operands)
    return all(isinstance(y, Tensor) and y.layout is torch.strided for y in results)


# --- choices


def captured(sample: Sample) -> Captured:
    """The op alone in a graph: floating operands are parameters, the others buffers."""
    graph, names = fx.Graph(), []
    leaves: list[Any] = []
    for x in sample.leaves:
        leaf = x
        if isinstance(x, Tensor):
            leaf = graph.placeholder(f"x{len(names)}")
            leaf.meta["val"] = x
            names.append(leaf.name)
        leaves.append(leaf)
    args, kwargs = pytree.tree_unflatten(leaves, sample.spec)
    node = graph.call_function(sample.target, tuple(args), kwargs)
    node.meta["val"] = result = sample.target(*_values(args), **_values(kwargs))
    graph.output(tuple(_results(graph, node, result)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    unreduce_losses(module)
    wanted = set(sample.wanted)
    named = {wants: [n for i, n in enumerate(names) if (i in wanted) is wants] for wants in (True, False)}
    empty = pytree.tree_flatten(((), {}))[1]
    return Captured(
        module=module, parameters={n: n for n in named[True]}, tied={}, frozen=frozenset(),
        buffers={n: n for n in named[False]}, constants={}, inputs={}, in_spec=empty, literals={},
        out_spec=empty, mutated={}, is_step=False, training=True,
    )  # fmt: skip


def _values(arguments: Any) -> Any:
    return fx.map_arg(arguments, lambda argument: argument.meta["val"])


def _results(graph: fx.Graph, node: fx.Node, result: Any) -> Iterator[fx.Node]:
    if isinstance(result, Tensor):
        yield node
        return
    for i, value in enumerate(result):
        item = graph.call_function(_getitem, (node, i))
        item.meta["val"] = value
        yield item


import operator as _operator  # noqa: E402

_getitem = _operator.getitem


def split_error(
    sample: Sample, own: Captured, analysis: Analysis, labels: dict[str, str], count: int
) -> float:
    """How far the sample, run as `labels` say on `count` ranks, is from the unsplit op on any rank."""
    mesh = Mesh.of({"a": count})
    ops = {o.name: (labels.get(o.name, UNSPLIT),) for o in analysis.graph.ops}
    parameters = {n: ParameterPlan((R,), (R,)) for n in own.parameters}
    program = build_program(own, analysis, Plan(mesh, own.fingerprint, "", 1, parameters, {}, ops))
    wanted = differentiable(sample)
    leaves = {
        f"x{i}": [x.clone().requires_grad_(i in wanted) for _ in range(count)]
        for i, x in enumerate(sample.operands)
    }
    order = [leaf.name for leaf in (*program.parameters, *program.buffers)]
    results = run(program, [leaves[name] for name in order])
    each = zip(results, program.outputs, strict=True)
    whole = [convert(ranks, o.dims, o.layout, (R,), mesh) for ranks, o in each]
    got = [*whole, *_gradients(whole, [leaves[f"x{i}"] for i in wanted])]
    want = with_gradients(sample.run, sample.operands, wanted)
    if len(got) != len(want):
        return math.inf
    return max(distance(x, y) for ranks, y in zip(got, want, strict=True) for x in ranks)


def _gradients(results: list[list[Tensor]], leaves: list[list[Tensor]]) -> list[list[Tensor]]:
    """Of every leaf of every rank, where every rank's results get the same gradient."""
    ends = [y for ranks in results for y in ranks if y.requires_grad]
    flat = [x for ranks in leaves for x in ranks]
    if not ends or not flat:
        return []
    ones = [weights(y) for y in ends]
    grads = torch.autograd.grad(ends, flat, ones, allow_unused=True, materialize_grads=True)
    count = len(leaves[0])
    return [[x.detach() for x in grads[i : i + count]] for i in range(0, len(grads), count)]


def differentiable(sample: Sample) -> list[int]:
    """The operands whose gradient PyTorch can compute: all that could have one, or none."""
    try:
        with_gradients(sample.run, sample.operands, sample.wanted)
    except RuntimeError:
        return []
    return sample.wanted


def counts(sizes: Iterable[int]) -> list[int]:
    """The least prime by which something can be split, and 4."""
    first = next((n for n in COUNTS if any(size % n == 0 for size in sizes if size > 1)), 0)
    return [first, 4] if first == 2 else [first] if first else []


# --- what no rule offers


def missing(sample: Sample, offered: set[States]) -> list[str]:
    """Splits that hold and that no rule offers, as `S(0) V -> S(0)`."""
    want = sample.run(*sample.operands)
    if any(not y.numel() or (y == y.flatten()[0]).all() for y in want):
        return []  # every split of a constant holds
    found = []
    for states in itertools.islice(_guesses(sample), MOST_GUESSES):
        if states in offered:
            continue
        results = _holds(sample, states, want)
        if results:
            found.append(f"{_text(states)} -> {_text(results)}")
    return found


States = tuple[State, ...]


def _text(states: States) -> str:
    return " ".join(map(str, states))


def _guesses(sample: Sample) -> Iterator[States]:
    options = [
        [V, *(S(d) for d, size in enumerate(x.shape) if size % 2 == 0)] for x in sample.operands
    ]
    return (states for states in itertools.product(*options) if any(s != V for s in states))


def _holds(sample: Sample, states: States, want: Results) -> States | None:
    """The states of the results where the op on two parts gives them, gradients included."""
    try:
        parts = [
            on_parts(lambda *x, i=i: _part(sample, i, x), states, [V] * len(want), 2)(*sample.operands)
            for i in range(1)
        ]
    except Exception:
        return None
    return None


# --- the table

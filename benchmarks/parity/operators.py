"""Every rule against PyTorch's operator database: split by every choice, run, put together, compared.

    OMP_NUM_THREADS=1 python benchmarks/parity/operators.py --markdown benchmarks/results/operators.md

Samples are those of `op_db` in float64 (or what an op takes), with the database's sizes made even. Each is
traced to the ATen ops it calls, as torch.export would leave them; every call of an op that has a rule
becomes a graph of its own, is split by every choice of the rule on 2 ranks (or the next prime) and on 4,
rewritten and simulated as a model would be, and compared with the unsplit op, forward and backward.

With --uneven the sizes are odd, and every choice runs on 2 and 3 ranks that do not divide what it splits.

`missing` are splits that hold and that no choice of the rule is: every way to give each operand one dim
to be cut along is tried, and the results joined along a dim or added up.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import operator
import random
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
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

from autopar.analysis.factors import Analysis, analyze
from autopar.capture.captured import Captured
from autopar.ir import UNSPLIT, VARIED, Choice, Mesh, Op, P, ParameterPlan, Plan, R, S, State, V, is_legal
from autopar.passes.cleanup.unreduce_losses import unreduce_losses
from autopar.program.program import build_program
from autopar.proof.lockstep import convert, run
from autopar.rules.trial import Results, dense, difference, distance, join, on_parts, run_parts, weights, with_gradients
from benchmarks.tables import markdown_table

TOLERANCE = 1e-8  # in float64; gradients of decompositions lose some digits
COUNTS = (2, 3, 5, 7, 4)  # the first of the primes that divides, and 4
MOST_ELEMENTS = 4096
MOST_INPUTS = 250
MOST_GUESSES = 400
# They write or read at positions of other operands without a check, and parts that do not fit together
# break the heap: of these only what a rule offers is run.
UNCHECKED = tuple(
    f"aten.{name}"
    for name in (
        "max_unpool2d",
        "max_unpool3d",
        "max_pool2d_with_indices_backward",
        "segment_reduce",
        "lu_solve",
        "linalg_lu_solve",
        "linalg_ldl_solve",
        "lu_unpack",
        "ormqr",
        "linalg_householder_product",
        "masked_scatter",
        "put",
        "embedding_bag",
        "_unsafe_masked_index",
        "_unsafe_masked_index_put_accumulate",
        "_embedding_bag",
        "index_reduce",
        "scatter_reduce",
        "native_batch_norm",
        "native_group_norm",
        "_softmax_backward_data",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
    )
)
EVEN_SIZES = {"XS": 2, "S": 4, "M": 8, "L": 12}  # the database has 3, 5, 10 and 20
ODD_SIZES = {"XS": 3, "S": 5, "M": 7, "L": 9}


# --- samples


@dataclass(frozen=True)
class Sample:
    """One call of an ATen op with real tensors.

    Attributes:
        target: the overload.
        leaves: leaves of (args, kwargs), tensors among them.
        spec: pytree of these leaves.
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
        shown = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in self.leaves]
        return f"{self.target} {shown} {self.spec}"


def resize(sizes: dict[str, int]) -> None:
    """Gives the database's samples other sizes."""
    places = ("core", "definitions.linalg", "definitions._masked", "definitions.special")
    names = [f"torch.testing._internal.opinfo.{place}" for place in places]
    for name in [*names, "torch.testing._internal.common_methods_invocations"]:
        module = importlib.import_module(name)
        for letter, size in sizes.items():
            if hasattr(module, letter):
                setattr(module, letter, size)


def database(*, uneven: bool = False) -> list[opinfo.OpInfo]:
    """PyTorch's operators and how to sample them, with sizes that two and four ranks divide, or odd ones."""
    module = importlib.import_module("torch.testing._internal.common_methods_invocations")
    resize(ODD_SIZES if uneven else EVEN_SIZES)
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
    # Closed here: a generator that dies while another call is traced would be traced too.
    with contextlib.closing(_inputs(info, dtype)) as given:
        inputs = [x for x in itertools.islice(given, MOST_INPUTS) if _is_small((x.input, x.args, x.kwargs))]
    step = max(1, len(inputs) // most)
    for sample in inputs[::-step]:  # the first of a list are often numbers
        yield from traced(info.op, (sample.input, *sample.args), sample.kwargs)


DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)


def _inputs(info: opinfo.OpInfo, dtype: torch.dtype) -> Generator[Any, None, None]:
    """The database's samples; an entry that cannot be sampled ends early."""
    try:
        yield from info.sample_inputs("cpu", dtype, requires_grad=False)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return


def _is_small(arguments: Any) -> bool:
    """Whether there are tensors, none of them empty or large."""
    tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
    return bool(tensors) and all(0 < x.numel() <= MOST_ELEMENTS for x in tensors)


def traced(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sample]:
    """The ATen ops that a call of a Python function makes; none where it cannot be traced."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    tensors = [leaves[i].detach() for i in where]

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
    if sample.target._schema.is_mutable or "empty" in sample.kind or not sample.operands:
        return False
    if any(x.layout is not torch.strided or not x.numel() for x in sample.operands):
        return False
    draws = torch.Tag.nondeterministic_seeded in sample.target.tags
    try:
        results, *again = (sample.run(*sample.operands) for _ in range(10 if draws else 1))
    except RuntimeError:  # as_strided of a view, whose storage the sample has not
        return False
    if not all(isinstance(y, Tensor) and y.layout is torch.strided for y in results):
        return False
    return all(all(map(torch.equal, results, each)) for each in again)


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
        module=module,
        parameters={n: n for n in named[True]},
        tied={},
        frozen=frozenset(),
        buffers={n: n for n in named[False]},
        constants={},
        inputs={},
        in_spec=empty,
        literals={},
        out_spec=empty,
        mutated={},
        is_step=False,
        training=True,
    )


def _values(arguments: Any) -> Any:
    return fx.map_arg(arguments, lambda argument: argument.meta["val"])


def _results(graph: fx.Graph, node: fx.Node, result: Any) -> Iterator[fx.Node]:
    if isinstance(result, Tensor):
        yield node
        return
    for i, value in enumerate(result):
        item = graph.call_function(operator.getitem, (node, i))
        item.meta["val"] = value
        yield item


def split_error(sample: Sample, own: Captured, analysis: Analysis, labels: dict[str, str], count: int) -> float:
    """How far the sample, run as `labels` say on `count` ranks, is from the unsplit op on any rank."""
    mesh = Mesh.of({"a": count})
    ops = {o.name: (labels.get(o.name, UNSPLIT),) for o in analysis.graph.ops}
    parameters = {n: ParameterPlan((R,), (R,)) for n in own.parameters}
    program = build_program(own, analysis, Plan(mesh, own.fingerprint, "", 1, parameters, {}, ops))
    wanted = differentiable(sample)
    leaves = {
        f"x{i}": [x.clone().requires_grad_(i in wanted) for _ in range(count)] for i, x in enumerate(sample.operands)
    }
    order = [node.name for node in program.module.graph.find_nodes(op="placeholder")]
    results = run(program, [leaves[name] for name in order])
    each = zip(results, program.outputs, strict=True)
    whole = [convert(ranks, o.dims, o.layout, (R,), mesh) for ranks, o in each]
    got = [*whole, *_gradients(whole, [leaves[f"x{i}"] for i in wanted])]
    want = with_gradients(sample.run, sample.operands, wanted)
    if len(got) != len(want):
        return math.inf
    return max(distance(x, y) for ranks, y in zip(got, want, strict=True) for x in ranks)


def _gradients(results: list[list[Tensor]], leaves: list[list[Tensor]]) -> list[list[Tensor]]:
    """Gradients of every leaf of every rank, where every rank's results get the same gradient."""
    ends = [y for ranks in results for y in ranks if y.requires_grad]
    flat = [x for ranks in leaves for x in ranks]
    if not ends or not flat:
        return []
    ones = [weights(y) for y in ends]
    grads = torch.autograd.grad(ends, flat, ones, allow_unused=True, materialize_grads=True)
    count = len(leaves[0])
    return [[dense(x) for x in grads[i : i + count]] for i in range(0, len(grads), count)]


def differentiable(sample: Sample) -> list[int]:
    """The operands whose gradient PyTorch can compute: all that could have one, or none."""
    try:
        with_gradients(sample.run, sample.operands, sample.wanted)
    except RuntimeError:
        return []
    return sample.wanted


def counts(sizes: Iterable[int], *, uneven: bool) -> list[int]:
    """The least prime by which something can be split, and 4; or those of 2 and 3 that divide nothing."""
    if uneven:
        return [count for count in (2, 3) if all(size % count for size in sizes)]
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
    options = [[V, *(S(d) for d, size in enumerate(x.shape) if size % 2 == 0)] for x in sample.operands]
    return (states for states in itertools.product(*options) if any(s != V for s in states))


def _holds(sample: Sample, states: States, want: Results) -> States | None:
    """The states of the results where the op on two parts gives them, gradients included."""
    try:
        parts = run_parts(sample.run, sample.operands, states, 2)
        results = tuple(_joins(each, y) for each, y in zip(zip(*parts, strict=True), want, strict=True))
        if any(state == V for state in results):
            return None
        split = on_parts(sample.run, states, results, 2)
        error = difference(split, sample.run, sample.operands, differentiable(sample))
    except (RuntimeError, ValueError, IndexError, TypeError):  # an op that rejects such parts
        return None
    return results if error < TOLERANCE else None


def _joins(parts: Sequence[Tensor], want: Tensor) -> State:
    """How parts make up a result; V for not at all."""
    options = [*(S(d) for d in range(want.ndim)), *([] if want.dtype is torch.bool else [P])]
    for state in options:
        if all(x.ndim == want.ndim for x in parts) and _fits(parts, state, want):
            return state
    return V


def _fits(parts: Sequence[Tensor], state: State, want: Tensor) -> bool:
    """Whether shapes allow it, and values agree."""
    expected = list(want.shape)
    if state.kind == "S":
        expected[state.dim] = sum(x.shape[state.dim] for x in parts) // len(parts)
        if want.shape[state.dim] != expected[state.dim] * len(parts):
            return False
    if any(list(x.shape) != expected for x in parts):
        return False
    return distance(join(parts, state), want) < TOLERANCE


# --- the table


@dataclass
class Row:
    """The results of one ATen op.

    Attributes:
        kind: `aten.linear`.
        samples: number of its calls that were tried.
        covered: number of these calls that a rule covers.
        tried: number of splits that were compared.
        labels: labels of the choices among these splits.
        wrong: choices that do not hold.
        missing: split that holds without a choice -> number of samples on which it does.
    """

    kind: str
    samples: int = 0
    covered: int = 0
    tried: int = 0
    labels: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)

    @property
    def has_rule(self) -> bool:
        """Whether a rule split it."""
        return bool(self.tried)

    @property
    def cells(self) -> tuple[str, ...]:
        gaps = "; ".join(f"{text} ({n})" for text, n in self.missing.most_common(4))
        more = f"; {len(self.missing) - 4} more" if len(self.missing) > 4 else ""
        wrong = "; ".join(self.wrong[:3]) if self.wrong else "0"
        return (
            self.kind.removeprefix("aten."),
            f"{self.covered} of {self.samples}",
            str(self.tried),
            wrong,
            gaps + more or "0",
        )

    @property
    def cells_without_rule(self) -> tuple[str, ...]:
        name, *_, gaps = self.cells
        return name, str(self.samples), gaps


COLUMNS = ("op", "samples with a rule", "splits compared", "wrong", "missing")


def measure(row: Row, sample: Sample, *, search: bool = True, uneven: bool = False) -> None:
    """Adds one sample to its row: every choice of the rule, then what no choice is."""
    own = captured(sample)
    try:
        analysis = analyze(own)
    except Exception as fault:
        row.wrong.append(f"the rule raises {fault!r}"[:90])
        return
    offered: set[States] = set()
    ops = [o for o in analysis.graph.ops if o.operands]
    if all(o.kind != row.kind for o in ops):
        return  # the clean-up leaves none of it, as of broadcast_tensors
    row.samples += 1
    row.covered += all(o.has_rule for o in ops)
    for op in ops:
        for choice in op.choices:
            if choice.label in (UNSPLIT, VARIED):
                continue
            if op is ops[0]:
                offered.add(tuple(_whole(state) for state in choice.operands))
            _try(row, sample, own, analysis, op, choice, uneven)
    if search and sample.kind not in UNCHECKED:
        row.missing.update(missing(sample, offered))


def _whole(state: State) -> State:
    """A state as the search writes it: the major factor of a dim stands for the dim."""
    return S(state.dim) if state.kind == "S" else V if state == R else state


def _try(row: Row, sample: Sample, own: Captured, analysis: Analysis, op: Op, choice: Choice, uneven: bool) -> None:
    sizes = [choice.size] if choice.size > 1 else [4]
    for count in counts(sizes, uneven=uneven):
        if not is_legal(analysis.graph, op, (choice.label,), Mesh.of({"a": count})):
            continue
        row.tried += 1
        row.labels.add(choice.label)
        try:
            error = split_error(sample, own, analysis, {op.name: choice.label}, count)
        except Exception as fault:
            row.wrong.append(f"{choice.label} on {count}: {str(fault).splitlines()[0][:80]}")
            continue
        if not error < TOLERANCE:
            row.wrong.append(f"{choice.label} on {count}: {error:.1e}")


def collect(infos: Iterable[opinfo.OpInfo], most: int) -> dict[str, list[Sample]]:
    """Samples by ATen op, each once."""
    found: dict[str, dict[str, Sample]] = defaultdict(dict)
    for info in infos:
        for sample in samples_of(info, most):
            found[sample.kind].setdefault(sample.key, sample)
    return {kind: list(samples.values()) for kind, samples in sorted(found.items())}


def spread(samples: list[Sample], most: int) -> list[Sample]:
    """At most so many of them, from all over the list."""
    step = max(1, math.ceil(len(samples) / most))
    return samples[::step]


def markdown(rows: list[Row], samples: int, most: int) -> str:
    """The tables as a page."""
    ruled, others = [r for r in rows if r.covered], [r for r in rows if not r.covered]
    split = sum(r.has_rule for r in ruled)
    tried, wrong = sum(r.tried for r in ruled), sum(len(r.wrong) for r in ruled)
    lines = [
        "# Rules against PyTorch's operator database",
        "",
        "Samples of `op_db` (torch.testing._internal.common_methods_invocations), in float64 or what an op takes,",
        "traced to the ATen ops that a captured graph keeps. Every choice that the op's rule offers runs on 2 ranks",
        "(or the next prime that divides) and on 4, through the rewriting and the simulation that models go through;",
        "results and gradients of every rank are compared with the unsplit op, to 1e-8 of the largest value. Made by",
        f"`OMP_NUM_THREADS=1 python benchmarks/parity/operators.py --samples {samples} --most {most} "
        "--markdown benchmarks/results/operators.md`.",
        "",
        f"**{len(ruled)} ATen ops have a rule that covers a sample, {split} of them are split by it; "
        f"{tried} splits compared, {wrong} wrong.**",
        "",
        "`missing` are splits into two that hold, forward and backward, and that no choice is, with the number of",
        "samples: every way to cut each operand along one dim, or not at all, is tried (at most",
        f"{MOST_GUESSES} ways a sample), and the results joined along a dim or added up (P). Some are worth nothing",
        "(a dim of size 2 whose halves happen not to meet); windows that do not overlap (pooling with stride and",
        "kernel alike) and norms that are sums (p = 1) are what a rule could still offer.",
        "",
        *markdown_table(COLUMNS, [row.cells for row in ruled]),
        "",
        f"## {len(others)} ops of the database of which no sample is covered by a rule",
        "",
        "Some have a rule that refuses these samples, such as `linalg_solve_triangular` with `left=False` or an",
        "operand that is broadcast.",
        "",
        "They run replicated. Some have a size that depends on values, some work on all elements at once; those with",
        "a split in the last column could have a rule.",
        "",
        *markdown_table(("op", "samples", "splits that hold"), [row.cells_without_rule for row in others]),
    ]
    return "\n".join(lines) + "\n"


@click.command(context_settings={"show_default": True})
@click.option("--only", default="", help="Database entries, separated by commas; all by default.")
@click.option("--samples", default=4, help="Of every database entry.")
@click.option("--most", default=10, help="Samples of every ATen op.")
@click.option("--uneven", is_flag=True, help="On parts of different sizes.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the table there.")
def main(only: str, samples: int, most: int, uneven: bool, path: Path | None) -> None:
    """Print a row per ATen op; exit 1 if any choice is wrong."""
    warnings.simplefilter("ignore")
    console = Console()
    start_seconds = time.perf_counter()
    chosen = set(only.split(",")) - {""}
    infos = [info for info in database(uneven=uneven) if not chosen or info.name in chosen]
    found = collect(track(infos, description="samples", console=console), samples)
    rows = []
    for kind, own in track(found.items(), description="ops", console=console):
        rows.append(Row(kind))
        for sample in spread(own, most):
            measure(rows[-1], sample, search=not uneven, uneven=uneven)
        console.print("  ".join(rows[-1].cells))
    rows = [row for row in rows if row.samples or row.wrong]
    console.print(
        f"{sum(r.covered > 0 for r in rows)} ops with a rule, {sum(r.has_rule for r in rows)} split by it, "
        f"{sum(bool(r.wrong) for r in rows)} wrong, {time.perf_counter() - start_seconds:.0f} s"
    )
    if path is not None:
        path.write_text(markdown(rows, samples, most))
    sys.exit(1 if any(row.wrong for row in rows) else 0)


if __name__ == "__main__":
    main()

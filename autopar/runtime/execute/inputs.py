"""Arguments of a call: matched with a program, checked, and cut into micro-batches and into this rank's part."""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch import pytree
from autopar.capture.checks import refuse_layouts
from autopar.errors import StepError
from autopar.ir import Dims, R, local_shape
from autopar.ir.batches import sizes_of_micro_batches
from autopar.ir.share import Share
from autopar.ops.sharding import shard
from autopar.program.program import Program, TensorSpec
from autopar.runtime.collectives.transfer import converted
from autopar.runtime.execute.outputs import local_part
from autopar.runtime.ranks.world import World

Shape = tuple[int, ...]
Form = Literal["whole", "part", ""]


def shape_words(shapes: Sequence[Sequence[int]]) -> str:
    """Shapes for people, such as `[8, 8], [8]`."""
    return ", ".join(str(list(shape)) for shape in shapes)


def shapes_of(tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
    """The shapes of tensors, in order."""
    return tuple(tuple(x.shape) for x in tensors)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, flattened.

    Attributes:
        tensors: tensor leaves in pytree order.
        literals: leaf position -> value, for the other leaves.
        spec: the pytree of (args, kwargs); kwargs are ordered by name.
        whole: positions of the DTensors among the tensors, which are known to be whole.
    """

    tensors: tuple[Tensor, ...]
    literals: Mapping[int, Any]
    spec: pytree.TreeSpec
    whole: frozenset[int] = frozenset()

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments of a call, flattened. DTensors, as `outputs="dtensor"` gives them, are kept.

        Raises CaptureError for a sparse or nested tensor.
        """
        pytree.register_objects((args, kwargs))
        leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        refuse_layouts(given)
        literals = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        whole = frozenset(i for i, x in enumerate(given) if isinstance(x, DTensor))
        return cls(tuple(given), literals, spec, whole)

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with other tensors in place."""
        remaining = iter(tensors)
        count = len(self.tensors) + len(self.literals)
        leaves = [self.literals[i] if i in self.literals else next(remaining) for i in range(count)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the tensors, in order."""
        return shapes_of(self.tensors)

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each tensor, such as `[0][1]` or `[1]['mask']`, which is the same in every call."""
        pairs, _ = pytree.tree_flatten_with_path(self.rebuild(self.tensors))
        return tuple(pytree.keystr(path) for path, leaf in pairs if isinstance(leaf, Tensor))

    @property
    def digest(self) -> str:
        """A digest of the values; "" where there are none, as on the meta device. DTensors need none."""
        if any(x.is_meta for x in self.tensors):
            return ""
        return digest_of(x for x in self.tensors if not isinstance(x, DTensor))

    @property
    def differentiable(self) -> frozenset[int]:
        """Positions of the tensors to which a gradient is to flow."""
        return frozenset(i for i, x in enumerate(self.tensors) if x.requires_grad and torch.is_grad_enabled())

    def of_shapes(self, shapes: Sequence[Shape]) -> Arguments:
        """The same inputs with tensors of these shapes; other shapes than its own have no values."""
        tensors = [
            x
            if tuple(x.shape) == shape
            else torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
            for x, shape in zip(self.tensors, shapes, strict=True)
        ]
        return replace(self, tensors=tuple(tensors))

    def without_values(self) -> Arguments:
        """The same inputs with tensors of the meta device."""
        tensors = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in self.tensors]
        return replace(self, tensors=tuple(tensors), whole=frozenset())

    def fits(self, program: Program) -> bool:
        """Whether the program was captured for arguments of this tree, these literals and dtypes."""
        return (
            self.spec == program.in_spec
            and _typed(self.literals) == _typed(program.literals)
            and [x.dtype for x in self.tensors] == [s.dtype for s in program.inputs]
        )

    def gets_gradients(self, program: Program) -> bool:
        """Whether the program gives a gradient to every tensor that asks for one; a step refuses to."""
        return program.is_step or all(program.inputs[i].name in program.differentiable for i in self.differentiable)

    def with_gradients_of_own_loss(self, wholes: Sequence[Shape]) -> Arguments:
        """The same inputs, where a part's gradient is that of this rank's loss: see [Note: a loss outside].

        Args:
            wholes: the shapes of the whole batch.
        """
        tensors = list(self.tensors)
        for i in self.differentiable - self.whole:
            parts = math.prod(wholes[i]) // max(tensors[i].numel(), 1)
            tensors[i] = _multiplied(tensors[i], parts)
        return replace(self, tensors=tuple(tensors))


def _multiplied(x: Tensor, factor: int) -> Tensor:
    """The same values, whose gradient is multiplied on its way back."""
    own = x.view_as(x)
    own.register_hook(lambda gradient: gradient * factor)
    return own


def digest_of(tensors: Iterable[Tensor]) -> str:
    """A digest of the values of plain tensors."""
    found = hashlib.blake2b(digest_size=16)
    for x in tensors:
        data = x.detach().cpu().contiguous().reshape(-1)
        found.update(data.view(torch.uint8).numpy().data if data.numel() else b"")
    return found.hexdigest()


def _typed(literals: Mapping[int, Any]) -> dict[int, tuple[type, Any]]:
    """Literals with their types: 1, 1.0 and True are equal, and make different graphs."""
    return {i: (type(value), value) for i, value in literals.items()}


def micro_batch(arguments: Arguments, micro_batches: int, number: int = 0) -> list[Tensor]:
    """A micro-batch of a batch, by its number; of 30 rows four micro-batches have 8, 8, 7 and 7.

    Raises StepError if a micro-batch would have no rows, or the tensors cannot be cut in proportion.
    """
    if micro_batches == 1:
        return list(arguments.tensors)
    common, sizes = _cut_rows(arguments, micro_batches)
    first, size = sum(sizes[:number]), sizes[number]

    def rows(x: Tensor) -> Tensor:
        each = x.shape[0] // common if common else 0
        return x[first * each : (first + size) * each]

    return [rows(x) if x.ndim else x for x in arguments.tensors]


def rows_of_micro_batches(arguments: Arguments, micro_batches: int) -> tuple[int, ...]:
    """The rows of every micro-batch, in a unit that all tensors have in common. Raises StepError as `micro_batch`."""
    return (1,) if micro_batches == 1 else _cut_rows(arguments, micro_batches)[1]


def _cut_rows(arguments: Arguments, micro_batches: int) -> tuple[int, tuple[int, ...]]:
    """The rows that all tensors have in common, and how many of them each micro-batch has."""
    lengths = {x.shape[0]: number for number, x in enumerate(arguments.tensors) if x.ndim}
    common = math.gcd(*lengths)
    if common % micro_batches and common != min(lengths):
        first, last = min(lengths), max(lengths)
        raise StepError(
            f"Tensors {lengths[first]} and {lengths[last]} of the batch have {first} and {last} rows, which "
            f"{micro_batches} micro-batches of different sizes do not cut in proportion. Take micro_batches=1, another "
            f"number that divides {common}, or a row of each tensor for every sample."
        )
    if 0 < common < micro_batches:
        raise StepError(
            f"Tensor {lengths[min(lengths)]} of the batch has {common} rows, of which {micro_batches} micro-batches "
            f"cannot each have one. Use at most micro_batches={common}, or a batch of at least {micro_batches} rows."
        )
    return common, sizes_of_micro_batches(common, micro_batches)


def whole_shapes(program: Program, micro_batches: int) -> tuple[Shape, ...]:
    """The global shapes of the inputs of a whole step."""
    every = [[spec.shape for spec in program.of(i).inputs] for i in range(micro_batches)]
    return tuple(map(_together, zip(*every, strict=True)))


def part_shapes(program: Program, micro_batches: int) -> tuple[Shape, ...]:
    """The shapes of a rank's parts of the inputs of a whole step: of all micro-batches, or of the batch as a whole."""
    if cuts_alike(program):
        return tuple(_together([shape] * micro_batches) for shape in program.input_parts)
    wholes = zip(program.inputs, whole_shapes(program, micro_batches), strict=True)
    return tuple(local_shape(_dims_of_whole(spec, whole), spec.layout, program.plan.mesh) for spec, whole in wholes)


def cuts_alike(program: Program) -> bool:
    """Whether every rank has as many rows of each micro-batch as any other; else parts that ranks give are gathered."""
    return program.smaller is None and not any(isinstance(x, Share) for shape in program.input_parts for x in shape[:1])


def _dims_of_whole(spec: TensorSpec, whole: Shape) -> Dims:
    """The factors of an input of a whole step, by those of a micro-batch."""
    if not whole:
        return spec.dims
    _, *within = spec.dims[0] or (1,)
    return ((whole[0] // math.prod(within), *within), *spec.dims[1:])


def _together(shapes: Sequence[Shape]) -> Shape:
    """The shape of tensors one after the other; that of one of them where they have no dims."""
    first = shapes[0]
    return (functools.reduce(operator.add, (shape[0] for shape in shapes)), *first[1:]) if first else first


def form(arguments: Arguments, wholes: Sequence[Shape], parts: Sequence[Shape]) -> Form:
    """Whether the tensors have a program's global shapes, or some have those of this rank's part, or neither."""
    if arguments.shapes == wholes:
        return "whole"
    fits = all(x in known for x, *known in zip(arguments.shapes, wholes, parts, strict=True))
    return "part" if fits else ""


def parts_given(program: Program, arguments: Arguments, wholes: Sequence[Shape]) -> int:
    """The number of parts of a batch of several micro-batches, if each rank gave its own rows; else 1.

    It is 1, too, if some tensor was given whole, or ranks have different numbers of rows: `cut_inputs` then gathers.

    Args:
        program: the program of a micro-batch.
        arguments: the arguments of this rank.
        wholes: the shapes of the whole batch.
    """
    pairs = [pair for pair in zip(wholes, arguments.shapes, strict=True) if pair[0]]
    if not cuts_alike(program) or any(whole == own for whole, own in pairs):
        return 1
    return max((whole[0] // own[0] for whole, own in pairs if own[0]), default=1)


def cuts(program: Program, world: World) -> list[Shape]:
    """The number of parts into which the program cuts every dim of every input."""
    return [
        tuple(
            math.prod(
                size for state, size in zip(spec.layout, world.mesh.sizes, strict=True) if state[:2] == ("S", dim)
            )
            for dim in range(len(spec.shape))
        )
        for spec in program.inputs
    ]


def shapes_of_parts(arguments: Arguments, known: Mapping[str, Shape]) -> tuple[Shape, ...]:
    """The shapes of the whole batch, from this rank's parts and the cuts of earlier inputs with the same paths.

    Args:
        known: path of an input -> number of parts into which each of its dims was cut.

    A tensor at a new place is taken to be cut along dim 0 as the others are, if it has as many rows; one that
    came as a DTensor is whole.
    """
    pairs = list(zip(arguments.paths, arguments.shapes, strict=True))
    by_rows = {
        shape[0]: known[path][0]
        for number, (path, shape) in enumerate(pairs)
        if shape and number not in arguments.whole and len(known.get(path, ())) == len(shape)
    }

    def cut(number: int, path: str, shape: Shape) -> Shape:
        if number in arguments.whole:
            return (1,) * len(shape)
        if len(known.get(path, ())) == len(shape):
            return known[path] if shape else ()
        return (by_rows.get(shape[0], 1), *(1 for _ in shape[1:]))

    return tuple(
        tuple(size * parts for size, parts in zip(shape, cut(number, path, shape), strict=True))
        for number, (path, shape) in enumerate(pairs)
    )


def fitting_micro_batches(shapes: Sequence[Shape], usual: int, takes: Callable[[int], bool]) -> int:
    """The number of micro-batches for a batch whose shapes differ from those of the first batch.

    It is the usual number where each micro-batch then has a row, and the schedule takes it; else the nearest one that
    the schedule takes, if it takes any. Tensors that have other numbers of rows than the shortest are cut in
    proportion, which not every number allows.
    """
    lengths = [shape[0] for shape in shapes if shape]
    rows = math.gcd(*lengths)
    if usual == 1 or not rows:
        return usual
    possible = (n for n in range(1, rows + 1) if rows == min(lengths) or rows % n == 0)
    return min(possible, key=lambda n: (not takes(n), abs(n - usual)))


def cut_inputs(program: Program, arguments: Arguments, micro_batches: int, world: World) -> list[list[Tensor]]:
    """For every micro-batch this rank's inputs.

    Where whole tensors were given as well as parts, such as results of `model(...)`, parts of a batch of several
    micro-batches are gathered: micro-batch i of a whole tensor has rows of all ranks in turn, and of a part those of
    this rank. A forward's inputs are differentiable, if they were given so.

    Raises StepError for a tensor of another shape, and for one whose gradient would be lost.
    """
    if program.is_step:
        _refuse_gradients(program, arguments)
    tensors = list(arguments.tensors)
    wholes, parts = whole_shapes(program, micro_batches), part_shapes(program, micro_batches)
    if micro_batches > 1 and (_is_mixture(wholes, arguments) or not cuts_alike(program)):
        tensors = [
            x if tuple(x.shape) == whole or tuple(x.shape) != part else _gathered(spec, x, whole, world)
            for spec, x, whole, part in zip(program.inputs, tensors, wholes, parts, strict=True)
        ]
    every = [program.of(i).inputs for i in range(micro_batches)]
    columns = [
        _cut_input(specs, x, whole, part, world)
        for specs, x, whole, part in zip(zip(*every, strict=True), tensors, wholes, parts, strict=True)
    ]
    return [[column[i] for column in columns] for i in range(micro_batches)]


def _is_mixture(wholes: Sequence[Shape], arguments: Arguments) -> bool:
    """Whether some tensors with dims have the shapes of the whole batch, and others have not."""
    return len({whole == shape for whole, shape in zip(wholes, arguments.shapes, strict=True) if shape}) > 1


def _gathered(spec: TensorSpec, x: Tensor, whole: Shape, world: World) -> Tensor:
    """The whole tensor of which ranks have parts in the layout of an input; a DTensor as it is."""
    if isinstance(x, DTensor):
        return x
    dims = _dims_of_whole(spec, whole)
    replicated = (R,) * len(spec.layout)
    own = x.detach().to(world.device).contiguous()
    return converted(own, dims, spec.layout, replicated, world)


def _refuse_gradients(program: Program, arguments: Arguments) -> None:
    for spec, x in zip(program.inputs, arguments.tensors, strict=True):
        if x.requires_grad:
            raise StepError(
                f"Input {spec.name!r} requires a gradient, but a step's gradients flow only to parameters. Compute the "
                "loss outside of the model, which then returns what the loss is computed of: model(x) and "
                "loss.backward() give its inputs gradients, too (docs/training.md). Where nothing trains before this "
                "model, give x.detach()."
            )


def _cut_input(specs: Sequence[TensorSpec], x: Tensor, whole: Shape, part: Shape, world: World) -> list[Tensor]:
    """What this rank takes of an input, for every micro-batch, of which each has a spec."""
    spec, micro_batches = specs[0], len(specs)
    if tuple(x.shape) not in (whole, part):
        raise _wrong_shape(spec, x, whole, part, micro_batches)
    takes_gradient = x.requires_grad and torch.is_grad_enabled()  # refused in a step
    if isinstance(x, DTensor):
        if micro_batches == 1 and x.device_mesh == world.device_mesh:
            own = local_part(x, spec, world).contiguous()
            return [own if takes_gradient else own.detach()]
        x = x.full_tensor()
    is_whole = tuple(x.shape) == whole
    if takes_gradient:
        source = (R,) * len(spec.layout) if is_whole else spec.layout
        return [converted(x.to(world.device), spec.dims, source, spec.layout, world).contiguous()]
    pieces: Sequence[Tensor] = [x] * micro_batches
    if micro_batches > 1 and x.ndim:
        pieces = x.split([own.shape[0] for own in specs]) if is_whole else x.chunk(micro_batches)
    if is_whole:
        pairs = zip(pieces, specs, strict=True)
        pieces = [shard(y, own.dims, own.layout, world.mesh, world.rank) for y, own in pairs]
    return [y.detach().to(world.device, non_blocking=True).contiguous() for y in pieces]


def _wrong_shape(spec: TensorSpec, x: Tensor, whole: Shape, part: Shape, micro_batches: int) -> StepError:
    count = f" ({micro_batches} micro-batches)" if micro_batches > 1 else ""
    or_part = "" if any(isinstance(size, Share) for size in part) else f" or this rank's part of it, {list(part)}"
    return StepError(
        f"Input {spec.name!r} has shape {list(x.shape)}; the plan for this batch takes the global shape "
        f"{list(whole)}{or_part}{count}. Ranks that give parts of a batch "
        "have to give them as the plan cuts it, which differs from shape to shape where sizes do not "
        "divide: give the global batch, or drop a last, smaller one (DataLoader(..., drop_last=True))."
    )

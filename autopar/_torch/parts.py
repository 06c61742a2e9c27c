"""DTensors of which a rank has a part, and functions of torch that would take the part for the whole.

A tensor knows by its mesh whose it is: parameters, what `detach`, `clone` and `state_dict` make of them, their
gradients and the states of optimizers lie on one mesh. So what is refused here is refused however a script came by the
tensors: in a dict of its own, in a list that it made before, one alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, serialization
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grad

from autopar._torch.distributed.stage_meshes import is_of_stage
from autopar.errors import StepError

_FOR_A_FILE = "is_shard_for_a_file"  # an attribute of the DTensors that `for_a_file` makes
IsOwn = Callable[[DTensor], bool]


def refuse_parts(is_own: IsOwn) -> Callable[[], None]:
    """Makes `torch.save` raise StepError where it sees a part, and torch compute norms of parts of all stages.

    `float(x)` and `x.item()` of a sum or norm of shards raise it, too. Numbers of one stage's parameters become plain
    ones, the same on all ranks, where they are read, added up or stacked; so does what `torch.cat` joins. A number of
    parameters that is added to a loss of plain tensors becomes a plain one. Whole tensors are pickled as plain ones.
    What is refused leaves the file of an earlier `torch.save` as it is.

    Args:
        is_own: function that says whether a DTensor is of a model. One on the mesh of a pipeline stage is, always.

    Returns a function that restores the behaviour of torch.
    """
    _owners().append(is_own)
    return lambda: _owners().remove(is_own)


@functools.cache
def _owners() -> list[IsOwn]:
    """The registered functions; the first call replaces functions of torch, where other functions of torch look."""
    DTensor.__reduce_ex__ = _reduced  # type: ignore[method-assign, assignment]
    DTensor.full_tensor = _of_model(DTensor.full_tensor)  # type: ignore[method-assign]
    for name in ("item", "__float__", "__int__", "__bool__"):
        setattr(DTensor, name, _of_sum(getattr(DTensor, name)))
    for name in ("tolist", "numpy"):
        setattr(DTensor, name, _of_whole_values(_of_sum(getattr(DTensor, name))))
    torch.allclose = _of_both(_by_isclose(torch.allclose))
    torch.equal = _of_both(torch.equal)
    for name in ("allclose", "equal"):
        setattr(DTensor, name, getattr(torch, name))
    for name in ("__add__", "__radd__", "__sub__", "__rsub__"):
        combine = getattr(DTensor, name)
        setattr(DTensor, name, _of_numbers(combine, combine))
    for name in ("__iadd__", "__isub__"):
        combine = getattr(DTensor, name.replace("i", "", 1))
        setattr(DTensor, name, _of_numbers(getattr(DTensor, name), combine))
        setattr(Tensor, name, _of_totals(getattr(Tensor, name), getattr(DTensor, name.replace("i", "r", 1))))
    torch.stack, torch.cat = _of_stages(torch.stack), _of_stages(torch.cat)
    files: Any = serialization
    files._open_zipfile_writer = _opened_late(files._open_zipfile_writer)
    clip_grad._get_total_norm = _of_whole(clip_grad._get_total_norm)
    torch.nn.utils.get_total_norm = _of_whole(torch.nn.utils.get_total_norm)
    return []


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Context in which nothing is refused: for functions of torch whose numbers of one stage are shared afterwards."""
    _pauses().append(None)
    try:
        yield
    finally:
        _pauses().pop()


@functools.cache
def _pauses() -> list[None]:
    """An entry for each `unchecked` context that is open."""
    return []


def _is_of_model(x: Any) -> bool:
    if not isinstance(x, DTensor) or _pauses():
        return False
    # A copy: a model that is freed meanwhile takes its function out.
    return is_of_stage(x) or any(is_own(x) for is_own in tuple(_owners()))


def _is_of_stage(x: Any) -> bool:
    return is_of_stage(x) and not _pauses()


def _shared(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, whole and plain on all ranks if one of them is of a single pipeline stage."""
    own = [i for i, x in enumerate(tensors) if _is_of_stage(x)]
    if not own:
        return list(tensors)
    spread = tensors[own[0]]._spec.mesh.spread
    found = dict(zip(own, spread.share([tensors[i] for i in own]), strict=True))
    return [found[i] if i in found else x.full_tensor() if isinstance(x, DTensor) else x for i, x in enumerate(tensors)]


def has_shards(x: DTensor) -> bool:
    """Whether other ranks have other parts of a DTensor, or other terms of a sum."""
    sizes = zip(x.placements, x.device_mesh.shape, strict=True)
    return any(not placement.is_replicate() and size > 1 for placement, size in sizes)


def is_part(x: DTensor) -> bool:
    """Whether some rank lacks a part of a DTensor: it is in shards, or of one pipeline stage."""
    return is_of_stage(x) or has_shards(x)


def for_a_file(x: Any) -> Any:
    """The same tensor, which is pickled with its part: one file has the part of one rank."""
    if not isinstance(x, DTensor):
        return x
    found = x.detach()
    setattr(found, _FOR_A_FILE, True)
    return found


def _is_number_of_stage(x: Any) -> bool:
    """Whether a tensor is a number of parameters or gradients of one pipeline stage."""
    return _is_of_stage(x) and x.ndim == 0


def _of_numbers(combine: Callable[[Tensor, Any], Any], out_of_place: Callable[[Tensor, Any], Any]) -> Any:
    """A sum or difference that takes a number of DTensors to a loss of plain tensors, and one of a stage to all stages.

    torch adds a DTensor to a plain loss, and fails in backward: the gradient of the plain loss would be a DTensor.
    """

    @functools.wraps(combine)
    def checked(x: Tensor, other: Any) -> Any:
        if not isinstance(other, Tensor) or x.ndim or other.ndim or torch.compiler.is_compiling():
            return combine(x, other)
        is_update = combine is not out_of_place and isinstance(x, nn.Parameter)
        if not is_update and (_is_number_of_stage(x) or _is_number_of_stage(other)):
            return out_of_place(*_shared([x, other]))
        if not isinstance(other, DTensor) and other.requires_grad and isinstance(x, DTensor) and _is_of_model(x):
            return out_of_place(x.full_tensor(), other)
        return combine(x, other)

    return checked


def _of_totals(combine: Callable[[Tensor, Any], Any], reflected: Callable[[Any, Tensor], Any]) -> Any:
    """`total += x` of a plain number and one of DTensors, which torch cannot write into the plain one."""

    @functools.wraps(combine)
    def checked(x: Tensor, other: Any) -> Any:
        if not isinstance(other, DTensor) or isinstance(x, DTensor) or x.ndim or other.ndim or not _is_of_model(other):
            return combine(x, other)
        return reflected(other, x)

    return checked


def _of_stages(join: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.stack` or `torch.cat` of tensors of several stages; a result that is no list of numbers is a DTensor."""

    @functools.wraps(join)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or not isinstance(tensors, (list, tuple)):
            return join(tensors, *args, **kwargs)
        own = next((x for x in tensors if _is_of_stage(x)), None)
        if own is None:
            return join(tensors, *args, **kwargs)
        found = join(_shared(tensors), *args, **kwargs)
        if own.ndim == 0 or not all(isinstance(x, DTensor) for x in tensors):
            return found
        mesh = own._spec.mesh
        return DTensor.from_local(found, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return _in_place_of(join, checked)


def _of_model(full_tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`DTensor.full_tensor` that gives a stage's tensor to all."""

    @functools.wraps(full_tensor)
    def checked(x: DTensor, **options: Any) -> Tensor:
        (found,) = [x] if getattr(x, _FOR_A_FILE, False) else _shared([x])
        return full_tensor(x, **options) if found is x else found

    return checked


def _of_sum(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A method that reads a value, and raises StepError where this rank has one term of a sum, norm or maximum."""

    @functools.wraps(read)
    def checked(x: Tensor) -> Any:
        if _is_number_of_stage(x):
            (whole,) = _shared([x])
            return getattr(whole, read.__name__)()
        if isinstance(x, DTensor) and _has_terms(x):
            raise StepError(
                f"{read.__name__}() reads a {list(x.placements)} of parameters or gradients in shards, of which this "
                "rank has its own term: the number is another on every rank. Call .full_tensor() before it, on all "
                "ranks (not under `if rank == 0`): float(p.grad.norm().full_tensor()). Where torch.optim.Adafactor "
                "reads it, take autopar.runtime.parameters.adafactor.Adafactor."
            )
        return read(x)

    return checked


def _of_whole_values(read: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reads all values, and raises StepError where this rank has a part of them."""

    @functools.wraps(read)
    def checked(x: Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(x, DTensor) or x.ndim == 0:
            return read(x, *args, **options)
        if is_part(x):
            raise StepError(
                f"{read.__name__}() reads all values of a tensor of shape {list(x.shape)}, of which this rank has a "
                f"part or none. On all ranks (not under `if rank == 0`): x.detach().full_tensor().{read.__name__}()."
            )
        return getattr(x._local_tensor, read.__name__)(*args, **options)

    return checked


def _by_isclose(allclose: Callable[..., bool]) -> Callable[..., bool]:
    """`torch.allclose`, of which torch (2.13) has no rule for DTensors."""

    @functools.wraps(allclose)
    def checked(x: Tensor, other: Tensor, *args: Any, **options: Any) -> bool:
        if not isinstance(x, DTensor) or torch.compiler.is_compiling():
            return allclose(x, other, *args, **options)
        close = torch.isclose(x, other, *args, **options)
        apart = (~close).sum()
        return not (apart.full_tensor() if isinstance(apart, DTensor) else apart).item()

    return checked


def _of_both(compare: Callable[..., bool]) -> Callable[..., bool]:
    """A comparison of two tensors that gives those of one pipeline stage to the ranks of all stages first."""

    @functools.wraps(compare)
    def checked(x: Tensor, other: Tensor, *args: Any, **options: Any) -> bool:
        if torch.compiler.is_compiling() or not (_is_of_stage(x) or _is_of_stage(other)):
            return compare(x, other, *args, **options)
        return compare(*_shared([x, other]), *args, **options)

    return _in_place_of(compare, checked)


def _in_place_of(function: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes the place of one of torch's, by its name.

    The name is for pickle, and the table for torch.jit.script, which looks up functions of torch by their ids.
    """
    checked.__module__, checked.__qualname__ = "torch", function.__name__
    torch.jit._builtins._register_builtin(checked, f"aten::{function.__name__}")
    return checked


def _has_terms(x: DTensor) -> bool:
    """Whether other ranks have other terms of a reduction that has not taken place."""
    return any(p.is_partial() and size > 1 for p, size in zip(x.placements, x.device_mesh.shape, strict=True))


class _LateFile:
    """A file of `torch.save` that is opened for its first record, after all tensors are pickled."""

    def __init__(self, opener: Callable[[], Any]) -> None:
        self._opener = opener
        self._opened: Any = None
        self._file: Any = None

    def __enter__(self) -> _LateFile:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._opened is not None:
            self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if self._opened is None:
            self._opened = self._opener()
            self._file = self._opened.__enter__()
        return getattr(self._file, name)


def _opened_late(opener: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`torch.serialization._open_zipfile_writer` that leaves a file as it is where pickling is refused."""

    @functools.wraps(opener)
    def opened(name_or_buffer: Any) -> Any:
        if not isinstance(name_or_buffer, str):
            return opener(name_or_buffer)
        return _LateFile(lambda: opener(name_or_buffer))

    return opened


def _reduced(x: DTensor, protocol: Any) -> Any:
    if not _is_of_model(x) or getattr(x, _FOR_A_FILE, False):
        return Tensor.__reduce_ex__(x, protocol)
    if is_part(x):
        raise StepError(_not_whole(x))
    local = x._local_tensor
    plain = nn.Parameter(local, x.requires_grad) if isinstance(x, nn.Parameter) else local
    return plain.__reduce_ex__(protocol)


def _not_whole(x: DTensor) -> str:
    lies = "is of one pipeline stage" if is_of_stage(x) else f"lies as {list(x.placements)}"
    return (
        f"A tensor of shape {list(x.shape)} was given to torch.save or pickle, but it {lies}, so this rank has only a "
        "part of it: such a file is not the model, and ranks that save under one name overwrite each other's files. "
        "Save with autopar.checkpoint.save_checkpoint(folder, model, optimizer) or model.export(folder) on all ranks "
        "(docs/checkpoints.md; after shard_ docs/backend.md)."
    )


def _of_whole(norm_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm of tensors that is of those of all pipeline stages."""

    @functools.wraps(norm_of)
    def checked(given: Tensor | Iterable[Tensor], norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [given] if isinstance(given, Tensor) else list(given)
        if any(map(_is_of_stage, tensors)):
            tensors = _shared([torch.linalg.vector_norm(x, norm_type) for x in tensors])
        return norm_of(tensors, norm_type, *args, **kwargs)

    return checked

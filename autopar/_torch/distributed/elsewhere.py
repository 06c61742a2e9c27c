"""Parameters of other pipeline stages, in their places in the model: their shapes and formats, without values.

What is computed of them is elsewhere, too: their squares, their gradients, the states that an optimizer makes for them.
So a loop over all parameters does the same on every rank, and on each it changes what the rank has. An op that would
need values raises StepError: it reads them, writes them into a DTensor of this rank, or takes tensors of two stages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree

from autopar._torch.distributed.dtensors import dtensor, handlers
from autopar._torch.distributed.stage_meshes import seen_from_outside
from autopar._torch.distributed.subclasses import dispatched
from autopar.errors import StepError

_REMEDY = (
    "x.full_tensor() gives a tensor to all ranks, if all of them call it; norms and other numbers of parameters may be "
    "added, stacked and read as they are. Or plan without stages, as with autopar.compile(model, recipe='zero3')."
)
_NEEDS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# How many numbers these take from a generator depends on values.
_DRAWS_BY_VALUES = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise")


@dispatched
class Elsewhere(DTensor):
    """A tensor of other pipeline stages.

    Attributes:
        holders: positions along the pipeline of the ranks that have its values.
    """

    # As those of DTensor, so that the two can be swapped.
    __slots__ = ()
    holders: frozenset[int]

    @staticmethod
    def __new__(cls: Any, shape_of: Tensor, mesh: DeviceMesh, holders: frozenset[int], device: torch.device) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls, shape_of.shape, strides=shape_of.stride(), dtype=shape_of.dtype, device=device
        )
        meta = TensorMeta(shape_of.shape, shape_of.stride(), shape_of.dtype)
        made._local_tensor = shape_of
        made._spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
        made.holders = holders
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({words_of(self)})"

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the ranks that have its values, of which this one is not."""
        return seen_from_outside(self._spec.mesh)

    def to_local(self, **_: Any) -> Tensor:
        return self

    def redistribute(self, *_: Any, **__: Any) -> DTensor:
        return self

    @property
    def data(self) -> Tensor:
        """The same without autograd. What is assigned has to be of the same kind, and is for the ranks that hold it."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise StepError(
                f"p.data = x was given x of shape {list(value.shape)}, {value.dtype}, but the parameter is of shape "
                f"{list(self.shape)}, {self.dtype}. Assign a tensor of its kind on every rank."
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._is_any_true.default:  # by which anomaly detection asks: its ranks look at their own
            return torch.zeros((), dtype=torch.bool)
        write = handlers().get(func) if func._schema.is_mutable else None
        if write is not None and not any(isinstance(x, DTensor) for x in _pytree.tree_leaves(args[0])):
            return write(func, args, kwargs or {})  # into plain tensors, for which the holders give the values
        if func._schema.name.startswith("aten::_foreach_") and len(args[0]) > 1:
            return _entry_by_entry(func, args, kwargs or {})
        return _without_values(func, args, kwargs or {})


def elsewhere(parameter: nn.Parameter, mesh: DeviceMesh, holders: frozenset[int], device: torch.device) -> nn.Parameter:
    """A parameter that others hold, of the shape and format of one that is here."""
    shape_of = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return nn.Parameter(Elsewhere(shape_of, mesh, holders, device), parameter.requires_grad)


def is_elsewhere(x: Any) -> bool:
    """Whether a tensor is one of other pipeline stages."""
    return isinstance(x, Elsewhere)


def entries_here(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state dict that this rank has, without those of other pipeline stages."""
    return {name: x for name, x in state.items() if not is_elsewhere(x)}


def words_of(x: Elsewhere) -> str:
    """Shape and place of a tensor in words."""
    return f"shape {list(x.shape)}, of pipeline position {', '.join(map(str, sorted(x.holders)))}"


def _without_values(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The results of an op as tensors that are elsewhere; tensors that it writes to are returned as they are."""
    absent: list[Elsewhere] = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Elsewhere)]
    written = _written(func, args, kwargs)
    _refuse_values(func, absent, written, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        _draw(func, args, kwargs)
    device, metas = kwargs.get("device") or absent[0].device, {}

    def meta(x: Tensor) -> Tensor:
        if id(x) not in metas:
            metas[id(x)] = x._local_tensor if isinstance(x, Elsewhere) else _meta(x)
        return metas[id(x)]

    of_meta = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
    found = func(*_pytree.tree_map_only(Tensor, meta, args), **_pytree.tree_map_only(Tensor, meta, of_meta))
    known = {id(x._local_tensor): x for x in written if isinstance(x, Elsewhere)}
    mesh, holders = absent[0]._spec.mesh, _holders(absent)

    def wrapped(x: Tensor) -> Tensor:
        return known[id(x)] if id(x) in known else Elsewhere(x, mesh, holders, torch.device(device))

    return _pytree.tree_map_only(Tensor, wrapped, found)


def _meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _holders(absent: Sequence[Elsewhere]) -> frozenset[int]:
    """The positions that have all of these tensors."""
    return frozenset.intersection(*(x.holders for x in absent))


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that an op writes to."""
    if not func._schema.is_mutable:
        return []
    given = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(func._schema.arguments)]
    return _pytree.tree_leaves([x for a, x in given if a.alias_info is not None and a.alias_info.is_write])


def _refuse_values(func: Any, absent: Sequence[Elsewhere], written: Sequence[Any], args: Any, kwargs: Any) -> None:
    """Raises StepError for an op that needs the values of a tensor that is elsewhere."""
    name = func._schema.name.removeprefix("aten::")
    if not written and any(map(_is_plain, _pytree.tree_leaves((args, kwargs)))):
        # The error that torch raises on the ranks that have the tensor.
        raise RuntimeError(
            f"{func}: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling "
            "distributed operators!"
        )
    if any(tag in func.tags for tag in _NEEDS_VALUES) or name.rstrip("_") in _DRAWS_BY_VALUES:
        raise StepError(f"{name} reads the values of a tensor of {words_of(absent[0])}, not of this rank. {_REMEDY}")
    here = [x for x in written if isinstance(x, Tensor) and not isinstance(x, Elsewhere)]
    if not written:
        here = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, DTensor) and not is_elsewhere(x)]
    if here or not _holders(absent):
        others = (
            [f"of shape {list(here[0].shape)}, of this rank"] if here else [f"of {words_of(x)}" for x in absent[1:]]
        )
        raise StepError(
            f"{name} takes a tensor of {words_of(absent[0])}, together with one {others[0]}: no rank has both. "
            f"{_REMEDY}"
        )


def _is_plain(x: Any) -> bool:
    """Whether a value is a tensor with dims and no DTensor; torch takes numbers beside DTensors."""
    return isinstance(x, Tensor) and not isinstance(x, DTensor) and x.ndim > 0


def _draw(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Draws the numbers that the holders draw, so that later ones are the same on all ranks."""

    def room(x: Tensor) -> Tensor:
        if not isinstance(x, Elsewhere):
            return x
        local = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(1)  # a probability
        return dtensor(local, x._spec.mesh, x.placements, tuple(x.shape))

    func(*_pytree.tree_map_only(Tensor, room, args), **_pytree.tree_map_only(Tensor, room, kwargs))


def _entry_by_entry(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """An op on lists: those entries by themselves that are elsewhere, and the others together."""
    count = len(args[0])
    lists = [a for a in args if isinstance(a, (list, tuple)) and len(a) == count]
    absent = [i for i in range(count) if any(is_elsewhere(x[i]) for x in lists)]
    here = [i for i in range(count) if i not in absent]

    def run(op: Any, entries: Sequence[int]) -> None:
        made = op(*([a[i] for i in entries] if any(a is x for x in lists) else a for a in args), **kwargs)
        found.update(zip(entries, made or [None] * len(entries), strict=True))

    found: dict[int, Any] = {}
    for i in absent:
        run(lambda *given, **options: _without_values(func, given, options), [i])
    if here:
        run(func, here)
    return None if func._schema.is_mutable else [found[i] for i in range(count)]


def of_own(update: Callable[..., None]) -> Callable[..., None]:
    """An update of lists of parameters, gradients and states, without those that are elsewhere."""

    @functools.wraps(update)
    def update_own(*lists: Any, **options: Any) -> None:
        own = [i for i, p in enumerate(lists[0]) if not is_elsewhere(p)]
        if len(own) == len(lists[0]):
            return update(*lists, **options)
        taken = [[x[i] for i in own] if len(x) == len(lists[0]) else x for x in lists]
        update(*taken, **options)
        for given, each in zip(lists, taken, strict=True):
            # The update may have made states, such as the first momentum of SGD.
            for i, x in zip(own, each, strict=True) if len(given) == len(lists[0]) else ():
                given[i] = x
        _follow(lists, options)

    return update_own


def _follow(lists: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Counts a step of the parameters that are elsewhere, in the last list, and makes their first momenta."""
    absent = [i for i, p in enumerate(lists[0]) if is_elsewhere(p)]
    for states in lists[2:]:
        for i in absent if len(states) == len(lists[0]) else ():
            states[i] = torch.empty_like(lists[0][i]) if states[i] is None else states[i]
    skipped = options.get("found_inf")
    for i in absent if len(lists[-1]) == len(lists[0]) else ():
        if not isinstance(lists[-1][i], DTensor):
            lists[-1][i] += 1 if skipped is None else 1 - skipped


@contextlib.contextmanager
def own_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which an optimizer has those of its parameters alone that are not elsewhere."""
    every = [list(group["params"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"][:] = [p for p in group["params"] if not is_elsewhere(p)]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, every, strict=True):
            group["params"][:] = parameters

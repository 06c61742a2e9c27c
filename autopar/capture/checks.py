"""Checks of an exported graph. Each refuses an op that a plan cannot repeat, with its line and a remedy."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from autopar import _torch
from autopar._torch import pytree
from autopar.capture.guards.refusals import BACKEND_RUNS_IT
from autopar.capture.remedies import MODEL, changed_in_place, traced_line, uncaptured
from autopar.errors import CaptureError
from autopar.ops.nodes import reached

aten = torch.ops.aten
_ABSENT = object()


def refuse_trained_constants(exported: Any, leaves: list[Tensor]) -> None:
    """Refuses tensors outside the model that require a gradient: they would get none, or a part (`OutsideLeaves`)."""
    trained = set(map(_torch.storage_reference, leaves))
    nodes = {n.name: n for n in exported.graph.find_nodes(op="placeholder")}
    for spec in exported.graph_signature.input_specs:
        constant = exported.constants.get(spec.target)
        if not isinstance(constant, Tensor) or spec.arg.name not in nodes:
            continue
        if _torch.storage_reference(constant) in trained and _takes_gradient(nodes[spec.arg.name]):
            raise CaptureError(
                f"The loss or the model computes with a tensor of shape {list(constant.shape)} that requires a "
                "gradient and is not a parameter of the model: it would not be trained. Make one module that holds "
                "both and whose forward returns the loss, and give that without loss_fn; or compute what is not to be "
                "trained under torch.no_grad(). (A closure over the model reads the original, not the copy that is "
                "proved: give a method of the model, or functools.partial.)"
            )


def refuse_fake_constants(exported: Any) -> None:
    """Refuses values that the trace has kept as a constant without values, which would be read in every step.

    Torch refuses them itself, except in a trace of inputs without values.
    """
    for name, constant in exported.constants.items():
        is_made = name.rpartition(".")[-1].startswith("lifted_tensor")
        if is_made and isinstance(constant, _torch.FakeTensor):
            raise CaptureError(
                f"The forward computes a tensor of shape {list(constant.shape)} in a way that a graph does not follow, "
                "such as torch.autograd.grad or x.data inside of it. Read x.detach() in place of x.data, and write a "
                'gradient that the forward needs as a formula; or run the model by torch.compile(backend="autopar"), '
                "which breaks the graph there."
            )


def _takes_gradient(node: fx.Node) -> bool:
    """Whether a result of the graph is computed from `node` without a detach between them."""
    found = reached([node], lambda seen: (u for u in seen.users if u.op == "output" or not _cuts_gradient(u)))
    return any(user.op == "output" for user in found)


def _cuts_gradient(node: fx.Node) -> bool:
    """Whether no gradient passes a node: it detaches, has an integer result, or uses only the shape of its operand."""
    value, name = node.meta.get("val"), getattr(node.target, "__name__", "")
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return True
    return node.target is aten.detach.default or name.startswith("new_") or name.partition(".")[0].endswith("_like")


def refuse_changed_parameters(mutated: list[Any], parameters: set[str]) -> None:
    changed = sorted({plain_name(s.target) for s in mutated} & parameters)
    if changed:
        raise changed_in_place(changed[0])


def refuse_numbers_from_tensors(module: fx.GraphModule) -> None:
    """Refuses Python numbers that are read from tensors (`.item()`, `x[:, i]` with a tensor i): no plan knows them."""
    for node in module.graph.nodes:
        if node.op == "call_function" and _is_unknown(node) and is_read(node):
            made = "size" if isinstance(node.meta["val"], Tensor) else "Python number"
            remedy = (
                "Keep it a tensor (no .item(); index with torch.index_select, and mask with torch.where "
                "instead of x[mask])"
            )
            if node.target is aten.bincount.default:
                remedy = "Count by torch.nn.functional.one_hot(x, n).sum(0), whose size is known"
            raise uncaptured(traced_line(node), f"{node.target} makes a {made} of a tensor's value", remedy)


def refuse_bodies(module: fx.GraphModule) -> None:
    """Refuses ops that run graphs (torch.cond, a scan), which have no rule."""
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(module, node.target, None), fx.GraphModule):
            call = next(iter(node.users))
            raise uncaptured(
                traced_line(call),
                f"{call.target} runs graphs inside the graph",
                "Compute what its branches compute, and choose with torch.where",
            )


def _is_unknown(node: fx.Node) -> bool:
    """Whether a result, or a size of it, is a Python number that is only known at run time."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(map(_torch.depends_on_values, sizes))


def is_read(number: fx.Node) -> bool:
    """Whether anything other than assertions uses a number. Assertions are removed, and the number with them."""
    return any(
        is_read(user) if _is_number(user) or _is_unknown(user) else "_assert" not in str(user.target)
        for user in number.users
    )


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, *_torch.SYMBOLIC))


def plain_name(name: str) -> str:
    return name.removeprefix(MODEL)


@contextlib.contextmanager
def refusing_changed_arguments(arguments: Any) -> Iterator[None]:
    """Raises CaptureError if a forward or loss changes what an object, dict or list among its arguments holds.

    An entry that it takes out of a dict, as `batch.pop("labels")` does, stays in that of the caller.
    """
    before = [(x, pytree.contents_of(x)) for x in pytree.changeable_in(arguments)]
    yield
    for x, held in before:
        after, kind = pytree.contents_of(x), type(x).__name__
        kept = after if isinstance(x, dict) else {**held, **after}
        names = [n for n in kept if held.get(n, _ABSENT) is not after.get(n, _ABSENT)]
        if names:
            place = f"[{names[0]!r}] of a {kind}" if isinstance(x, (list, deque, dict)) else f"{kind}.{names[0]}"
            raise CaptureError(
                f"The forward or loss sets or deletes {place} of its argument, and a captured program does not do that "
                f"again. Return the new value, or let it change a copy of its own: copy.copy of the {kind}."
            )


def refuse_layouts(tensors: Iterable[Tensor]) -> None:
    """Raises CaptureError for an input that is sparse, or a nested tensor, whose rows have lengths of their own."""
    for number, x in enumerate(tensors):
        if x.is_nested:
            raise CaptureError(
                f"Tensor {number} of the batch is a nested tensor ({x.layout}), and no plan says how rows of other "
                "lengths are split. Give its values and its offsets as two inputs, x.values() and x.offsets(), and "
                "attend within documents (flex_attention with a mask, torch.nn.attention.varlen); or pad it, "
                "x.to_padded_tensor(0.0)."
            )
        if x.layout is not torch.strided:
            raise CaptureError(
                f"Tensor {number} of the batch is stored as {x.layout}, and no plan says how that is split. Give "
                f"x.to_dense(), which torch.spmm takes, too. {BACKEND_RUNS_IT}"
            )

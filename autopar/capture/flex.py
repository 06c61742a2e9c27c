"""Captures calls of torch's flex_attention as one op, whose mask_mod and score_mod are text in the graph.

While export traces, a call of flex_attention runs both functions once, on scalars of the op `score_point`:

    %point = score_point(%q);  %seen = ge(%point[3], %point[4]);  %out = flex_attention(%q, %k, %v, [%seen], ...)
    -> %out = flex_attention(%q, %k, %v, [], '{"lines": [["aten.ge.Tensor", ...', ...)

When the graph is functional, what was computed from these scalars becomes a program (`autopar.ops.point_program`), and
what it reads besides becomes an operand. So a mask of documents, made in the forward, follows its batch.

A block mask says twice what is seen: by its function, and by its blocks. `create_block_mask` makes the blocks from the
function; of a mask made otherwise both are compared where its tensors have values.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention.flex_attention import AuxOutput

from autopar import _torch
from autopar.capture.remedies import traced_line, uncaptured
from autopar.ops import flex_attention  # noqa: F401  (it defines torch.ops.autopar.flex_attention)
from autopar.ops.point_program import INDICES, SCORE, At, PointProgram

aten = torch.ops.aten
ours = torch.ops.autopar
_MASK, _SCORE = "mask", "score"  # in the place of programs, until these are read from the graph
_BLOCK_SIZE = 128  # of create_block_mask
_BLOCKS_KNOWN = "_autopar_blocks_known"


@contextlib.contextmanager
def keeping_flex_attention() -> Iterator[Callable[[fx.GraphModule], None]]:
    """Context in which calls of flex_attention are traced whole; yields what puts their functions into the graph.

    Raises CaptureError for a call that no graph says.
    """
    with _torch.flex_attention_by(_traced, _made):
        yield _put


def _made(
    mask_mod: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: Any = _BLOCK_SIZE,
    *_: Any,
    **__: Any,
) -> Any:
    """The block mask that stands in a trace for one of create_block_mask, with its arguments, but without blocks."""
    size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    shape = [B or 1, H or 1, *(-(-length // own) for length, own in zip((Q_LEN, KV_LEN), size, strict=True))]
    like = torch.zeros((), dtype=torch.int32, device=device or _torch.accelerator_kind() or "cpu")
    blocks, counts = (ours.untraced_blocks.default(like, x) for x in (shape, shape[:-1]))
    found = _torch.block_mask(mask_mod, blocks, counts, (Q_LEN, KV_LEN), size)
    vars(found)[_BLOCKS_KNOWN] = True
    return found


def _traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """The call that stands in a trace for flex_attention, with its arguments and results."""
    _check(query, key, block_mask, enable_gqa, return_aux)
    if dtype := _torch.autocast_dtype(query.device):
        query, key, value = (x.to(dtype) for x in (query, key, value))
    score, *indices = ours.score_point.default(query)
    with _torch.LookupsByTensors():
        seen = [block_mask.mask_mod(*indices)] if block_mask is not None else []
        scores = [score_mod(score, *indices)] if score_mod is not None else []
    scores = [x for x in scores if x is not score]  # as it was
    names = _MASK if seen else "", _SCORE if scores else ""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    result, logsumexp = ours.flex_attention.default(query, key, value, [*seen, *scores], *names, scale)
    if return_aux is not None:
        return result, AuxOutput(logsumexp if return_aux.lse else None)
    return (result, logsumexp) if return_lse else result


def _check(query: Tensor, key: Tensor, mask: Any, enable_gqa: bool, return_aux: Any) -> None:
    """Raises what flex_attention raises for operands that do not fit, and CaptureError for what is not captured."""
    if query.ndim != 4 or key.ndim != 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    if query.shape[0] != key.shape[0] or (not enable_gqa and query.shape[1] != key.shape[1]):
        raise ValueError(f"query of shape {list(query.shape)} and key of shape {list(key.shape)} do not fit")
    if return_aux is not None and return_aux.max_scores:
        raise _refused("the largest scores of flex_attention are asked for", "Ask for lse=True alone")
    is_known = mask is None or _BLOCKS_KNOWN in vars(mask) or _agrees(mask)
    if mask is not None and tuple(mask.shape[-2:]) != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"block_mask was created for block_mask.shape={mask.shape} but got q_len={query.shape[2]} and "
            f"kv_len={key.shape[2]}"
        )
    if not is_known:
        raise _refused(
            "the blocks of a block mask and its mask_mod say different things",
            "Make it in the forward, by create_block_mask(mask_mod, ...)",
        )


def _agrees(mask: Any) -> bool:
    """Whether the blocks of a mask that was made before the trace are those of its function."""
    with _torch.outside_of_traces():
        try:
            return _torch.blocks_agree(mask)
        except Exception:  # its tensors, or those that its function reads, have no values here
            return False


def _refused(reason: str, remedy: str) -> Exception:
    return uncaptured(_torch.user_line() or "", reason, remedy)


# --- the graph


def _put(module: fx.GraphModule) -> None:
    """Writes the functions of all calls as text, with the tensors that they read as operands."""
    for node in list(module.graph.find_nodes(op="call_function", target=ours.flex_attention.default)):
        query, key, value, ends, mask, score, scale = node.args
        ends = list(ends)
        ways = [_way(end) for end in ends]
        tensors = list(dict.fromkeys(x for way in ways for x in _read(way)))
        operands = [_as_tensor(x) for x in tensors]
        made = iter(zip(ends, ways, strict=True))
        texts = [
            _text(node, *next(made), tensors, takes_score=name == _SCORE) if name else "" for name in (mask, score)
        ]
        node.args = (query, key, value, operands, *texts, scale)
    module.graph.eliminate_dead_code()
    for node in module.graph.find_nodes(op="call_function", target=ours.untraced_blocks.default):
        raise uncaptured(
            traced_line(node),
            "the forward reads the blocks of a block mask, which a plan makes anew for every rank",
            "Give the mask to flex_attention as it is",
        )
    module.recompile()


def _point_of(node: fx.Node) -> int | None:
    """Which scalar of `score_point` a node is: 0 for the score, 1 to 4 for an index; None for another node."""
    source = node.args[0] if node.target is operator.getitem else None
    is_scalar = isinstance(source, fx.Node) and source.target is ours.score_point.default
    return node.args[1] if is_scalar else None  # type: ignore[return-value]


def _way(end: fx.Node) -> list[fx.Node]:
    """The calls that compute a node from scalars of `score_point`, in the order of the graph."""
    order = {node: i for i, node in enumerate(end.graph.nodes)}
    known: dict[fx.Node, bool] = {}
    stack = [end]
    while stack:
        node = stack[-1]
        open_ones = [x for x in node.all_input_nodes if x not in known and _point_of(node) is None]
        stack += open_ones
        if not open_ones:
            known[node] = _point_of(node) is not None or any(known[x] for x in node.all_input_nodes)
            stack.pop()
    return sorted((x for x, is_own in known.items() if is_own and _point_of(x) is None), key=order.__getitem__)


def _read(way: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that calls read, which neither are among them nor are scalars of `score_point`."""
    own = {*way}
    return [x for node in way for x in node.all_input_nodes if x not in own and _point_of(x) is None]


def _as_tensor(node: fx.Node) -> fx.Node:
    """A node as a tensor, if it is an open size."""
    if isinstance(node.meta["val"], Tensor):
        return node
    with node.graph.inserting_after(node):
        made = node.graph.call_function(aten.scalar_tensor.default, (node,), {"dtype": torch.int64})
    made.meta |= {"val": torch.empty((), dtype=torch.int64, device="meta")}
    return made


def _text(call: fx.Node, end: fx.Node, way: Sequence[fx.Node], tensors: Sequence[fx.Node], *, takes_score: bool) -> str:
    """The calls of a way as a program. Raises CaptureError for one that has no text."""
    scalars = (SCORE, *INDICES) if takes_score else INDICES
    places = {x: len(scalars) + i for i, x in enumerate(tensors)}
    inputs = (*scalars, *(f"x{i}" for i in range(len(tensors))))
    places |= {x: len(inputs) + i for i, x in enumerate(way)}

    def at(node: fx.Node) -> Any:
        point = _point_of(node)
        return At(places[node] if point is None else point - (not takes_score))

    lines = []
    for node in way:
        kwargs = {key: x for key, x in node.kwargs.items() if key not in ("device", "pin_memory", "layout")}
        lines.append(_constant(node) or (str(node.target), *fx.map_arg((node.args, kwargs), at)))
    try:
        result = at(end).number
        if end not in way and _point_of(end) is None:
            raise ValueError("its result depends on no index")
        text = PointProgram(inputs, tuple(lines), result).text()
        _refuse_unknown(way)
        return text
    except ValueError as error:
        which = "score_mod" if takes_score else "mask_mod"
        raise uncaptured(
            traced_line(call),
            f"the {which} of flex_attention cannot be captured: {error}",
            f"Compute with tensor operators of torch from {'the score and ' if takes_score else ''}the indices alone, "
            "and read tensors as x[i, j]",
        ) from error


def _constant(node: fx.Node) -> tuple[str, Any, Any] | None:
    """The line of a call such as `new_ones` of an index, which vmap does not take; None for another call."""
    values: Mapping[Any, Any] = {aten.new_ones.default: 1, aten.new_zeros.default: 0}
    value = node.args[2] if node.target is aten.new_full.default else values.get(node.target)
    size: Any = node.args[1] if len(node.args) > 1 else ()
    if value is None or list(size):
        return None
    return "aten.scalar_tensor.default", (value,), {"dtype": node.meta["val"].dtype}


def _refuse_unknown(way: Sequence[fx.Node]) -> None:
    for node in way:
        if _torch.operator_named(str(node.target)) is not node.target:
            raise ValueError(f"it calls {node.target}")
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise ValueError(f"it draws random numbers ({node.target})")

"""Forms of those mixtures of experts in `transformers` that loop over the experts with rows.

They call the grouped form that `transformers` has for all its other mixtures (`ALL_EXPERTS_FUNCTIONS["grouped_mm"]`);
`autopar.passes.join_experts` makes one op of it. If experts are separate modules, their parameters are stacked in the
graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _grouped(rows: Tensor, ids: Tensor, shares: Tensor, **layer: Any) -> Tensor:
    """The weighted sum over each row's experts, by the grouped form of `transformers`.

    Args:
        rows: rows of tokens, of shape `(t, d)`.
        ids, shares: experts of each row and their weights, of shape `(t, k)`.
        layer: settings that the form reads from a module of experts, where they differ from its defaults.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    usual = {"has_bias": False, "is_transposed": False, "has_post_expert_norm": False, "_is_expert_parallel": False}
    experts = SimpleNamespace(**{**usual, **layer})
    found: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, rows, ids, shares)
    return found


def _modules(module: Any, rows: Tensor, ids: Tensor, shares: Tensor, up: str, down: str, **more: Any) -> Tensor:
    """Experts `down(dropout(act(up(x))))` that are modules.

    Args:
        module: a ModuleDict `expert_0`, `expert_1` ...
        up, down: names of the two nn.Linear of an expert.
        more: settings of the grouped form.
    """
    experts = [module[f"expert_{i}"] for i in range(module.num_experts)]
    ups, downs = ([getattr(expert, name) for expert in experts] for name in (up, down))
    has_bias = ups[0].bias is not None
    stacked = {"up_proj": torch.stack([x.weight for x in ups]), "down_proj": torch.stack([x.weight for x in downs])}
    if has_bias:
        stacked |= {"up_proj_bias": torch.stack([x.bias for x in ups])}
        stacked |= {"down_proj_bias": torch.stack([x.bias for x in downs])}
    return _grouped(
        rows,
        ids,
        shares,
        num_experts=module.num_experts,
        has_gate=False,
        has_bias=has_bias,
        act_fn=lambda x: experts[0].dropout(experts[0].act(x)),
        **stacked,
        **more,
    )


def _gated(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gate(both: Tensor) -> Tensor:
        first, second = both.chunk(2, dim=-1)
        return act(first) * second

    return gate


def switch_experts(module: Any, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """SwitchTransformersExperts: `chosen`, of shape (t, 1, e), is one-hot, or zero for a row beyond the capacity."""
    taken = chosen.sum(-1)
    return _modules(module, rows, chosen.argmax(-1), shares * taken, "wi", "wo")


def nllb_experts(module: Any, rows: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """NllbMoeExperts: each of the k entries of a row in `ids`, of shape (t, k), names an expert.

    It is called with the mask of its router, k being the number of experts: entries are 0 and 1, and so are
    the experts that transformers 5.23 runs.
    """
    scale = 1.0 if module.training else 1 - module.moe_token_dropout
    dropped = {"has_post_expert_norm": True, "post_expert_norm": lambda y: module.token_dropout(y) * scale}
    return _modules(module, rows, ids, shares, "fc1", "fc2", **dropped)


def dbrx_experts(module: Any, rows: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """DbrxExperts: matrices of all experts below one another; `rows` of shape (b, s, d) or (t, d)."""
    experts = module.num_experts
    apart = (experts, module.ffn_hidden_size, module.hidden_size)
    w1, v1, w2 = (x.view(apart) for x in (module.mlp.w1, module.mlp.v1, module.mlp.w2))
    found = _grouped(
        rows.reshape(-1, module.hidden_size),
        ids,
        shares,
        num_experts=experts,
        has_gate=True,
        gate_up_proj=torch.cat([w1, v1], 1),
        down_proj=w2.transpose(1, 2),
        _apply_gate=_gated(module.mlp.activation_fn),
    )
    return found.view(rows.shape[0], -1, module.hidden_size)


def step_experts(module: Any, rows: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Step3p7Experts, which clamps the inputs of its gate."""
    return _grouped(
        rows,
        ids,
        shares,
        num_experts=module.num_experts,
        has_gate=True,
        gate_up_proj=module.gate_up_proj,
        down_proj=module.down_proj,
        _apply_gate=module._apply_gate,
    )


def longcat_experts(module: Any, rows: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """LongcatFlashExperts: its last `zero_expert_num` experts return a row unchanged."""
    experts = module.num_routed_experts
    computed = ids < experts
    given_back = rows * (shares * ~computed).sum(-1, keepdim=True).to(rows.dtype)
    if experts == 0:
        return given_back
    found = _grouped(
        rows,
        ids.clamp(max=experts - 1),
        shares * computed,
        num_experts=experts,
        has_gate=True,
        gate_up_proj=module.gate_up_proj[:experts],
        down_proj=module.down_proj,
        _apply_gate=_gated(module.act_fn),
    )
    return found + given_back


def casting_router(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A router whose forward casts its classifier permanently; the form casts the parameters at their use instead."""
    with _cast_where_used(module.classifier):
        return type(module).forward(module, *args, **kwargs)


@contextlib.contextmanager
def _cast_where_used(linear: nn.Linear) -> Iterator[None]:
    def forward(x: Tensor) -> Tensor:
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        return F.linear(x, linear.weight.to(x.dtype), bias)

    vars(linear).update(to=lambda dtype: linear, forward=forward)
    try:
        yield
    finally:
        for name in ("to", "forward"):
            del vars(linear)[name]


def masked_stack(module: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
    """SwitchTransformersStack with a mask of ones, which the class fills in only if it is not traced."""
    states = kwargs.get("inputs_embeds")
    first = input_ids if states is None else states
    if attention_mask is None and first is not None and kwargs.get("past_key_values") is None:
        attention_mask = torch.ones(first.shape[:2], device=first.device)
    return type(module).forward(module, input_ids, attention_mask, **kwargs)


_MODELS = "transformers.models"
_SWITCH = f"{_MODELS}.switch_transformers.modeling_switch_transformers.SwitchTransformers"
_NLLB = f"{_MODELS}.nllb_moe.modeling_nllb_moe.NllbMoe"

ROWS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        f"{_SWITCH}Experts": switch_experts,
        f"{_SWITCH}Top1Router": casting_router,
        f"{_SWITCH}Stack": masked_stack,
        f"{_NLLB}Experts": nllb_experts,
        f"{_NLLB}Top2Router": casting_router,
        f"{_MODELS}.dbrx.modeling_dbrx.DbrxExperts": dbrx_experts,
        f"{_MODELS}.step3p7.modeling_step3p7.Step3p7Experts": step_experts,
        f"{_MODELS}.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": longcat_experts,
    }
)

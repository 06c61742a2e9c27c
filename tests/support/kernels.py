"""Stand-ins for public kernels: functions of the same name and signature in plain PyTorch.

A stand-in has the name of the kernel's `torch.autograd.Function`, takes the arguments of its `apply`, needs the memory
of its operands as a kernel does, and keeps for backward what the kernel keeps.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GENERATOR = torch.Generator().manual_seed(0)


class Kernel(NamedTuple):
    """A public kernel.

    Attributes:
        plain: the same function in plain PyTorch, of all arguments of `apply`.
        tensors: example operands.
        others: the other arguments of `apply`, by position.
        saves: what it keeps: positions of operands as `x0`, of results as `y0`, and shapes of tensors of its own.
        splits: the letters that its row lets be split.
    """

    plain: Callable[..., object]
    tensors: tuple[Tensor, ...]
    splits: str
    saves: str = ""
    own: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    others: tuple[tuple[int, object], ...] = ()


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def share(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=GENERATOR)


def ids(most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape, generator=GENERATOR)


# --- plain definitions


def attend(q, k, v, dropout_p=0.0, scale=None, causal=True, *others):  # (b, s, h, d)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return y.transpose(1, 2)


def attend_kv(q, kv, *others):
    return attend(q, *kv.unbind(2), *others)


def attend_qkv(qkv, *others):
    return attend(*qkv.unbind(2), *others)


def attend_varlen(q, k, v, starts, key_starts, *others):  # (s, h, d); row i is of the document that starts at or before
    rows = torch.arange(len(q))
    document = torch.searchsorted(starts.contiguous(), rows, right=True)
    seen = (document[:, None] == document) & (rows[:, None] >= rows)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)


def attend_memory_efficient(op, q, k, v, bias, p, scale):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def rms_norm(x, weight, eps=1e-6, *others):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(x, weight, bias, eps=1e-5, *others):
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def apex_layer_norm(x, weight, bias, shape, eps, memory_efficient):
    return layer_norm(x, weight, bias, eps)


def apex_rms_norm(x, weight, shape, eps, memory_efficient):
    return rms_norm(x, weight, eps)


def add_rms_norm(x, residual, weight, eps):
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rope(q, k, cos, sin):  # (b, h, l, d) and (1, l, d)
    return rotated(q, cos[:, None], sin[:, None]), rotated(k, cos[:, None], sin[:, None])


def rotary(x, cos, sin, *others):  # (b, l, h, d) and (positions, d / 2)
    cos, sin = (torch.cat([t, t], -1)[: x.shape[1], None] for t in (cos, sin))
    return rotated(x, cos, sin)


def linear_loss(x, weight, target, bias, ce_weight, ignore_index, *others):
    return F.cross_entropy(x @ weight.T, target, ignore_index=ignore_index, reduction="sum")


def losses(logits, labels, *others):
    z = 1e-4 * logits.logsumexp(-1) ** 2
    return F.cross_entropy(logits, labels, reduction="none") + z, z


def convolve(x, weight, bias, *others):  # (b, d, l) and (d, w)
    width = weight.shape[1]
    y = F.conv1d(F.pad(x, (width - 1, 0)), weight[:, None], bias, groups=len(weight))
    return F.silu(y)


def selective_scan(u, delta, a, b, c, d, z, delta_bias, *others):
    delta = F.softplus(delta + delta_bias[:, None])
    state, ys = u.new_zeros(*u.shape[:2], a.shape[1]), []
    for i in range(u.shape[2]):
        step = delta[:, :, i, None]
        state = torch.exp(step * a) * state + step * b[:, None, :, i] * u[:, :, i, None]
        ys.append((state * c[:, None, :, i]).sum(-1))
    return (torch.stack(ys, 2) + u * d[:, None]) * F.silu(z)


def ssd(x, dt, a, b, c, chunk_size, d):  # (b, l, h, p), (b, l, h), (h), (b, l, g, n)
    b, c = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (b, c))
    state, ys = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1]), []
    for i in range(x.shape[1]):
        decay = torch.exp(dt[:, i] * a)[..., None, None]
        state = decay * state + (dt[:, i, :, None] * x[:, i])[..., None] * b[:, i, :, None]
        ys.append((state * c[:, i, :, None]).sum(-1) + d[:, None] * x[:, i])
    return torch.stack(ys, 1)


def gated(q, k, v, decay, beta, delta):
    """o_t = S_t q_t with S_t = decay_t S' + beta_t k_t (v_t - delta k_t S'), of (b, l, h, k) and (b, l, h, v)."""
    state, outputs = q.new_zeros(q.shape[0], *k.shape[2:], v.shape[-1]), []
    for i in range(q.shape[1]):
        state = decay[:, i] * state
        new = v[:, i] - delta * (k[:, i, :, None] @ state).squeeze(-2)
        state = state + beta[:, i, :, None, None] * k[:, i, ..., None] * new[..., None, :]
        outputs.append((q[:, i, :, None] @ state).squeeze(-2))
    return torch.stack(outputs, 1)


def gla(q, k, v, g, *others):
    return gated(q, k, v, g.exp()[..., None], torch.ones_like(q[..., 0]), 0)


def simple_gla(q, k, v, g, *others):
    return gated(q, k, v, g.exp()[..., None, None], torch.ones_like(g), 0)


def delta_rule(q, k, v, beta, *others):
    return gated(q, k, v, torch.ones_like(beta)[..., None, None], beta, 1)


def gated_delta_rule(q, k, v, g, beta, *others):
    return gated(q, k, v, g.exp()[..., None, None], beta, 1)


# --- stand-ins


def stand_in(name: str, kernel: Kernel) -> type[torch.autograd.Function]:
    """An autograd.Function of this name, whose backward computes again from what it keeps."""

    def forward(ctx, *args):
        given = [x for x in args if isinstance(x, Tensor)]
        for x in given:
            x.detach().numpy()  # a kernel reads memory
        results = kernel.plain(*args)
        made = list(results) if isinstance(results, tuple) else [results]
        kept = {f"x{i}": x for i, x in enumerate(given)} | {f"y{i}": y for i, y in enumerate(made)}
        own = [torch.zeros(shape, dtype=dtype) for shape, dtype in kernel.own]
        ctx.save_for_backward(*(kept[each] for each in kernel.saves.split()), *own)
        ctx.args = lambda: args  # not what the kernel keeps, but what this one computes with again
        return results

    def backward(ctx, *gradients):
        leaves = [x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in ctx.args()]
        with torch.enable_grad():
            results = kernel.plain(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        found = iter(torch.autograd.grad(results, wanted, gradients, allow_unused=True))
        return tuple(next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in leaves)

    module, _, own_name = name.rpartition(".")
    members = {
        "__module__": module,
        "__qualname__": own_name,
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
    }
    return type(own_name, (torch.autograd.Function,), members)


B, L, G, R, D = 2, 6, 2, 2, 4  # batch, positions, groups, heads of a group, width
H = G * R
STATE = rand(B, L, H, D), rand(B, L, H, D), rand(B, L, H, 6), -share(B, L, H), share(B, L, H)
HALF_LOG = ((B, H, L), torch.float32), ((2,), torch.int64)
FLASH = ((3, 0.0), (4, None), (5, True), (6, (-1, -1)), (7, 0.0), (8, None), (9, False), (10, False))
NORM = rand(B, L, 8), rand(8), rand(8)
ROWS_OF_NORM = ((B * L,), torch.float32)

KERNELS = {
    "apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction": Kernel(
        apex_layer_norm, NORM, "b0 b1", "x0 x1 x2", (ROWS_OF_NORM, ROWS_OF_NORM), ((3, (8,)), (4, 1e-5), (5, False))
    ),
    "apex.normalization.fused_layer_norm.FusedRMSNormAffineFunction": Kernel(
        apex_rms_norm, NORM[:2], "b0 b1", "x0 x1", (ROWS_OF_NORM,), ((2, (8,)), (3, 1e-5), (4, False))
    ),
    "causal_conv1d.causal_conv1d_interface.CausalConv1dFn": Kernel(
        convolve, (rand(B, 4, L), rand(4, 3), rand(4)), "b d", "x0 x1 x2"
    ),
    "fla.ops.delta_rule.chunk.ChunkDeltaRuleFunction": Kernel(
        delta_rule,
        (*STATE[:3], STATE[4]),
        "b h",
        "x0 x1 x2 x3",
        (((B, L, H, 64), torch.float64),),
        ((4, 1.0), (5, None), (6, False)),
    ),
    "fla.ops.gated_delta_rule.chunk.ChunkGatedDeltaRuleFunction": Kernel(
        gated_delta_rule, STATE, "b h", "x0 x1 x2 x3 x4", (((B, L, H, 64), torch.float64),), ((5, 1.0),)
    ),
    "fla.ops.gla.chunk.ChunkGLAFunction": Kernel(
        gla, (*STATE[:3], -share(B, L, H, D)), "b h", "x0 x1 x2 x3", (((B, L, H, D), torch.float32),), ((4, 1.0),)
    ),
    "fla.ops.simple_gla.chunk.ChunkSimpleGLAFunction": Kernel(
        simple_gla, STATE[:4], "b h", "x0 x1 x2 x3", (((B, L, H), torch.float32),), ((4, 1.0),)
    ),
    "flash_attn.flash_attn_interface.FlashAttnFunc": Kernel(
        attend, (rand(B, L, H, D), rand(B, L, G, D), rand(B, L, G, D)), "b g", "x0 x1 x2 y0", HALF_LOG, FLASH
    ),
    "flash_attn.flash_attn_interface.FlashAttnKVPackedFunc": Kernel(
        attend_kv,
        (rand(B, L, H, D), rand(B, L, 2, G, D)),
        "b g",
        "x0 x1 y0",
        HALF_LOG,
        tuple((i - 1, value) for i, value in FLASH),
    ),
    "flash_attn.flash_attn_interface.FlashAttnQKVPackedFunc": Kernel(
        attend_qkv, (rand(B, L, 3, H, D),), "b h", "x0 y0", HALF_LOG, tuple((i - 2, value) for i, value in FLASH)
    ),
    "flash_attn.flash_attn_interface.FlashAttnVarlenFunc": Kernel(
        attend_varlen,
        (rand(L, H, D), rand(L, G, D), rand(L, G, D), torch.tensor([0, 4, 6]), torch.tensor([0, 4, 6])),
        "g",
        "x0 x1 x2 x3 x4 y0",
        (((H, L), torch.float32), HALF_LOG[1]),
        ((5, 4), (6, 4), (7, 0.0)),
    ),
    "flash_attn.layers.rotary.ApplyRotaryEmb": Kernel(
        rotary, (rand(B, L, H, D), rand(8, 2), rand(8, 2)), "b h", "x1 x2", (), ((3, False), (4, False))
    ),
    "flash_attn.ops.activations.SwiGLUFunction": Kernel(
        lambda x, y: F.silu(x) * y, (rand(B, L, 8), rand(B, L, 8)), "b0 b1 b2", "x0 x1"
    ),
    "flash_attn.ops.triton.cross_entropy.CrossEntropyLoss": Kernel(
        losses, (rand(L, 10), ids(10, L)), "b", "x0 x1", (((L,), torch.float32),), ((2, 0.0),)
    ),
    "liger_kernel.ops.fused_add_rms_norm.LigerFusedAddRMSNormFunction": Kernel(
        add_rms_norm, (rand(B, L, 8), rand(B, L, 8), rand(8)), "b0 b1", "y1 x2", (ROWS_OF_NORM,), ((3, 1e-6),)
    ),
    "liger_kernel.ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction": Kernel(
        linear_loss,
        (rand(L, 8), rand(10, 8), ids(10, L)),
        "b",
        "",
        (((L, 8), torch.float64), ((10, 8), torch.float64)),
        ((3, None), (4, None), (5, -100), (6, 0.0), (7, 0.0), (8, "sum")),
    ),
    "liger_kernel.ops.geglu.LigerGELUMulFunction": Kernel(
        lambda x, y: F.gelu(x, approximate="tanh") * y, (rand(B, L, 8), rand(B, L, 8)), "b0 b1 b2", "x0 x1"
    ),
    "liger_kernel.ops.layer_norm.LigerLayerNormFunction": Kernel(
        layer_norm, NORM, "b0 b1", "x0 x1 x2", (ROWS_OF_NORM, ROWS_OF_NORM), ((3, 1e-5),)
    ),
    "liger_kernel.ops.rms_norm.LigerRMSNormFunction": Kernel(
        rms_norm, NORM[:2], "b0 b1", "x0 x1", (ROWS_OF_NORM,), ((2, 1e-6), (3, 0.0), (4, "llama"), (5, True))
    ),
    "liger_kernel.ops.rope.LigerRopeFunction": Kernel(
        rope, (rand(B, H, L, D), rand(B, G, L, D), rand(1, L, D), rand(1, L, D)), "b g l", "x2 x3"
    ),
    "liger_kernel.ops.softmax.LigerSoftmaxFunction": Kernel(lambda x: x.softmax(-1), (rand(B, L, 8),), "b0 b1", "y0"),
    "liger_kernel.ops.swiglu.LigerSiLUMulFunction": Kernel(
        lambda x, y: F.silu(x) * y, (rand(B, L, 8), rand(B, L, 8)), "b0 b1 b2", "x0 x1"
    ),
    "mamba_ssm.ops.selective_scan_interface.SelectiveScanFn": Kernel(
        selective_scan,
        (rand(B, 4, L), rand(B, 4, L), -share(4, 3), rand(B, 3, L), rand(B, 3, L), rand(4), rand(B, 4, L), rand(4)),
        "b d",
        "x0 x1 x2 x3 x4 x5 x6 x7",
        (((B, 4, 1, 6), torch.float32), ((B, 4, L), torch.float64)),
        ((8, True), (9, False)),
    ),
    "mamba_ssm.ops.triton.ssd_combined.MambaChunkScanCombinedFn": Kernel(
        ssd,
        (rand(B, L, H, D), share(B, L, H), -share(H), rand(B, L, G, 3), rand(B, L, G, 3), rand(H)),
        "b g",
        "x0 x1 x2 x3 x4 x5 y0",
        (((B, H, L), torch.float32),),
        ((5, 3),),
    ),
    "unsloth.kernels.rms_layernorm.Fast_RMS_Layernorm": Kernel(
        rms_norm, NORM[:2], "b0 b1", "x0 x1", (ROWS_OF_NORM,), ((2, 1e-6), (3, False))
    ),
    "xformers.ops.fmha._fMHA": Kernel(
        attend_memory_efficient,
        (rand(B, L, H, D), rand(B, L, H, D), rand(B, L, H, D), rand(B, H, L, L)),
        "b h0",
        "x0 x1 x2 x3 y0",
        (HALF_LOG[0],),
        ((0, None), (5, 0.0), (6, None)),
    ),
}


def applied(name: str) -> Callable[..., object]:
    """The stand-in of a kernel as a function of its operands."""
    kernel = KERNELS[name]
    function = stand_in(name, kernel)

    def run(*tensors: Tensor) -> object:
        args = list(tensors)
        for position, value in kernel.others:
            args.insert(position, value)
        return function.apply(*args)

    return run

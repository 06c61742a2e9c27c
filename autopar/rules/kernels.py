"""Rows of public kernels, by the name of their op or `torch.autograd.Function`, in the notation of `register_rule`.

Each is held against a stand-in: a function of the same signature in plain PyTorch (tests/rules/test_kernels.py). At
capture it is proved on the kernel itself, as a rule of one's own is; where it does not hold for the version that is
installed, or for the call's other arguments (dropout), the op is one without a rule.

Letters: b batch, s and t positions of queries and keys, l positions, g groups of r heads, h heads or hidden size, d, e,
n, p, k widths, v classes or width of values, w a window. Positions stay whole: most of these kernels are causal.
FLOPs of attention by lengths are those of one document, an upper bound. Mamba's states are those of up to 2,048
positions. Liger's fused loss computes its gradients in forward, which the price counts with backward.
"""

from __future__ import annotations

_ATTENTION = "| flops 4 b s t g r d over t | saves x0 x1 x2 y0; [b g r s] float32; 2 [] int64"
_PACKED_ATTENTION = "| flops 4 b s t g r d over t | saves x0 x1 y0; [b g r s] float32; 2 [] int64"
_LAYER_NORM = "b.. h!, h!, h! -> b.. h! | flops 8 b h | saves x0 x1 x2; 2 [b] float32"
_RMS_NORM = "b.. h!, h! -> b.. h! | flops 4 b h | saves x0 x1; [b] float32"
_GATED = "b.., b.. -> b.. | flops 4 b | saves x0 x1"
_LINEAR_STATE = "-> b l! h v!, b h k! v! | flops 4 b l h k v over k | saves x0.."

ROWS: dict[str, str] = {
    "apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction": _LAYER_NORM,
    "apex.normalization.fused_layer_norm.FusedRMSNormAffineFunction": _RMS_NORM,
    "causal_conv1d.causal_conv1d_interface.CausalConv1dFn": (
        "b d l!, d w!, d -> b d l! | flops 2 b d l w | saves x0.."
    ),
    "fla.ops.delta_rule.chunk.ChunkDeltaRuleFunction": (
        f"b l! h k!, b l! h k!, b l! h v!, b l! h, b h k! v! {_LINEAR_STATE}; 64 [b l h] x0"
    ),
    "fla.ops.gated_delta_rule.chunk.ChunkGatedDeltaRuleFunction": (
        f"b l! h k!, b l! h k!, b l! h v!, b l! h, b l! h, b h k! v! {_LINEAR_STATE}; 64 [b l h] x0"
    ),
    "fla.ops.gla.chunk.ChunkGLAFunction": (
        f"b l! h k!, b l! h k!, b l! h v!, b l! h k!, b h k! v! {_LINEAR_STATE}; [b l h k] float32"
    ),
    "fla.ops.simple_gla.chunk.ChunkSimpleGLAFunction": (
        f"b l! h k!, b l! h k!, b l! h v!, b l! h, b h k! v! {_LINEAR_STATE}; [b l h] float32"
    ),
    "flash_attn.flash_attn_interface.FlashAttnFunc": (
        "b s! (g r) d!, b t! g d!, b t! g d!, b (g r) -> b s! (g r) d!, b (g r) s!, b (g r) s! t! " + _ATTENTION
    ),
    "flash_attn.flash_attn_interface.FlashAttnKVPackedFunc": (
        "b s! (g r) d!, b t! e! g d!, b (g r) -> b s! (g r) d!, b (g r) s! " + _PACKED_ATTENTION
    ),
    "flash_attn.flash_attn_interface.FlashAttnQKVPackedFunc": (
        "b s! e! h d!, b h -> b s! h d!, b h s! | flops 4 b s s h d over s | saves x0 y0; [b h s] float32; 2 [] int64"
    ),
    "flash_attn.flash_attn_interface.FlashAttnVarlenFunc": (
        "s! (g r) d!, t! g d!, t! g d!, n!, m!, (g r) -> s! (g r) d!, (g r) s! "
        "| flops 4 s t g r d over t | saves x0 x1 x2 x3 x4 y0; [g r s] float32; 2 [] int64"
    ),
    "flash_attn.layers.rotary.ApplyRotaryEmb": ("b l! h d!, n! e!, n! e! -> b l! h d! | flops 3 b l h d | saves x1 x2"),
    "flash_attn.ops.activations.SwiGLUFunction": _GATED,
    "flash_attn.ops.triton.cross_entropy.CrossEntropyLoss": (
        "b v!, b -> b, b | flops 5 b v | saves x0 x1; [b] float32"
    ),
    "liger_kernel.ops.fused_add_rms_norm.LigerFusedAddRMSNormFunction": (
        "b.. h!, b.. h!, h! -> b.. h!, b.. h! | flops 5 b h | saves y1 x2; [b] float32"
    ),
    "liger_kernel.ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction": (
        "b k!, v! k!, b, v! -> | sum b | flops 2 b k v over k | saves [b k] x0; [v k] x1"
    ),
    "liger_kernel.ops.geglu.LigerGELUMulFunction": _GATED,
    "liger_kernel.ops.layer_norm.LigerLayerNormFunction": _LAYER_NORM,
    "liger_kernel.ops.rms_norm.LigerRMSNormFunction": _RMS_NORM,
    "liger_kernel.ops.rope.LigerRopeFunction": (
        "b (g r) l d!, b g l d!, b l d!, b l d! -> b (g r) l d!, b g l d! "
        "| flops 3 b g r l d | flops 3 b g l d | saves x2 x3"
    ),
    "liger_kernel.ops.softmax.LigerSoftmaxFunction": "b.. v! -> b.. v! | flops 5 b v | saves y0",
    "liger_kernel.ops.swiglu.LigerSiLUMulFunction": _GATED,
    "mamba_ssm.ops.selective_scan_interface.SelectiveScanFn": (
        "b d l!, b d l!, d n!, b n! l!, b n! l!, d, b d l!, d -> b d l!, b d n! "
        "| flops 9 b d l n | saves x0..; 2 [b d n] float32; [b d l] x0"
    ),
    "mamba_ssm.ops.triton.ssd_combined.MambaChunkScanCombinedFn": (
        "b l! (g r) p!, b l! (g r), (g r), b l! g n!, b l! g n!, (g r), (g r) -> b l! (g r) p!, b (g r) p! n! "
        "| flops 6 b l g r p n over n | saves x0.. y0; [b l g r] float32"
    ),
    "unsloth.kernels.rms_layernorm.Fast_RMS_Layernorm": _RMS_NORM,
    "xformers.ops.fmha._fMHA": (
        "b s! h.. d!, b t! h.. d!, b t! h.. d!, b h.. s! t! -> b s! h.. d! "
        "| flops 4 b s t h d over t | saves x0.. y0; [b h s] float32"
    ),
}

"""Small models of public libraries: timm, torchvision, vit-pytorch, x-transformers, segmentation and graph models.

Each row names a model, with its arguments and the shapes of its inputs; nothing is downloaded. A library that is not
installed has no rows.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.models import BATCH, SEQ, perturb_constants
from benchmarks.zoo.small import Small, Step

CLASSES = 16
VOCAB = 32
WIDTH = 32

# One small model of a family: first those that take pictures of any size, then those built for a size, then those that
# take their own size alone.
TIMM_ANY = """
test_byobnet test_convnext test_convnext2 test_efficientnet test_efficientnet_evos test_efficientnet_gn
test_mambaout test_nfnet test_resnet convnext_zepto_rms cpubone_nano cs3darknet_focus_s cspnext_tiny
densenet121 dla46_c dpn48b edgenext_x_small mnasnet_050 efficientvim_m1 efficientvit_b0 fasternet_t0 fastvit_t8
ghostnet_050 hardcorenas_b hgnetv2_b0 hrnet_w18_small iformer_t inception_next_atto lcnetv2_small lowformer_b0
mambaout_femto poolformerv2_s12 lcnet_035 mobilevit_xs nf_regnet_b0 pvt_v2_b0 regnetx_002 repghostnet_050 repvit_m1
resnest14d resnet10t resnetv2_18 rexnet_100 legacy_seresnet18 shvit_s1 skresnet18 starnet_s1 swiftformer_xs mobileone_s1
ese_vovnet19b_slim_dw xcit_nano_12_p8_224
"""
TIMM_SIZED = """
test_vit test_vit3 test_vit4 test_vit_relpos test_coatnet test_maxvit vit_tiny_patch16_224 deit_tiny_patch16_224
deit_tiny_distilled_patch16_224 cait_xxs24_224 convit_tiny vit_tiny_patch16_dinov3_qkvb gmlp_ti16_224 resmlp_12_224
pit_ti_224 vit_tiny_r_s16_p8_224 gcvit_xxtiny
"""
TIMM_OWN = (
    "efficientformer_l1 efficientformerv2_s0 efficientvit_m0 levit_128s visformer_tiny crossvit_tiny_240 coat_tiny"
)

TORCHVISION = """
resnet18 squeezenet1_1 mobilenet_v2 mobilenet_v3_small shufflenet_v2_x0_5 mnasnet0_5 efficientnet_b0 regnet_y_400mf
googlenet
"""

SEGMENTATION = "Unet UnetPlusPlus Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus MAnet UPerNet Segformer"

GRAPHS = "GCN GraphSAGE GIN GAT EdgeCNN"

# Options of the layers of x-transformers, each tried alone.
TEXT_OPTIONS = """
rotary_pos_emb alibi_pos_bias rel_pos_bias dynamic_pos_bias use_rmsnorm use_simple_rmsnorm use_scalenorm ff_glu ff_swish
ff_relu_squared ff_no_bias attn_qk_norm attn_one_kv_head attn_gate_values attn_flash macaron
sandwich_norm residual_attn gate_residual attn_softclamp_logits attn_laser add_value_residual attn_add_zero_kv
"""
TEXT_NUMBERS = {"attn_kv_heads": 2, "shift_tokens": 1, "attn_num_mem_kv": 2, "attn_sparse_topk": 4}

_VIT: Mapping[str, Any] = {"image_size": 32, "patch_size": 8, "dim": WIDTH, "depth": 2, "heads": 4, "mlp_dim": 64}
_LINE = {"seq_len": 32, "patch_size": 8, "dim": WIDTH, "depth": 2, "heads": 4, "mlp_dim": 64}
_FRAMES = {"image_size": 32, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "dim": WIDTH, "heads": 4}
_FOUR = {"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1)}
_CROSS = {
    "sm_dim": 16,
    "sm_patch_size": 8,
    "sm_enc_heads": 2,
    "sm_enc_mlp_dim": 32,
    "lg_dim": 32,
    "lg_enc_depth": 1,
    "lg_enc_heads": 2,
    "lg_enc_mlp_dim": 32,
    "cross_attn_heads": 2,
}
_CVT = {f"s{i}_{name}": n for i in (1, 2, 3) for name, n in (("emb_dim", 16), ("heads", 2), ("depth", 1))}
_TWINS = {f"s{i}_{name}": n for i in (1, 2, 3, 4) for name, n in (("emb_dim", 16), ("depth", 1))}
_PATCHES = {f"s{i}_{name}": n for i, n in ((1, 4), (2, 4), (3, 2), (4, 1)) for name in ("local_patch_size", "global_k")}
_COMPACT = {"img_size": 32, "embedding_dim": WIDTH, "n_conv_layers": 2, "kernel_size": 3, "padding": 1}

# module and class of vit-pytorch -> side of its pictures, and arguments
VIT_PYTORCH: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "vit.ViT": (32, _VIT),
    "simple_vit.SimpleViT": (32, _VIT),
    "deepvit.DeepViT": (32, _VIT),
    "cait.CaiT": (32, _VIT | {"cls_depth": 1}),
    "vit_for_small_dataset.ViT": (32, _VIT),
    "parallel_vit.ViT": (32, _VIT | {"num_parallel_branches": 2}),
    "vit_with_patch_merger.ViT": (32, _VIT | {"patch_merge_layer": 1, "patch_merge_num_tokens": 4}),
    "learnable_memory_vit.ViT": (32, _VIT),
    "normalized_vit.nViT": (32, _VIT),
    "simple_vit_with_qk_norm.SimpleViT": (32, _VIT),
    "simple_vit_with_register_tokens.SimpleViT": (32, _VIT),
    "simple_vit_with_fft.SimpleViT": (32, _VIT | {"freq_patch_size": 8}),
    "simple_vit_with_value_residual.SimpleViT": (32, _VIT),
    "simple_vit_with_hyper_connections.SimpleViT": (32, _VIT | {"num_residual_streams": 2}),
    "simple_vit_with_patch_dropout.SimpleViT": (32, _VIT),
    "simple_vit_attn_residual.SimpleViTAttnResidual": (32, _VIT),
    "rvt.RvT": (32, _VIT),
    "jumbo_vit.JumboViT": (32, _VIT),
    "ats_vit.ViT": (32, _VIT | {"max_tokens_per_depth": (12, 8)}),
    "vit_with_decorr.ViT": (32, _VIT),
    "vit_5.ViT": (32, _VIT),
    "vit_with_keel_post_ln.ViT": (32, _VIT),
    "simple_uvit.SimpleUViT": (32, _VIT),
    "xcit.XCiT": (32, _VIT | {"cls_depth": 1}),
    "pit.PiT": (32, _VIT | {"depth": (1, 1)}),
    "vit_1d.ViT": (0, _LINE),
    "simple_vit_1d.SimpleViT": (0, _LINE),
    "vit_3d.ViT": (-32, _FRAMES | {"depth": 2, "mlp_dim": 64}),
    "simple_vit_3d.SimpleViT": (-32, _FRAMES | {"depth": 2, "mlp_dim": 64}),
    "vivit.ViViT": (-32, _FRAMES | {"spatial_depth": 1, "temporal_depth": 1, "mlp_dim": 64}),
    "cct.CCT": (32, _COMPACT | {"num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0}),
    "t2t.T2TViT": (32, {k: v for k, v in _VIT.items() if k != "patch_size"} | {"t2t_layers": ((7, 4), (3, 2))}),
    "cross_vit.CrossViT": (48, _CROSS | {"image_size": 48, "depth": 1}),
    "crossformer.CrossFormer": (
        64,
        _FOUR | {"dim": (32, 32, 64, 64), "global_window_size": (4, 2, 2, 1), "local_window_size": 2},
    ),
    "cvt.CvT": (64, _CVT),
    "levit.LeViT": (64, {"image_size": 64, "stages": 2, "dim": (32, 64), "depth": 1, "heads": (2, 4), "mlp_mult": 2}),
    "max_vit.MaxViT": (64, {"dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4}),
    "mobile_vit.MobileViT": (
        64,
        {"image_size": (64, 64), "dims": [16, 24, 32], "channels": [8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64]},
    ),
    "nest.NesT": (
        32,
        {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1)},
    ),
    "regionvit.RegionViT": (64, _FOUR | {"window_size": 2}),
    "scalable_vit.ScalableViT": (
        64,
        {
            "dim": 16,
            "heads": (2, 2, 2, 2),
            "depth": (1, 1, 1, 1),
            "reduction_factor": (2, 2, 2, 1),
            "window_size": (4, 4, None, None),
        },
    ),
    "sep_vit.SepViT": (112, {"dim": 16, "dim_head": 8, "heads": (1, 2), "depth": (1, 1)}),
    "twins_svt.TwinsSVT": (64, _TWINS | _PATCHES),
}


@dataclass(frozen=True)
class _Library:
    """Models of one library.

    Attributes:
        distribution: what is installed.
        package: what is imported.
        names: its models here.
        make: the model of a name with its inputs.
    """

    distribution: str
    package: str
    names: tuple[str, ...]
    make: Callable[[str], tuple[nn.Module, tuple[Tensor, ...]]]


def _pictures(side: int) -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, 3, side, side),)


def _timm(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import timm

    sized = {"img_size": 64} if name in TIMM_SIZED.split() else {}
    model = timm.create_model(name, num_classes=CLASSES, **sized)
    return model, _pictures(model.default_cfg["input_size"][-1] if name in TIMM_OWN.split() else 64)


def _torchvision(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import torchvision

    extra = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    return torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **extra), _pictures(64)


def _vit_pytorch(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    module, _, kind = name.partition(".")
    side, arguments = VIT_PYTORCH[name]
    model = getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(num_classes=CLASSES, **arguments)
    if side == 0:
        return model, (torch.randn(BATCH, 3, 32),)
    return model, _pictures(side) if side > 0 else (torch.randn(BATCH, 3, 4, -side, -side),)


def _text(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import x_transformers as x

    options = {name: TEXT_NUMBERS.get(name, True)}
    layers = x.Decoder(**{"dim": WIDTH, "depth": 2, "heads": 4, "attn_dim_head": 8} | options)
    model = x.TransformerWrapper(num_tokens=VOCAB, max_seq_len=SEQ, attn_layers=layers)
    return model, (torch.randint(0, VOCAB, (BATCH, SEQ)),)


def _segmentation(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import segmentation_models_pytorch as smp

    return getattr(smp, name)("resnet18", encoder_weights=None, classes=4), _pictures(64)


def _graph(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    from torch_geometric.nn import models

    nodes = 12
    model = getattr(models, name)(in_channels=8, hidden_channels=16, num_layers=2, out_channels=4)
    return model, (torch.randn(nodes, 8), torch.randint(0, nodes, (2, 40)))


LIBRARIES: Mapping[str, _Library] = {
    "timm": _Library("timm", "timm", tuple((TIMM_ANY + TIMM_SIZED + TIMM_OWN).split()), _timm),
    "torchvision": _Library("torchvision", "torchvision", tuple(TORCHVISION.split()), _torchvision),
    "vit-pytorch": _Library("vit-pytorch", "vit_pytorch", tuple(VIT_PYTORCH), _vit_pytorch),
    "x-transformers": _Library("x-transformers", "x_transformers", (*TEXT_OPTIONS.split(), *TEXT_NUMBERS), _text),
    "segmentation": _Library(
        "segmentation-models-pytorch", "segmentation_models_pytorch", tuple(SEGMENTATION.split()), _segmentation
    ),
    "geometric": _Library("torch-geometric", "torch_geometric", tuple(GRAPHS.split()), _graph),
}


def names() -> Iterator[str]:
    """`timm:resnet10t` and so on, of the libraries that are installed."""
    for prefix, library in LIBRARIES.items():
        if importlib.util.find_spec(library.package) is not None:
            yield from (f"{prefix}:{name}" for name in library.names)


def has(name: str) -> bool:
    """Whether a name is that of a model here."""
    return name.partition(":")[0] in LIBRARIES


def distributions() -> Iterator[str]:
    """The names of the libraries for pip."""
    yield from (library.distribution for library in LIBRARIES.values())


def make(name: str, *, seed: int = 0) -> Small:
    """The small model of that name, in float64 where it runs so. Raises what the model does where it does not."""
    try:
        return _made(name, torch.float64, seed)
    except RuntimeError:  # it makes float32 numbers itself
        return _made(name, torch.float32, seed)


def _made(name: str, dtype: torch.dtype, seed: int) -> Small:
    prefix, _, own = name.partition(":")
    torch.manual_seed(seed)
    model, inputs = LIBRARIES[prefix].make(own)
    model = model.to(dtype)
    perturb_constants(model)
    args = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    step = Step(model.train(), _parameter_names(model, len(args)))
    step.draw_targets(*args)
    first, second = (step(*args) for _ in range(2))
    second.backward()
    model.zero_grad()
    return Small(step, args, prefix, None, draws=not torch.equal(first, second))


def _parameter_names(model: nn.Module, count: int) -> Sequence[str]:
    """The names of the first arguments of the model's forward."""
    return tuple(inspect.signature(model.forward).parameters)[:count]

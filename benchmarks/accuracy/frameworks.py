"""What tables of published runs leave unsaid about the code that ran: one description a framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autopar.cost_model.items import FULL, MIXED, MIXED_BOTH_GRADIENTS, MIXED_FLOAT32_GRADIENTS, TrainingState
from autopar.cost_model.optimizers import OptimizerFormat, StateFormat
from benchmarks.accuracy.traits import USUAL, Traits

# PyTorch FSDP and autocast: parameters in float32, cast to bfloat16 where they are used; the
# captured graph has them in bfloat16, so float32 masters stand for the stored ones.
AUTOCAST = TrainingState(
    gradient_bytes=4, master_bytes=2, optimizer=OptimizerFormat("adamw", (StateFormat(element_bytes=4),) * 2)
)
# ZeRO-Offload: gradients leave as they come, and states are on the host.
HOST_STATES = TrainingState(gradient_bytes=0, optimizer=OptimizerFormat("host", ()))


@dataclass(frozen=True)
class Framework:
    """What a table leaves unsaid about the code that ran it.

    Attributes:
        name: its name in the catalogue of fitted software.
        family: family of models, a key of `autopar.models.FAMILIES`.
        training_state: bytes that training keeps in addition to parameters.
        zero_stage: stage of ZeRO where a row has none.
        pads_vocab: whether it pads the vocabulary to a multiple of 128 times tp (Megatron-LM).
        flash: whether attention keeps no weights.
        dropout: share of activations and attention weights that is dropped.
        vocab: size of the vocabulary where a row has none.
        chunk_layers: layers of a chunk of an interleaved schedule, where a row does not tell chunks.
        traits: its habits.
        narrow_state: bytes that training keeps in addition to parameters in runs with products of 8 bits, which then
            keep their inputs so; None where it is the same as in others, and so are inputs.
        sequence_parallel: whether tensor parallelism always comes with sequence parallelism, whatever a row says.
        network: network of the cluster where a row names none: a suffix in the catalogue of hardware.
        overlaps: whether any communication hides behind compute.
    """

    name: str
    family: str
    training_state: TrainingState
    zero_stage: int = 0
    pads_vocab: bool = False
    flash: bool = True
    dropout: float = 0.0
    vocab: int | None = None
    chunk_layers: int | None = None
    traits: Traits = USUAL
    narrow_state: TrainingState | None = None
    network: str = ""
    sequence_parallel: bool = False
    overlaps: bool = True


# Megatron-Core with Transformer Engine. Products keep their inputs in 8 bits where they are of 8 bits, and gradients
# are then added up in bfloat16; runs in bfloat16 add them up in float32, and keep of a float32 master the half that the
# bfloat16 parameter lacks (NeMo, `scripts/performance/helpers.py` at 02a0e6a: `grad_reduce_in_fp32`,
# `use_precision_aware_optimizer`; MLPerf Training v5.0, NVIDIA's `llama31_405b`: the same, no recomputation). Products
# add gradients of weights to their sum (`gradient_accumulation_fusion`). Megatron-Core's fused loss holds logits and
# their gradient in bfloat16 and one tensor in float32, in which it works (`fused_cross_entropy.py`). Buckets have 40M
# parameters, or 1M for each data-parallel rank (`distributed_data_parallel.py`), here counted in bfloat16.
NEMO = Framework(
    "nemo",
    "llama",
    replace(MIXED_FLOAT32_GRADIENTS, master_bytes=2),
    1,
    pads_vocab=True,
    traits=Traits(
        fused=True,
        regathers=True,
        hides_regathers=True,
        accumulates_in_products=True,
        repeats_layers=True,
        logit_bytes=8,
        bucket_bytes=80e6,
        bucket_bytes_per_rank=2e6,
        loops_over_experts=True,
        hides_in_products=0.7,
    ),
    narrow_state=MIXED,
    sequence_parallel=True,
)

# Recipes of Megatron-Bridge v0.2.0 to v0.6.0: all add gradients up in bfloat16 (`grad_reduce_in_fp32 = False`), and
# those of mixtures have `moe_flex_dispatcher_backend` "deepep" or "hybridep".
BRIDGE = replace(NEMO, training_state=MIXED, traits=replace(NEMO.traits, sends_once=True))
TITAN = Framework("torchtitan", "llama", AUTOCAST, zero_stage=3)
COMPILED_TITAN = replace(TITAN, traits=Traits(logit_bytes=4))

# By the first word of `framework`, or of `source`, that matches; None for one that is not described.
FRAMEWORKS: Mapping[str, Framework | None] = MappingProxyType(
    {
        # examples/llama/train_llama3_8b_h100_fp8.sh of Megatron-LM at 157006d: gradients in bfloat16.
        "Megatron-LM examples/llama": NEMO,
        "nanotron": Framework(
            "nanotron",
            "llama",
            MIXED_BOTH_GRADIENTS,
            traits=Traits(balances=True, regathers=True, bucket_bytes=256e6),
            network="efa",
        ),
        "Megatron-DeepSpeed": Framework(
            "megatron-deepspeed",
            "gpt",
            MIXED,
            pads_vocab=True,
            flash=False,
            traits=Traits(scatters=True, repeats_layers=True),
        ),
        "llm-foundry": Framework(
            # MPT's loss is the fused one of flash-attn: logits and their gradient in bfloat16.
            "llm-foundry",
            "llm-foundry",
            AUTOCAST,
            zero_stage=3,
            traits=Traits(logit_bytes=4),
        ),
        # Where torchtitan compiles the model, it compiles the loss, too (since bbb1b61, `components/loss.py`): logits
        # and their gradient in bfloat16. The configurations of nvfp4.md take the loss in eight parts instead (b5bcd76,
        # `ChunkedLossWrapper` of `llama3_8b`), each as torch does: 16 bytes for each logit of a part.
        "torchtitan + torchao": COMPILED_TITAN,
        "torchtitan mxfp8.md": COMPILED_TITAN,
        "torchtitan nvfp4.md": replace(COMPILED_TITAN, traits=Traits(logit_bytes=2)),
        "torchtitan": TITAN,
        # Everything in bfloat16: on one GPU 8.03e9 parameters take 80.7 GB, so that there are no float32 masters.
        "KempnerForge": Framework("torchtitan", "llama", FULL, zero_stage=3, sequence_parallel=True),
        # Parameters in float32, cast to bfloat16, and torch's loss (bf0e6d3, FSDP with mixed precision).
        "Modalities": Framework("torchtitan", "llama", AUTOCAST, zero_stage=3),
        # States in bfloat16, as the table notes.
        "DeepSpeed DeepCompile": Framework("torchtitan", "llama", FULL, zero_stage=3),
        # The optimizer and its gradients on the host, but where a row notes none of it; Liger's loss keeps no logits.
        "+ Liger": Framework(
            "torchtitan", "llama", HOST_STATES, zero_stage=3, traits=Traits(fused=True, logit_bytes=0)
        ),
        "Primus": NEMO,
        "Deepspeed N": None,
        "maxtext": None,
        # With 512 tokens its products alone would have to run above the peak, if attention kept its weights.
        "PyTorch DDP": Framework("apex", "bert", MIXED),
        # Built in bfloat16, which is what "auto" means (36044ad, `_transformers/auto_model.py`), so that its states are
        # in it, too; the loss is torch's in that format (`fp32_upcast: false`): logits, their log-softmax and gradient.
        # Its kernels are those of Transformer Engine (`attn: te`, `linear: te`), as NeMo's (`dispatcher: deepep`).
        "AutoModel": Framework("nemo", "llama", FULL, zero_stage=3, traits=Traits(logit_bytes=6, sends_once=True)),
        # Qi et al. 2023, section 5.1: every layer is a chunk. The vocabulary is that of the tokenizer of
        # their example, and what the printed numbers of parameters leave for an embedding; dropout and
        # gradients added by the products themselves are defaults of Megatron-LM.
        "Megatron-LM (zero": Framework(
            "megatron-lm",
            "gpt",
            MIXED_FLOAT32_GRADIENTS,
            pads_vocab=True,
            flash=False,
            dropout=0.1,
            vocab=32000,
            chunk_layers=1,
            traits=Traits(accumulates_in_products=True, repeats_layers=True),
        ),
        "Megatron-LM": Framework(
            "megatron-lm", "gpt", MIXED, pads_vocab=True, flash=False, traits=Traits(scatters=True, repeats_layers=True)
        ),
        "perf summary 25.11": BRIDGE,
        "perf summary 26.": BRIDGE,
        "Megatron-Bridge performance studies": BRIDGE,
        "NeMo": NEMO,
        "Megatron-Bridge": NEMO,
        # SimuMax's runs of Megatron-Core: float32 gradients and masters, and overlap turned off (its release notes).
        "Megatron-Core": replace(
            NEMO,
            training_state=MIXED_FLOAT32_GRADIENTS,
            narrow_state=MIXED,
            overlaps=False,
            traits=replace(NEMO.traits, rings=False),
        ),
        # Others that submit use NVIDIA's code, and AMD's is made from it.
        "MLPerf Training": NEMO,
    }
)

"""The sizes of a model as a frozen value, with the numbers of a paper's table of architectures.

Three kinds share their blocks: `Transformer` (decoder or encoder alone), `EncoderDecoder` (T5-like)
and `VisionTransformer`. `autopar.models.build` builds plain PyTorch modules from them; `parameter_count` is a formula
for their number of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError

ACTIVATIONS = ("gelu", "silu", "relu")
NORMS = ("layer", "rms")
POSITIONS = ("learned", "rotary", "alibi")
RELATIVE_BUCKETS = 32  # of T5's relative positions (arXiv 1910.10683, section 2.1)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): widths that a token's heads are made from.

    Attributes:
        queries: width of the vector from which all queries are made.
        keys: width of the vector from which all keys and values are made.
        rotary: numbers of a query and a key that turn with the position, beside the `head_dim` that do not; those of a
            key are the same for all heads.
    """

    queries: int
    keys: int
    rotary: int


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A stack of attention and feed-forward blocks. Raises AutoparError for sizes that do not fit.

    Attributes:
        hidden: width of the residual stream.
        layers: how many blocks; of an encoder-decoder, those of the decoder.
        heads: attention heads of a block.
        kv_heads: heads of keys and values; 0 for as many as `heads`.
        head_dim: width of a head; 0 for hidden / heads.
        ffn: inner width of the feed-forward part, of one expert where there are experts.
        gated: whether a second product gates the inner activations (SwiGLU, GEGLU).
        activation: gelu, silu or relu.
        norm: "layer" (LayerNorm) or "rms" (RMSNorm).
        bias: whether linear layers, experts and LayerNorms have one.
        post_norm: whether the norm follows the residual sum, as in BERT, instead of leading in.
        experts: number of experts in the feed-forward part, 0 for a dense one.
        experts_per_token: number of experts that a token visits.
        shared_experts: number of experts beside these that every token visits.
        dropout: probability, of attention weights and of what is added to the residual stream.
        fused_attention: attention as one op that keeps no weights (scaled_dot_product_attention),
            or as product, softmax and product, as Megatron did.
        norms_heads: whether an RMSNorm of a head's width follows the products for query and key, as in Qwen3.
        fused_projections: one product for query, key and value together, and one for gate and up.
        latent: widths of multi-head latent attention; None for the usual one.
    """

    hidden: int
    layers: int
    heads: int
    ffn: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    activation: str = "gelu"
    norm: str = "layer"
    bias: bool = True
    post_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    dropout: float = 0.0
    fused_attention: bool = True
    norms_heads: bool = False
    fused_projections: bool = False
    latent: Latent | None = None

    def __post_init__(self) -> None:
        self._require_positive("hidden", "layers", "heads", "ffn")
        if not self.head_dim and self.hidden % self.heads:
            raise AutoparError(f"heads={self.heads} do not divide hidden={self.hidden}; give head_dim too.")
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        self._require_positive("head_dim", "kv_heads")
        if self.heads % self.kv_heads:
            raise AutoparError(f"kv_heads={self.kv_heads} do not divide heads={self.heads}.")
        self._require_one_of("activation", ACTIVATIONS)
        self._require_one_of("norm", NORMS)
        self._check_experts()
        if self.latent is not None and getattr(self, "positions", None) != "rotary":
            raise AutoparError("Latent attention has rotary positions here; give positions='rotary' to a Transformer.")
        if not 0 <= self.dropout < 1:
            raise AutoparError(f"dropout={self.dropout} is not a probability below 1.")

    def _check_experts(self) -> None:
        per_token = self.experts_per_token
        if not (0 < per_token <= self.experts or per_token == self.experts == 0):
            raise AutoparError(f"A token cannot visit experts_per_token={per_token} of experts={self.experts}.")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise AutoparError(f"{name}={value} is not a whole number of at least 1.")

    def _require_one_of(self, name: str, known: tuple[str, ...]) -> None:
        if getattr(self, name) not in known:
            raise AutoparError(f"{name}={getattr(self, name)!r} is none of {', '.join(known)}.")

    # --- closed forms

    @property
    def norm_parameters(self) -> int:
        """Number of parameters of one norm."""
        return self.hidden * (2 if self.norm == "layer" and self.bias else 1)

    @property
    def attention_parameters(self) -> int:
        """Number of parameters of the projections of query, key, value and output."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.latent is not None:
            low, rotary = self.latent, self.latent.rotary
            down = self.hidden * (low.queries + low.keys + rotary) + low.queries + low.keys
            return down + low.queries * (queries + self.heads * rotary) + 2 * low.keys * queries + queries * self.hidden
        weights = self.hidden * (2 * queries + 2 * keys) + (2 * self.head_dim if self.norms_heads else 0)
        return weights + (queries + 2 * keys + self.hidden if self.bias else 0)

    @property
    def ffn_parameters(self) -> int:
        """Number of parameters of the feed-forward part, with all its experts and their router."""
        into, bias = 2 if self.gated else 1, int(self.bias)
        one = (into + 1) * self.hidden * self.ffn + bias * (into * self.ffn + self.hidden)
        if not self.experts:
            return one
        return (self.experts + self.shared_experts) * one + self.experts * (self.hidden + bias)

    @property
    def block_parameters(self) -> int:
        """Number of parameters of one block: attention, feed-forward part and two norms."""
        return self.attention_parameters + self.ffn_parameters + 2 * self.norm_parameters


@dataclass(frozen=True, kw_only=True)
class Transformer(Blocks):
    """A language model of one stack: a decoder, or with causal=False an encoder such as BERT.

    Attributes:
        vocab: rows of the embedding.
        max_positions: the longest sequence; only learned positions have parameters for it.
        positions: learned, rotary (arXiv 2104.09864) or alibi (arXiv 2108.12409).
        tied: whether the head is the embedding.
        causal: whether a token attends only to itself and the tokens before it.
        dense_layers: number of blocks before the `layers`, with a dense feed-forward part in place of experts.
        dense_ffn: inner width of that part.
    """

    vocab: int
    max_positions: int
    positions: str = "learned"
    tied: bool = True
    causal: bool = True
    dense_layers: int = 0
    dense_ffn: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("vocab", "max_positions", *(("dense_ffn",) if self.dense_layers else ()))
        self._require_one_of("positions", POSITIONS)
        if self.positions == "alibi" and not self.causal:
            raise AutoparError("alibi positions are for causal models here.")
        if self.positions == "rotary" and self.head_dim % 2:
            raise AutoparError(f"Rotary positions need an even head_dim, not {self.head_dim}.")

    @property
    def dense(self) -> Transformer:
        """The same with the sizes of the blocks before those that have experts."""
        return replace(self, ffn=self.dense_ffn, experts=0, experts_per_token=0, shared_experts=0, dense_layers=0)

    @classmethod
    def from_dimensions(
        cls,
        family: str,
        *,
        hidden: int,
        layers: int,
        heads: int,
        vocab: int,
        max_positions: int,
        ffn: int | None = None,
        kv_heads: int | None = None,
        tied: bool | None = None,
        **changes: Any,
    ) -> Transformer:
        """The model that a row of dimensions means, for a row that names its family.

        Args:
            family: a key of `FAMILIES`, which says what a row of sizes leaves unsaid.
            hidden, layers, heads, vocab, max_positions: as in the class.
            ffn: None for 4 * hidden.
            kv_heads: None for as many as heads.
            tied: None for what the family does.
            changes: any other attribute, such as fused_attention=True or dropout=0.1.

        Raises AutoparError for an unknown family, or sizes that do not fit.
        """
        if family not in FAMILIES:
            raise AutoparError(f"There is no family {family!r}; there are {', '.join(FAMILIES)}.")
        style = FAMILIES[family] | ({} if tied is None else {"tied": tied}) | changes
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads or 0,
            vocab=vocab,
            ffn=ffn or 4 * hidden,
            max_positions=max_positions,
            **style,
        )


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder(Blocks):
    """T5 and its like: relative positions, and blocks of the decoder that look at the encoder too.

    Attributes:
        vocab: rows of the embedding, which both stacks and the head share.
        encoder_layers: blocks of the encoder; `layers` are those of the decoder.
    """

    vocab: int
    encoder_layers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("vocab", "encoder_layers")


@dataclass(frozen=True, kw_only=True)
class VisionTransformer(Blocks):
    """ViT (arXiv 2010.11929): square images cut into square patches, and a class token.

    Attributes:
        image: pixels of a side.
        patch: pixels of a side of a patch.
        channels: number of colour channels of a pixel.
        classes: number of classes to tell apart.
    """

    image: int
    patch: int
    classes: int
    channels: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("image", "patch", "classes", "channels")
        if self.image % self.patch:
            raise AutoparError(f"patch={self.patch} does not divide image={self.image}.")

    @property
    def positions(self) -> int:
        """Length of the sequence: the patches and the class token."""
        return (self.image // self.patch) ** 2 + 1


Description = Transformer | EncoderDecoder | VisionTransformer

LLAMA: dict[str, Any] = {
    "gated": True,
    "activation": "silu",
    "norm": "rms",
    "bias": False,
    "positions": "rotary",
    "tied": False,
}

# What a row of dimensions leaves unsaid, by the code that ran it.
FAMILIES: dict[str, dict[str, Any]] = {
    # LLaMA, arXiv 2302.13971 section 2.2; nanotron and torchtitan write it alike.
    "llama": LLAMA,
    # Megatron-LM's GPT, arXiv 2104.04473: attention as product, softmax, product.
    "gpt": {"fused_attention": False, "fused_projections": True},
    # MPT as published (mosaicml/mpt-7b, config.json): ALiBi and no biases.
    "mpt": {"positions": "alibi", "bias": False, "fused_projections": True},
    # The MPT of llm-foundry's table of throughputs, whose numbers of parameters are, to the last
    # digit, those of learned positions and biases.
    "llm-foundry": {"fused_projections": True},
    # BERT, arXiv 1810.04805.
    "bert": {"causal": False, "post_norm": True},
}


def parameter_count(description: Description) -> int:
    """Parameters of `build(description)`, from the sizes alone."""
    blocks = description.layers * description.block_parameters
    if isinstance(description, VisionTransformer):
        return blocks + description.norm_parameters + _image_parameters(description)
    if isinstance(description, EncoderDecoder):
        return blocks + _encoder_decoder_parameters(description)
    embeddings = description.vocab * (1 if description.tied else 2)
    embeddings += description.max_positions if description.positions == "learned" else 0
    if description.dense_layers:
        blocks += description.dense_layers * description.dense.block_parameters
    return blocks + description.norm_parameters + embeddings * description.hidden


def _image_parameters(description: VisionTransformer) -> int:
    hidden, patch = description.hidden, description.patch
    patches = hidden * (description.channels * patch**2 + 1)
    return patches + hidden * (1 + description.positions) + description.classes * (hidden + 1)


def _encoder_decoder_parameters(description: EncoderDecoder) -> int:
    """All but the decoder's own blocks, with the attention that looks at the encoder."""
    looking = description.attention_parameters + description.norm_parameters
    return (
        description.encoder_layers * description.block_parameters
        + description.layers * looking
        + 2 * description.norm_parameters
        + 2 * RELATIVE_BUCKETS * description.heads
        + description.vocab * description.hidden
    )


def repeated_layers(description: Description) -> dict[str, int]:
    """Path of every stack of blocks in the built model -> how many the model has."""
    if isinstance(description, EncoderDecoder):
        return {"encoder": description.encoder_layers, "decoder": description.layers}
    if isinstance(description, Transformer) and description.dense_layers:
        return {"dense_layers": description.dense_layers, "layers": description.layers}
    return {"layers": description.layers}


def padded(vocab: int, multiple: int = 128) -> int:
    """The vocabulary rounded up to Megatron-LM's multiple, which makes it divisible for tensor parallelism."""
    return multiple * math.ceil(vocab / multiple)

"""The dtypes of a training step under mixed precision, as data.

Between steps a parameter keeps its own dtype; the optimizer updates it, and checkpoints store it, in that dtype. A
step casts the parameter once, before any all-gather, so that gathers and ops use the cast copy. Gradients are
accumulated and reduced in `reduce_dtype`, and `.grad` has the parameter's own dtype. Linear layers may round their
operands to float8 just before they multiply them (`autopar.ops.float8`).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import AutoparError

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
FORMATS = ("bfloat16", "float16", "float32", "float64")
_SHORT_PRODUCTS = {"fp8": "float8"}
PRODUCT_FORMATS = ("float8",)
# `precision="fp8"`: parameters are used in bfloat16, the format of what products of float8 make on GPUs.
_SHORT_POLICIES = {"fp8": "bfloat16 products=float8", "float8": "bfloat16 products=float8"}
_WORDS = ("reduce", "output", "products", "exempt")
_EXAMPLE = "bf16 reduce=float32 output=float32 products=fp8 exempt=lm_head"


@dataclass(frozen=True)
class MixedPrecision:
    """A mixed-precision policy; field names are those of `torch.distributed.fsdp.MixedPrecisionPolicy`.

    A dtype is given as `torch.dtype` or by name (`"bfloat16"`, `"bf16"`), and kept as a name.

    Attributes:
        param_dtype: dtype to which floating-point parameters and inputs of the model are cast for forward and
            backward. Buffers and the weights of batch normalization keep theirs.
        reduce_dtype: dtype in which gradients are summed over micro-batches and ranks. None means the dtype in
            which each parameter is stored; with FSDP2, None means `param_dtype`.
        output_dtype: dtype to which the model's floating-point results are cast before the loss function gets them;
            None leaves them as they are.
        product_dtype: format to which linear layers round their operands, "float8" or "fp8"; None rounds nothing.
            Layers whose weight has a dim that is not a multiple of 128 are left as they are.
        exempt: names of linear layers that are not rounded, in the notation of `fnmatch`, such as `lm_head`
            or `layers.0.*`; the name of a module covers the layers inside it. A weight that several layers share is not
            rounded where one of them is exempt.

    Raises AutoparError for a format that is none of `FORMATS` (of `PRODUCT_FORMATS` for products), and for layers
    that are exempt where no product is rounded.

    >>> policy = MixedPrecision("bf16", reduce_dtype="float32")
    >>> str(policy), str(MixedPrecision.parse("fp8"))
    ('bfloat16 reduce=float32', 'bfloat16 products=float8')
    """

    param_dtype: str
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    product_dtype: str | None = None
    exempt: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            given = getattr(self, field)
            if given is not None or field == "param_dtype":
                object.__setattr__(self, field, _format(given, field))
        if self.product_dtype is not None:
            object.__setattr__(self, "product_dtype", _product_format(self.product_dtype))
        _check_exempt(self)

    def __str__(self) -> str:
        """The policy as text such as `bfloat16 reduce=float32`; the inverse of `parse`."""
        exempt = ",".join(self.exempt) or None
        fields = (self.reduce_dtype, self.output_dtype, self.product_dtype, exempt)
        named = zip(_WORDS, fields, strict=True)
        return " ".join([self.param_dtype, *(f"{k}={v}" for k, v in named if v is not None)])

    @classmethod
    def parse(cls, text: str) -> MixedPrecision:
        """Reads `bf16`, `fp8` or `bfloat16 reduce=float32 products=float8 exempt=lm_head`. Raises AutoparError."""
        first, *rest = text.split() or [""]
        first, *more = _SHORT_POLICIES.get(first, first).split() or [""]
        rest = more + rest
        words = [word.partition("=")[::2] for word in rest]
        given = dict(words)
        if unknown := [key for key in given if key not in _WORDS]:
            raise AutoparError(f"Cannot read {unknown[0]!r} in the precision {text!r}; write bf16, fp8, or {_EXAMPLE}.")
        if len(given) < len(words):
            raise AutoparError(f"The precision {text!r} names a field twice; write {_EXAMPLE}.")
        exempt = tuple(given["exempt"].split(",")) if "exempt" in given else ()
        return cls(first, given.get("reduce"), given.get("output"), given.get("products"), exempt)

    @classmethod
    def of(cls, given: object) -> MixedPrecision | None:
        """Makes a policy from any form that users may give: a policy, its text, a `torch.dtype`, or None for no policy.

        Raises AutoparError for anything else.
        """
        if given is None or isinstance(given, cls):
            return given
        return cls.parse(str(given))


def _format(given: object, field: str) -> str:
    name = str(given).removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in FORMATS:
        raise AutoparError(f"The {field} of a precision must be one of {', '.join(FORMATS)}, not {given!r}.")
    return name


def _product_format(given: object) -> str:
    name = _SHORT_PRODUCTS.get(str(given), str(given))
    if name not in PRODUCT_FORMATS:
        raise AutoparError(
            f"Products of a precision are rounded to {', '.join(PRODUCT_FORMATS)} or not at all, not to {given!r}."
        )
    return name


def _check_exempt(policy: MixedPrecision) -> None:
    if policy.exempt and policy.product_dtype is None:
        raise AutoparError(
            f"The precision exempts {', '.join(policy.exempt)} but rounds no products; write {_EXAMPLE}."
        )
    for pattern in policy.exempt:
        if not pattern or set(pattern) & set(" ,="):
            raise AutoparError(
                f"Cannot read {pattern!r} as the name of an exempt layer; write {_EXAMPLE}, with commas between names."
            )

"""The dtypes of a training step under mixed precision, as data.

Between steps a parameter keeps its own dtype; the optimizer updates it, and checkpoints store it, in that dtype. A
step casts the parameter once, before any all-gather, so that gathers and ops use the cast copy. Gradients are
accumulated and reduced in `reduce_dtype`, and `.grad` has the parameter's own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import AutoparError

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
FORMATS = ("bfloat16", "float16", "float32", "float64")


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

    Raises AutoparError for a format that is none of `FORMATS`.

    >>> MixedPrecision("bf16", reduce_dtype="float32")
    MixedPrecision(param_dtype='bfloat16', reduce_dtype='float32', output_dtype=None)
    """

    param_dtype: str
    reduce_dtype: str | None = None
    output_dtype: str | None = None

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            given = getattr(self, field)
            if given is not None or field == "param_dtype":
                object.__setattr__(self, field, _format(given, field))

    def __str__(self) -> str:
        """The policy as text such as `bfloat16 reduce=float32`; the inverse of `parse`."""
        named = (("reduce", self.reduce_dtype), ("output", self.output_dtype))
        return " ".join([self.param_dtype, *(f"{k}={v}" for k, v in named if v is not None)])

    @classmethod
    def parse(cls, text: str) -> MixedPrecision:
        """Reads `bf16` or `bfloat16 reduce=float32 output=float32`. Raises AutoparError."""
        first, *rest = text.split() or [""]
        words = [word.partition("=")[::2] for word in rest]
        given = dict(words)
        if unknown := [key for key in given if key not in ("reduce", "output")]:
            raise AutoparError(
                f"Cannot read {unknown[0]!r} in the precision {text!r}; write bf16, or bf16 "
                "reduce=float32 output=float32."
            )
        if len(given) < len(words):
            raise AutoparError(
                f"The precision {text!r} names a field twice; write bf16 reduce=float32 output=float32."
            )
        return cls(first, given.get("reduce"), given.get("output"))

    @classmethod
    def of(cls, given: object) -> MixedPrecision | None:
        """Makes a policy from what users may give: a policy, its text, a `torch.dtype`, or None for no policy.

        Raises AutoparError for anything else.
        """
        if given is None or isinstance(given, cls):
            return given
        return cls.parse(str(given))


def _format(given: object, field: str) -> str:
    name = str(given).removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in FORMATS:
        raise AutoparError(
            f"The {field} of a precision is one of {', '.join(FORMATS)}, not {given!r}."
        )
    return name

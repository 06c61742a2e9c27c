"""Rewrites of an exported graph before it is made functional. Each keeps what this step would lose or fail at."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar.capture.rewrites.drop_assertions import drop_assertions
from autopar.capture.rewrites.functionalize_strided_ops import functionalize_strided_ops
from autopar.capture.rewrites.keep_no_grad import keep_no_grad
from autopar.capture.rewrites.promote_losses import promote_losses
from autopar.capture.rewrites.write_statistics import write_statistics

EXPORTED: tuple[Callable[[fx.GraphModule], None], ...] = (  # raise CaptureError for what they cannot say
    drop_assertions,  # of numbers that nothing else reads; not all can be decomposed
    keep_no_grad,  # regions are inlined, and what they make would get gradients
    functionalize_strided_ops,  # writes to memory by strides
    write_statistics,  # writes that a schema does not mark
    promote_losses,  # of two dtypes, which not every torch differentiates
)

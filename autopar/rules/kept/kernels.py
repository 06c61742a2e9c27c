"""Kernels: what a saved tensor depends on besides the op, namely the kind of device and the number format."""

from __future__ import annotations

import torch

from autopar.rules.spec import Call

HALF = (torch.float16, torch.bfloat16)


def on_accelerator(call: Call) -> bool:
    """Whether kernels of an accelerator run the call. A model on the meta device is meant for an accelerator."""
    return call.operands[0].device.type != "cpu"

"""Base classes that torch.nn keeps to itself, and the modes and switches of torch."""

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar import _torch


def test_every_batch_norm_and_dropout_has_the_base():
    for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(norm, _torch.BatchNormBase)
    for dropout in (nn.Dropout, nn.Dropout1d, nn.Dropout3d, nn.AlphaDropout):
        assert issubclass(dropout, _torch.DropoutBase)
    assert not issubclass(nn.LayerNorm, (_torch.BatchNormBase, _torch.DropoutBase))


class _Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[bool] = []

    def ask(self, x: Tensor) -> Tensor:
        self.heard.append(_torch.is_computing())
        return x.sin()

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.ask, x, use_reentrant=False)


def test_a_forward_computes_in_backward_and_in_frames_of_dynamo_too():
    model, x = _Asking(), torch.ones(2, requires_grad=True)
    model.ask(x)
    model(x).sum().backward()
    torch.compile(model.ask, backend="eager")(x)
    assert model.heard == [False, True, True, True]


def test_hooks_of_all_modules_are_found():
    assert _torch.hooks_of_all_modules() == {}
    module, seen = nn.modules.module, []
    handles = [
        module.register_module_forward_hook(lambda *_: seen.append(0)),
        module.register_module_forward_pre_hook(lambda *_: seen.append(1)),
        module.register_module_full_backward_hook(lambda *_: seen.append(2)),
    ]
    with FlopCounterMode(display=False):
        assert [kind for kind, _ in _torch.hooks_of_all_modules()] == [
            "forward_hooks",
            "forward_pre_hooks",
            "backward_hooks",
        ]
    for handle in handles:
        handle.remove()
    assert _torch.hooks_of_all_modules() == {}


def test_modes_and_hooks_of_all_modules_are_counted():
    assert _torch.modes_above() == 0
    with torch.device("meta"):
        assert _torch.modes_above() == 1
    with _torch.FakeTensorMode():
        assert _torch.modes_above() == 1
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert _torch.modes_above() == 1
    handle.remove()
    assert _torch.modes_above() == 0


def test_switches_tell_what_is_set():
    before = _torch.switches()
    with torch.no_grad():
        assert _torch.switches() != before
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert _torch.switches() != before
    with torch.backends.mkldnn.flags(enabled=False):
        assert _torch.switches() != before
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert _torch.switches() != before
    finally:
        torch.set_float32_matmul_precision(precision)
    assert _torch.switches() == before

"""Part 6: number formats as they are defined: policies, a scaled loss, float8 products, TF32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import _torch
from autopar.ops.float8 import product, quantized
from benchmarks.accelerator.figures import Figure, Sentence
from benchmarks.accelerator.parts import Context, Found
from benchmarks.accelerator.subjects import Subject, varied

ROUNDING = 2.0**-8  # of bfloat16: half of a unit in the last of its 8 bits
HALF_ROUNDING = 2.0**-11  # of float16
SINGLE_ROUNDING = 2.0**-24  # of float32
TF32_ROUNDING = 2.0**-11
SCALE = 2.0**12  # of the loss in float16


def run(context: Context) -> Iterator[Found]:
    """Each number format against its definition on one device."""
    for subject in context.subjects(varied(context)):
        error = _policy(context, subject)
        name = f"{subject.name}: bf16 policy, loss and gradients against a model that casts"
        yield Figure(name, error, "error", limit=ROUNDING)
    yield from _scaled(context)
    yield from _float8(context)
    yield _float8_tiles(context)
    yield from _attention(context)
    yield from _tf32(context)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach().double() for n, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest distance of two tensors of a name, relative to the largest entry of the expected one.

    Entries below a hundredth of the largest of all tensors are compared with that.

    >>> distance({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([1.0, 2.5])})
    0.2
    """
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    least = max(x.abs().max().item() for x in expected.values()) / 100
    gaps = [(found[n] - x).abs().max().item() / max(x.abs().max().item(), least) for n, x in expected.items()]
    return max(gap if gap == gap else float("inf") for gap in gaps)


def _policy(context: Context, subject: Subject) -> float:
    """`precision="bf16"` against `functional_call` with parameters in bfloat16; see docs/precision.md."""
    batch = subject.inputs(context, torch.float32)
    model = subject.model(context, torch.float32)
    made = autopar.compile(
        subject.model(context, torch.float32), example_inputs=batch, mesh={"dp": 1}, precision="bf16"
    )
    loss = made.step(*batch)
    cast = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
    given = tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in batch)
    expected = torch.func.functional_call(model, cast, given)
    expected.backward()
    both = (made.original, loss), (model, expected)
    (ours, plain) = (_gradients(m) | {"loss": value.detach().double()} for m, value in both)
    return distance(ours, plain)


def _scaled(context: Context) -> Iterator[Found]:
    """float16 with a scaled loss: gradients that would vanish unscaled are those of float32 to float16's rounding."""

    def loss_fn(y: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        return F.mse_loss(y.float(), target) * scale

    torch.manual_seed(0)
    x, target = (torch.randn(16, 32).mul(1e-2).to(context.device) for _ in range(2))
    model = nn.Linear(32, 32).to(context.device)
    scaler = torch.amp.GradScaler(context.device.type, init_scale=SCALE)
    scale = scaler.scale(torch.ones((), device=context.device))
    expected = torch.autograd.grad(F.mse_loss(model(x), target), list(model.parameters()))
    made = autopar.compile(model, loss_fn=loss_fn, mesh={"dp": 1}, precision="fp16", loss_scale=1)
    made.step(x, target, scale)
    found = {n: g / scaler.get_scale() for n, g in _gradients(made.original).items()}
    wanted = dict(zip(found, (g.double() for g in expected), strict=True))
    yield Figure(
        "fp16 with a scaled loss: gradients against float32",
        distance(found, wanted),
        "error",
        limit=8 * HALF_ROUNDING,
        note="8 roundings: inputs, weights, result, gradient, and their products",
    )


def _float8(context: Context) -> Iterator[Found]:
    """A product of float8 by `_scaled_mm` against the product of the same values in float64 on the processor."""
    size = context.size(64, 1024)
    torch.manual_seed(0)
    a, b = (torch.randn(size, size).to(torch.float8_e4m3fn) for _ in range(2))
    scales = [torch.tensor(2.0), torch.tensor(0.5)]
    expected = (a.double() * scales[0]) @ (b.t().double() * scales[1])
    name = "float8 product against its values in float64"
    try:
        found = torch._scaled_mm(
            a.to(context.device),
            b.to(context.device).t(),
            *(s.to(context.device) for s in scales),
            out_dtype=torch.bfloat16,
        )
    except (RuntimeError, NotImplementedError) as error:
        yield Figure(name, None, "error", note=f"this device has none: {str(error).splitlines()[0]}")
        return
    error = distance({"product": found.double().cpu()}, {"product": expected})
    yield Figure(name, error, "error", limit=ROUNDING)


def _float8_tiles(context: Context) -> Figure:
    """A product of float8 with a scale a tile, as `precision="fp8"` makes it, against the values of its tiles."""
    size = context.size(256, 2048)
    torch.manual_seed(0)
    left, right = (quantized(torch.randn(size, size).to(context.device)) for _ in range(2))
    found = product(left, right, torch.bfloat16)
    expected = left.values().double().cpu() @ right.values().double().cpu().t()
    error = distance({"product": found.double().cpu()}, {"product": expected})
    runs = _torch.multiplies_tiles(context.device, torch.bfloat16)
    kernel = "torch._scaled_mm" if runs else "simulated: this device has no such kernel"
    return Figure("float8 product of tiles", error, "error", limit=ROUNDING, note=kernel)


def _attention(context: Context) -> Iterator[Found]:
    """The kernel of attention that rings use, and its backward, against scores in float64."""
    torch.manual_seed(0)
    drawn = torch.randn(4, 2, 4, context.size(64, 1024), 64).to(context.device, torch.bfloat16)
    query, key, value, gradient = drawn
    for is_causal in (False, True):
        how: Any = {"is_causal": is_causal, "scale": 0.125}
        assert _torch.has_fused_attention(query, key, value, None)
        result, logsumexp = _torch.fused_attention(query, key, value, None, **how)
        gradients = _torch.fused_attention_backward(gradient, query, key, value, None, result, logsumexp, **how)
        names = ("result", "logsumexp", "query", "key", "value")
        found = dict(zip(names, (result, logsumexp, *gradients), strict=True))
        expected = _scored(query, key, value, gradient, is_causal=is_causal, scale=0.125)
        error = distance({n: x.double().cpu() for n, x in found.items()}, expected)
        words = "causal" if is_causal else "full"
        yield Figure(
            f"{words} attention of rings and its gradients",
            error,
            "error",
            limit=4 * ROUNDING,
            note="4 roundings: scores, probabilities, result and gradient",
        )


def _scored(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, *, is_causal: bool, scale: float
) -> dict[str, Tensor]:
    """Result, log-sum-exp of the scores and gradients of attention, by its definition in float64 on the processor."""
    leaves = [x.double().cpu().requires_grad_() for x in (query, key, value)]
    scores = leaves[0] @ leaves[1].mT * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    result = scores.softmax(-1) @ leaves[2]
    gradients = torch.autograd.grad(result, leaves, gradient.double().cpu())
    found = (result.detach(), scores.logsumexp(-1).detach(), *gradients)
    return dict(zip(("result", "logsumexp", "query", "key", "value"), found, strict=True))


def _tf32(context: Context) -> Iterator[Found]:
    """Float32 products of a compiled model under both settings, against float64."""
    size = context.size(128, 2048)
    torch.manual_seed(0)
    x, model = torch.randn(size, size), nn.Linear(size, size, bias=False)
    expected = {"y": x.double() @ model.weight.double().t()}
    made = autopar.compile(model.to(context.device), mesh={"dp": 1})
    before = torch.get_float32_matmul_precision()
    limits = {"highest": size**0.5 * SINGLE_ROUNDING, "high": size**0.5 * TF32_ROUNDING}
    try:
        for setting, limit in limits.items():
            torch.set_float32_matmul_precision(setting)
            with torch.no_grad():
                y = made(x.to(context.device)).double().cpu()
            name = f"float32 products with the setting {setting!r}"
            yield Figure(name, distance({"y": y}, expected), "error", limit=limit)
    finally:
        torch.set_float32_matmul_precision(before)
    if not context.on_accelerator:
        yield Sentence("A processor has no TF32: there both settings give products of float32.")

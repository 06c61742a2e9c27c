"""A page with the figures of a Llama-3 8B on 128 H100s (dp=16 in ZeRO-3, tp=8), made up but plausible.

Everything is consistent by construction: sums are sums of their parts, and the events add up to the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from autopar.cost_model.breakdown import Breakdown, Candidate, Event
from autopar.ir import Pipeline
from autopar.pipeline.schedules import actions
from autopar.pipeline.simulation import Simulation, StageCosts, simulate
from autopar.views import BlockCollective, BlockNode, Formula, Page, RooflinePoint, StageRow

LAYERS, MICRO_BATCHES = 32, 4
PEAK_FLOPS, HBM_BYTES_PER_SECOND = 989.4e12, 3.35e12

batch, seq, hidden, ffn, vocab = sympy.symbols("batch seq hidden ffn vocab", positive=True)
heads, kv_heads, layers = sympy.symbols("heads kv_heads layers", positive=True)
dp, tp, micro_batches = sympy.symbols("dp tp micro_batches", positive=True)
peak_flops, link_bandwidth, link_latency = sympy.symbols("peak_flops link_bandwidth link_latency", positive=True)
parameters = sympy.Symbol("parameters", positive=True)


def whole(name: str, unit: str, parts: Sequence[Breakdown], note: str = "") -> Breakdown:
    """A cost that is the sum of its parts, largest first."""
    ordered = tuple(sorted(parts, key=lambda part: -part.value))
    expression = sympy.Add(*(part.expression for part in parts))
    return Breakdown(name, unit, expression, sum(p.value for p in parts), ordered, note)


def leaf(name: str, unit: str, value: float, expression=parameters, note: str = "") -> Breakdown:
    return Breakdown(name, unit, expression, value, note=note)


def memory() -> Breakdown:
    saved = [
        leaf("aten.linear mlp.gate", "bytes", 6.7e9, batch * seq * hidden / tp),
        leaf("aten.linear mlp.down", "bytes", 7.5e9, batch * seq * ffn / tp),
        leaf("aten.silu", "bytes", 7.5e9, batch * seq * ffn / tp),
        leaf("aten.scaled_dot_product_attention", "bytes", 4.1e9, batch * seq * hidden / tp),
        leaf("aten._log_softmax", "bytes", 4.2e9, 4 * batch * seq * vocab / tp),
        leaf("aten.mul", "bytes", 2.4e9, batch * seq * hidden / tp),
        leaf("aten.rsqrt", "bytes", 4.2e6, batch * seq),
    ]
    return whole(
        "memory",
        "bytes",
        [
            leaf("parameters", "bytes", 0.251e9, 4 * parameters / (dp * tp)),
            leaf("gradients", "bytes", 0.251e9, 4 * parameters / (dp * tp)),
            leaf("optimizer state", "bytes", 0.502e9, 8 * parameters / (dp * tp), "Adam, two moments"),
            whole("saved activations", "bytes", saved, "kept for backward, all micro-batches in flight"),
            leaf("gathered parameters", "bytes", 1.34e9, 2 * parameters / tp, "transient, at the peak"),
            leaf("collective buffers", "bytes", 0.42e9, batch * seq * hidden, "transient"),
            leaf("reserved", "bytes", 2.2e9, sympy.Integer(2200000000), "CUDA context and NCCL"),
        ],
    )


# Per layer and micro-batch, forward: (name, seconds on compute, collective over tp before it, seconds)
OPS = (
    ("q_proj linear", 412e-6, "all_gather x", 180e-6),
    ("k_proj linear", 110e-6, "", 0.0),
    ("v_proj linear", 110e-6, "", 0.0),
    ("attention", 690e-6, "", 0.0),
    ("o_proj linear", 412e-6, "", 0.0),
    ("norm", 96e-6, "reduce_scatter x", 180e-6),
    ("gate linear", 1440e-6, "all_gather x", 180e-6),
    ("up linear", 1440e-6, "", 0.0),
    ("silu", 130e-6, "", 0.0),
    ("down linear", 1440e-6, "", 0.0),
    ("residual add", 61e-6, "reduce_scatter x", 180e-6),
)
GATHER_SECONDS, OPTIMIZER_SECONDS, REDUCE_SECONDS = 2.9e-3, 21e-3, 48e-3


def events() -> tuple[Event, ...]:
    """A step, layer by layer; parameters are gathered one layer ahead, behind compute."""
    found: list[Event] = []
    now = 0.0
    for micro_batch in range(MICRO_BATCHES):
        for direction, factor in (("forward", 1.0), ("backward", 2.0)):
            for layer in range(LAYERS):
                name = f"all_gather layers.{layer}.*"
                detail = {"bytes": 436_207_616, "micro_batch": micro_batch}
                found.append(Event("dp", name, now, GATHER_SECONDS, detail))
                now = _layer(found, now, direction, factor)
    found.append(Event("dp", "reduce_scatter gradients", now, REDUCE_SECONDS, {"bytes": 2.0e9}))
    found.append(Event("compute", "optimizer step", now + REDUCE_SECONDS, OPTIMIZER_SECONDS))
    return tuple(found)


def _layer(found: list[Event], now: float, direction: str, factor: float) -> float:
    for name, seconds, collective, moved in OPS:
        if collective:
            found.append(Event("tp", f"{collective} ({direction})", now, moved, {"bytes": 58_720_256}))
            now += moved
        found.append(Event("compute", f"{name} {direction}", now, seconds * factor))
        now += seconds * factor
    return now


def time() -> Breakdown:
    times = MICRO_BATCHES * LAYERS
    compute = [
        leaf(f"aten.{name}", "seconds", 3 * seconds * times, 6 * batch * seq * hidden**2 / (dp * tp * peak_flops))
        for name, seconds, _, _ in OPS
    ]
    moved = 2 * times * sum(seconds for *_, seconds in OPS)
    exposed = sympy.Max(0, batch * seq * hidden / link_bandwidth - parameters / peak_flops)
    return whole(
        "time",
        "seconds",
        [
            whole("compute", "seconds", compute),
            leaf("communication over tp", "seconds", moved, 4 * layers * exposed, "exposed"),
            leaf(
                "communication over dp",
                "seconds",
                REDUCE_SECONDS,
                2 * parameters / (tp * link_bandwidth),
                f"exposed; {GATHER_SECONDS * times * 2:.2f} s more are hidden behind compute",
            ),
            leaf("optimizer step", "seconds", OPTIMIZER_SECONDS, 16 * parameters / (dp * tp)),
            leaf("pipeline bubble", "seconds", 0.0, sympy.Integer(0)),
        ],
    )


def traffic() -> Breakdown:
    times = 2 * MICRO_BATCHES * LAYERS
    over_tp = [leaf("all_gather x", "bytes", 2 * 58.7e6 * times), leaf("reduce_scatter x", "bytes", 2 * 58.7e6 * times)]
    over_dp = [
        leaf("all_gather parameters", "bytes", 0.436e9 * times / 16),
        leaf("reduce_scatter gradients", "bytes", 2.0e9),
    ]
    return whole(
        "traffic", "bytes", [whole("over tp", "bytes", over_tp, "NVLink"), whole("over dp", "bytes", over_dp, "NIC")]
    )


def candidates() -> tuple[Candidate, ...]:
    seconds, used = time().value, memory().value
    return (
        Candidate("dp=16,tp=8 zero3, 4 micro-batches", seconds, used, 69e9, "compute", True, True),
        Candidate(
            "dp=32,tp=4 zero3, 4 micro-batches",
            seconds * 0.94,
            84.9e9,
            51e9,
            "compute",
            False,
            why_not="needs 4.9 GB more than there is",
        ),
        Candidate(
            "dp=32,tp=4 zero3, selective recompute",
            seconds * 1.06,
            49.2e9,
            51e9,
            "compute",
            True,
            why_not="recomputes attention: 6 % slower",
        ),
        Candidate(
            "dp=128 zero3, full recompute",
            seconds * 1.31,
            36.0e9,
            210e9,
            "dp",
            True,
            why_not="gathers cross nodes for every micro-batch",
        ),
        Candidate("dp=8,tp=8,pp=2 1f1b", seconds * 1.12, 42.7e9, 61e9, "bubble", True, why_not="bubble of 11 %"),
        Candidate("dp=8,tp=16 zero1", seconds * 1.94, 34.1e9, 420e9, "tp", True, why_not="tp crosses nodes"),
        Candidate(
            "dp=128 ddp", seconds * 0.97, 171.5e9, 32e9, "compute", False, why_not="needs 91.5 GB more than there is"
        ),
    )


def roofline() -> tuple[RooflinePoint, ...]:
    times = 3 * MICRO_BATCHES * LAYERS
    figures = (
        ("mlp.gate linear", 2100.0, 702e12, 1440e-6),
        ("mlp.up linear", 2100.0, 702e12, 1440e-6),
        ("mlp.down linear", 1850.0, 690e12, 1440e-6),
        ("q_proj linear", 1300.0, 640e12, 412e-6),
        ("k_proj linear", 480.0, 420e12, 110e-6),
        ("v_proj linear", 480.0, 420e12, 110e-6),
        ("o_proj linear", 1300.0, 640e12, 412e-6),
        ("attention", 930.0, 520e12, 690e-6),
        ("norm", 1.3, 3.6e12, 96e-6),
        ("silu", 0.9, 2.6e12, 130e-6),
        ("residual add", 0.17, 0.47e12, 61e-6),
        ("head linear", 2400.0, 715e12, 31e-6),
        ("embedding", 0.0, 0.0, 12e-6),
    )
    return tuple(RooflinePoint(n, i, rate, seconds * times) for n, i, rate, seconds in figures)


def block() -> tuple[BlockNode, ...]:
    rows, whole_seq, split = (
        (("dp", "batch"), ("tp", "seq")),
        (("dp", "batch"), ("tp", "-")),
        lambda factor: (("dp", "batch"), ("tp", factor)),
    )
    gather_x = BlockCollective("tp", "all_gather", 58.7e6, 180e-6)

    def linear(name, module, source, factor, seconds, *, gathered):
        weight = BlockCollective("dp", "all_gather", 33.5e6 / 8, 230e-6, f"{module}.weight")
        moved = (gather_x._replace(operand=source), weight) if gathered else (weight,)
        operands = (source, f"{module}.weight")
        return BlockNode(name, "aten.linear", f"layers.*.{module}", split(factor), seconds, operands, moved)

    def scatter(source):
        return BlockCollective("tp", "reduce_scatter", 58.7e6, 180e-6, source)

    attention, mlp = "layers.*.self_attn", "layers.*.mlp"
    return (
        BlockNode("x", "input", "", rows),
        BlockNode("norm_1", "aten.rms_norm", "layers.*.input_layernorm", rows, 96e-6, ("x",)),
        linear("q", "self_attn.q_proj", "norm_1", "heads", 412e-6, gathered=True),
        linear("k", "self_attn.k_proj", "norm_1", "kv_heads", 110e-6, gathered=True),
        linear("v", "self_attn.v_proj", "norm_1", "kv_heads", 110e-6, gathered=True),
        BlockNode("cos", "input", "", whole_seq),
        BlockNode("mul_1", "aten.mul", attention, split("heads"), 22e-6, ("q", "cos")),
        BlockNode("neg_1", "aten.neg", attention, split("heads"), 11e-6, ("q",)),
        BlockNode("cat_1", "aten.cat", attention, split("heads"), 22e-6, ("neg_1", "q")),
        BlockNode("add_1", "aten.add", attention, split("heads"), 22e-6, ("mul_1", "cat_1")),
        BlockNode("mul_2", "aten.mul", attention, split("kv_heads"), 6e-6, ("k", "cos")),
        BlockNode(
            "sdpa", "aten.scaled_dot_product_attention", attention, split("heads"), 690e-6, ("add_1", "mul_2", "v")
        ),
        linear("o", "self_attn.o_proj", "sdpa", "heads", 412e-6, gathered=False),
        BlockNode("add_2", "aten.add", "layers.*", rows, 61e-6, ("x", "o"), (scatter("o"),)),
        BlockNode("norm_2", "aten.rms_norm", "layers.*.post_attention_layernorm", rows, 96e-6, ("add_2",)),
        linear("gate", "mlp.gate_proj", "norm_2", "ffn", 1440e-6, gathered=True),
        linear("up", "mlp.up_proj", "norm_2", "ffn", 1440e-6, gathered=True),
        BlockNode("silu", "aten.silu", f"{mlp}.act_fn", split("ffn"), 65e-6, ("gate",)),
        BlockNode("mul_3", "aten.mul", mlp, split("ffn"), 65e-6, ("silu", "up")),
        linear("down", "mlp.down_proj", "mul_3", "ffn", 1440e-6, gathered=False),
        BlockNode("add_3", "aten.add", "layers.*", rows, 61e-6, ("add_2", "down"), (scatter("down"),)),
        BlockNode("y", "output", "", rows, 0.0, ("add_3",)),
    )


def formulas() -> tuple[Formula, ...]:
    ring = (tp - 1) / tp * batch * seq * hidden / link_bandwidth + (tp - 1) * link_latency
    compute = 72 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden)) / (dp * tp * peak_flops)
    saved = layers * batch * seq * (34 * hidden + 5 * heads * seq + 2 * ffn) / (tp * micro_batches)
    return (
        Formula("step time", sympy.Max(compute, ring, evaluate=False) + link_latency * 2.3e-6, "2.27 s"),
        Formula("memory", memory().expression, "37.4 GB"),
        Formula("saved activations", saved, "32.4 GB"),
        Formula("all-gather over tp", ring, "180 µs"),
        Formula("optimizer state", 8 * parameters / (dp * tp), "502 MB"),
        Formula("device", peak_flops + sympy.Integer(989400000000000), "989 TFLOP/s"),
    )


SENSITIVITY = {
    "batch": 0.0094,
    "peak_flops": -0.0082,
    "NVLink bandwidth": -0.00071,
    "NVLink latency": 0.00012,
    "NIC bandwidth": -0.00021,
    "memory bandwidth": -0.00055,
    "seq": 0.0105,
    "hidden": 0.0171,
    "vocab": 0.00039,
    "launch_seconds": 0.000004,
}


COSTS = (
    StageCosts(0.031, 0.066, 0.03, 1.1e9, None, 0.4e9, 9.2e9, send_forward_seconds=0.002),
    StageCosts(0.034, 0.071, 0.03, 1.2e9, None, 1.9e9, 9.8e9, send_backward_seconds=0.002),
)


def simulation() -> Simulation:
    """Two stages by 1F1B; the page is of no plan, so that this need not fit the rest."""
    return simulate(actions(Pipeline(2, "1f1b", ("linear_80",)), 6), COSTS)


def stages() -> tuple[StageRow, ...]:
    modules = (("embedding", "layers.15"), ("layers.16", "head"))
    peaks = simulation().peak_bytes
    return tuple(
        StageRow(
            i,
            i,
            *modules[i],
            16,
            4_015_000_000,
            cost.forward_seconds,
            cost.backward_seconds,
            cost.send_forward_seconds,
            cost.send_backward_seconds,
            2 - i,
            cost.saved_bytes,
            cost.kept_bytes,
            peaks[i],
        )
        for i, cost in enumerate(COSTS)
    )


def page(**changes) -> Page:
    """The page; keyword arguments replace fields."""
    step, used = time(), memory()
    tokens = 512 * 8192  # 6 FLOPs x 8.03e9 parameters x 4.19e6 tokens / (128 x 989.4e12 x 2.69 s) = 59.3 %
    fields = {
        "title": "Llama-3 8B on 128 H100 as dp=16,tp=8",
        "subtitle": "h100x8x16, bfloat16, batch 512 of 8,192 tokens in 4 micro-batches, no recomputation",
        "figures": (
            ("step", f"{step.value:.2f} s"),
            ("tokens a second", f"{tokens / step.value:,.0f}"),
            ("model FLOPs utilisation", "59.3 %"),
            ("memory of a rank", f"{used.value / 1e9:.1f} GB"),
            ("bound by", "compute"),
        ),
        "memory": used,
        "memory_bound_bytes": 80e9,
        "time": step,
        "traffic": traffic(),
        "events": events(),
        "simulation": simulation(),
        "stages": stages(),
        "candidates": candidates(),
        "roofline": roofline(),
        "peak_flops": PEAK_FLOPS,
        "memory_bytes_per_second": HBM_BYTES_PER_SECOND,
        "block": block(),
        "formulas": formulas(),
        "sensitivity": SENSITIVITY,
        "notes": (
            "tp=8 splits heads, kv_heads and ffn; it stays inside a node.",
            "dp=16 splits batch; parameters are stored split (ZeRO-3) and gathered one layer ahead.",
            "The efficiency of small products is a guess; `autopar calibrate` measures it.",
        ),
        "document": {"memory": used.to_json(), "time": step.to_json()},
    }
    return Page(**{**fields, **changes})

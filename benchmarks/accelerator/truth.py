"""Part 3: what the cost model predicts against what is measured, priced with the hardware file of part 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar import _torch
from autopar.explanation.explanation import Explanation
from benchmarks.accelerator.calibration import hardware_of
from benchmarks.accelerator.figures import Figure, Picture, Sentence
from benchmarks.accelerator.memory import peak_of
from benchmarks.accelerator.parts import Context, Found
from benchmarks.accelerator.subjects import Batch, Subject, subjects, varied
from benchmarks.accelerator.training import compile_subject, compiled_step, in_turns
from benchmarks.speed.bench_recomputation import WITHIN, measured_bytes

STEP_GOAL, PEAK_GOAL = 0.05, 0.01
HALF = 0.5  # share of what recomputation can save that is kept
# Neither lies among the tensors of a step of SGD: what the context takes, and moments of an optimizer.
NOT_IN_A_STEP = ("reserved", "optimizer")


def run(context: Context) -> Iterator[Found]:
    """Compares every subject, without recomputation and with half of it op by op."""
    hardware = hardware_of(context)
    yield Sentence(f"Priced with {Path(hardware).name}.")
    errors, bars = list[float](), dict[str, list[tuple[str, float]]]()
    for subject in context.subjects(subjects(context)):
        made, batch = compile_subject(subject, context, torch.bfloat16, hardware=hardware)
        found = made.explain()
        assert isinstance(found, Explanation)
        yield from _step(context, subject, made, batch, found, errors, bars)
        yield from _memory(context, subject, made, batch, found)
        yield from _ops(context, subject, made, batch, found)
        if subject in varied(context):
            yield from _recomputed(context, subject, hardware)
    yield Figure(
        "median error of the step time",
        median(errors),
        "ratio",
        limit=STEP_GOAL,
        asked=context.on_accelerator,
        note=_why_not(context),
    )
    yield Picture("Step time", "bars", "seconds", bars)


def _why_not(context: Context) -> str:
    if context.on_accelerator:
        return ""
    return "asked of accelerators: small ops of a shared processor take what the host takes"


def _step(
    context: Context,
    subject: Subject,
    made: autopar.CompiledModule,
    batch: Batch,
    found: Explanation,
    errors: list[float],
    bars: dict[str, list[tuple[str, float]]],
) -> Iterator[Found]:
    """The duration of a step."""
    step = compiled_step(made, batch)
    step()
    (time,) = in_turns([step], context.device, context.size(7, 15))
    errors.append(abs(found.step_seconds / time.seconds - 1))
    name = f"{subject.name}: error of the step time, predicted : measured - 1"
    yield Figure(name, found.step_seconds / time.seconds - 1, "ratio")
    for words, seconds in (("predicted", found.step_seconds), ("measured", time.seconds)):
        bars.setdefault(words, []).append((f"{subject.name}, {words}", seconds))


def _memory(
    context: Context, subject: Subject, made: autopar.CompiledModule, batch: Batch, found: Explanation
) -> Iterator[Found]:
    """Peak, saved activations and what an op holds for a moment, in bytes of tensors."""
    parts = {part.name: part.value for part in found.memory.parts}
    parameters = sum(p.numel() * p.element_size() for p in made.original.parameters())
    peak = parameters + peak_of(compiled_step(made, batch), context.device)
    predicted = sum(size for name, size in parts.items() if name not in NOT_IN_A_STEP)
    why = "" if context.on_accelerator else "asked of accelerators, whose sizes are not small"
    yield Figure(f"{subject.name}: peak memory", peak, "bytes")
    yield Figure(
        f"{subject.name}: error of the peak memory",
        abs(predicted / peak - 1),
        "ratio",
        limit=PEAK_GOAL,
        asked=context.on_accelerator,
        note=why,
    )
    saved = measured_bytes(made, batch)
    yield Figure(
        f"{subject.name}: error of saved activations",
        abs(parts["saved activations"] / saved - 1),
        "ratio",
        limit=WITHIN,
    )
    transient = parts.get("transient peak", 0.0)
    yield Figure(f"{subject.name}: transient memory, predicted", transient, "bytes")
    yield Figure(f"{subject.name}: peak beyond parameters and saved activations", peak - parameters - saved, "bytes")


def _ops(
    context: Context, subject: Subject, made: autopar.CompiledModule, batch: Batch, found: Explanation
) -> Iterator[Found]:
    """The forward op whose predicted time is furthest off, by the seconds between the two."""
    predicted: Counter[str] = Counter()
    for event in found.events():
        name, _, phase = event.name.rpartition(" ")
        if phase == "forward":
            predicted[name.split(" ")[-1]] += event.duration_seconds
    measured = _forward_seconds(context, made, batch)
    both = predicted.keys() & measured.keys()
    if not both:
        yield Figure(f"{subject.name}: time of single ops", None, "seconds", note="no op is in both")
        return
    worst = max(both, key=lambda name: abs(measured[name] - predicted[name]))
    share = sum(measured[name] for name in both) / sum(measured.values())
    yield Figure(
        f"{subject.name}: the op furthest off, predicted : measured",
        predicted[worst] / measured[worst],
        "ratio",
        note=f"{worst} of forward; ops that are compared take {share:.0%} of the measured time",
    )


def _forward_seconds(context: Context, made: autopar.CompiledModule, batch: Batch) -> dict[str, float]:
    """Seconds of every kind of op in a forward, on the device."""
    activities = [ProfilerActivity.CPU]
    if context.on_accelerator:
        activities.append(getattr(ProfilerActivity, context.device.type.upper()))
    with torch.no_grad():
        made.step(*batch)
        with profile(activities=activities) as trace:
            made.step(*batch)
            _torch.synchronize(context.device)
    found = {}
    for row in trace.key_averages():
        seconds = row.device_time_total if context.on_accelerator else row.cpu_time_total
        if row.key.startswith("aten::") and seconds:
            found[row.key.removeprefix("aten::")] = seconds * 1e-6
    return found


def _recomputed(context: Context, subject: Subject, hardware: str) -> Iterator[Found]:
    """Saved activations where ops are recomputed one by one, down to half of what can be saved."""
    made, batch = compile_subject(subject, context, torch.bfloat16, hardware=hardware, recompute=HALF)
    found = made.explain()
    assert isinstance(found, Explanation)
    priced = {part.name: part.value for part in found.memory.parts}["saved activations"]
    saved = measured_bytes(made, batch)
    yield Figure(
        f"{subject.name}: error of saved activations with recomputation {HALF}",
        abs(priced / saved - 1),
        "ratio",
        limit=WITHIN,
    )

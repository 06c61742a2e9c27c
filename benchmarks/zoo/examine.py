"""What is done with one architecture of the zoo: built, captured, six plans compared with one device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from autopar.cost_model import find_hardware
from autopar.errors import CaptureError
from autopar.ir import Mesh, Plan
from autopar.planning.planning import make_plan
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from autopar.search.request.request import Request
from benchmarks.zoo import diffusion as zoo_diffusers
from benchmarks.zoo import libraries as zoo_libraries
from benchmarks.zoo import small as zoo_small
from benchmarks.zoo.rows import BEYOND, PASSED, PLANS, RANDOM, SEARCHED, Row
from benchmarks.zoo.small import Small

SAME_PROGRAM = 2e-5  # relative error of a float32 loss that is computed in the same way
WITHOUT_STAGES = tuple(plan for plan in PLANS if plan != "pp=2")


def make(name: str, *, masked: bool = False, dtype: torch.dtype | None = None) -> Small:
    """The small model of that name, of whichever package it is.

    Args:
        name: model type, or a library and a model of it, such as `diffusers:AutoencoderKL`.
        masked: whether an attention mask must be among the inputs.
        dtype: format of weights and floating inputs; None for the widest in which the model runs.
    """
    if name.startswith(zoo_diffusers.PREFIX):
        small = zoo_diffusers.make(name)
    elif zoo_libraries.has(name):
        small = zoo_libraries.make(name)
    else:
        small = zoo_small.make(name, masked=masked)
    return small if dtype is None else cast(small, dtype)


def cast(small: Small, dtype: torch.dtype) -> Small:
    """The model with weights, buffers and floating inputs in another format; raises if it does not run so."""
    step = small.step.to(dtype)
    for module in step.modules():  # what forward has cached, such as a rotary embedding
        for attribute, x in vars(module).items():
            if isinstance(x, Tensor) and x.is_floating_point():
                setattr(module, attribute, x.detach().to(dtype))
    args = tuple(x.to(dtype) if x.is_floating_point() else x for x in small.args)
    step(*args).backward()
    step.zero_grad()
    return replace(small, step=step, args=args)


def examine(
    name: str, progress: Callable[[Row], None], dtype: torch.dtype | None = None, plans: Sequence[str] = PLANS
) -> Row:
    """Builds, captures and compares one architecture.

    Args:
        name: model type, or a library and a model of it.
        progress: called with the row before every stage.
        dtype: format of weights and floating inputs; None for the widest in which the model runs.
        plans: the plans to compare, a selection of `PLANS`.
    """
    row = Row(name)
    try:
        small = make(name, dtype=dtype)
        _describe(row, small)
    except Exception as error:
        row.stopped = one_line(error)
        return row
    row.stage = "capture"
    progress(row)
    subject = _captured(small, row)
    if subject is None:
        return row
    for plan in plans:
        row.stage = plan
        progress(row)
        row.plans[plan] = _outcome(subject, plan, row)
    if all(outcome.startswith(BEYOND) for outcome in row.plans.values()):
        row.differs = _differs(small)
    row.stage = "done"
    return row


def _describe(row: Row, small: Small) -> None:
    row.model, row.kind, row.parameters = small.description, small.kind, small.parameters
    row.dtype = str(next(small.step.model.parameters()).dtype).removeprefix("torch.")
    row.note = small.left_out


def _captured(small: Small, row: Row) -> Subject | None:
    """None where it cannot be, with the reason in the row.

    A model that fills in a mask only where it is not traced is given one.
    """
    try:
        return Subject.of(small.step, small.args)
    except CaptureError as error:
        row.stopped = one_line(error)
    except Exception as error:  # whatever fails after export is autopar's: it counts as captured
        row.plans, row.stage = {"analysis": one_line(error)}, "done"
        return None
    if "NoneType" not in row.stopped:
        return None
    try:
        masked = make(row.name, masked=True, dtype=next(small.step.model.parameters()).dtype)
        subject = Subject.of(masked.step, masked.args)
    except (ValueError, CaptureError):  # the first reason stands
        return None
    _describe(row, masked)
    row.stopped, row.note = "", "only with an attention mask among its inputs"
    return subject


def _outcome(subject: Subject, name: str, row: Row) -> str:
    try:
        report = subject.compare(_plan(subject, name))
    except Exception as error:
        return one_line(error)
    worst = max(report.verdicts, key=lambda verdict: verdict.share)
    if worst.share >= row.worst:
        row.worst, row.worst_tensor = worst.share, str(worst)
    return PASSED if report.passed else f"{BEYOND}: {worst}"


def _differs(small: Small) -> str:
    """How torch.export's own program, which autopar has not touched, differs from the model; "" if it does not.

    A model may ask whether it is exported, and then compute something else. The plans are then held to the
    program instead, but for those with stages, which go by the model's blocks. Where torch.export refuses what autopar
    captures, there is no such program.
    """
    try:
        program = torch.export.export(small.step, small.args, strict=False).module()
    except Exception:  # whatever it cannot trace
        return ""
    eager, exported = (_drawing_alike(run, small.args).item() for run in (small.step, program))
    error = abs(exported - eager) / abs(eager)
    if error <= SAME_PROGRAM:
        return ""
    return (
        f"torch.export's own program has the loss {exported:.6f}, the model run eagerly {eager:.6f} "
        f"({error:.0e} apart); with that program {_agreeing(program, small)} of {len(WITHOUT_STAGES)} plans agree"
    )


def _drawing_alike(run: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    """The result of a module whose random numbers begin at a fixed seed."""
    torch.manual_seed(0)
    result: Tensor = run(*args)
    return result


def _agreeing(program: nn.Module, small: Small) -> int:
    subject = Subject.of(program, small.args)
    return sum(_outcome(subject, plan, Row("")) == PASSED for plan in WITHOUT_STAGES)


def _plan(subject: Subject, name: str) -> Plan:
    prepared = subject.prepared
    if name == RANDOM:
        graph, fingerprint = prepared.analysis.graph, prepared.captured.fingerprint
        return random_plan(graph, Mesh.of({"a": 2}), seed=0, fingerprint=fingerprint)
    mesh, recipe, micro_batches = SEARCHED[name]
    return make_plan(
        prepared,
        Request(find_hardware("cpu-gloo"), mesh=mesh, recipe=recipe, must_fit=False, micro_batches=micro_batches),
    )


def one_line(error: BaseException) -> str:
    """Type and first lines of an error, with the place of one that is not meant for people."""
    words = " ".join(str(error).split())
    if isinstance(error, CaptureError):
        return words[:800]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f" ({Path(frame.filename).name}:{frame.lineno})"
    return f"{type(error).__name__}: {words[:240]}{place}"

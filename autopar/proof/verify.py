"""The proof without a cluster: all ranks of a plan simulated in one process, against the model itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.analysis.objective import objective_of
from autopar.capture.export import LossFunction
from autopar.capture.quantized import inner_tensors_stored
from autopar.cost_model import find_hardware
from autopar.errors import AutoparError
from autopar.ir import PIPELINE_AXIS, Mesh, MixedPrecision, Plan
from autopar.options import takes_options
from autopar.planning.duration import LONG_SECONDS
from autopar.planning.planning import Prepared, make_plan, policy_of
from autopar.program.term_shares import refuse_unknown
from autopar.proof.random_plan import random_plan
from autopar.proof.single_device import Between
from autopar.proof.subject import Subject
from autopar.proof.verdict import VerifyReport
from autopar.search import RecipeLike
from autopar.search.request.request import Request
from autopar.units import counted, format_seconds

log = logging.getLogger("autopar")

# Of the model, for ranks and micro-batches: 4,000 of two layers took 30 s on a busy processor (2026-11-29).
MOST_RUNS = 2048

# Of a parameter in a chain of products, on a busy processor (2026-11-30): to capture it, and to run it once for a rank
# and a micro-batch, there and back. A model with several ops a parameter takes longer.
_CAPTURE_SECONDS, _RUN_SECONDS = 3e-3, 2e-3


@takes_options()
def verify(
    model: nn.Module,
    example_inputs: Any,
    *,
    mesh: Mesh | Mapping[str, int],
    plan: Plan | str | None = None,
    recipe: RecipeLike = "auto",
    seed: int = 0,
    loss_fn: LossFunction | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    precision: MixedPrecision | str | None = None,
    between: Between | None = None,
) -> VerifyReport:
    """Runs a plan with all ranks simulated in one process, and compares loss, every gradient and updated buffers.

    The reference is the single-device model in float64. The plan must give it in float64 arithmetic up to a
    relative 1e-9; and where the model's own arithmetic is lower, the plan's error there must be of the size of the
    single device's own error, by a bound per tensor (`autopar.proof.verdict`). A model that holds state
    (updated buffers, a counter, a weight that `between` changes) is run for two steps.

    Random ops draw the same on both sides: one number for each logical element of what they draw, of which every rank
    has its part (docs/verify.md).

    Raises StepError for a number of micro-batches that was asked for and gives another loss, as `compile` does.

    A plan whose schedule updates inside of a step (docs/pipeline.md) is compared so with one update a step, and then
    with a single device that has the same delays, for two steps of SGD in float64.

    A plan with replicas that meet every so many steps is compared with plain replicas that meet as often: three steps
    are run between meetings, or fewer, with SGD, two meetings and one step more (docs/replicas.md).

    Needs no process group and no device; the model must have real weights and is left as it was.

    Args:
        model: plain PyTorch.
        example_inputs: a tuple of arguments, a dict of keyword arguments, or one tensor; with several
            micro-batches, the first of them, and with replicas that of all of them.
        mesh: the axes to simulate; `pp` has the pipeline stages.
        plan: a plan, "random" for one drawn at random, or None to search one.
        recipe: constraints on the search.
        seed: seed of the random plan.
        loss_fn, schedule: the same as in `compile`.
        micro_batches: number of micro-batches of a searched plan; by default 1, and two for each rank of a pipeline.
        precision: the same as in `compile`; by default the precision of the plan. The single device runs the model with
            parameters and inputs cast in the same way.
        between: a function of the model that makes a script's changes between two steps, such as `set_beta`
            for `model.beta = 0.5`. It is called with a copy of the model, once for each side, so it
            must set values and not add to them.

    Returns:
        A verdict in words and numbers; `passed` says whether every tensor is within its bound.

    >>> import autopar, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    >>> mesh = {"dp": 2, "tp": 2}
    >>> autopar.verify(model, torch.ones(4, 8), mesh=mesh, loss_fn=torch.mean).passed
    True
    """
    with inner_tensors_stored(model):
        return _verified(
            model,
            example_inputs,
            Mesh.of(mesh),
            plan,
            recipe,
            seed,
            loss_fn,
            micro_batches,
            schedule,
            policy_of(precision, plan if isinstance(plan, Plan) else None),
            between,
        )


def _verified(
    model: nn.Module,
    example_inputs: Any,
    mesh: Mesh,
    plan: Plan | str | None,
    recipe: RecipeLike,
    seed: int,
    loss_fn: LossFunction | None,
    micro_batches: int | None,
    schedule: str | None,
    policy: MixedPrecision | None,
    between: Between | None,
) -> VerifyReport:
    runs = _refuse_long(mesh, plan.micro_batches if isinstance(plan, Plan) else micro_batches or 1)
    if long := words_if_long(sum(1 for _ in model.parameters()), runs):
        log.warning(long)
    request = Request(
        find_hardware("cpu-gloo"), mesh=mesh, recipe=recipe, micro_batches=micro_batches, schedule=schedule
    ).of_replica(plan if isinstance(plan, Plan) else None)
    subject = Subject.of(
        model,
        example_inputs,
        loss_fn=loss_fn,
        precision=policy,
        between=between,
        replicas=request.meeting.replicas if request.meeting else 1,
        loss_tile_bytes=plan.loss_tile_bytes if isinstance(plan, Plan) else None,
    )
    if micro_batches is not None and micro_batches > 1:
        whole = subject.whole(micro_batches).whole
        refuse_unknown(objective_of(subject.prepared.captured, whole), micro_batches)
    return subject.compare(_plan_of(subject, plan, request, seed))


def words_if_long(parameters: int, runs: int) -> str:
    """A sentence about a proof that takes more than a minute, with a size that takes one; "" for others."""
    each_seconds = _CAPTURE_SECONDS + runs * _RUN_SECONDS
    if parameters * each_seconds <= LONG_SECONDS:
        return ""
    return (
        f"The proof may take about {format_seconds(parameters * each_seconds)} or more, since the model has "
        f"{parameters} parameters and runs {counted(runs, 'time')}, once for each rank and micro-batch. With at most "
        f"{int(LONG_SECONDS / each_seconds)} parameters, as fewer layers have, it takes about a minute."
    )


def _refuse_long(mesh: Mesh, micro_batches: int) -> int:
    """The number of runs of the model. Raises AutoparError for more than `MOST_RUNS`."""
    if mesh.ranks * micro_batches > MOST_RUNS:
        raise AutoparError(
            f"The proof would run the model once for each rank and micro-batch, {mesh.ranks} x {micro_batches} times, "
            f"but at most {MOST_RUNS} runs are allowed (half a minute for a small model): take at most "
            f"{max(1, MOST_RUNS // micro_batches)} ranks, or at most {max(1, MOST_RUNS // mesh.ranks)} micro-batches."
        )
    return mesh.ranks * micro_batches


def _plan_of(subject: Subject, plan: Plan | str | None, request: Request, seed: int) -> Plan:
    """The plan that was given, drawn or searched; AutoparError for a text other than "random"."""
    if isinstance(plan, Plan):
        return plan
    if plan == "random":
        assert request.mesh is not None, "verify was given a mesh"
        captured, graph = subject.prepared.captured, subject.prepared.analysis.graph
        return random_plan(graph, request.mesh, seed=seed, fingerprint=captured.fingerprint)
    if plan is not None:
        raise AutoparError(f'A plan to verify is a Plan, "random" or None, not {plan!r}.')
    return _searched(subject.prepared, request)


def _searched(prepared: Prepared, request: Request) -> Plan:
    """A plan for the proof of its arithmetic: the ranks share this process's memory."""
    depth = dict(request.mesh.axes).get(PIPELINE_AXIS) if request.mesh else None
    count = request.chosen_micro_batches or (2 * depth if depth else 1)
    return make_plan(prepared, request.but(micro_batches=count, must_fit=False))

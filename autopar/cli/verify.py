"""`autopar verify`: a plan proved against the single-device model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from torch import nn

from autopar.capture.export import LossFunction
from autopar.capture.rows import arguments_of_replica
from autopar.cli.options import RECIPE_NAMES, Count, plan_option
from autopar.cli.output import console
from autopar.errors import AutoparError
from autopar.explanation.few_layers import first_rows
from autopar.ir import Mesh, MixedPrecision, Plan
from autopar.ir.batches import captured_batch
from autopar.models.importing import staying
from autopar.models.targets import Target, resolve_target
from autopar.planning.planning import prepare_step
from autopar.proof.verify import verify


@click.command(
    "verify",
    help="""Prove a plan for TARGET: simulate all ranks in this process, and compare
loss and every gradient with the single-device model.

TARGET is package.module:function; the function returns (model, example_inputs) or
(model, example_inputs, loss_fn), and may take a parameter `batch`, which gets the batch
of the plan given with --plan. The plan is searched, or drawn with --random, or read with
--plan; with an axis pp it has pipeline stages, run in the order of their schedule.

\b
Examples:
  autopar verify examples.gpt:tiny_example --mesh dp=2,tp=2 --random
  autopar verify examples.gpt:tiny_example --mesh pp=2,tp=2 --recipe pp:1f1b,tp:tp+sp
  autopar verify examples.gpt:tiny_example --plan plan.json""",
)
@click.argument("target")
@plan_option("mesh", help="Axes of the mesh, such as dp=2,tp=2 or pp=2,tp=2.")
@plan_option("recipe", default=None, help=f"One of {RECIPE_NAMES}, or per axis: pp:1f1b,tp:tp+sp.  [default: auto]")
@plan_option("schedule")
@plan_option("micro_batches", help="Micro-batches of a step; by default 1, and two for each rank of a pipeline.")
@click.option("--plan", "path", type=click.Path(path_type=Path), help="A saved plan to prove.")
@click.option("--random", "draw", is_flag=True, help="Draw the plan at random.")
@click.option("--seed", type=Count(2**63 - 1, 0), help="Of a random plan.  [default: 0]")
@plan_option(
    "precision",
    help="Cast parameters for use, as precision= of autopar.compile does: bf16; by default that of the plan.",
)
def verify_command(
    target: str,
    mesh: Mesh | None,
    recipe: str | None,
    schedule: str | None,
    micro_batches: int | None,
    path: Path | None,
    draw: bool,
    seed: int | None,
    precision: MixedPrecision | None,
) -> None:
    if ":" not in target:
        how = f"{target.removesuffix('.py').replace('/', '.')}:make for a function make of this file"
        why = f"is a file; write {how}" if target.endswith(".py") else "has no weights; write package.module:function"
        raise AutoparError(f"Cannot prove {target!r}: it {why}.")
    searching = {"--recipe": recipe, "--schedule": schedule, "--micro-batches": micro_batches}
    if path is not None:
        given = {"--mesh": mesh, **searching, "--random": draw or None, "--seed": seed}
        _refuse("--plan", "has all of a plan", given)
    elif draw:
        _refuse("--random", "draws all of a plan", searching)
    else:
        _refuse("a plan that is searched", "draws nothing", {"--seed": seed})
    plan: Plan | str | None = "random" if draw else Plan.load(path) if path else None
    axes = plan.world_mesh if isinstance(plan, Plan) else mesh
    if axes is None:
        raise click.UsageError("Give --mesh, such as --mesh dp=2,tp=2, or a saved --plan.")
    with staying(f"The model of {target}"):
        model, args, kwargs, loss_fn = _target(target, plan).build(None)
        if isinstance(plan, Plan):
            args, kwargs = _micro_batch(plan, model, args, kwargs, loss_fn)
        result = verify(
            model,
            kwargs or args,
            mesh=axes,
            plan=plan,
            recipe=recipe or "auto",
            seed=seed or 0,
            loss_fn=loss_fn,
            schedule=schedule,
            micro_batches=micro_batches,
            precision=precision,
        )
    console().print(result)
    sys.exit(0 if result.passed else 1)


def _target(text: str, plan: Plan | str | None) -> Target:
    """The model, with the batch of a plan that was loaded if its function takes a batch."""
    target = resolve_target(text)
    if not isinstance(plan, Plan) or target.own_batch:
        return target
    shapes = (plan.shapes.get(f"input {name}") for name in plan.inputs)
    rows = next((shape[0] for shape in shapes if shape), None)
    replicas = plan.meeting.replicas if plan.meeting else 1  # a plan has the rows of one of them
    return target if rows is None else resolve_target(text, batch=rows * replicas)


def _refuse(what: str, does: str, given: Mapping[str, object]) -> None:
    """Raises a usage error for options that would be ignored."""
    beside = [name for name, value in given.items() if value is not None]
    if beside:
        raise click.UsageError(f"{what} {does}: leave out {', '.join(beside)}.")


def _micro_batch(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: LossFunction | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs that the plan was made for: the example, or one micro-batch of it."""
    if plan.micro_batches == 1:
        return args, kwargs
    replicas = plan.meeting.replicas if plan.meeting else 1
    own = arguments_of_replica(args, kwargs, 0, replicas)
    prepared = prepare_step(
        model, *own, loss_fn=loss_fn, precision=plan.precision, loss_tile_bytes=plan.loss_tile_bytes
    )
    if prepared.captured.fingerprint == plan.fingerprint:
        return args, kwargs
    rows = captured_batch(prepared.analysis.graph) * replicas
    return first_rows((args, kwargs), rows, max(1, rows // plan.micro_batches))

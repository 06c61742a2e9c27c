"""`autopar verify`: a plan proved against the single-device model."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from autopar.cli.output import console
from autopar.errors import AutoparError
from autopar.ir import Mesh, Plan
from autopar.targets import resolve_target
from autopar.verify import verify


@click.command(
    "verify",
    help="""Prove a plan for TARGET: simulate all ranks in this process, and compare
loss and every gradient with the single-device model.

TARGET is package.module:function; the function takes no arguments and returns
(model, example_inputs) or (model, example_inputs, loss_fn).

\b
Example:
  autopar verify examples.gpt:tiny_example --mesh dp=2,tp=2 --random""",
)
@click.argument("target")
@click.option("--mesh", metavar="AXES", help="Axes of the mesh, such as dp=2,tp=2.")
@click.option("--recipe", default="auto", metavar="R",
              help="One of auto, ddp, zero1, zero2, zero3, tp, tp+sp, or dp:zero3,tp:tp+sp.")  # fmt: skip
@click.option("--plan", "path", type=click.Path(path_type=Path), help="A saved plan to prove.")
@click.option("--random", "draw", is_flag=True, help="Draw the plan at random.")
@click.option("--seed", default=0, help="Of a random plan.")
def verify_command(
    target: str, mesh: str | None, recipe: str, path: Path | None, draw: bool, seed: int
) -> None:
    if ":" not in target:
        raise AutoparError(
            f"Cannot prove {target!r}: it has no weights; write package.module:function."
        )
    model, args, kwargs, loss_fn = resolve_target(target).build(None)
    plan: Plan | str | None = "random" if draw else Plan.load(path) if path else None
    axes = plan.mesh if isinstance(plan, Plan) else Mesh.parse(mesh) if mesh else None
    if axes is None:
        raise click.UsageError("Give --mesh, such as --mesh dp=2,tp=2, or a saved --plan.")
    result = verify(
        model, kwargs or args, mesh=axes, plan=plan, recipe=recipe, seed=seed, loss_fn=loss_fn
    )
    console().print(result)
    sys.exit(0 if result.passed else 1)

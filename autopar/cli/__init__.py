"""The `autopar` command line: explain a plan, or prove it, before anyone rents the cluster."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from autopar import report
from autopar.cost_model import HARDWARE, find_hardware
from autopar.errors import AutoparError, StepError
from autopar.ir import Plan
from autopar.planning import Prepared, make_plan, prepare_step
from autopar.verify import verify

TARGET_HELP = """TARGET is package.module:function; the function takes no arguments and returns
(model, example_inputs) or (model, example_inputs, loss_fn)."""


class _Commands(click.Group):
    """Prints an error that people can mend as one sentence, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AutoparError as error:
            raise click.ClickException(str(error)) from error


@click.group(
    cls=_Commands, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="autopar")
def main() -> None:
    """Parallelizes single-device PyTorch models over a cluster."""


mesh_option = click.option("--mesh", metavar="AXES", help="Axes of the mesh, such as dp=8,tp=8.")
recipe_option = click.option(
    "--recipe", default="auto", metavar="R",
    help="One of auto, ddp, zero1, zero2, zero3, tp, tp+sp, or one per axis: dp:zero3,tp:tp+sp.",
)  # fmt: skip


@main.command(
    help=f"""Print the plan for TARGET, without devices, weights or a process group.

{TARGET_HELP}

\b
Example:
  autopar explain examples.gpt:example --mesh dp=8,tp=8 --recipe dp:zero3,tp:tp+sp"""
)
@click.argument("target")
@mesh_option
@click.option("--ranks", type=int, help="Number of ranks, where the mesh is to be searched too.")
@recipe_option
@click.option("--pin", "pins", multiple=True, metavar="NAME=CHOICE",
              help="Fix one choice, such as 'layers.*.mlp.up.weight=S(0)@tp'; may be repeated.")  # fmt: skip
@click.option(
    "--hardware", default="h100", type=click.Choice(sorted(HARDWARE)), help="What to price for."
)
@click.option("--memory-gb", type=float, help="Bound on the memory of a rank, in 1e9 bytes.")
@click.option(
    "--micro-batches", default=1, help="Micro-batches of a step; the inputs are one of them."
)
@click.option("--save", type=click.Path(path_type=Path), help="Write the plan to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(
    target: str,
    mesh: str | None,
    ranks: int | None,
    recipe: str,
    pins: tuple[str, ...],
    hardware: str,
    memory_gb: float | None,
    micro_batches: int,
    save: Path | None,
    as_json: bool,
) -> None:
    if (mesh is None) == (ranks is None):
        raise click.UsageError("Give either --mesh, such as --mesh dp=8,tp=8, or --ranks.")
    with torch.device("meta"):
        prepared = prepare(*load_target(target))
    plan = make_plan(
        prepared, report.mesh_of(mesh), world_size=ranks, hardware=find_hardware(hardware),
        recipe=recipe, pins=read_pins(pins), micro_batches=micro_batches,
        memory_bytes=None if memory_gb is None else int(memory_gb * 1e9),
    )  # fmt: skip
    if save is not None:
        plan.save(save)
    show(report.Explanation(plan, prepared.analysis.graph), as_json)


@main.command(
    "verify",
    help=f"""Prove a plan for TARGET: simulate all ranks in this process, and compare
loss and every gradient with the single-device model.

{TARGET_HELP}

\b
Example:
  autopar verify examples.gpt:tiny_example --mesh dp=2,tp=2 --random""",
)
@click.argument("target")
@mesh_option
@recipe_option
@click.option("--plan", "path", type=click.Path(path_type=Path), help="A saved plan to prove.")
@click.option("--random", "draw", is_flag=True, help="Draw the plan at random.")
@click.option("--seed", default=0, help="Of a random plan.")
def verify_command(
    target: str, mesh: str | None, recipe: str, path: Path | None, draw: bool, seed: int
) -> None:
    model, args, kwargs, loss_fn = load_target(target)
    plan: Plan | str | None = "random" if draw else Plan.load(path) if path else None
    axes = plan.mesh if isinstance(plan, Plan) else report.mesh_of(mesh)
    if axes is None:
        raise click.UsageError("Give --mesh, such as --mesh dp=2,tp=2, or a saved --plan.")
    result = verify(
        model, kwargs or args, mesh=axes, plan=plan, recipe=recipe, seed=seed, loss_fn=loss_fn
    )
    console().print(result)
    sys.exit(0 if result.passed else 1)


def prepare(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: Any) -> Prepared:
    """Captures a target's step."""
    return prepare_step(model, args, kwargs, loss_fn=loss_fn)


def show(explanation: report.Explanation, as_json: bool) -> None:
    """Prints an explanation for people, or as JSON."""
    if as_json:
        click.echo(json.dumps(explanation.to_json(), indent=1))
    else:
        console().print(explanation)


def console() -> Console:
    """The terminal; a file or a pipe gets wide lines rather than the 80 columns rich assumes."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def read_pins(pins: tuple[str, ...]) -> dict[str, str]:
    """`NAME=CHOICE` pairs as a mapping."""
    pairs = [pin.partition("=") for pin in pins]
    for name, equals, choice in pairs:
        if not (name and equals and choice):
            raise click.UsageError(
                f"Cannot read the pin {name!r}; write 'layers.*.weight=S(0)@tp'."
            )
    return {name: choice for name, _, choice in pairs}


def load_target(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """Calls `package.module:function` and returns (model, args, kwargs, loss function or None)."""
    module_name, colon, function_name = target.partition(":")
    if not colon:
        raise click.UsageError(f"Cannot read the target {target!r}; write package.module:function.")
    if os.getcwd() not in sys.path:
        sys.path.insert(
            0, os.getcwd()
        )  # as `python -m` does: users name modules of where they stand
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise click.UsageError(
            f"There is no module {module_name!r} here (tried {os.getcwd()})."
        ) from None
    except AttributeError:
        raise click.UsageError(
            f"The module {module_name} has no function {function_name!r}."
        ) from None
    return _unpack(function(), target)


def _unpack(made: Any, target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise StepError(
            f"{target} must return (model, example_inputs) or (model, example_inputs, loss_fn)."
        )
    model, inputs, *loss = made
    if isinstance(inputs, dict):
        return model, (), inputs, loss[0] if loss else None
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return model, args, {}, loss[0] if loss else None

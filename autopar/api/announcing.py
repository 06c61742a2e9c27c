"""Log lines and warnings of a planner: the start line, axes without work, folders without files, shapes."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from autopar.ir import PIPELINE_AXIS, Plan
from autopar.ir.note import kind_of
from autopar.planning.planning import Prepared, why_not_again
from autopar.runtime.ranks.all_ranks import warn_together
from autopar.runtime.ranks.files import Files
from autopar.runtime.ranks.stderr_log import heard, log
from autopar.search.request.notes import axis_lines, idle_axes
from autopar.search.request.request import Progress, Request, silent
from autopar.units import counted, format_bytes, format_seconds

_HINT = "model.explain() shows what it costs; logging.getLogger('autopar').setLevel('WARNING') hides these lines"


def start_line(plan: Plan, request: Request, is_given: bool, predicted: tuple[float, float]) -> str:
    """The line that is logged when the model is first planned: how it is split, its predicted time and memory.

    Args:
        plan: the plan that will run.
        request: what the user asked for.
        is_given: whether the user gave the plan; False if the search found it.
        predicted: predicted seconds of a step, and predicted peak memory of a rank in bytes.
    """
    idle = idle_axes(plan)
    mesh = plan.world_mesh
    used = [f"{n}={s}" for n, s in mesh.placed.axes if s > 1 and n not in idle]
    words = [" ".join(used) or "nothing is split"]
    if mesh.placement:
        words.append(f"nested as {', '.join(mesh.names)}")
    if idle and not is_given:
        words.append(f"{', '.join(idle)} left idle, because that was found fastest; recipe='ddp' uses it anyway")
    words.append("as the given plan has it" if is_given else f"recipe {plan.recipe_in_use}")
    if plan.meeting is not None:
        words.append(f"{counted(plan.meeting.replicas, 'replica')} that synchronise {plan.meeting}")
    if plan.pipeline is not None:
        words.append(f"{plan.pipeline.schedule} over {counted(plan.pipeline.stages, 'stage')}")
    words.append(_micro_batches_of(plan))
    words += plan.kept_words
    seconds, size = predicted
    guess = ", a guess: nothing here was measured" * any(kind_of(note) == "guess" for note in plan.notes)
    return (
        f"{'; '.join(words)}: predicted {format_seconds(seconds)} a step and {format_bytes(size)} of "
        f"{format_bytes(request.bound_bytes)} a rank on {request.hardware.name}{guess}"
    )


def _micro_batches_of(plan: Plan) -> str:
    """The number of micro-batches, with the reason for it where the search chose it on a mesh without stages."""
    notes = (str(note) for note in plan.notes if kind_of(note) == "micro-batches")
    return next(notes, counted(plan.micro_batches, "micro-batch"))


def announce(line: Callable[[], str], notes: Sequence[str]) -> None:
    """Logs the chosen plan, on stderr unless the script has configured logging; its notes at DEBUG.

    Args:
        line: function that makes the line, called where it is shown.
        notes: notes of the plan.
    """
    with heard(_HINT):
        if log.isEnabledFor(logging.INFO):
            log.info("%s", line())
    for note in notes:
        log.debug("%s", note)


def warn_of_idle_axes(plan: Plan) -> None:
    """Warns of the axes of `plan.mesh` along which nothing is split, so that its ranks repeat the same work."""
    sizes, idle = dict(plan.mesh.axes), list(idle_axes(plan))
    if not idle:
        return
    axes = " and ".join(f"{name}={sizes[name]}" for name in idle)
    splits = "axis {} splits" if len(idle) == 1 else "axes {} split"
    ranks = math.prod(sizes[name] for name in idle)
    warn_together(
        f"The {splits.format(axes)} nothing: all {ranks} ranks do the same work, because that was found fastest for "
        f"such a small model. To split it anyway name a recipe, such as recipe={{{idle[0]!r}: 'ddp'}}; the axis of "
        f"pipeline stages is called {PIPELINE_AXIS!r}.",
        stacklevel=2,
    )


def warn_of_repeated_work(plan: Plan) -> None:
    """Warns of axes that store parts of the parameters and split no work, as where they do not divide the batch."""
    for note in plan.notes:
        if kind_of(note) == "repeated":
            warn_together(f"Under this plan {note}.", stacklevel=2)


def warn_of_unasked_stages(plan: Plan) -> None:
    """Warns of pipeline stages that a plan has under a recipe that names no schedule, and says why it has them."""
    for note in plan.notes:
        if kind_of(note) == "unasked":
            warn_together(
                f"The plan has {note} Choose a batch or a number of ranks that the recipe can split, or give mesh= to "
                "insist.",
                stacklevel=2,
            )


def warn_of_unused_folder(files: Files, plan: Plan) -> None:
    """Warns that a folder was named for files, and that the plan keeps no parameters there."""
    warn_together(
        f"nvme={str(files.folder)!r} is not used: the plan (recipe {plan.recipe}) keeps no parameters in files. "
        "Take the recipe 'zero-infinity-nvme', or leave nvme out.",
        stacklevel=2,
    )


def warn_of_loss(obstacle: str, micro_batches: int) -> None:
    """Warns that a batch norm sees other statistics in a micro-batch than in the batch, and names its op."""
    warn_together(
        f"The loss and the gradients are means over {micro_batches} micro-batches, and may differ from those of the "
        f"whole batch: {obstacle}. micro_batches=1 gives the loss of the whole batch.",
        stacklevel=2,
    )


def warn_of_shape(first: Plan, plan: Plan, prepared: Prepared) -> None:
    """Warns that a batch of a new shape cannot be split as the first batch was, and says how it is split."""
    axes = "; ".join(axis_lines(prepared.analysis.graph, plan))
    reason = why_not_again(first, prepared) or "it would not fit into memory"
    warnings.warn(
        f"This batch cannot be split as the first was: {reason}. It has a plan of its own, in which {axes}. To avoid "
        "this, give batches of the first one's size (drop_last=True leaves out a last, smaller one), or pad.",
        stacklevel=2,
    )


@contextlib.contextmanager
def shown_planning() -> Iterator[Progress]:
    """A function that replaces the text of one line under the cell; outside of a notebook it shows nothing.

    The line ends with the duration of what ran inside of the context.
    """
    if not Console().is_jupyter:
        yield silent
        return
    from IPython.display import display  # only a notebook has it

    start_seconds = time.perf_counter()
    line = display({"text/plain": "autopar"}, raw=True, display_id=True)

    def show(message: str) -> None:
        line.update({"text/plain": f"autopar: {message}"}, raw=True)

    yield lambda message: show(f"{message} ...")
    show(f"planned in {format_seconds(time.perf_counter() - start_seconds)}")

"""The shapes of the whole batch, found from the batches that the ranks were given.

[Note: whole or part] The shape of a tensor may be that of the whole batch, or that of this rank's part of it. The first
batch is whole. Later, if a shape can be either, the ranks compare their values: whole batches are the same on all
ranks, and parts differ. With batch="local" every rank always gives its own part.

[Note: drift] Samplers that start with the same order may later differ between ranks, for instance from the second epoch
on. Comparing every batch would copy its values from the device each time. So among the steps' batches with a known
whole shape, the ranks compare only batches 1, 2, 4, 8 and so on. If batches differ from number n on, a StepError is
raised before number 2n. Forwards are compared likewise where ranks take parts of the batch and gather the results;
others a single rank may run by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from autopar.errors import StepError
from autopar.ir import Pipeline
from autopar.pipeline.schedules import takes
from autopar.program.program import Program
from autopar.runtime.execute.inputs import (
    Arguments,
    Shape,
    cuts,
    fitting_micro_batches,
    form,
    shape_words,
    shapes_of_parts,
)
from autopar.runtime.execute.local_batches import shapes_of_whole
from autopar.runtime.execute.settings import Batch
from autopar.runtime.model.program_cache import ReadyProgram
from autopar.runtime.ranks.all_ranks import warn_together
from autopar.runtime.ranks.comparison import Comparison
from autopar.runtime.ranks.world import World
from autopar.units import counted


class BatchShapes:
    """Finds the shapes of whole batches, and remembers those of earlier batches.

    Args:
        batch: whether a rank gives the batch of all ranks, or its own part of it.
        comparison: gathers the values of all ranks.
        ranks: number of ranks that share a batch.
        gathers: whether all ranks gather the results of a forward.
    """

    def __init__(self, batch: Batch, comparison: Comparison, ranks: int, *, gathers: bool = False) -> None:
        self._gathers = gathers
        self._is_local, self._ranks = batch == "local", ranks
        self._comparison = comparison
        self._gives_parts = False  # whether ranks have given parts of batches
        # Numbers of steps (True) and of forwards that are cut, with a batch of a known whole shape.
        self._wholes = {True: 0, False: 0}
        self._cuts: dict[str, Shape] = {}  # path of an input -> how the first program cuts its dims

    def whole(self, arguments: Arguments, known: Sequence[ReadyProgram], *, is_step: bool) -> tuple[Shape, ...]:
        """The shapes of the whole batch, see [Note: whole or part].

        Args:
            arguments: the arguments of this rank.
            known: the programs that take such arguments.
            is_step: whether they are those of a step, which all ranks run.

        Raises StepError if the ranks gave different values that cannot be parts.
        """
        if self._is_local:
            whole = shapes_of_whole(arguments, self._ranks)
            if all(each.shapes != whole for each in known):
                self.compare(arguments, "")
            return whole
        forms = [form(arguments, r.shapes, r.parts) for r in known]
        as_part = next((r.shapes for r, f in zip(known, forms, strict=True) if f == "part"), None)
        if "whole" in forms and as_part is None and not self._gives_parts:
            fitting = [r for r in known if r.shapes == arguments.shapes]
            if is_step or (self._gathers and any(r.parts != r.shapes for r in fitting)):
                self._refuse_drift(arguments, is_step=is_step)
            return arguments.shapes
        if as_part is not None and "whole" not in forms and self._gives_parts:
            return as_part
        if self.compare(arguments, arguments.digest):
            return arguments.shapes
        found = as_part or shapes_of_parts(arguments, self._cuts)
        if found == arguments.shapes:
            raise _differences(arguments)
        self._gives_parts = True
        return found

    def _refuse_drift(self, arguments: Arguments, *, is_step: bool) -> None:
        """Raises StepError if the batch is one of those that ranks compare, and differs; see [Note: drift]."""
        self._wholes[is_step] += 1
        is_compared = self._wholes[is_step].bit_count() == 1  # a power of two
        if is_compared and not self.compare(arguments, arguments.digest):
            raise _differences(arguments)

    def compare(self, arguments: Arguments, digest: str) -> bool:
        """Whether all ranks have the same values. Raises StepError unless they have the same shapes."""
        own = json.dumps([[list(shape) for shape in arguments.shapes], digest])
        why = f"The batch has the shapes {shape_words(arguments.shapes)}, which all ranks compare."
        found = [json.loads(text) for text in self._comparison.gather(own, why)]
        others = [rank for rank, each in enumerate(found) if each[0] != found[0][0]]
        if others:
            said = "; ".join(f"rank {rank} {shape_words(found[rank][0])}" for rank in (0, *others[:4]))
            raise StepError(
                f"The ranks gave batches of different shapes: {said}. Each has to give the same whole "
                "batch, or parts of one shape: pad parts to one length, and let the samplers drop what "
                "does not divide (DistributedSampler(..., drop_last=True))."
            )
        return all(each == found[0] for each in found)

    def learn(self, arguments: Arguments, program: Program, world: World) -> None:
        """Remembers how the first program with such inputs cuts them into parts."""
        for path, cut in zip(arguments.paths, cuts(program, world), strict=True):
            self._cuts.setdefault(path, cut)


def _differences(arguments: Arguments) -> StepError:
    """The error for ranks with different values, if each of them has to give the whole batch."""
    return StepError(
        f"The ranks gave different values in a batch of the shapes {shape_words(arguments.shapes)}, but every "
        "rank must give the same whole batch. If each rank gives its own part, as with DistributedSampler, "
        'say so: autopar.compile(..., batch="local"). Otherwise seed the samplers alike on all ranks. '
        '(Results of model(...) with outputs="dtensor" count as whole, and may be passed in.)'
    )


def micro_batches_near(usual: int, shapes: Sequence[Shape], pipeline: Pipeline | None) -> int:
    """The number of micro-batches of a step of such shapes; warns where it is not the usual one.

    Args:
        usual: number of micro-batches of the first step.
        shapes: global shapes of the batch.
        pipeline: stages of the model, whose schedule allows only some numbers.
    """
    count = fitting_micro_batches(shapes, usual, lambda count: pipeline is None or takes(pipeline, count))
    if count != usual:
        warn_together(
            f"A batch of the shapes {shape_words(shapes)} is run in {counted(count, 'micro-batch')}, not {usual}: it "
            "has too few rows for them.",
            stacklevel=7,
        )
    return count

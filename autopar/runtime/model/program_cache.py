"""The programs of a compiled module: one for each shape of a batch and mode of torch, a bounded number of them.

[Note: programs are kept] Each shape of a batch has a program, which holds a graph and no parameters. At most
`KEPT_PROGRAMS` programs of steps are kept, and as many of forwards; a new one replaces the least recently used one.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.capture.guards.guards import ChangedValue, Guards, NumberInput
from autopar.capture.guards.structure import Structure
from autopar.capture.guards.writes import Write
from autopar.program.captures import Captures
from autopar.runtime.execute.executor import BoundProgram
from autopar.runtime.execute.inputs import Arguments, Shape, part_shapes, shape_words, whole_shapes
from autopar.runtime.pipeline.pipeline import BoundPipeline
from autopar.runtime.ranks.all_ranks import warn_together

log = logging.getLogger("autopar")

KEPT_PROGRAMS = 16
_MANY_SHAPES = 4  # shapes so far after which a warning recommends buckets


@dataclass
class ReadyProgram:
    """A program, and the state of Python and of torch for which it is right.

    Attributes:
        bound: the program on this rank.
        state: modes of torch at the capture, see `ModulePrograms._state`.
        count: number of micro-batches.
        guards: guards of the Python values that the capture read.
        structure: guards of the model's modules, parameters and hooks.
        captures: captures of the model, which may also give programs for other sizes.
        writes: changes of attributes of modules that the forward makes.
        numbers: numbers of Python that are inputs of the program.
    """

    bound: BoundProgram | BoundPipeline
    state: tuple[object, ...]
    count: int
    guards: Guards
    structure: Structure
    captures: Captures
    writes: Sequence[Write]
    numbers: Sequence[NumberInput] = ()

    def holds(self) -> bool:
        """Whether a new capture would give the same program."""
        numbers = all(number.holds() for number in self.numbers)
        return numbers and self.guards.hold() and self.structure.hold()

    def broken(self) -> ChangedValue | None:
        """The changes of the model since the capture."""
        gone = (number.gone() for number in self.numbers if not number.holds())
        return next(gone, None) or self.guards.broken() or self.structure.broken()

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The global shapes of its inputs."""
        return whole_shapes(self.bound.program, self.count)

    @cached_property
    def parts(self) -> tuple[Shape, ...]:
        """The shapes of this rank's parts of its inputs."""
        return part_shapes(self.bound.program, self.count)

    def finish(self) -> None:
        """After a run: repeats the changes to attributes that the forward makes."""
        for write in self.writes:
            write.repeat()


class ProgramCache:
    """The programs that can run now, see [Note: programs are kept].

    Attributes:
        ready: programs of steps (True) and of forwards (False), the most recently made or used last.
        has_stepped: whether there was a program of a step, whose number of micro-batches later ones take.
    """

    def __init__(self) -> None:
        self.ready: dict[bool, list[ReadyProgram]] = {True: [], False: []}
        self.has_stepped = False
        self._captures, self._capture_seconds = 0, 0.0  # of further shapes
        self._said: set[str] = set()  # reasons why sizes are not left open

    def fitting(self, arguments: Arguments, *, is_step: bool) -> list[ReadyProgram]:
        """The programs that take such arguments, of any sizes."""
        return [r for r in self._of_kind(arguments, is_step=is_step) if arguments.gets_gradients(r.bound.program)]

    def _of_kind(self, arguments: Arguments, *, is_step: bool) -> list[ReadyProgram]:
        return [r for r in self.ready[is_step] if arguments.fits(r.bound.program)]

    def fit_for(self, arguments: Arguments, state: tuple[object, ...], *, is_step: bool) -> ReadyProgram | None:
        """The program for arguments of these shapes as the model is now; None if there is none."""
        known = self.fitting(arguments, is_step=is_step)
        alike = (r for r in known if r.state == state and r.shapes == arguments.shapes)
        return next((r for r in alike if r.holds()), None)

    def captures(self, arguments: Arguments, state: tuple[object, ...], *, is_step: bool) -> Captures:
        """The captures of the model as it is now, for such arguments of any sizes; new ones where it has changed."""
        known = reversed(self._of_kind(arguments, is_step=is_step))  # whatever gets gradients
        found = (r.captures for r in known if r.state == state and r.holds())
        return next(found, None) or Captures()

    def used(self, program: ReadyProgram) -> None:
        """Marks a program as the most recently used one."""
        programs = self.ready[program.bound.program.is_step]
        programs.append(programs.pop(programs.index(program)))

    def add(self, ready: ReadyProgram, arguments: Arguments, seconds: float, *, was_captured: bool) -> None:
        """Keeps a program, logs the seconds of its capture and planning, and warns if shapes are many."""
        program = ready.bound.program
        alike = [r for r in self.fitting(arguments, is_step=program.is_step) if r.state == ready.state]
        another = bool(alike) and all(r.shapes != ready.shapes for r in alike)
        kept = self.ready[program.is_step]
        self.has_stepped |= program.is_step
        kept.append(ready)
        if ready.bound.world.rank == 0:
            done = "Captured" if was_captured else "Planned, without a capture,"
            log.info("%s for the shapes %s in %.2f s.", done, shape_words(ready.shapes), seconds)
            self._say_closed(ready.captures.why_closed)
        another = another and was_captured
        self._captures += another
        self._capture_seconds += seconds * another
        if another and self._captures + 1 in (_MANY_SHAPES, KEPT_PROGRAMS + 1):
            self._warn_of_shapes()
        del kept[:-KEPT_PROGRAMS]

    def _say_closed(self, why: str) -> None:
        """Logs once why a size was captured separately; nothing for an empty reason."""
        if why and why not in self._said:
            self._said.add(why)
            log.info("Captured by itself, as %s.", " ".join(why.split()).rstrip("."))

    def clear(self) -> None:
        """Drops all programs."""
        for programs in self.ready.values():
            programs.clear()

    def _warn_of_shapes(self) -> None:
        warn_together(
            f"{self._captures + 1} programs so far, one for each shape of a batch and mode of the model: those "
            f"after the first took {self._capture_seconds:.1f} s to capture and plan, and {KEPT_PROGRAMS} are "
            "kept. Pad to few lengths (pad_to_multiple_of=64 of transformers' "
            "collators, or buckets), and drop a last, smaller batch (drop_last=True).",
            stacklevel=7,
        )


def release(kept: ProgramCache) -> None:
    """Drops the bound programs, see [Note: groups end before Python]."""
    kept.clear()


# [Note: groups end before Python] Process groups that outlive Python abort the process when their threads are torn
# down. So bound programs are dropped before the interpreter ends, with their references to process groups. Dropped
# programs are in reference cycles, which one collection at the end frees: finalizers run in the reverse order of
# their creation, and this one is created before those of all compiled modules.
weakref.finalize(ProgramCache, gc.collect)

"""Plans drawn at random, and worlds of 64 and 1,024 ranks, checked by NCCL's rules in one process.

OMP_NUM_THREADS=1 python -m benchmarks.nccl.run random    280 plans on 2 to 8 ranks, all of them played
OMP_NUM_THREADS=1 python -m benchmarks.nccl.run worlds    every place along pp, the first and the last along other axes

Results are added to results.jsonl beside this file, and what is there is not run again.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from unittest import mock

import torch

from autopar.api import planner
from autopar.ir import Mesh
from benchmarks.stored import store, stored
from tests.support import shared_captures
from tests.support.nccl.launches import MODES, launches_of
from tests.support.nccl.programs import WORDS, Model, Program
from tests.support.nccl.rules import unlike_orders, violations
from tests.support.nccl.traces import NewGroup, calls_of
from tests.support.session import begin_session

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from tests.runtime.training import drawn, make_on

RESULTS = Path(__file__).with_name("results.jsonl")
MODELS = ("mlp", "gpt", "tied", "normed")
MESHES: tuple[Mapping[str, int], ...] = (
    {"a": 2},
    {"a": 2, "b": 2},
    {"pp": 2},
    {"pp": 2, "a": 2},
    {"pp": 4},
    {"a": 2, "b": 2, "c": 2},
    {"pp": 2, "a": 2, "b": 2},
)
SEEDS = 10  # of each mesh and model: 280 plans

_ZERO3 = {"dp": "zero3", "tp": "tp+sp"}
_DDP = {"dp": "ddp", "tp": "tp"}
# Mesh, recipe and schedule, chunks of a rank.
WORLDS: tuple[tuple[Mapping[str, int], Mapping[str, str], int], ...] = (
    ({"dp": 16, "tp": 4}, _ZERO3, 1),
    ({"pp": 4, "dp": 4, "tp": 4}, {"pp": "1f1b", **_ZERO3}, 1),
    ({"pp": 4, "dp": 4, "tp": 4}, {"pp": "gpipe", **_DDP}, 1),
    ({"pp": 4, "dp": 4, "tp": 4}, {"pp": "interleaved", **_ZERO3}, 2),
    ({"pp": 4, "dp": 4, "tp": 4}, {"pp": "zb", **_DDP}, 2),
    ({"pp": 4, "dp": 4, "tp": 4}, {"pp": "zbv", **_ZERO3}, 2),
    ({"pp": 4, "dp": 8, "cp": 2}, {"pp": "dualpipev", "dp": "zero2", "cp": "cp"}, 2),
    ({"dp": 256, "tp": 4}, _ZERO3, 1),
    ({"pp": 8, "dp": 32, "tp": 4}, {"pp": "1f1b", **_ZERO3}, 1),
    ({"pp": 8, "dp": 32, "tp": 4}, {"pp": "zbv", **_ZERO3}, 2),
    ({"pp": 8, "dp": 16, "cp": 2, "tp": 4}, {"pp": "1f1b", "cp": "cp", **_DDP}, 1),
    ({"pp": 4, "dp": 64, "tp": 4}, {"pp": "interleaved", **_ZERO3}, 2),
)


@dataclass(frozen=True)
class Result:
    """What one program was found to do.

    Attributes:
        name: the program.
        ranks: number of ranks of the world.
        played: number of ranks that were played.
        operations: operations of all played ranks.
        new_groups: calls of `new_group` on a rank.
        communicators: communicators of the rank that has most, in the mode lazy.
        judged: whether the operations follow from the plan. Owners of rows tell each other how many come, and of a
            played world these numbers are made up.
        violations: what is illegal, in both modes.
        seconds: processor time.
    """

    name: str
    ranks: int
    played: int
    operations: int
    new_groups: int
    communicators: int
    judged: bool
    violations: list[str]
    seconds: float


def random_programs() -> Iterator[tuple[str, Callable[[], tuple[Program, list[int]]]]]:
    """Names of programs with random plans, and functions that make one with the ranks to play."""
    for mesh, name, seed in itertools.product(MESHES, MODELS, range(SEEDS)):
        if name == "normed" and mesh == {"pp": 4}:  # a batch norm takes no micro-batch of one row
            name, seed = "mlp", SEEDS + seed
        yield f"random {dict(mesh)} {name} {seed}", partial(_random, mesh, name, seed)


def _random(mesh: Mapping[str, int], name: str, seed: int) -> tuple[Program, list[int]]:
    plan = drawn(name, dict(mesh), seed, lone_ops=False)
    _, batch, loss_fn = make_on("cpu", name)
    # Each rank makes the model anew, and the batch is the same.
    program = Program(mesh, "", lambda: make_on("cpu", name)[0], lambda: batch, loss_fn, {"plan": plan})
    return program, list(range(prod(mesh.values())))


def worlds() -> Iterator[tuple[str, Callable[[], tuple[Program, list[int]]]]]:
    """Names of programs on many ranks, and functions that make one with the ranks to play."""
    for mesh, recipe, chunks in WORLDS:
        yield f"{Mesh.of(dict(mesh))} {dict(recipe)}", partial(_world, mesh, recipe, chunks)


def _world(mesh: Mapping[str, int], recipe: Mapping[str, str], chunks: int) -> tuple[Program, list[int]]:
    stages = mesh.get("pp", 1)
    count = 2 * stages if stages > 1 else 1
    rows = mesh["dp"] * count
    batch = torch.randint(WORDS, (rows, 8), generator=torch.Generator().manual_seed(0))
    options = {"micro_batches": count, "bucket_bytes": 16384}
    if recipe.get("pp") in ("interleaved", "zb"):
        options["chunks"] = chunks
    program = Program(mesh, recipe, partial(Model, stages * chunks), lambda: (batch, batch.roll(1, 1)), options=options)
    return program, _places(mesh)


def _places(mesh: Mapping[str, int]) -> list[int]:
    """All ranks along pp, and the first and the last along every other axis."""
    whole = Mesh.of(dict(mesh))
    lines = [range(size) if name == "pp" else (0, size - 1) for name, size in mesh.items()]
    return sorted(whole.rank_at(place) for place in itertools.product(*lines))


def result_of(name: str, make: Callable[[], tuple[Program, list[int]]]) -> Result:
    """Plays a program and checks it."""
    began = time.process_time()
    program, ranks = make()
    with mock.patch.object(planner, "StoredCaptures", shared_captures._shared_unless_named):
        traces = program.play(ranks)
    calls = [call for trace in traces.values() for event in trace for call in calls_of(event)]
    judged = not any("runtime/collectives/rows.py" in call.where for call in calls)
    found = [words for mode in MODES if judged for words in violations(traces, mode)]
    # Two ranks may own different buckets, and then each has broadcasts that the other has not.
    if not any(call.is_message or "owners.py" in call.where for call in calls):
        found += filter(None, [unlike_orders(traces)])
    return Result(
        name,
        prod(program.mesh.values()),
        len(ranks),
        len(calls),
        sum(isinstance(event, NewGroup) for event in traces[0]),
        max(len({each.communicator for each in own.values()}) for own in launches_of(traces, "lazy").values()),
        judged,
        found,
        round(time.process_time() - began, 1),
    )


def main(part: str) -> None:
    torch.set_num_threads(1)
    end = begin_session()
    done = stored(RESULTS, Result)
    for name, make in {"random": random_programs, "worlds": worlds}[part]():
        if name not in done:
            result = result_of(name, make)
            store(RESULTS, result)
            print(result, flush=True)
    end()


if __name__ == "__main__":
    main(sys.argv[1])

"""What `compile` is asked: its options are read, and compared between the ranks before these share anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.api.machine import axes_of, hardware_of
from autopar.errors import AutoparError
from autopar.ir import Mesh, Plan
from autopar.ir.plan_reading import digest_of
from autopar.ir.recompute import SAVED_TIERS, is_saved_option
from autopar.options import options_of, shared_words, split_options
from autopar.planning.likeness import likeness_of_options
from autopar.planning.planning import policy_of
from autopar.runtime.execute.settings import RunOptions
from autopar.runtime.ranks.processes import check_world, refuse_unlike, world_size
from autopar.search.request.options import PlanOptions, in_bytes
from autopar.search.request.recipes import format_recipe, is_open
from autopar.search.request.request import Request


class Asked(NamedTuple):
    """What `compile` was asked: of a plan and of its run, the given plan, and notes on what was assumed."""

    request: Request
    run: RunOptions
    plan: Plan | None
    assumed: Sequence[str]


def read_asked(given: Mapping[str, Any], plan: Plan | str | os.PathLike[str] | None, device: torch.device) -> Asked:
    """Reads the options of `compile`. Raises what `compile` states of them."""
    asked, run_options = split_options(given, PlanOptions, RunOptions)
    mesh, loaded = asked.pop("mesh"), plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    if loaded is not None:
        _check_beside_plan(loaded, asked)
        asked["micro_batches"] = loaded.micro_batches
        # A plan that names no size of buckets runs with any.
        if loaded.bucket_bytes is None and asked.get("bucket_bytes") is not None:
            loaded = replace(loaded, bucket_bytes=in_bytes(asked["bucket_bytes"]))
    asked["precision"] = policy_of(asked["precision"], loaded)
    run = RunOptions(**run_options)
    priced, assumed = hardware_of(run.hardware, device)
    request = Request(
        priced,
        ranks=world_size(),
        mesh=_checked(axes_of(mesh, loaded)),
        cuts_batch=True,
        splits_backward=not run.executor.compiles,
        refines=loaded is None and not isinstance(mesh, DeviceMesh),
        **without_idle(asked),
    ).of_replica(loaded)
    return Asked(request, run, loaded, assumed)


def alike_asked(read: Callable[[], Asked], *, has_example: bool) -> Asked:
    """Reads the options on this rank. Raises MeshError on all ranks if they differ between ranks."""
    found: Asked | Exception
    try:
        found = read()
        words = [*shared_words(found.request, PlanOptions), *shared_words(found.run, RunOptions)]
        words += ["example_inputs"] * has_example
        words += [] if found.plan is None else [f"plan of digest {digest_of(found.plan.to_json())[:12]}"]
    except Exception as error:  # the others would wait for this rank
        found, words = error, [f"{type(error).__name__}: {error}"]
    refuse_unlike(likeness_of_options(words))
    if isinstance(found, Exception):
        raise found
    return found


def without_idle(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options for a request, to which offload=False says no more than leaving it out."""
    return {name: value for name, value in asked.items() if name != "offload" or value}


def _check_beside_plan(plan: Plan, asked: Mapping[str, Any]) -> None:
    """Raises AutoparError for an option that the given plan was not made with, or that is for a search alone."""
    found = {
        "micro_batches": plan.micro_batches,
        "schedule": plan.pipeline and plan.pipeline.schedule,
        "chunks": plan.pipeline and plan.pipeline.chunks,
        "recompute": plan.recompute,
        "decompose": plan.decomposed,
        "overlap_batches": plan.overlap_batches,
        **({} if plan.bucket_bytes is None else {"bucket_bytes": plan.bucket_bytes}),
    }
    wish = asked.get("recompute")
    tiers = {how.tier for how in plan.saved.values()}
    if is_saved_option(wish) and plan.recompute == "full" and tiers <= {SAVED_TIERS[wish]}:
        found["recompute"] = wish
    beside = {}
    for name, each in options_of(PlanOptions).items():
        value = asked.get(name)
        if name in found and value is not None and each.parse(value) not in ((), found[name]):
            raise AutoparError(
                f"The plan has {name}={found[name]!r}, and compile was given {name}={value!r}; leave it out, or make "
                "another plan."
            )
        if each.is_limit and value and not _is_recipe_of(plan, name, value):
            beside[name] = f"{name}={value!r}"
    if beside:
        raise AutoparError(
            f"A plan is given, so that nothing is searched, and {', '.join(beside.values())} would have no effect: "
            f"leave out {', '.join(f'{name}=' for name in beside)}, or plan= to search with it."
        )


def _is_recipe_of(plan: Plan, name: str, value: Any) -> bool:
    return name == "recipe" and (is_open(value) or format_recipe(value) == plan.recipe)


def _checked(mesh: Mesh | None) -> Mesh | None:
    """A mesh that has as many ranks as run; MeshError otherwise."""
    if mesh is not None:
        check_world(mesh)
    return mesh

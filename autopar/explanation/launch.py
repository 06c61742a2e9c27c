"""The first and last lines of every report: the question, and the commands that launch the plan."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autopar.cost_model.items import FULL, TrainingState
from autopar.cost_model.machines.cluster import Cluster
from autopar.explanation.asked import is_intent
from autopar.explanation.explanation import Explanation
from autopar.explanation.few_layers import tokens_of
from autopar.ir import PIPELINE_AXIS, Graph, Meeting, Mesh, Plan
from autopar.ir.batches import first_smaller
from autopar.ir.recompute import Selection
from autopar.search.request.options import HEADROOM, PlanOptions
from autopar.search.request.recipes import resolve, split_recipe
from autopar.search.request.request import Request
from autopar.units import counted, format_bytes

PLAN_FILE = "plan.json"
SCRIPT = "train.py"
WIDTH = 100  # of a line, which no terminal or pipe breaks inside of a text
FOLDER = "/a/folder/on/the/disk"  # where the reader's disk is, nobody else knows


def asked(e: Explanation, model: str) -> tuple[tuple[str, str], ...]:
    """Pairs (what, value) of the question that an explanation answers.

    Args:
        e: the explanation.
        model: name of the model.

    Returns:
        The model, the batch, the length of a sequence, the cluster, the precision, the bound on memory, and
        the constraints that were expressed, if any.
    """
    return tuple(_asked(e, model))


def _asked(e: Explanation, model: str) -> Iterator[tuple[str, str]]:
    yield "model", model
    yield "batch", _batch(e.graph, int(e.run.micro_batches), e.plan.meeting, e.sizes)
    if "seq" in e.graph.factors and tokens_of(e.graph):  # else it is a dim of an image, or of features
        yield "sequence", f"{e.graph.factors['seq'].size:,} tokens"
    yield "cluster", f"{e.place}, {counted(e.ranks, 'rank')}"
    yield "precision", _precision(e)
    yield "memory bound", _bound(e)
    if e.request is not None and e.request.text:
        yield "constraints", e.request.text


def _batch(graph: Graph, micro_batches: int, meeting: Meeting | None, sizes: Sequence[int]) -> str:
    """The samples of a step, and of its micro-batches, which differ where their number does not divide the batch."""
    if "batch" not in graph.factors:
        return counted(micro_batches, "example")
    rows = sum(sizes)
    whole = f"{rows:,} samples"
    if meeting is not None:
        whole = f"{rows * meeting.replicas:,} samples, {rows:,} of each replica"
    of = ", ".join(f"{size:,}" for size in (sizes if first_smaller(sizes) else sizes[:1]))
    return whole if micro_batches == 1 else f"{whole}, {micro_batches} micro-batches of {of} on all ranks"


def _precision(e: Explanation) -> str:
    states = _states(e.run.training_state)
    if e.plan.precision is not None:
        return f"{e.plan.precision}; states of {e.run.training_state.optimizer.name}"
    return f"parameters of {_parameter_bytes(e)} bytes; {states}"


def _parameter_bytes(e: Explanation) -> int:
    """Bytes of an element of the parameters that are trained, the smallest where they differ."""
    parameters = [e.graph.tensors[t] for t in e.graph.parameters.values()]
    trained = [t for t in parameters if t.needs_grad] or parameters  # a frozen base may have other formats
    return min((t.itemsize_bytes for t in trained), default=4)


def _states(state: TrainingState) -> str:
    """`gradients of 4 bytes, master weights of 4 bytes, states of adamw8bit`."""
    own = "gradients in the same format"
    gradients = own if state.gradient_bytes is None else f"gradients of {state.gradient_bytes} bytes"
    masters = f", master weights of {state.master_bytes} bytes" if state.master_bytes else ""
    return f"{gradients}{masters}, states of {state.optimizer.name}"


def _bound(e: Explanation) -> str:
    request = e.request
    if request is None or request.memory_bytes is not None or not request.headroom:
        return f"{format_bytes(e.bound_bytes)} a rank"
    whole = format_bytes(int(e.cluster.hardware.memory_bytes))
    return f"{format_bytes(e.bound_bytes)} a rank: {whole} less {100 * request.headroom:g} % headroom"


def launch(e: Explanation, saved: Path | None = None) -> tuple[str, ...]:
    """The lines that launch a plan: how it is saved, the calls that load it, and the torchrun command.

    A plan of a model of which only some layers were captured is launched by its settings, within which `compile`
    searches again: the user's own module may have other names than the plan.

    Args:
        e: the explanation of the plan.
        saved: the file that the plan was saved in; None if it was not saved.
    """
    is_written = saved is not None or e.graph.layer_count
    lines = [] if is_written else [f"# autopar explain ... --save {PLAN_FILE} writes the plan"]
    model = "model, loss_fn=loss_fn" if e.has_loss_fn else "model"
    files = {"nvme": FOLDER} if _needs_files(e) else {}
    given = settings(e) if e.graph.layer_count else {"plan": str(saved or PLAN_FILE)}
    call = _call(model, [f"{name}={_literal(value)}" for name, value in (given | files).items()])
    pipeline = e.plan.pipeline
    inside = pipeline is not None and pipeline.update_every > 0
    attach = ["model.attach_optimizer(optimizer)"] if inside else []
    notes = [line for each in _comments(e) for line in _commented(each)]
    return (*lines, *notes, *call, *attach, _torchrun(e.cluster, e.ranks))


def _call(model: str, arguments: Sequence[str]) -> list[str]:
    """The call of `compile`, in one line or with one argument a line."""
    line = f"model = autopar.compile({model}, {', '.join(arguments)})"
    if len(line) <= WIDTH:
        return [line]
    return ["model = autopar.compile(", *(f"    {each}," for each in (model, *arguments)), ")"]


def _commented(text: str) -> list[str]:
    """A comment in lines that each begin with `#`."""
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def _literal(value: Any) -> str:
    """A value as Python writes it, with double quotes."""
    return json.dumps(value) if isinstance(value, (str, dict)) else repr(value)


def _needs_files(e: Explanation) -> bool:
    """Whether the plan keeps parameters in files, for which `compile` has to be given a folder."""
    return any(how.tier == "nvme" for how in e.plan.parameters.values())


def settings(e: Explanation) -> dict[str, Any]:
    """Arguments with which `autopar.compile` searches under the constraints that the plan was searched under.

    They are the plan's settings, the bound on memory, and the training state that its memory was counted for. Single
    ops that are recomputed are not an argument: `compile` finds them again within the bound.
    """
    plan, stages, state = e.plan, int(e.run.stages), e.run.training_state
    mesh = plan.world_mesh.used or Mesh((("dp", 1),))
    if plan.pipeline is None and stages > 1:
        mesh = mesh.with_axis(PIPELINE_AXIS, stages, 0)
    arguments = {
        "mesh": str(mesh) if mesh.placement or mesh.occupied else dict(mesh.axes),
        "recipe": _recipe(plan.recipe, mesh.names),
        "micro_batches": plan.micro_batches,
        **_schedule(plan),
        "recompute": None if isinstance(plan.recompute, Selection) else plan.recompute,
        "decompose": ",".join(plan.decomposed),
        "overlap_batches": plan.overlap_batches if plan.overlap_batches > 1 else None,
        "bucket_bytes": plan.bucket_bytes,
        "precision": plan.precision and str(plan.precision),
        "training_state": "" if state == FULL else str(state),
        "hardware": str(e.cluster) if e.cluster.hardware.kinds else None,
        **_bounds(e.request),
    }
    return {name: value for name, value in arguments.items() if value not in (None, "", {})}


def _schedule(plan: Plan) -> dict[str, Any]:
    """The schedule, unless the recipe names it, and the stages of a pipeline rank where there are several."""
    if plan.pipeline is None:
        return {}
    named = any(part.startswith(f"{PIPELINE_AXIS}:") for part in plan.recipe.split(","))
    chunks = plan.pipeline.stages // plan.pipeline.ranks
    return {"schedule": None if named else plan.pipeline.schedule, "chunks": chunks if chunks > 1 else None}


def _bounds(request: Request | None) -> dict[str, Any]:
    """The limits of the search that `compile` takes, as far as the request differs from the defaults."""
    if request is None:
        return {}
    is_usual = request.memory_bytes is not None or request.headroom == HEADROOM
    return {
        "memory_bytes": request.memory_bytes,
        "headroom": None if is_usual else request.headroom,
        "pins": {name: pin for name, pin in request.pins.items() if not is_intent(pin)},
        "inside_node": ",".join(request.inside_node),
        "without": ",".join(sorted(request.without - _IN_SETTINGS)),
        "offload": request.offload or None,
        "skew": None if request.skew == 1 else request.skew,
    }


_IN_SETTINGS = {"recompute", "dp", "tp"}  # the mesh and recompute= of the call say it


def _comments(e: Explanation) -> Iterator[str]:
    """Comments above a call, for settings that the call itself cannot express."""
    if not e.graph.layer_count:
        return
    if e.plan.precision is None and _parameter_bytes(e) == 2:
        yield "a model with parameters of 2 bytes was planned: model.to(torch.bfloat16) makes them so"
    pins = e.request.pins.items() if e.request else ()
    rest = PlanOptions(pins={name: pin for name, pin in pins if is_intent(pin)})
    if rest.pins:
        yield f"compile has no argument for {rest.text}"
    far = [name for name, how in e.plan.parameters.items() if how.tier != "device"]
    decides = []
    if far and all(row.tier == "device" for row in resolve(split_recipe(e.plan.recipe)[1], e.plan.mesh)):
        count = sum(e.graph.layer_count.get(name, 1) for name in far)
        decides.append(f"which parameters the host stores (here {count:,})")
    if e.plan.loss_tile_bytes is not None:
        decides.append("whether the loss runs in tiles (here it does)")
    also = f", and so decides {' and '.join(decides)}" if decides else ""
    yield f"this call searches the layouts again{also}; --save {PLAN_FILE} saves them, for a model with these names"


def _recipe(recipe: str, axes: Sequence[str]) -> str:
    """The recipe without axes that the mesh does not have."""
    if ":" not in recipe:
        return recipe
    parts = [part for part in recipe.split(",") if part.partition(":")[0] in axes]
    return ",".join(parts) or "auto"


def _torchrun(cluster: Cluster, ranks: int) -> str:
    """The command that starts every rank; on several nodes it runs on each of them."""
    if cluster.hardware.kinds:
        return _torchrun_of_kinds(cluster)
    in_node = min(ranks, cluster.devices_per_node)
    nodes = -(-ranks // in_node)
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {in_node} {SCRIPT}"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {in_node} --rdzv-backend c10d --rdzv-endpoint HOST:29500 {SCRIPT}"
    )


def _torchrun_of_kinds(cluster: Cluster) -> str:
    """The command for every node of several kinds: ranks are numbered by nodes, in the order of the kinds."""
    nodes = sum(kind.nodes for kind in cluster.kinds)
    sizes = {kind.devices_per_node for kind in cluster.kinds}
    size = str(sizes.pop()) if len(sizes) == 1 else "GPUS"
    rendezvous = "--node-rank NODE --master-addr HOST --master-port 29500"
    return f"torchrun --nnodes {nodes} --nproc-per-node {size} {rendezvous} {SCRIPT}"

"""Options that several commands share, and the question that they make."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, TypeVar

import click

from autopar.cost_model.items import TrainingState
from autopar.cost_model.machines.cluster import MOST_RANKS, Cluster, find_cluster
from autopar.cost_model.machines.gpu_names import canonical_gpu
from autopar.cost_model.machines.software import with_eager_runs
from autopar.cost_model.optimizers import OPTIMIZERS
from autopar.errors import AutoparError, MeshError
from autopar.explanation.advice import Question
from autopar.explanation.asked import is_intent
from autopar.ir import PIPELINE_AXIS, Mesh
from autopar.options import Option, options_of
from autopar.search.request.options import AXES, PlanOptions
from autopar.search.request.recipe_rows import MEETING_RECIPES, PIPELINE_RECIPES, RECIPES
from autopar.search.request.request import Progress, Request
from autopar.search.request.several_axes import SEVERAL_AXES

F = TypeVar("F", bound=Callable[..., Any])

TARGET_HELP = """TARGET is a preset (llama3-8b, gpt3-175b, mixtral-8x7b, bert-large, t5-11b, vit-h ...), the
path of a Hugging Face config.json or of a directory that has one, or package.module:function, which
returns (model, example_inputs) or (model, example_inputs, loss_fn)."""

AUTO = "auto"  # value of --batch


def _has_plain_digits(text: str) -> bool:
    """Whether a number has only digits 0 to 9; Python also takes those of other scripts, and 1_0 for 10."""
    return text.isascii() and "_" not in text


class Count(click.IntRange):
    """A whole number of at least `least`, in the digits 0 to 9; Python's `int` would take those of other scripts."""

    def __init__(self, most: int = 10**9, least: int = 1) -> None:
        super().__init__(min=least, max=most)

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if not re.fullmatch(r"[-+]?[0-9]{1,100}", str(value)):
            self.fail(f"{value!r} is not a whole number; write one such as 8.", param, ctx)
        found: int = super().convert(value, param, ctx)
        return found


class Real(click.FloatRange):
    """A finite number in the digits 0 to 9; nan is inside of every range of click."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if not _has_plain_digits(str(value)):
            self.fail(f"{value!r} is not a number; write one such as 0.5.", param, ctx)
        found: float = super().convert(value, param, ctx)
        if not isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


class BatchSize(click.ParamType):
    """A number of sequences, or the word auto."""

    name = "N|auto"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | str:
        if value == AUTO:
            return AUTO
        if not re.fullmatch(r"-?[0-9]+", str(value)):
            self.fail(f"{value!r} is not a batch; write a number such as 64, or auto.", param, ctx)
        return POSITIVE.convert(value, param, ctx)


class Parsed(click.ParamType):
    """The value of an option of a plan, as the option itself reads it."""

    def __init__(self, asked: Option) -> None:
        self.name, self._parse = asked.metavar, asked.parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self._parse(value)
        except AutoparError as error:
            self.fail(str(error), param, ctx)


class Price(click.ParamType):
    """GPU=PRICE as a pair, with "" for the GPU of a bare price."""

    name = "[GPU=]PRICE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        gpu, _, text = value.rpartition("=")
        try:
            price = float(text) if _has_plain_digits(text) else -1.0
        except ValueError:
            price = -1.0
        if not 0 <= price < float("inf"):
            self.fail(f"Cannot read the price {value!r}; write 2.5, or h200=3.5.", param, ctx)
        return canonical_gpu(gpu) if gpu else "", price


# as help texts have them
RECIPE_NAMES = (
    f"{', '.join(RECIPES)} (over several axes, as x,y:2d, {', '.join(SEVERAL_AXES)}; "
    f"with an axis pp also {', '.join(PIPELINE_RECIPES)}; for the first axis also "
    f"{', '.join(MEETING_RECIPES)}, where replicas synchronise every K steps or are at most S exchanges ahead)"
)

POSITIVE = Count()

_WHERE = (
    click.option(
        "--cluster",
        metavar="NAME",
        help="GPU x ranks in a node x nodes: h100x8x16, a100x4; several kinds: h100x8x2+a100x8x2; or a TOML file.",
    ),
    click.option(
        "--batch",
        type=BatchSize(),
        metavar="N|auto",
        help="Sequences of a step on all ranks; by default one per rank. With auto, explain tries twenty "
        "to thirty, explains the smallest within 1 % of the least time per token, and names the fastest "
        "and the largest that fits at once.",
    ),
    click.option("--seq", type=POSITIVE, metavar="N", help="Tokens of a sequence."),
    click.option(
        "--ranks", type=Count(MOST_RANKS), metavar="N", help="Number of ranks, where --cluster names one GPU or none."
    ),
    click.option("--hardware", metavar="GPU", help="The GPU of --mesh or --ranks; by default h100."),
)


def plan_option(name: str, **own: Any) -> Callable[[F], F]:
    """The flag of an option of a plan; `own` overrides its properties for one command."""
    asked = _PLAN[name]
    how: dict[str, Any] = {"help": _sentence(asked.help), "multiple": asked.repeats}
    if asked.choices:
        how["type"] = click.Choice(asked.choices)
    elif asked.metavar:
        how |= {"type": _NUMBERS.get(asked.metavar) or Parsed(asked), "metavar": asked.metavar}
    else:
        how["is_flag"] = True
    if isinstance(asked.default, (int, float, str)):
        how["default"] = asked.default
    return click.option(asked.flag, *asked.also, name, **how | own)


def _sentence(text: str) -> str:
    plain = text.replace("`", "")
    return plain[0].upper() + plain[1:]


_PLAN = options_of(PlanOptions)
_NUMBERS = {"N": POSITIVE, "V": POSITIVE, "PART": Real(0, 1, max_open=True), "FACTOR": Real(1)}
_OWN: dict[str, dict[str, Any]] = {
    "recipe": {
        "help": f"One of {RECIPE_NAMES}, or per axis: pp:1f1b,dp:zero3,tp:tp+sp. fit and compare take auto, "
        "ddp, zero1 to zero3, tp, tp+sp and schedules with a flush."
    },
    "decompose": {"default": ""},
    "training_state": {
        "type": str,
        "default": "",
        "help": f"What the optimizer keeps: one of {', '.join(OPTIMIZERS)}; then gradients=BYTES and masters=BYTES of "
        "an element, if they differ from the usual. 'adamw8bit gradients=2 masters=0' trains bf16 parameters without "
        "float32 masters.",
    },
}
_INTENTS = (
    *(plan_option(name, **_OWN.get(name, {})) for name in _PLAN),
    click.option("--memory-gb", type=Real(min=0, min_open=True), hidden=True),
)


def question_options(command: F) -> F:
    """Adds the options that say what to plan, for which machine, and under which constraints."""
    for option in reversed(_WHERE + _INTENTS):
        command = option(command)
    return command


def question(target: str, progress: Progress, given: Mapping[str, Any], *, tries_batches: bool = False) -> Question:
    """The question that the options ask. Raises AutoparError or a click error where they cannot.

    Args:
        target: the model, as the user names it.
        progress: function that is called with a line of text when a phase of the search begins.
        given: values of the options by name.
        tries_batches: whether the command takes `--batch auto`; the question then names no batch.
    """
    if given["batch"] == AUTO and not tries_batches:
        raise click.UsageError(
            "--batch auto tries several batches, which `autopar explain` does; give this command one of them as a "
            "number, such as --batch 64."
        )
    mesh = given["mesh"]
    cluster = _cluster(given, mesh)
    asked = {name: given[name] for name in _PLAN if name != "training_state"}
    if asked["memory_bytes"] is None and given["memory_gb"] is not None:
        asked["memory_bytes"] = max(1, int(given["memory_gb"] * 1e9))
    depths = {1, *given["stages"]} if given["stages"] and mesh is None else None
    request = Request(
        cluster.hardware,
        ranks=cluster.ranks,
        batch=None if given["batch"] == AUTO else given["batch"],
        refines=True,
        **asked | {"stages": depths, "offload": given["offload"] or None},
    )
    _check_pins(request)
    TrainingState.parse(given["training_state"])  # refuses unknown words before a model is captured
    return Question(target, request, given["seq"], progress, given["training_state"])


def _check_pins(request: Request) -> None:
    mesh = request.mesh
    axes = AXES if mesh is None else tuple(n for n in mesh.names if n != PIPELINE_AXIS)
    for name, choice in request.pins.items():
        if is_intent(choice) and choice not in axes:
            raise click.UsageError(f"The pin {name}={choice} names no axis; the axes are {', '.join(axes)}.")


def _cluster(given: Mapping[str, Any], mesh: Mesh | None) -> Cluster:
    name, ranks = given["cluster"], given["ranks"]
    if name is not None and given["hardware"] is not None:
        raise click.UsageError("Give --cluster or --hardware, not both.")
    if name is None and mesh is None and ranks is None:
        raise click.UsageError("Say where: --cluster h100x8x16, or --ranks 8, or --mesh dp=8,tp=8 for H100.")
    if name is not None and ranks is None and (mesh is None or "x" in name[1:] or find_cluster(name).hardware.kinds):
        return with_eager_runs(find_cluster(name))
    if mesh is not None and ranks not in (None, mesh.ranks):
        raise click.UsageError(f"--mesh {mesh} has {mesh.ranks} ranks, and --ranks says {ranks}.")
    size = ranks or (mesh.ranks if mesh else 1)
    return with_eager_runs(cluster_of(name or given["hardware"] or "h100", size))


def cluster_of(gpu: str, ranks: int) -> Cluster:
    """A cluster of `ranks` GPUs of one type: whole nodes of the size in the catalogue, or a part of one node.

    Raises MeshError for more ranks than a node has, unless they fill whole nodes.
    """
    found = find_cluster(gpu)
    if found.hardware.kinds:
        raise MeshError(
            f"{found} has {found.ranks} ranks of several kinds, and {ranks} are asked for; leave --ranks out."
        )
    if "x" in gpu.removeprefix(found.hardware.name):
        if found.ranks == ranks:
            return found
        raise MeshError(f"--cluster {gpu} has {found.ranks} ranks, and --ranks says {ranks}; leave --ranks out.")
    node = found.devices_per_node
    if ranks > node and ranks % node:
        raise MeshError(
            f"{ranks} ranks are not a whole number of nodes of {node} {gpu}; say how they are spread, "
            f"such as --cluster {gpu}x{_spread(ranks, node)}x{ranks // _spread(ranks, node)}."
        )
    return find_cluster(f"{gpu}x{min(node, ranks)}x{max(1, ranks // node)}")


def _spread(ranks: int, node: int) -> int:
    """The largest number of ranks in a node that divides them all."""
    return max(size for size in range(1, node + 1) if ranks % size == 0)

"""The cost of a plan for users: as text and data, with answers to questions such as what another machine changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rich.console import RenderableType
from rich.jupyter import JupyterMixin

from autopar.cost_model.breakdown import Event
from autopar.cost_model.history import SHARE
from autopar.cost_model.symbols import factor_symbols
from autopar.errors import AutoparError, did_you_mean
from autopar.explanation import solving
from autopar.explanation.costs import PlanCost
from autopar.explanation.nearness import most_gained
from autopar.explanation.owned import owner_sentences
from autopar.explanation.report import as_text, explain, starred
from autopar.explanation.solving import LargestFit
from autopar.explanation.timeline import timeline
from autopar.explanation.what_would_change import GROUPS, Change, changed_hardware, scaled
from autopar.ir import Graph
from autopar.ir.note import kind_of
from autopar.ir.recompute import recompute_json
from autopar.search import search as search_plan
from autopar.search.candidates.settings import ClusterSetting
from autopar.search.refine.buckets import usual_bytes
from autopar.search.request.notes import head_factors
from autopar.search.request.recipes import split_recipe
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.pipeline import search_pipeline
from autopar.units import format_bytes, format_seconds
from autopar.views import BatchRow


@dataclass(frozen=True)
class Explanation(PlanCost, JupyterMixin):
    """The cost of one plan on one cluster, with answers to questions about it.

    With pipeline stages, and where single ranks run ops, `sensitivity` and `solve_for` use the closed-form estimate,
    not the simulated schedule.

    Attributes:
        words: size -> name of this size, such as 4096 -> "hidden".
        changes: changes of the cluster that would change the plan.
        setting: the setting of the plan; None if the user named the mesh.
        has_loss_fn: whether the model was given with a loss function.
        batches: the batches that were tried, smallest first; none where the user names the batch.
        batch_lines: sentences on the fastest and the largest of these batches.
        kind_lines: sentences on who waits for whom in a cluster of several kinds of machines.
    """

    words: Mapping[int, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    setting: ClusterSetting | None = None
    has_loss_fn: bool = False
    batches: tuple[BatchRow, ...] = ()
    batch_lines: tuple[str, ...] = ()
    kind_lines: tuple[str, ...] = ()

    def __rich__(self) -> RenderableType:
        sentences = self.simulated.sentences if self.simulated else ()
        if self.owned is not None:
            sentences = owner_sentences(self.graph, self.plan, self.owned)
        notes = (*self._choices, *sentences, self._prediction)
        return explain(replace(self.plan, notes=notes), self.graph, self.op_seconds)

    @property
    def _choices(self) -> tuple[str, ...]:
        """The search's notes on its choices, without those on times and stages, which the report prints itself."""
        return tuple(n for n in self.plan.notes if kind_of(n) not in ("price", "stages"))

    @property
    def _prediction(self) -> str:
        return (
            f"predicted on {self.place}{' by simulation' if self.simulated else ''}: "
            f"{format_seconds(self.step_seconds)} a step, "
            f"{format_bytes(self.memory_bytes)} of {format_bytes(self.bound_bytes)} of a rank"
        )

    def __str__(self) -> str:
        return as_text(self)

    @cached_property
    def most_gained(self) -> float | None:
        """The part of the step by which other layouts on its mesh are faster at most; None where that is not known."""
        return most_gained(self)

    # --- words for sizes

    @cached_property
    def factor_words(self) -> Mapping[str, str]:
        """Name of a factor -> word for its size, such as "hidden"."""
        return words_of_factors(self.graph, self.words)

    @cached_property
    def legend(self) -> Mapping[str, str]:
        """Symbol -> its meaning: a word if there is one, and the dims whose size it is."""
        stands: dict[str, list[str]] = {}
        for name, symbol in factor_symbols(self.graph).items():
            stands.setdefault(str(symbol), []).append(name)
        return {symbol: self._meaning(symbol, names) for symbol, names in stands.items() if symbol in self.values}

    def _meaning(self, symbol: str, names: Sequence[str]) -> str:
        size = int(self.values[symbol])
        word = self.word(symbol)
        where = list(dict.fromkeys(starred(f".{name}")[1:] for name in names))  # a leading number, too
        said = f"{word}, " if word and word != symbol else ""
        return f"{said}{size}: {', '.join(where[:2])}{' ...' if len(where) > 2 else ''}"

    def word(self, symbol: str) -> str:
        """Word for the size that a symbol stands for, such as "hidden"; "" if there is none."""
        if symbol in ("batch", "seq", "layers"):
            return symbol
        names = (n for n, s in factor_symbols(self.graph).items() if str(s) == symbol)
        return next((self.factor_words[n] for n in names if n in self.factor_words), "")

    def symbol_in_words(self, symbol: str) -> str:
        """A symbol with the model's word for it, such as `hidden (embedding_1)` for `embedding_1`."""
        word = self.word(symbol)
        return f"{word} ({symbol})" if word and word != symbol else symbol

    # --- questions

    def sensitivity(self) -> dict[str, float]:
        """Relative change of the step's time T when a symbol x grows by 1 %, for every symbol that T depends on.

        The change is 0.01 x / T dT/dx. A step in the complex plane gives the derivative exactly up to rounding
        (Squire and Trapp 1998). Symbols of axes with one rank, and of stages where there is one, are left out. The
        largest change comes first. With pipeline stages, T is the time of the closed form.
        """
        return solving.sensitivity(self)

    def solve_for(self, name: str) -> LargestFit:
        """The largest value of a size such as `batch` for which the plan still fits into a rank's memory.

        With pipeline stages the memory is that of the closed form. Raises AutoparError if the memory does not depend on
        a symbol of this name, or if no value fits.
        """
        return solving.solve_for(self, name)

    def what_if(self, *, search: bool = False, **changes: float) -> Explanation:
        """The cost of this plan on another machine or at other sizes.

        A simulated pipeline and a new search accept changes of the machine only: other sizes need another capture. For
        a pipeline, `closed_form.what_if` accepts sizes too.

        Args:
            search: whether to search a new plan for the changed machine, in place of keeping this one.
            changes: new values. A symbol takes a value in its own unit (`batch=64`, `memory_bytes_per_second=4.8e12`),
                `hbm_bytes` the memory of a rank; `link_bandwidth`, `link_latency`, `flops`, `memory_bandwidth` and
                `host_speed` take factors: 2 is twice as much.

        Raises AutoparError for any other name, and for values that are not positive.
        """
        if search:
            return self._searched_again(changes)
        if self.simulated is not None or self.owned is not None:
            return self._on_changed(changes)
        overrides, bound = dict(self.overrides), self.memory_bound_bytes
        for name, value in changes.items():
            if not 0 < value < math.inf:
                raise AutoparError(f"what_if({name}={value}): give a positive number.")
            if name == "hbm_bytes":
                bound = int(value)
            elif name in GROUPS:
                overrides |= scaled(self.values, name, value)
            elif name in self.values:
                overrides[name] = float(value)
            else:
                known = [*sorted(GROUPS), "hbm_bytes", *sorted(self.values)]
                near = did_you_mean(name, known)
                raise AutoparError(f"There is no size or figure {name!r}{near}; there are {', '.join(known)}.")
        return replace(self, overrides=overrides, memory_bound_bytes=bound, built=self.expressions)

    def _on_changed(self, changes: Mapping[str, float]) -> Explanation:
        """The cost of this plan, whose schedule over stages or owners is simulated, on the changed machine."""
        changed = self.closed_form.what_if(search=False, **changes)  # refuses unknown names
        others = sorted(changes.keys() - {*GROUPS, "hbm_bytes"})
        if others:
            raise AutoparError(
                "The schedule of stages or owners is simulated for this graph and this machine, so "
                f"what_if({others[0]}={changes[others[0]]}) has no answer: explain the model again with that value, or "
                f"ask the closed form, closed_form.what_if({others[0]}={changes[others[0]]}). What can be changed is "
                f"{', '.join([*sorted(GROUPS), 'hbm_bytes'])}."
            )
        cluster = replace(self.cluster, hardware=changed_hardware(self.cluster.hardware, changes))
        return replace(self, cluster=cluster, memory_bound_bytes=changed.memory_bound_bytes, built=None)

    def _searched_again(self, changes: Mapping[str, float]) -> Explanation:
        """The cost of the best plan under the same recipe on the changed machine."""
        changed = self.closed_form.what_if(search=False, **changes)  # refuses unknown names
        sizes = sorted(changes.keys() - {*GROUPS, "hbm_bytes"})
        if sizes:
            raise AutoparError(f"A new search for another {sizes[0]} needs a new capture: explain the model again.")
        hardware = changed_hardware(self.cluster.hardware, changes)
        count = self.plan.micro_batches
        recipe = self.plan.recipe if self.plan.pipeline else split_recipe(self.plan.recipe)[1]
        request = Request(
            hardware,
            mesh=self.plan.replica_mesh,
            recipe=recipe,
            micro_batches=count,
            memory_bytes=changed.bound_bytes,
            training_state=self.run.training_state,
            software=self.software,
        )
        if self.plan.pipeline is None:
            plan = search_plan(
                self.graph,
                self.plan.mesh,
                hardware=hardware,
                recipe=request.recipe,
                memory_bytes=request.bound_bytes,
                micro_batches=count,
                fingerprint=self.plan.fingerprint,
                training_state=self.run.training_state,
            )
            plan = replace(plan, meeting=self.plan.meeting)
        else:
            asked = request.but(recompute=self.plan.recompute, batch=None)
            plan = search_pipeline(Case(self.graph, asked, count, self.plan.fingerprint)).plan
        cluster = replace(self.cluster, hardware=hardware)
        run = replace(self.run, chunks=plan.pipeline.chunks) if plan.pipeline else self.run
        return replace(changed, plan=plan, cluster=cluster, run=run, overrides=self.overrides, built=None)

    @property
    def trace(self) -> tuple[Event, ...]:
        """The predicted step for `--trace`: with pipeline stages that of all ranks, else that of one."""
        return self.simulated.events if self.simulated else self.events()

    def events(self) -> tuple[Event, ...]:
        """The predicted step as a timeline, with one lane for compute and one for communication along each axis."""
        return timeline(self.step)

    def to_json(self) -> dict[str, Any]:
        """The plan, its cost and all figures of its HTML report, as data for JSON, with units in the keys."""
        return {
            "plan": self.plan.to_json(),
            "cluster": {"name": self.place, "ranks": self.ranks},
            "run": {
                "micro_batches": int(self.values["micro_batches"]),
                "stages": int(self.values["stages"]),
                "chunks": int(self.values["chunks"]),
                "recompute": recompute_json(self.run.recompute),
                "bucket_bytes": self.plan.bucket_bytes or usual_bytes(self.graph, self.plan),
            },
            "step_seconds": self.step_seconds,
            "step_spread": self._spread_json(),
            "most_gained_by_layouts": self.most_gained,
            "origins": self.origins,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "memory_bound_bytes": self.bound_bytes,
            "fits": self.fits,
            "time": self.time.to_json(),
            "memory": self.memory.to_json(),
            "traffic": self.traffic.to_json(),
            "sensitivity_per_percent": self.sensitivity(),
            "symbols": dict(sorted(self.values.items())),
            "candidates": [dataclasses.asdict(each) for each in self.candidates],
            **self._pipeline_json(),
            "symbols_meaning": dict(self.legend),
            "changes": [dataclasses.asdict(each) for each in self.changes],
            **({"batches": [each._asdict() for each in self.batches]} if self.batches else {}),
        }

    def _spread_json(self) -> dict[str, Any] | None:
        """Between which seconds 80 % of such steps lie, and by which runs; None where nothing was measured."""
        found = self.spread
        if found is None:
            return None
        return {
            "share": SHARE,
            "low_seconds": found.low * self.step_seconds,
            "high_seconds": found.high * self.step_seconds,
            "runs": found.runs,
            "tables": found.tables,
            "of": str(found.group),
        }

    def _pipeline_json(self) -> dict[str, Any]:
        """The stages and the simulated schedule, as part of `to_json`; empty without pipeline stages."""
        run = self.simulated
        if run is None:
            return {}
        closed = self.closed_form
        return {
            "pipeline": {
                "schedule": run.pipeline.schedule,
                "stages": [each._asdict() for each in run.stages],
                "slowest_stage": run.slowest_stage,
                "fullest_rank": run.fullest_rank,
                "busy_seconds": list(run.simulation.busy_seconds),
                "rank_bytes": list(run.simulation.peak_bytes),
                "schedule_seconds": run.simulation.step_seconds,
                "once_seconds": list(run.once_seconds),
                "bubble_fraction": run.simulation.bubble_fraction,
                "closed_form": {
                    "bubble_fraction": run.closed_bubble,
                    "step_seconds": closed.step_seconds,
                    "memory_bytes": closed.memory_bytes,
                },
            }
        }


def words_of_factors(graph: Graph, words: Mapping[int, str]) -> dict[str, str]:
    """Name of a factor -> word for it: by its size if that has a word, or by its use."""
    heads = head_factors(graph)
    found = {}
    for name, factor in graph.factors.items():
        op = graph.by_name.get(name.partition("~")[0])
        if name in ("batch", "seq"):
            continue
        if word := words.get(factor.size, ""):
            found[name] = word
        elif name in heads:
            found[name] = "heads"
        elif op is not None and op.kind.startswith("aten.arange"):
            found[name] = "positions"
    return found

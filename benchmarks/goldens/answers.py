"""What the search answers to a question: the plan as text, its price, and the timeline that shows this price."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autopar.cost_model import find_cluster
from autopar.cost_model.machines.software import with_eager_runs
from autopar.errors import AutoparError
from autopar.explanation.advice import Question
from autopar.explanation.explanation import Explanation
from autopar.ir import Mesh
from autopar.search.request.request import Request
from benchmarks.site.gallery import QUESTIONS
from benchmarks.speed.bench_search_quality import questions, tokens

Answer = dict[str, Any]


@dataclass(frozen=True)
class Golden:
    """A question whose answer is stored.

    Attributes:
        model: name of a preset.
        cluster: GPU x ranks in a node x nodes.
        mesh: the mesh that is named; "" leaves it open.
        batch: samples of a step on all ranks.
        seq: tokens of a sequence; None for an image model.
    """

    model: str
    cluster: str
    mesh: str
    batch: int
    seq: int | None

    @property
    def name(self) -> str:
        """
        >>> Golden("gpt2", "h100x4", "", 16, 1024).name
        'gpt2 h100x4 open b16'
        """
        return f"{self.model} {self.cluster} {self.mesh or 'open'} b{self.batch}"

    def answer(self) -> Answer:
        """The plan and its price; for a question without a plan, the first line of the error."""
        place = with_eager_runs(find_cluster(self.cluster))
        asked = Request.on(place, batch=self.batch, mesh=Mesh.parse(self.mesh) if self.mesh else None)
        begin = time.process_time()
        try:
            found = Question(self.model, asked, self.seq).answer()
        except AutoparError as error:
            return {"error": str(error).splitlines()[0]}
        return {**_shown(found), "search_seconds": time.process_time() - begin}


def goldens() -> Iterator[Golden]:
    """The questions of the law but those on mixtures, which take up to six minutes each, and those of the gallery."""
    for model, cluster, mesh, batch in questions():
        if model != "mixtral-8x7b":
            yield Golden(model, cluster, mesh, batch, tokens(model))
    for each in QUESTIONS:
        yield Golden(each.model, each.cluster, "", each.batch, each.seq)


def _shown(found: Explanation) -> Answer:
    """What the report of a plan shows, in numbers that do not depend on the machine that computed them."""
    plan = found.plan.to_json()
    return {
        "step_seconds": f"{found.step_seconds:.9g}",
        "memory_bytes": f"{found.memory_bytes:.9g}",
        "parts_seconds": f"{sum(part.value for part in found.time.parts):.9g}",
        "timeline_seconds": f"{_end_seconds(found):.9g}",
        "plan": {name: value for name, value in plan.items() if name not in ("notes", "digest")},
    }


def _end_seconds(found: Explanation) -> float:
    """Where the last event of the timeline ends, as `explain --trace` writes it."""
    return max(each.start_seconds + each.duration_seconds for each in found.trace)

"""The pictures of the site, one for every page of a concept.

python -m benchmarks.site.pictures    writes docs/pictures/*.svg again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.site import bars, curves, flows, ranks, steps, tensors

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"

PICTURES: Mapping[str, Callable[[], str]] = {  # page -> its picture
    "async_server": curves.async_server,
    "backend": flows.backend,
    "checkpoints": tensors.checkpoints,
    "cost_model": steps.cost_model,
    "delays": curves.delays,
    "design": flows.design,
    "executors": bars.executors,
    "experts": tensors.experts,
    "guards": flows.guards,
    "hardware": steps.hardware,
    "layouts": tensors.layouts,
    "local_steps": curves.local_steps,
    "optimizers": bars.optimizers,
    "overlap": bars.overlap,
    "owners": ranks.owners,
    "pipeline": steps.pipeline,
    "pipeline_search": steps.pipeline_search,
    "plans": tensors.plans,
    "precision": flows.precision,
    "randomness": flows.randomness,
    "recomputation": steps.recomputation,
    "reserved_memory": bars.reserved_memory,
    "rings": ranks.rings,
    "rules": tensors.rules,
    "schedules": steps.schedules,
    "search": tensors.search,
    "shapes": flows.shapes,
    "soak": curves.soak,
    "tensor_dims": ranks.tensor_dims,
    "tiers": ranks.tiers,
    "verify": flows.verify,
    "versions": curves.versions,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for page, draw in PICTURES.items():
        (FOLDER / f"{page}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The pictures of the site, one for every page of a concept.

python -m benchmarks.site.pictures    writes docs/pictures/*.svg again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.site import curves, flows, steps, tensors

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"

PICTURES: Mapping[str, Callable[[], str]] = {  # page -> its picture
    "async_server": curves.async_server,
    "backend": flows.backend,
    "checkpoints": tensors.checkpoints,
    "cost_model": steps.cost_model,
    "delays": curves.delays,
    "design": flows.design,
    "experts": tensors.experts,
    "guards": flows.guards,
    "hardware": steps.hardware,
    "layouts": tensors.layouts,
    "local_steps": curves.local_steps,
    "pipeline": steps.pipeline,
    "pipeline_search": steps.pipeline_search,
    "plans": tensors.plans,
    "precision": flows.precision,
    "randomness": flows.randomness,
    "recomputation": steps.recomputation,
    "rules": tensors.rules,
    "schedules": steps.schedules,
    "search": tensors.search,
    "shapes": flows.shapes,
    "soak": curves.soak,
    "verify": flows.verify,
    "versions": curves.versions,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for page, draw in PICTURES.items():
        (FOLDER / f"{page}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""A figure is measured, published or scaled, as the worst of its parts."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_model import Source, find_hardware
from autopar.cost_model.machines.origins import ORIGINS, origins_of

H100 = find_hardware("h100")


def test_figures_of_the_catalogue_are_published_or_scaled() -> None:
    found = origins_of(H100)
    assert found["products"] == "published" and found["overlap"] == "scaled"
    assert {*found.values()} <= {*ORIGINS} - {"measured"}


def test_what_was_measured_here_is_so_and_a_guess_among_its_parts_is_not() -> None:
    sources = {name: Source("measured", "calibrate") for name, _ in H100.sources}
    own = replace(H100, name="ours", sources=tuple(sources.items()))
    assert origins_of(own)["links in a node"] == "measured"
    part = sources | {"inside_node.latency_seconds": Source("guess", "one rank alone")}
    assert origins_of(replace(own, sources=tuple(part.items())))["links in a node"] == "scaled"
    stated = sources | {"peak_flops.bfloat16": Source("datasheet", "the vendor")}
    assert origins_of(replace(own, sources=tuple(stated.items())))["products"] == "published"

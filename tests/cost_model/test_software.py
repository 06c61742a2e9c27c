"""What runtimes make of machines."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from autopar.cost_model import H100
from autopar.cost_model.cluster import find_cluster
from autopar.cost_model.hardware import Source
from autopar.cost_model.software import AUTOPAR, SOFTWARE, as_eager_runs, software_for


def test_a_neutral_runtime_leaves_the_machine_as_it_is() -> None:
    assert AUTOPAR.on(H100) == H100


def test_every_fitted_figure_is_physical_and_has_a_source() -> None:
    for software in SOFTWARE.values():
        assert software.source and software.source != "guess"
        for field in fields(software):
            value = getattr(software, field.name)
            if "efficiency" in field.name and value is not None:
                assert 0 < value <= 1, (software.name, field.name)


def test_an_unknown_runtime_is_the_nearest_and_says_so() -> None:
    found = software_for("torchtitan", "h100")
    assert found.name == "torchtitan"
    assert found.source.startswith("guess")
    assert found.matmul_efficiency == SOFTWARE["llm-foundry", "h100"].matmul_efficiency


def test_guesses_fill_only_what_nobody_stated() -> None:
    cluster = find_cluster("h100x8")
    guessed = as_eager_runs(cluster).hardware
    assert guessed.host_seconds > 0
    assert guessed.source("host_seconds").kind == "guess"
    measured = replace(
        cluster.hardware, host_seconds=9e-6,
        sources=(*cluster.hardware.sources, ("host_seconds", Source("measured", "here"))),
    )  # fmt: skip
    kept = as_eager_runs(replace(cluster, hardware=measured)).hardware
    assert kept.host_seconds == pytest.approx(9e-6)

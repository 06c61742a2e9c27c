"""What runtimes make of machines."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from autopar.api.machine import hardware_of
from autopar.cli.options import cluster_of
from autopar.cost_model import H100
from autopar.cost_model.machines.cluster import find_cluster
from autopar.cost_model.machines.hardware import Source
from autopar.cost_model.machines.software import AUTOPAR, named_hardware, with_eager_runs
from benchmarks.accuracy.runtimes import SOFTWARE, software_for


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
    guessed = with_eager_runs(cluster).hardware
    assert guessed.host_seconds > 0
    assert guessed.source("host_seconds").kind == "guess"
    measured = replace(
        cluster.hardware,
        host_seconds=9e-6,
        sources=(*cluster.hardware.sources, ("host_seconds", Source("measured", "here"))),
    )
    kept = with_eager_runs(replace(cluster, hardware=measured)).hardware
    assert kept.host_seconds == pytest.approx(9e-6)


def test_messages_hide_as_the_machine_says_and_a_runtime_has_its_own_figure() -> None:
    gpu, processor = named_hardware("h100"), named_hardware("cpu-gloo")
    assert (gpu.hides, processor.hides) == (0.8, 0.0)
    assert gpu.source("hides").kind == "guess"
    assert named_hardware(replace(gpu, hides=0.5)).hides == pytest.approx(0.5)
    assert replace(AUTOPAR, hides=0.3).on(gpu).hides == pytest.approx(0.3)


def test_compile_and_the_command_line_name_one_machine() -> None:
    (found, _), cluster = hardware_of("h100", torch.device("cpu")), cluster_of("h100", 8)
    assert found == with_eager_runs(cluster).hardware

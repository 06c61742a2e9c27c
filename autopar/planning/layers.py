"""The plan of a whole model, from a plan of a graph with few of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from autopar.capture.captured import Captured
from autopar.ir import Graph, Plan

T = TypeVar("T")


def spoken_of_all_layers(plan: Plan, graph: Graph, captured: Captured) -> Plan:
    """The plan of the whole model in which every layer has the choices of the captured layer that stands for it.

    Args:
        plan: a plan of `graph`; where it has stages, they begin at ops of the whole model already.
        graph: the graph with few layers, whose `copies` tell the names of the whole model.
        captured: the capture of the whole model (`autopar.passes.unroll_layers`).
    """
    order = [node.name for node in captured.module.graph.nodes]
    return replace(
        plan,
        fingerprint=captured.fingerprint,
        ops=_in_order(dict(_copied(plan.ops, graph.copies)), order),
        parameters=_in_order(dict(_copied(plan.parameters, graph.copies)), captured.parameters.values()),
    )


def _copied(choices: Mapping[str, T], copies: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, T]]:
    for name, choice in choices.items():
        for copy in copies.get(name, (name,)):
            yield copy, choice


def _in_order(choices: Mapping[str, T], order: Iterable[str]) -> dict[str, T]:
    return {name: choices[name] for name in order if name in choices}

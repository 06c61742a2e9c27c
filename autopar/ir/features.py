"""Features that do not go together yet: one table, which requests and plans are both asked.

features of a plan or a request        each feature that it has, in its own words
EXCLUDES[a, b]                         why no step can have both
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from autopar.errors import AutoparError


class Feature(Enum):
    """A feature that a plan may have, or a request may ask for, in addition to layouts."""

    REPLICAS = auto()
    SERVED_REPLICAS = auto()
    WIDE_REPLICAS = auto()
    STAGES = auto()
    VERSIONS = auto()
    LONE_OPS = auto()
    OFF_DEVICE = auto()
    RECOMPUTED = auto()
    SLICES = auto()
    DECOMPOSED = auto()
    OVERLAP = auto()
    PRECISION = auto()
    OPEN_MESH = auto()


Features = Mapping[Feature, str]

_TURNS = "micro-batches that run at the same time share one graph, in which nothing is cut into stages or recomputed"
_STORED = (
    "several versions of parameters are kept, and so far these must be stored in the layout in which they are used"
)
_ALONE = "a step in which one rank runs ops alone does not support that yet"

EXCLUDES: Mapping[tuple[Feature, Feature], str] = {
    (Feature.REPLICAS, Feature.STAGES): "replicas in stages cannot be run yet",
    (Feature.REPLICAS, Feature.OFF_DEVICE): "replicas whose parameters are on the host cannot synchronise "
    "yet; a recipe such as zero3 keeps them on the device",
    (Feature.SERVED_REPLICAS, Feature.WIDE_REPLICAS): "a replica that exchanges with an asynchronous server is a "
    "single rank so far; replicas under geo wait for each other and may have several",
    (Feature.VERSIONS, Feature.PRECISION): _STORED,
    (Feature.VERSIONS, Feature.OFF_DEVICE): _STORED,
    (Feature.OVERLAP, Feature.STAGES): _TURNS,
    (Feature.OVERLAP, Feature.RECOMPUTED): _TURNS,
    (Feature.OVERLAP, Feature.SLICES): _TURNS,
    (Feature.LONE_OPS, Feature.OPEN_MESH): "the mesh says which ranks there are; give mesh=",
    **{
        (Feature.LONE_OPS, other): _ALONE
        for other in (
            Feature.VERSIONS,
            Feature.OFF_DEVICE,
            Feature.REPLICAS,
            Feature.RECOMPUTED,
            Feature.SLICES,
            Feature.DECOMPOSED,
            Feature.OVERLAP,
        )
    },
}


def conflict(features: Features) -> str:
    """The first two features that cannot be combined, in words, and why; "" if all do.

    >>> conflict({Feature.STAGES: "2 stages", Feature.REPLICAS: "4 replicas"})
    '4 replicas and 2 stages, which cannot be combined: replicas in stages cannot be run yet'
    """
    found = ((pair, why) for pair, why in EXCLUDES.items() if features.keys() >= {*pair})
    (a, b), why = next(found, ((None, None), ""))
    return f"{features[a]} and {features[b]}, which cannot be combined: {why}" if a and b else ""


def check_features(subject: str, features: Features, error: type[AutoparError]) -> None:
    """Raises the error, of which `subject` is the start, if two features cannot be combined."""
    if words := conflict(features):
        raise error(f"{subject} {words}. Leave out one of the two.")

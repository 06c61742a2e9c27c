"""Will it fit, and what is the least one could change so that it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.cost_model.catalogue import HARDWARE
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.software import as_eager_runs
from autopar.errors import AutoparError
from autopar.explanation.advice import Advice, Question
from autopar.explanation.launch import asked
from autopar.search.comparison import best_that_fits, smallest
from autopar.search.intents import allows
from autopar.search.settings import DATA, ClusterSetting, PricedCandidate

_FACTORS = (2, 4, 8, 16, 32, 64)  # of nodes


@dataclass(frozen=True)
class Remedy:
    """A change with which it fits, or still does.

    Attributes:
        what: the change in words, such as "ZeRO-2 instead of ZeRO-1".
        setting: the configuration then, in words.
        memory_bytes: peak memory of a rank after the change.
        step_seconds: then.
        slower: relative to the step as asked; negative is faster.
    """

    what: str
    setting: str
    memory_bytes: float
    step_seconds: float
    slower: float


@dataclass(frozen=True)
class Fit:
    """The answer.

    Attributes:
        asked: the configuration in question, the fastest that fits or else the smallest.
        advice: its explanation.
        remedies: smallest changes first; where it fits, what room there is.
    """

    asked: PricedCandidate
    advice: Advice
    remedies: tuple[Remedy, ...]

    @property
    def fits(self) -> bool:
        return self.advice.fits

    @property
    def margin_bytes(self) -> float:
        """What is left of a rank's memory; negative for what is missing."""
        return self.advice.bound_bytes - self.advice.memory_bytes


def will_it_fit(question: Question) -> Fit:
    """Whether a request leaves a way that fits, and what would change that."""
    bound = question.bound_bytes
    asked = best_that_fits(question.settings, bound) or smallest(question.settings)
    advice = question.explain(asked)
    find = _room if advice.fits else _remedies
    question.progress("pricing what one could change")
    return Fit(asked, advice, tuple(find(question, asked)))


def _remedies(question: Question, asked: PricedCandidate) -> Iterator[Remedy]:
    """One change at a time, the smallest of its kind that is enough; then anything on this cluster."""
    found = 0
    priced = question.space.price()
    allowed = [p for p in priced if not _refused(question, p.setting)]
    fitting = [p for p in allowed if p.memory_bytes <= question.bound_bytes]
    for what, near, order in _kinds(asked.setting):
        same = [p for p in fitting if near(p.setting)]
        if same:
            best = min(same, key=lambda p: (order(p.setting), p.seconds))
            found += 1
            yield _remedy(what(best.setting), best, asked)
    if fitting and not found:
        yield _remedy("several changes at once", fitting[0], asked)
    yield from _other_clusters(question, asked)


_Kind = tuple[
    Callable[[ClusterSetting], str],
    Callable[[ClusterSetting], bool],
    Callable[[ClusterSetting], float],
]


def _kinds(s: ClusterSetting) -> list[_Kind]:
    """(in words, whether a setting differs in this alone, what is least) of every kind of change."""

    def alike(other: ClusterSetting, **changed: object) -> bool:
        values = {name: getattr(other, name) for name in changed}
        return other == replace(s, **values)

    return [
        (
            lambda o: f"{o.data} instead of {s.data}",
            lambda o: alike(o, data=1) and DATA.index(o.data) > DATA.index(s.data),
            lambda o: DATA.index(o.data),
        ),
        (
            lambda o: "run layers again in backward",
            lambda o: alike(o, recompute=1) and o.recompute != s.recompute == "none",
            lambda o: 0,
        ),
        (
            lambda o: f"micro-batches of {o.micro_batch} instead of {s.micro_batch}",
            lambda o: alike(o, micro_batch=1, micro_batches=1) and o.micro_batch < s.micro_batch,
            lambda o: -o.micro_batch,
        ),
        (
            lambda o: f"{o.data} and layers run again in backward",
            lambda o: alike(o, data=1, recompute=1) and o.recompute != s.recompute == "none"
            and o.data != s.data,
            lambda o: DATA.index(o.data),
        ),
        (
            lambda o: f"tp={o.tp} instead of tp={s.tp}",
            lambda o: alike(o, tp=1, dp=1, tensor=1, data=1, micro_batch=1, micro_batches=1)
            and o.tp > s.tp,
            lambda o: o.tp,
        ),
    ]  # fmt: skip


def _refused(question: Question, setting: ClusterSetting) -> bool:
    """Whether a setting uses what the request rules out by name; all else may be changed."""
    request = question.request.but(mesh=None, recipe="auto", chunks=None, micro_batches=None)
    return not allows(request, setting, question.cluster.devices_per_node)


def _remedy(what: str, then: PricedCandidate, asked: PricedCandidate) -> Remedy:
    slower = then.seconds / asked.seconds - 1
    return Remedy(what, then.setting.name, then.memory_bytes, then.seconds, slower)


def _other_clusters(question: Question, asked: PricedCandidate) -> Iterator[Remedy]:
    cluster, bound = question.cluster, question.bound_bytes
    for factor in _FACTORS:
        more = _best_on(question, Cluster(cluster.hardware, cluster.nodes * factor))
        if more is not None and more.memory_bytes <= bound:
            what = f"{factor} times the nodes, {cluster.ranks * factor} ranks"
            yield _remedy(what, more, asked)
            break
    if question.request.memory_bytes is None:
        yield from _other_devices(question, asked)


def _other_devices(question: Question, asked: PricedCandidate, count: int = 2) -> Iterator[Remedy]:
    """The devices of the catalogue with least memory that would do."""
    cluster = question.cluster
    larger = sorted(
        (h for h in HARDWARE.values() if h.memory_bytes > cluster.hardware.memory_bytes),
        key=lambda h: (h.memory_bytes, h.name),
    )
    for hardware in larger:
        if count == 0 or hardware.devices_per_node < cluster.devices_per_node:
            continue
        there = replace(hardware, devices_per_node=cluster.devices_per_node)
        priced = _on(question, as_eager_runs(Cluster(there, cluster.nodes)), asked)
        bound_bytes = question.request.but(hardware=there, mesh=None).bound_bytes
        if priced is not None and priced.memory_bytes <= bound_bytes:
            count -= 1
            yield _remedy(f"{hardware.name}, {hardware.memory_bytes / 1e9:.0f} GB", priced, asked)


def _best_on(question: Question, cluster: Cluster) -> PricedCandidate | None:
    """The fastest setting that fits on another cluster, whatever its recipe."""
    try:
        priced = question.space.on(cluster).price()
    except AutoparError:  # its ranks and the batch have no common divisor
        return None
    allowed = [p for p in priced if not _refused(question, p.setting)]
    return best_that_fits(allowed, question.bound_bytes)


def _on(question: Question, cluster: Cluster, asked: PricedCandidate) -> PricedCandidate | None:
    """The setting on another cluster, dp as long as its ranks ask for and the batch as it was."""
    setting = asked.setting
    dp, rest = divmod(cluster.ranks, setting.tp * setting.stages)
    batch = setting.dp * setting.micro_batch * setting.micro_batches
    if rest or dp == 0 or batch % dp:
        return None
    micro = min(setting.micro_batch, batch // dp)
    while batch // dp % micro:
        micro -= 1
    then = replace(setting, dp=dp, micro_batch=micro, micro_batches=batch // dp // micro)
    found = question.space.on(cluster).price_of([then])
    return found[0] if found else None


def _room(question: Question, asked: PricedCandidate) -> Iterator[Remedy]:
    """What else would fit: a larger micro-batch, fewer nodes."""
    s, bound = asked.setting, question.bound_bytes
    larger = [
        p
        for p in question.settings
        if p.memory_bytes <= bound and p.setting.micro_batch > s.micro_batch
        if p.setting == replace(
            s, micro_batch=p.setting.micro_batch, micro_batches=p.setting.micro_batches
        )
    ]  # fmt: skip
    if larger:
        best = max(larger, key=lambda p: p.setting.micro_batch)
        yield _remedy(f"micro-batches of {best.setting.micro_batch}", best, asked)
    yield from _fewer_nodes(question, asked)


def _fewer_nodes(question: Question, asked: PricedCandidate) -> Iterator[Remedy]:
    nodes, fewest = question.cluster.nodes, None
    for factor in _FACTORS:
        if nodes % factor:
            break
        cluster = Cluster(question.cluster.hardware, nodes // factor)
        priced = _on(question, cluster, asked)
        if priced is not None and priced.memory_bytes <= question.bound_bytes:
            fewest = (cluster, priced)
    if fewest is not None:
        yield _remedy(f"{fewest[0].ranks} ranks are enough", fewest[1], asked)


def to_json(fit: Fit, target: str) -> dict[str, object]:
    """The answer about a model of this name, with units in the keys."""
    advice = fit.advice
    return {
        "fits": fit.fits,
        "setting": fit.asked.setting.name,
        "cluster": str(advice.cluster),
        "asked": dict(asked(advice, target)),
        "memory_bytes": advice.memory_bytes,
        "memory_bound_bytes": advice.bound_bytes,
        "margin_bytes": fit.margin_bytes,
        "step_seconds": advice.step_seconds,
        "memory": advice.memory.to_json(),
        "remedies": [dataclasses.asdict(each) for each in fit.remedies],
    }

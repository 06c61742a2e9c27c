"""Answers whether a model fits into memory, which changes would make it fit, and their cost in time and money."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.cost_model.machines.cluster import Cluster
from autopar.errors import AutoparError
from autopar.explanation.advice import Question
from autopar.explanation.candidate_rows import name_of
from autopar.explanation.comparison import smallest
from autopar.explanation.explanation import Explanation
from autopar.explanation.launch import asked
from autopar.explanation.remedies import FACTORS, Found, answered, keeps_too_much, remedies
from autopar.planning.loss_tiles import tile_bytes_of
from autopar.search.candidates.settings import PricedCandidate

Prices = Mapping[str, float]  # device of the catalogue -> price of one device for an hour


@dataclass(frozen=True)
class Remedy:
    """A change with which the model fits.

    Attributes:
        what: the change in words, such as "zero2 instead of zero1".
        options: options of the command line that ask for it.
        setting: name of the setting after the change.
        memory_bytes: peak memory of a rank after the change.
        step_seconds: duration of a step after the change.
        slower: change of the duration of a step's tokens, relative to the step as asked; negative is faster.
        money: cost of the tokens of the step as asked, in the currency of the prices; None without a price
            of the device.
    """

    what: str
    options: str
    setting: str
    memory_bytes: float
    step_seconds: float
    slower: float
    money: float | None = None


@dataclass(frozen=True)
class Fit:
    """Whether a model fits, and the changes that help.

    Attributes:
        asked: the fastest setting that fits; if none fits, the one with least memory.
        advice: explanation of this setting.
        remedies: changes, sorted by the time (with prices, by the money) that the same tokens take after them.
        prices: name of a device -> price of one device for an hour.
        is_largest: whether the micro-batch cannot be larger, and the nodes cannot be fewer.
    """

    asked: PricedCandidate
    advice: Explanation
    remedies: tuple[Remedy, ...]
    prices: Prices = field(default_factory=dict)
    is_largest: bool = False

    @property
    def fits(self) -> bool:
        return self.advice.fits

    @property
    def fits_on_host(self) -> bool:
        """Whether it does not fit as asked, but with parameters stored on the host."""
        return not self.fits and any(each.options.endswith("--offload") for each in self.remedies)

    @property
    def margin_bytes(self) -> float:
        """Free bytes of a rank's memory; negative if the plan does not fit."""
        return self.advice.bound_bytes - self.advice.memory_bytes

    @property
    def money(self) -> float | None:
        """Cost of the step as asked; None without a price of the device."""
        return _money(self.advice, self.prices)


def will_it_fit(question: Question, prices: Prices | None = None) -> Fit:
    """Whether some setting that a request allows fits, and which changes would help.

    Args:
        question: the model and the request.
        prices: price of an hour of one device, by its name in the catalogue, such as `{"h100": 2.5}`.
    """
    prices = prices or {}
    question, best, advice = _in_tiles_if_needed(question)
    question.progress("pricing what one could change")
    larger = list(_larger(question, best))
    fewer = list(_fewer_nodes(question))
    if advice.fits:
        found = [*_room(question, larger), *_fewest(question, fewer)]
    else:
        found = list(remedies(question, advice, best.setting))
    listed = [_remedy(each, advice, prices) for each in found]
    ranked = sorted(listed, key=lambda r: (r.money is None, r.money or 0.0, r.slower))
    is_largest = best.setting.micro_batches == 1 and not fewer
    return Fit(best, advice, tuple(ranked), prices, is_largest)


def _in_tiles_if_needed(question: Question) -> tuple[Question, PricedCandidate, Explanation]:
    """The question with its setting and plan, with the loss in tiles where only that fits, as a search takes it."""
    found = question, *_as_asked(question)
    if found[2].fits or keeps_too_much(question, found[2]):
        return found
    try:
        tiled = question.in_tiles(tile_bytes_of(question.request))
        with_tiles = tiled, *_as_asked(tiled)
    except AutoparError:  # no loss of the step has tiles, or an option does not go with them
        return found
    return with_tiles if with_tiles[2].fits else found


def _as_asked(question: Question) -> tuple[PricedCandidate, Explanation]:
    """The fastest of three settings whose plan fits where their estimates do; else the one with least memory."""
    fitting = [each for each in question.settings if each.memory_bytes <= question.bound_bytes]
    for each in fitting[:3]:
        if (advice := question.explain(each)).fits:
            return each, advice
    least = smallest(question.settings)
    return least, question.explain(least)


def _remedy(found: Found, asked: Explanation, prices: Prices) -> Remedy:
    what, options, then = found
    work = _tokens(then) / _tokens(asked)
    money = _money(then, prices)
    return Remedy(
        what,
        options,
        then.setting.name if then.setting else name_of(then.plan),
        then.memory_bytes,
        then.step_seconds,
        then.step_seconds / work / asked.step_seconds - 1,
        None if money is None else money / work,
    )


def _tokens(advice: Explanation) -> float:
    """Tokens of a step, or 1 for every step of a model without tokens, whose batch stays as it is."""
    return 1.0 if advice.tokens is None else advice.tokens * advice.plan.micro_batches


def _money(advice: Explanation, prices: Prices) -> float | None:
    price = prices.get(advice.cluster.hardware.name)
    return None if price is None else advice.ranks * advice.step_seconds / 3600 * price


# --- where it fits


def _larger(question: Question, asked: PricedCandidate) -> Iterator[PricedCandidate]:
    """The same setting with larger micro-batches, whether these fit or not."""
    s = asked.setting
    for p in question.settings:
        o = p.setting
        same = o == replace(s, micro_batch=o.micro_batch, micro_batches=o.micro_batches)
        if same and o.micro_batch > s.micro_batch:
            yield p


def _room(question: Question, larger: list[PricedCandidate]) -> Iterator[Found]:
    """The largest micro-batch that still fits."""
    fitting = [p for p in larger if p.memory_bytes <= question.bound_bytes]
    for each in sorted(fitting, key=lambda p: -p.setting.micro_batch)[:3]:
        if (advice := question.explain(each)).fits:
            options = f"--micro-batches {each.setting.micro_batches}"
            yield f"micro-batches of {each.setting.micro_batch}", options, advice
            return


def _fewer_nodes(question: Question) -> Iterator[Question]:
    """The same question on fewer nodes: a half, a quarter and so on."""
    nodes = question.cluster.nodes
    if question.cluster.hardware.kinds:  # of which kind there should be fewer is not asked
        return
    for factor in FACTORS:
        if nodes % factor:
            return
        cluster = Cluster(question.cluster.hardware, nodes // factor)
        request = question.request.but(mesh=None)
        yield question.on(replace(request, ranks=cluster.ranks))


def _fewest(question: Question, fewer: list[Question]) -> Iterator[Found]:
    """The fewest nodes on which the step still fits."""
    fewest: Found | None = None
    for each in fewer:
        advice = answered(each)
        if advice is None:
            break
        ranks = each.cluster.ranks
        fewest = (f"{ranks} ranks are enough", f"--cluster {each.cluster}", advice)
    if fewest is not None:
        yield fewest


def to_json(fit: Fit, target: str) -> dict[str, object]:
    """The answer as JSON values, with units in the keys; `target` is the name of the model."""
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
        "money": fit.money,
        "memory": advice.memory.to_json(),
        "remedies": [dataclasses.asdict(each) for each in fit.remedies],
    }

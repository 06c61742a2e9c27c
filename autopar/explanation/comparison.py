"""Comparison of priced settings: which one is best, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cost_model.breakdown import Candidate
from autopar.explanation.candidate_rows import AS_FAST, slower
from autopar.search.candidates.settings import PricedCandidate
from autopar.units import format_seconds

ELSEWHERE = "elsewhere"  # seconds of all causes without a name


def best_that_fits(priced: Sequence[PricedCandidate], bound_bytes: float) -> PricedCandidate | None:
    """The fastest setting within the memory of a rank; `priced` is sorted by time."""
    return next((each for each in priced if each.memory_bytes <= bound_bytes), None)


def smallest(priced: Sequence[PricedCandidate]) -> PricedCandidate:
    """The setting that takes least memory."""
    return min(priced, key=lambda each: (each.memory_bytes, each.seconds))


def compared(
    priced: Sequence[PricedCandidate],
    chosen: PricedCandidate | None,
    bound_bytes: float,
    count: int = 12,
    found: Mapping[str, float] | None = None,
) -> tuple[Candidate, ...]:
    """The chosen setting and the best others, in at most `count` rows, with reasons why the others were not chosen.

    There is one row for each mesh, recipe and recomputation. Settings that need too much memory come last: only those
    faster than the chosen one, or all of them if none is faster. Reasons compare with `found`, the seconds of the plan
    that the search has found by their cause; by default with the estimate of the chosen setting.
    """
    if found is None and chosen is not None:
        found = chosen.parts
    best = _best_of_every_kind(priced, bound_bytes)
    fitting = [each for each in best if each.memory_bytes <= bound_bytes]
    too_large = [each for each in best if each.memory_bytes > bound_bytes]
    faster = [each for each in too_large if chosen is None or each.seconds < chosen.seconds]
    listed = (fitting[: count - min(3, len(faster))] + (faster or too_large))[:count]
    if chosen is not None and chosen not in listed:
        listed = [chosen, *listed[: count - 1]]
    return tuple(
        replace(
            each.candidate(bound_bytes),
            chosen=each is chosen,
            why_not="" if each is chosen else why_not(each, found, bound_bytes),
        )
        for each in listed
    )


def _best_of_every_kind(priced: Sequence[PricedCandidate], bound_bytes: float) -> list[PricedCandidate]:
    kept: dict[tuple[object, ...], PricedCandidate] = {}
    for each in sorted(priced, key=lambda p: (p.memory_bytes > bound_bytes, p.seconds)):
        s = each.setting
        again = "some" if isinstance(s.recompute, int) else s.recompute
        kept.setdefault((s.world_mesh, s.data, s.tensor, again), each)
    return list(kept.values())


def why_not(each: PricedCandidate, found: Mapping[str, float] | None, bound_bytes: float) -> str:
    """Words for the disadvantages of a setting against a plan, of which `found` has the seconds by cause."""
    words = []
    if each.memory_bytes > bound_bytes:
        words.append(f"{(each.memory_bytes - bound_bytes) / 1e9:.1f} GB too much")
    if found is not None:
        words.append(_against(each, found))
    return "; ".join(words)


def _against(each: PricedCandidate, found: Mapping[str, float]) -> str:
    """Words such as `4.1 % slower: 120 ms more along tp, 80 ms less elsewhere`.

    They name the causes that differ most, up to three, until all others make up less than a tenth of the difference.
    """
    found_seconds = sum(found.values())
    difference, words = each.seconds - found_seconds, slower(each.seconds, found_seconds)
    if abs(difference) < AS_FAST * found_seconds:
        return words
    changes = {name: each.parts.get(name, 0.0) - found.get(name, 0.0) for name in (*each.parts, *found)}
    sign = 1 if difference > 0 else -1
    said, rest = [], difference
    for name in sorted(changes.keys() - {ELSEWHERE}, key=lambda n: (-sign * changes[n], n))[:3]:
        if sign * changes[name] > 0.1 * abs(difference) and sign * rest > 0.1 * abs(difference):
            rest -= changes[name]
            # what hides comes off a step, so that a step is longer by what hides less
            hides = max(each.parts.get(name, 0.0), found.get(name, 0.0)) <= 0
            said.append(_more(changes[name], name, hides))
    if said and abs(rest) > 0.1 * abs(difference):
        said.append(_more(rest, ELSEWHERE, False))
    return f"{words}: {', '.join(said)}" if said else words


def _more(seconds: float, where: str, hides: bool) -> str:
    return f"{format_seconds(abs(seconds))} {'more' if (seconds > 0) != hides else 'less'} {where}"

"""Comparison of priced settings: which one is best, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_model.breakdown import Candidate
from autopar.search.candidates.settings import PricedCandidate
from autopar.units import format_seconds


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
    chosen_seconds: float | None = None,
) -> tuple[Candidate, ...]:
    """The chosen setting and the best others, in at most `count` rows, with reasons why the others were not chosen.

    There is one row for each mesh, recipe and recomputation. Settings that need too much memory come last: only those
    faster than the chosen one, or all of them if none is faster. Percentages compare with `chosen_seconds`, the seconds
    of the chosen setting's plan; by default with its estimate.
    """
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
            why_not=why_not(each, chosen, bound_bytes, chosen_seconds),
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


def why_not(
    each: PricedCandidate, chosen: PricedCandidate | None, bound_bytes: float, chosen_seconds: float | None = None
) -> str:
    """Words for the disadvantages of a setting against the chosen one; "" for the chosen one itself."""
    if each is chosen:
        return ""
    words = []
    if each.memory_bytes > bound_bytes:
        words.append(f"{(each.memory_bytes - bound_bytes) / 1e9:.1f} GB too much")
    if chosen is not None:
        words.append(_against(each, chosen, chosen_seconds or chosen.seconds))
    return "; ".join(words)


def _against(each: PricedCandidate, chosen: PricedCandidate, chosen_seconds: float) -> str:
    """Words such as `4.1 % slower: 120 ms more along tp, 80 ms less elsewhere`, with the causes that differ most."""
    slower = each.seconds / chosen_seconds - 1
    if abs(slower) < 5e-5:
        return "as fast"
    words = f"{100 * abs(slower):.1f} % {'slower' if slower > 0 else 'faster'}"
    names = dict.fromkeys((*each.parts, *chosen.parts))
    changes = {name: each.parts.get(name, 0.0) - chosen.parts.get(name, 0.0) for name in names}
    sign = 1 if slower > 0 else -1
    reasons = sorted((n for n in names if sign * changes[n] > 0), key=lambda n: -sign * changes[n])
    weighty = [n for n in reasons[:2] if abs(changes[n]) > 0.1 * abs(each.seconds - chosen.seconds)]
    said, rest = [], each.seconds - chosen_seconds
    for name in weighty:
        rest -= changes[name]
        # what hides comes off a step, so that a step is longer by what hides less
        hides = max(each.parts.get(name, 0.0), chosen.parts.get(name, 0.0)) <= 0
        more = "more" if (sign > 0) != hides else "less"
        said.append(f"{format_seconds(abs(changes[name]))} {more} {name}")
    if sign * rest < 0 and abs(rest) > 0.1 * abs(each.seconds - chosen_seconds):
        said.append(f"{format_seconds(abs(rest))} {'less' if sign > 0 else 'more'} elsewhere")
    return f"{words}: {', '.join(said)}" if said else words
